"""What a function does to modules, optimizers, schedulers and scalers that it is given."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # an optimizer's first step would import it, which sets a variable
from torch import nn
from torch.optim import lr_scheduler

import distribute
from distribute import Context, distributed, outcome, stateful
from distribute.changes import follow
from distribute.payload import pack
from distribute.state import Held
from distribute.task import Task
from tests.scripts import SLOW_METHODS, run_python, write

# Start method and ranks; re-exec needs a script, see below.
WAYS = [
    pytest.param("auto", 1, id="inline"),
    pytest.param("fork", 1, id="fork-1"),
    pytest.param("fork", 2, id="fork-2"),
    pytest.param("forkserver", 2, id="forkserver-2", marks=pytest.mark.slow),
    pytest.param("spawn", 2, id="spawn-2", marks=pytest.mark.slow),
]
every_way = pytest.mark.parametrize(("method", "ranks"), WAYS)


def run(method: str, ranks: int, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    options = {"devices": ranks, "accelerator": "cpu", "start_method": method, **options}
    return distribute.run(fn, *args, **options)


def fork(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return run("fork", 2, fn, *args, **options)


def copied(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in module.state_dict().items()}


def same(one: Any, other: Any) -> bool:
    """Whether two structures are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def steps(ctx: Context, net: nn.Module, optimizer: Any, count: int = 1) -> None:
    """Trains on the same data on every rank, so that any number of them does the same."""
    model = ctx.model(net)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(8, 4, generator=generator)
    for _ in range(count):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


# -- modules -----------------------------------------------------------------------------------


@every_way
def test_a_trained_model_is_the_callers_own(method: str, ranks: int) -> None:
    def train(ctx: Context, net: nn.Module) -> Any:
        steps(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1), 3)
        return ctx.world_size, copied(net)

    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    before, parameters = copied(net), [*net.parameters()]

    world, trained = run(method, ranks, train, net)

    assert world == ranks
    assert same(copied(net), trained)
    assert not same(trained, before)
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert all(one.is_leaf and one.requires_grad for one in parameters)


def test_it_is_rank_0s_state_also_where_every_rank_returns() -> None:
    def fill(ctx: Context, net: nn.Linear) -> int:
        nn.init.constant_(net.weight, 10 + ctx.rank)
        return ctx.rank

    net = nn.Linear(2, 2)

    assert fork(fill, net, returns="all") == [0, 1]
    assert net.weight.unique().tolist() == [10]


@every_way
def test_buffers_modes_and_frozen_flags_come_back(method: str, ranks: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 1)
            self.register_buffer("seen", torch.zeros(()), persistent=False)
            self.register_buffer("none", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            return self.head(self.norm(x))

    def train(ctx: Context, net: Any) -> Any:
        net.head.bias.requires_grad_(False)
        ctx.model(net)(torch.arange(12.0).reshape(3, 4)).sum().backward()
        net.eval()
        net.head.train()
        return net.norm.running_mean.clone()

    net: Any = Net()
    buffers = [net.seen, net.norm.running_mean]

    mean = run(method, ranks, train, net)

    assert same(net.norm.running_mean, mean)
    assert mean.tolist() == pytest.approx([0.4, 0.5, 0.6, 0.7])
    assert (net.seen.item(), net.norm.num_batches_tracked.item()) == (3, 1)
    assert net.seen is buffers[0]
    assert net.norm.running_mean is buffers[1]
    assert (net.training, net.norm.training, net.head.training) == (False, False, True)
    assert [one.requires_grad for one in net.head.parameters()] == [True, False]
    assert "seen" not in net.state_dict()
    assert net.none is None


@every_way
def test_tied_weights_stay_tied_and_are_tied_where_the_function_ties_them(
    method: str, ranks: int
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.embedding.weight
            self.other = nn.Linear(3, 5, bias=False)

    def train(ctx: Context, net: Any) -> bool:
        tied = net.out.weight is net.embedding.weight
        with torch.no_grad():
            net.embedding.weight.fill_(2.0)
        net.other.weight = net.out.weight
        return tied

    net: Any = Net()
    weight = net.embedding.weight

    assert run(method, ranks, train, net)
    assert net.embedding.weight is net.out.weight is net.other.weight is weight
    assert weight.unique().tolist() == [2.0]


def test_views_of_one_memory_stay_views() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.zeros(4)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[:2])
            self.register_buffer("wide", torch.zeros(1).expand(3))

    def fill(ctx: Context, net: Any) -> None:
        net.part.fill_(3.0)
        net.wide = torch.ones(1).expand(3)

    net: Any = Net()

    fork(fill, net)

    assert net.whole.tolist() == [3, 3, 0, 0]
    assert net.part.data_ptr() == net.whole.data_ptr()
    assert net.wide.tolist() == [1, 1, 1]


@every_way
def test_a_lazy_module_comes_back_with_its_shape(method: str, ranks: int) -> None:
    def train(ctx: Context, net: nn.Module) -> Any:
        net(torch.ones(2, 3))
        steps(ctx, nn.Sequential(nn.Linear(4, 3), net), torch.optim.SGD(net.parameters(), lr=0.1))
        return copied(net)

    net: Any = nn.Sequential(nn.LazyLinear(5), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    first, weight = net[0], net[0].weight

    trained = run(method, ranks, train, net)

    assert net[0] is first
    assert first.weight is weight
    assert [type(one) for one in net] == [nn.Linear, nn.BatchNorm1d, nn.Linear]
    assert [net[0].in_features, net[1].num_features, net[2].in_features] == [3, 5, 5]
    assert type(weight) is nn.Parameter
    assert same(copied(net), trained)
    assert net(torch.ones(4, 3)).shape == (4, 1)
    torch.optim.SGD(net.parameters(), lr=0.1)


def test_a_lazy_module_that_saw_nothing_stays_lazy() -> None:
    net: Any = nn.LazyLinear(5)

    fork(lambda ctx, net: None, net)

    assert net.has_uninitialized_params()
    assert net(torch.ones(4, 3)).shape == (4, 5)


def test_extra_state_comes_back() -> None:
    class Counter(nn.Module):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    def train(ctx: Context, net: Any) -> None:
        net.count += 5

    net = Counter()

    fork(train, net)

    assert net.count == 5


class Decorated(nn.Module):
    """A distributed method under a name that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    @distributed(devices=2, accelerator="cpu", start_method="fork")
    def train(self, ctx: Context, count: int = 1) -> Any:
        steps(ctx, self, torch.optim.SGD(self.layer.parameters(), lr=0.1), count)
        return ctx.world_size, copied(self)


@pytest.mark.parametrize("method", ["fork", *SLOW_METHODS])
def test_a_model_whose_train_method_is_distributed(method: str) -> None:
    net = Decorated()
    before = copied(net)
    train = distributed(devices=2, accelerator="cpu", start_method=method)(
        Decorated.train.__wrapped__
    )

    for _ in range(2):
        world, trained = net.train(3) if method == "fork" else train(net, 3)
        assert world == 2
        assert same(copied(net), trained)
    assert not same(trained, before)


# -- what the function makes of a module -------------------------------------------------------


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module = nn.Linear(4, 4)
        self.head: Any = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@every_way
def test_a_replaced_head_and_its_parameters_in_the_optimizer(method: str, ranks: int) -> None:
    """The caller's network is the one that was trained, and its optimizer trains it on."""

    def train(ctx: Context, net: Headed, optimizer: Any) -> Any:
        net.head = nn.Sequential(nn.Linear(4, 7), nn.Tanh())
        net.body = nn.Sequential(net.body, nn.Tanh())
        optimizer.add_param_group({"params": [*net.head.parameters()], "lr": 0.5})
        steps(ctx, net, optimizer)
        return copied(net)

    net = Headed()
    optimizer = torch.optim.SGD(net.body.parameters(), lr=0.1, momentum=0.9)
    body, group = net.body, optimizer.param_groups[0]

    trained = run(method, ranks, train, net, optimizer)

    assert same(copied(net), trained)
    assert net.head[0].weight.shape == (7, 4)
    assert isinstance(net.body, nn.Sequential)
    assert net.body[0] is body
    assert optimizer.param_groups[0] is group
    assert [one["lr"] for one in optimizer.param_groups] == [0.1, 0.5]
    added = zip(optimizer.param_groups[1]["params"], net.head.parameters(), strict=True)
    assert all(one is other for one, other in added)
    before = copied(net)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(one, before[name]) for name, one in net.state_dict().items())


@every_way
def test_parts_that_are_taken_out_renamed_or_of_another_type(method: str, ranks: int) -> None:
    def change(ctx: Context, net: Any) -> None:
        net.b, net.c = net.a, net.b
        del net.a
        net.c.bias = None
        net.b.half()
        net.b.weight = nn.Parameter(torch.ones(1, 2))
        net.register_parameter("scale", nn.Parameter(torch.tensor(3.0)))
        net.register_buffer("table", torch.arange(3), persistent=False)

    net: Any = nn.Module()
    net.a, net.b = nn.Linear(2, 2), nn.Linear(3, 3)
    a, b, bias = net.a, net.b, net.a.bias

    run(method, ranks, change, net)

    assert not hasattr(net, "a")
    assert net.b is a
    assert net.c is b
    assert b.bias is None
    assert net.b.bias is bias
    assert (bias.dtype, bias.grad) == (torch.float16, None)
    assert net.b.weight.tolist() == [[1, 1]]
    assert net.b.weight.requires_grad
    assert net.scale.item() == 3
    assert dict(net.named_parameters()).keys() == {"scale", "b.weight", "b.bias", "c.weight"}
    assert net.table.tolist() == [0, 1, 2]
    assert "table" not in net.state_dict()


def test_wrappers_that_the_function_puts_around_parts_stay_there() -> None:
    def train(ctx: Context, net: Any) -> str:
        net[0] = ctx.model(net[0])
        net[0](torch.ones(2, 4)).sum().backward()
        return type(net[0]).__name__

    net = nn.Sequential(nn.Linear(4, 1))
    inner = net[0]

    assert fork(train, net) == "DistributedModel"
    assert net[0] is inner


def test_a_recurrent_module_knows_a_parameter_that_was_replaced() -> None:
    def replace(ctx: Context, net: Any) -> torch.Tensor:
        net.weight_hh_l0 = nn.Parameter(torch.full((8, 2), 0.5))
        return net(torch.ones(1, 3))[0]

    net = nn.LSTM(3, 2)

    found = fork(replace, net)

    torch.testing.assert_close(net(torch.ones(1, 3))[0], found)


@every_way
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_that_no_pickle_takes(method: str, ranks: int) -> None:
    def train(ctx: Context, net: nn.Module) -> int:
        steps(ctx, net, torch.optim.SGD(net.parameters(), lr=0.1))
        net.eval()
        return ctx.world_size

    net = torch.jit.script(nn.Linear(4, 2))
    before = copied(net)

    if method in ("forkserver", "spawn"):
        with pytest.raises(distribute.RequestError, match="serialize"):
            run(method, ranks, train, net)
        return
    assert run(method, ranks, train, net, write_back=False) == ranks
    assert same(copied(net), before)
    assert net.training
    assert run(method, ranks, train, net) == ranks
    assert not same(copied(net), before)
    assert not net.training


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_come_back_is_a_warning_and_the_rest_comes() -> None:
    def train(ctx: Context, net: Any) -> str:
        nn.init.constant_(net[0].weight, 4.0)
        net.add_module("lock", Locked())
        return "value"

    net = nn.Sequential(nn.Linear(2, 2))

    with pytest.warns(UserWarning, match=r"argument \(Sequential\) comes back in part") as caught:
        assert fork(train, net) == "value"

    assert len(caught) == 1
    assert "cannot pickle '_thread.lock' object" in str(caught[0].message)
    assert net[0].weight.unique().tolist() == [4.0]
    assert not hasattr(net, "lock")


def test_a_value_that_cannot_come_back_is_told_as_ever() -> None:
    def train(ctx: Context, net: Any) -> Any:
        nn.init.constant_(net.weight, 4.0)
        return threading.Lock()

    net = nn.Linear(2, 2)
    before = copied(net)

    with pytest.raises(distribute.RequestError, match="cannot pickle") as caught:
        fork(train, net)

    assert caught.value.__context__ is None
    assert same(copied(net), before)


# -- optimizers, schedulers, gradient scalers --------------------------------------------------

OPTIMIZERS: list[Callable[[Any], Any]] = [
    functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    functools.partial(torch.optim.Adam, lr=0.05),
    functools.partial(torch.optim.Adam, lr=torch.tensor(0.05), amsgrad=True),
    functools.partial(torch.optim.Adafactor, lr=0.05),
    functools.partial(torch.optim.Adagrad, lr=0.05),
]


@every_way
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_an_optimizer_goes_on_in_the_next_call(
    method: str, ranks: int, make: Callable[[Any], Any]
) -> None:
    """Two calls of two steps are four steps of a plain loop."""

    def train(ctx: Context, net: nn.Module, optimizer: Any) -> Any:
        steps(ctx, net, optimizer, 2)
        return ctx.world_size, copy.deepcopy(optimizer.state_dict())

    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    plain = copy.deepcopy(net)
    optimizer, plain_optimizer = make(net.parameters()), make(plain.parameters())
    groups = optimizer.param_groups
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
    for _ in range(4):
        plain_optimizer.zero_grad()
        plain(inputs).square().sum().backward()
        plain_optimizer.step()

    for _ in range(2):
        world, state = run(method, ranks, train, net, optimizer)
        assert world == ranks
        assert same(optimizer.state_dict(), state)

    assert optimizer.param_groups is groups
    assert {*optimizer.state} == {*net.parameters()}
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_lbfgs_keeps_its_history() -> None:
    def train(ctx: Context, net: nn.Module, optimizer: Any) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(3, 4)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return copy.deepcopy(optimizer.state_dict())

    net = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

    state = fork(train, net, optimizer)

    assert len(state["state"][0]["old_dirs"]) > 0
    assert same(optimizer.state_dict(), state)


class Ahead(torch.optim.Optimizer):
    """An optimizer around another one, which it shares its groups with."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"far": 0.5})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        before = [one.detach().clone() for one in self.param_groups[0]["params"]]
        self.inner.step()
        with torch.no_grad():
            for one, was in zip(self.param_groups[0]["params"], before, strict=True):
                one.lerp_(was, self.param_groups[0]["far"])


def halve(optimizer: Any, *_: object) -> None:
    with torch.no_grad():
        for one in optimizer.param_groups[0]["params"]:
            one.mul_(0.5)


@pytest.mark.parametrize("kind", [Ahead, torch.optim.LBFGS])
@every_way
def test_attributes_and_hooks_of_an_optimizer_are_there(method: str, ranks: int, kind: Any) -> None:
    torch.manual_seed(3)
    net, plain = nn.Linear(4, 2), nn.Linear(4, 2)
    plain.load_state_dict(net.state_dict())
    optimizer, other = kind(net.parameters()), kind(plain.parameters())
    for one in (optimizer, other):
        one.register_step_post_hook(halve)

    def train(ctx: Context, net: Any, optimizer: Any) -> int:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = net(torch.ones(3, 4)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return ctx.world_size

    for _ in range(2):
        distribute.run(train, plain, other, devices=1)
        assert run(method, ranks, train, net, optimizer) == ranks

    torch.testing.assert_close(copied(net), copied(plain))
    if kind is Ahead:
        assert optimizer.param_groups is optimizer.inner.param_groups
        assert {*optimizer.inner.state} == {*net.parameters()}


@every_way
def test_an_optimizer_alone_brings_its_parameters(method: str, ranks: int) -> None:
    def train(ctx: Context, optimizer: Any) -> list[torch.Tensor]:
        parameters = optimizer.param_groups[0]["params"]
        sum(one.square().sum() for one in parameters).backward()
        optimizer.step()
        return [one.detach().clone() for one in parameters]

    net = nn.Linear(3, 2)
    before = copied(net)

    trained = run(method, ranks, train, torch.optim.SGD(net.parameters(), lr=0.1))

    assert same([one.detach() for one in net.parameters()], trained)
    assert not same(copied(net), before)


@pytest.mark.parametrize("fused", [False, True])
def test_what_an_optimizer_keeps_follows_its_parameters_to_their_device(fused: bool) -> None:
    """The state of the last call is on the CPU, and `ctx.model` moves the parameters."""
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    optimizer.param_groups[0]["fused"] = fused
    moments = {"exp_avg": torch.ones(2), "exp_avg_sq": [torch.ones(2)], "name": "x"}
    optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}

    follow(optimizer)

    kept = optimizer.state[parameter]
    assert kept["exp_avg"].device.type == kept["exp_avg_sq"][0].device.type == "meta"
    assert kept["step"].device.type == ("meta" if fused else "cpu")
    assert kept["name"] == "x"


def _plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def _sequence(optimizer: Any) -> Any:
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    _plateau,
    _sequence,
]


@every_way
@pytest.mark.parametrize("make", SCHEDULERS)
def test_a_scheduler_goes_on_and_brings_its_optimizer(
    method: str, ranks: int, make: Callable[[Any], Any]
) -> None:
    def train(ctx: Context, scheduler: Any) -> Any:
        for _ in range(3):
            scheduler.optimizer.step()
            scheduler.step(
                *([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else [])
            )
        return scheduler.last_epoch, scheduler.optimizer.param_groups[0]["lr"]

    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    scheduler = make(optimizer)

    for count in (3, 6):
        epoch, lr = run(method, ranks, train, scheduler)
        assert epoch == scheduler.last_epoch == count
        assert optimizer.param_groups[0]["lr"] == lr != 1.0
        assert scheduler.optimizer is optimizer


@every_way
def test_a_gradient_scaler_goes_on(method: str, ranks: int) -> None:
    def train(ctx: Context, scaler: torch.amp.GradScaler, good: bool) -> float:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler.scale(weight.sum() * (1.0 if good else float("inf"))).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    found = []
    for good in (False, True, True):
        found.append(run(method, ranks, train, scaler, good))
        assert scaler.get_scale() == found[-1]
    assert found == [32, 32, 64]


# -- where they may be -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    net: nn.Module
    name: str = "job"


class Slotted:
    __slots__ = ("empty", "net")

    def __init__(self, net: nn.Module) -> None:
        self.net = net


class Holder:
    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.me = self  # a cycle

    def fit(self, ctx: Context) -> None:
        nn.init.constant_(self.net.weight, 5.0)  # type: ignore[arg-type]

    def __call__(self, ctx: Context) -> None:
        self.fit(ctx)


PLACES: dict[str, Callable[[nn.Module], Any]] = {
    "argument": lambda net: net,
    "list": lambda net: [1, [net]],
    "tuple": lambda net: (1, (net, "x")),
    "dict": lambda net: {"a": {"b": net}},
    "key": lambda net: {net: 1},
    "set": lambda net: {net},
    "deque": lambda net: deque([net]),
    "dataclass": lambda net: {"job": Job(net)},
    "slots": Slotted,
    "object": Holder,
    "method": lambda net: Holder(net).fit,
    "partial": lambda net: functools.partial(print, net, net=[net]),
    "long list": lambda net: [net, *range(5_000)],
    "many": lambda net: [*(nn.Identity() for _ in range(5_000)), net],
}


@pytest.mark.parametrize("place", PLACES)
def test_a_model_is_found_wherever_the_arguments_hold_it(place: str) -> None:
    net = nn.Linear(2, 2)

    assert net in Task(len, (), {"x": PLACES[place](net)}).stateful()


@pytest.mark.parametrize("place", ["dict", "set", "dataclass", "slots", "object", "method"])
@every_way
def test_a_model_comes_back_from_where_the_arguments_hold_it(
    method: str, ranks: int, place: str
) -> None:
    def train(ctx: Context, place: Any) -> int:
        for one in stateful.reach([place]):
            nn.init.constant_(one.weight, 5.0)
        return ctx.world_size

    net = nn.Linear(2, 2)

    assert run(method, ranks, train, PLACES[place](net)) == ranks
    assert net.weight.unique().tolist() == [5.0]


@pytest.mark.parametrize(
    "make", [lambda one: one.fit, lambda one: one, lambda one: functools.partial(one.fit)]
)
def test_a_model_of_the_object_that_the_function_belongs_to(make: Callable[[Any], Any]) -> None:
    holder = Holder(nn.Linear(2, 2))

    fork(make(holder))

    assert holder.net.weight.unique().tolist() == [5.0]  # type: ignore[operator,union-attr]


def test_where_nobody_looks() -> None:
    net = nn.Linear(2, 2)

    class Config:
        of_class = net

    assert not Task(lambda: net, (Config(), Config, [*range(5_000), net]), {}).stateful()


def test_what_is_found_is_found_once() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)

    found = Task(len, (net, [net, scheduler], optimizer), {"net": net}).stateful()

    assert found == [net, scheduler, optimizer]
    assert [type(one).__name__ for one in stateful.parts(found)] == [
        "Sequential", "Linear", "Parameter", "Parameter", "StepLR", "SGD",
    ]  # fmt: skip


class Agent(nn.Module):
    """A module with its optimizer, and a teacher that is none of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body: Any = nn.Sequential(nn.Linear(4, 2))
        self.body[0].head = [nn.Linear(4, 2)]
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def forward(self, inputs: Any) -> Any:
        return self.body(inputs)

    def fit(self, ctx: Context) -> int:
        steps(ctx, self, self.optimizer, 2)
        self.scheduler.step()
        self.body[0].head[0].load_state_dict(self.body[0].state_dict())
        return ctx.world_size


@every_way
def test_the_optimizer_of_a_module_that_is_an_agent(method: str, ranks: int) -> None:
    agent, plain = Agent(), Agent()
    plain.load_state_dict(agent.state_dict())
    optimizer, teacher = agent.optimizer, agent.body[0].head[0]
    distribute.run(plain.fit, devices=1)
    distribute.run(plain.fit, devices=1)

    assert run(method, ranks, agent.fit) == ranks
    assert run(method, ranks, agent.fit) == ranks

    assert agent.optimizer is optimizer
    assert agent.scheduler.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert {*optimizer.state} == {*agent.parameters()}
    torch.testing.assert_close(copied(agent), copied(plain))
    assert same(copied(teacher), copied(agent.body[0]))


@dataclasses.dataclass
class Sample:
    path: str
    label: int


@pytest.mark.parametrize(
    ("data", "most"),
    [
        pytest.param(lambda: [(str(i), i) for i in range(100_000)], 200, id="tuples"),
        pytest.param(lambda: [0] * 1_000_000, 200, id="numbers"),
        pytest.param(lambda: {i: [str(i)] * 10 for i in range(100_000)}, 200, id="dict"),
        pytest.param(lambda: [Sample("x", i) for i in range(100_000)], 5_000, id="objects"),
        pytest.param(lambda: [[(i, i)] * 900 for i in range(100)], 5_000, id="nested"),
        pytest.param(lambda: [torch.ones(1)] * 900, 200, id="tensors"),
    ],
)
def test_data_costs_a_few_steps_whatever_its_size(data: Callable[[], Any], most: int) -> None:
    made = data()
    count = 0

    def step(*_: object) -> None:
        nonlocal count
        count += 1

    task = Task(len, (made,), {})
    task.stateful()  # has the classes looked up
    sys.setprofile(step)
    try:
        found = task.stateful()
    finally:
        sys.setprofile(None)

    assert found == []
    assert 0 < count < most


def test_nothing_is_looked_for_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("looked for")

    monkeypatch.setattr(stateful, "reach", refuse)

    assert fork(lambda ctx, net: ctx.world_size, nn.Linear(1, 1), write_back=False) == 2
    assert run("auto", 1, lambda ctx, net: ctx.world_size, nn.Linear(1, 1)) == 1


# -- how they travel ---------------------------------------------------------------------------


def there_and_back(task: Task, function: Callable[[Task], Any]) -> Any:
    """Has a function work on what another process would get, and returns what comes home."""
    task.parts = stateful.parts(task.stateful())
    payload = pack(task, main_names=frozenset())
    try:
        sent: Task = payload.load()
    finally:
        payload.close()
    assert len(sent.parts) == len(task.parts)
    held = Held(sent.parts)
    came = outcome.returned(0, function(sent), local=False, held=held)
    came.parts = task.parts
    return came.value()


class Careful:
    """Leaves its model out when it is sent."""

    def __init__(self, net: nn.Module) -> None:
        self.net: Any = net

    def __getstate__(self) -> dict[str, Any]:
        return {"net": None}


def test_what_an_object_leaves_out_of_its_pickle_is_not_sent_behind_its_back() -> None:
    hidden = nn.Linear(100, 100)
    net = nn.Linear(2, 2)
    task = Task(len, (Careful(hidden), net), {})

    def body(sent: Task) -> int:
        nn.init.constant_(sent.args[1].weight, 5.0)
        assert sent.args[0].net is None
        return [type(one) for one in sent.parts].count(type(None))

    assert there_and_back(task, body) == 3  # the hidden one, its weight and its bias
    assert net.weight.unique().tolist() == [5.0]


def test_a_scheduler_that_was_sent_does_not_warn_of_its_optimizer() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def body(sent: Task) -> None:
        optimizer, scheduler = sent.args
        assert scheduler.optimizer is optimizer
        optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
        optimizer.step()
        scheduler.step()

    there_and_back(Task(len, (optimizer, scheduler), {}), body)

    assert optimizer.param_groups[0]["params"][0].item() == 0
    assert optimizer.param_groups[0]["lr"] == 0.5
    scheduler.step()


def test_a_scheduler_that_was_sent_warns_where_the_order_is_wrong() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)

    def body(sent: Task) -> None:
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            sent.args[0].step()

    there_and_back(Task(len, (lr_scheduler.StepLR(optimizer, 1),), {}), body)


class Caching(nn.Module):
    """Sends neither its cache nor its table, and makes a new table where it arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.cache = nn.Linear(3, 3)
        self.register_buffer("table", torch.arange(3))

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_modules": {**self._modules}, "_buffers": {**self._buffers}}
        del state["_modules"]["cache"], state["_buffers"]["table"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.register_buffer("table", torch.zeros(1))


def test_what_a_module_leaves_out_of_its_pickle_stays_in_the_callers() -> None:
    net = Caching()
    cache, table = net.cache, net.table

    def body(sent: Task) -> None:
        nn.init.constant_(sent.args[0].layer.weight, 5.0)
        assert not hasattr(sent.args[0], "cache")
        assert sent.args[0].table.shape == (1,)

    there_and_back(Task(len, (net,), {}), body)

    assert net.layer.weight.unique().tolist() == [5.0]
    assert net.cache is cache
    assert net.table is table
    assert table.tolist() == [0, 1, 2]


def test_the_parts_on_the_rank_are_those_of_its_arguments() -> None:
    net: Any = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def body(sent: Task) -> bool:
        there, trained = sent.args
        assert trained.param_groups[0]["params"][0] is there[0].weight
        expected = [there, there[0], there[0].weight, there[0].bias, trained]
        return all(map(lambda one, other: one is other, sent.parts, expected))

    assert there_and_back(Task(len, (net, optimizer), {}), body)


def test_weights_that_are_returned_as_well_travel_once() -> None:
    net = nn.Linear(1000, 1000)
    held = Held(stateful.parts([net]))

    came = outcome.returned(0, net.state_dict(), local=False, held=held)

    assert came.payload is not None
    assert sum(came.payload.sizes) < 1.1 * 4 * (1000 * 1000 + 1000)
    came.drop()


@every_way
def test_a_model_that_is_returned_is_the_callers_own(method: str, ranks: int) -> None:
    def train(ctx: Context, net: Any, optimizer: Any) -> Any:
        model = ctx.model(net)
        steps(ctx, net, optimizer)
        return model, [optimizer], net[0], net[0].weight

    net: Any = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    model, (returned,), layer, weight = run(method, ranks, train, net, optimizer)

    assert model is net
    assert returned is optimizer
    assert layer is net[0]
    assert weight is net[0].weight


def test_state_that_came_back_is_the_callers_own_memory() -> None:
    """A result that is kept does not change with the model, nor the model with it."""

    def train(ctx: Context, net: Any, optimizer: Any) -> Any:
        steps(ctx, net, optimizer)
        return net.state_dict(), optimizer.state_dict()

    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    weights, state = fork(train, net, optimizer)
    expected = copy.deepcopy(weights), copy.deepcopy(state)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    assert same((weights, state), expected)
    assert not same(copied(net), weights)
    assert not same(optimizer.state_dict(), state)


# -- what a call leaves alone ------------------------------------------------------------------


@every_way
@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_without_write_back_nothing_of_the_callers_changes(
    method: str, ranks: int, ends: str
) -> None:
    def train(ctx: Context, job: dict[str, Any]) -> Any:
        net, lazy, optimizer, scheduler, scaler = job["all"]
        steps(ctx, net, optimizer, 2)
        scheduler.step()
        scaler.scale(torch.ones(1))  # its pickle leaves out the tensor that it has made
        scaler.update(128.0)
        lazy(torch.ones(1, 4))
        net[0].bias.requires_grad_(False)
        net[0].tag = "changed"
        net.half()
        net.eval()
        net[0] = nn.Linear(4, 4)
        optimizer.add_param_group({"params": [*net[0].parameters()]})
        if ends == "raises":
            raise LookupError("after all that")
        return ctx.world_size, {"net": net}, copied(net), net[1].weight

    net: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    lazy: Any = nn.LazyLinear(1)
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.randn(3, 4)).square().sum().backward()
    optimizer.step()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    parameters = [*net.parameters()]
    gradients = [one.grad for one in parameters]
    memory = [one.data_ptr() for one in parameters]

    def facts() -> Any:
        return copy.deepcopy(
            (
                copied(net),
                [one.grad for one in net.parameters()],
                [one.requires_grad for one in net.parameters()],
                [type(one) for one in (*net.modules(), lazy, lazy.weight)],
                [one.training for one in net.modules()],
                [sorted(vars(one)) for one in (*net.modules(), lazy, optimizer)],
                optimizer.state_dict(),
                scheduler.state_dict(),
                scaler.state_dict(),
            )
        )

    before = facts()
    job = {"all": (net, lazy, optimizer, scheduler, scaler)}
    if ends == "raises":
        with pytest.raises(LookupError, match="after all that"):
            run(method, ranks, train, job, write_back=False)
    else:
        world, found, trained, scale = run(method, ranks, train, job, write_back=False)
        assert world == ranks
        assert found["net"] is not net
        assert same(copied(found["net"]), trained)
        assert not found["net"].training
        assert same(scale.detach(), trained["1.weight"])

    assert same(facts(), before)
    for one, other in zip(net.parameters(), parameters, strict=True):
        assert one is other
    assert [one.data_ptr() for one in parameters] == memory
    for one, grad in zip(parameters, gradients, strict=True):
        assert one.grad is grad
    assert lazy(torch.ones(1, 9)).shape == (1, 1)


def test_what_raises_brings_nothing_back_from_other_processes() -> None:
    def train(ctx: Context, net: nn.Linear) -> None:
        nn.init.constant_(net.weight, 5.0)
        if ctx.rank == 1:
            raise LookupError("no data")
        ctx.barrier()

    net = nn.Linear(2, 2)
    before = copied(net)

    with pytest.raises(LookupError, match="no data"):
        fork(train, net)

    assert same(copied(net), before)


def test_leaving_by_sys_exit_without_a_code_is_returning() -> None:
    def train(ctx: Context, net: nn.Linear) -> None:
        nn.init.constant_(net.weight, 5.0)
        sys.exit()

    net = nn.Linear(2, 2)

    assert fork(train, net) is None
    assert net.weight.unique().tolist() == [5.0]


def test_gradients_plain_attributes_and_tensors_do_not_come_back() -> None:
    def train(ctx: Context, net: Any, tensor: torch.Tensor, log: list[int]) -> None:
        net(tensor).sum().backward()
        net.note = "trained"
        tensor.zero_()
        log.append(1)

    net: Any = nn.Linear(2, 2)
    tensor, log = torch.ones(1, 2), [0]

    fork(train, net, tensor, log)

    assert net.weight.grad is None
    assert not hasattr(net, "note")
    assert tensor.tolist() == [[1, 1]]
    assert log == [0]


# -- call after call ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", *SLOW_METHODS])
def test_training_goes_on_over_calls_of_kept_workers(method: str) -> None:
    def train(ctx: Context, net: nn.Module, optimizer: Any) -> int:
        steps(ctx, net, optimizer)
        return ctx.world_size

    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    plain = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))

    with distribute.workers(devices=2, accelerator="cpu", start_method=method) as kept:
        for _ in range(4):
            assert kept.run(train, net, optimizer) == 2
            plain_optimizer.zero_grad()
            plain(inputs).square().sum().backward()
            plain_optimizer.step()
            for one, other in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one, other)


def test_kept_workers_leave_the_callers_objects_alone_where_asked() -> None:
    def train(ctx: Context, net: nn.Linear) -> list[float]:
        nn.init.constant_(net.weight, 5.0)
        return net.weight.unique().tolist()

    net = nn.Linear(2, 2)
    before = copied(net)

    with distribute.workers(
        devices=2, accelerator="cpu", start_method="fork", write_back=False
    ) as kept:
        assert kept.run(train, net) == [5.0]
    assert same(copied(net), before)


# -- scripts: re-exec, and processes of somebody else ------------------------------------------

SCRIPT = """
    import copy, sys, torch
    from torch import nn
    from distribute import distributed, run

    KEEP = sys.argv[1] == "keep"
    OPTIONS = {"devices": int(sys.argv[2])} if sys.argv[2] != "auto" else {}

    def copied(net):
        return {name: one.clone() for name, one in net.state_dict().items()}

    def same(one, other):
        return all(torch.equal(one[name], other[name]) for name in one)

    @distributed(accelerator="cpu", write_back=KEEP, **OPTIONS)
    def train(ctx, job):
        net, optimizer, scheduler = job
        model = ctx.model(net)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        scheduler.step()
        net.eval()
        assert ctx.world_size == 2
        return model, copied(net)

    if __name__ == "__main__":
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        weight = net[0].weight
        print(f"METHOD {train.plan().method}\\n", end="", flush=True)
        for count in (1, 2):  # the second call finds the workers of the first
            before = copied(net)
            model, trained = train((net, optimizer, scheduler))
            assert net[0].weight is weight
            assert same(model.state_dict(), trained) and not same(trained, before)
            if KEEP:
                # Under torchrun too, where rank 0's value goes to every process.
                assert model is net
                assert same(copied(net), trained) and not net.training
                assert scheduler.last_epoch == count and optimizer.state
                assert optimizer.param_groups[0]["lr"] == 0.1 ** count
            else:
                assert model is not net and not model.training
                assert same(copied(net), before) and net.training
                assert scheduler.last_epoch == 0 and not optimizer.state
                assert optimizer.param_groups[0]["lr"] == 1.0 and weight.grad is None
            print(f"HELD {count}\\n", end="", flush=True)  # in one piece
    """


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "leave"])
def test_a_script_that_is_run_again(keep: str, tmp_path: Path) -> None:
    ended = run_python(write(tmp_path, SCRIPT), keep, "2")

    assert ended.code == 0, ended.text
    assert ended.lines("METHOD") == ["METHOD reexec"]
    assert ended.lines("HELD") == ["HELD 1", "HELD 2"]


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "leave"])
def test_a_script_under_torchrun(keep: str, tmp_path: Path) -> None:
    script = write(tmp_path, SCRIPT)

    ended = run_python(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        script, keep, "auto",
    )  # fmt: skip

    assert ended.code == 0, ended.text
    assert ended.lines("METHOD") == ["METHOD attached"] * 2
    assert ended.lines("HELD") == ["HELD 1", "HELD 1", "HELD 2", "HELD 2"]
