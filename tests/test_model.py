"""What a wrapped model does on real ranks, and in a world of one."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribute.collectives import all_gather
from distribute.errors import CollectiveMismatch, RequestError
from distribute.model import accumulate, no_sync, sync_buffers, unwrap, wrap
from distribute.replica import DistributedModel
from distribute.world import World
from tests.ranks import alone, on_ranks


class Parts(nn.Module):
    """Parts that can be called one by one, and a method that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2, bias=False)
        self.head = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))

    def loss(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self(x).square().mean() * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.temperature = 1.0
        self.dim = 7

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)) / self.temperature

    def freeze(self) -> int:
        self.requires_grad_(False)
        return sum(1 for _ in self.parameters())


KEYS = list(Net().state_dict())


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def test_gradients_are_those_of_the_whole_batch() -> None:
    def fn(world: World) -> tuple[int, torch.Tensor]:
        batch = torch.arange(24.0).reshape(8, 3)
        model = wrap(world, seeded(lambda: nn.Linear(3, 1), seed=world.rank))
        share = batch.chunk(world.world_size)[world.rank]
        model(share).square().mean().backward()
        return world.world_size, model.weight.grad

    def whole(world: World) -> torch.Tensor:
        model = seeded(lambda: nn.Linear(3, 1))
        model(torch.arange(24.0).reshape(8, 3)).square().mean().backward()
        return model.weight.grad

    (expected,) = on_ranks(1, whole)
    for size, gradient in on_ranks(2, fn):
        assert size == 2
        torch.testing.assert_close(gradient, expected)


def test_the_wrapper_is_ddp_and_starts_from_rank_0() -> None:
    def fn(world: World) -> tuple[bool, torch.Tensor]:
        model = wrap(world, seeded(Net, seed=world.rank))
        return isinstance(model, DistributedDataParallel), model.head.weight.detach()

    weight = seeded(Net).head.weight
    for is_ddp, found in on_ranks(3, fn):
        assert is_ddp
        assert torch.equal(found, weight)


def test_names_and_state_dicts_have_no_prefix() -> None:
    def fn(world: World) -> dict[str, Any]:
        model = wrap(world, Net())
        parent = nn.ModuleDict({"a": model, "b": nn.Linear(1, 1)})
        state = model.state_dict()
        return {
            "state": list(state),
            "metadata": dict(state._metadata),
            "parameters": [name for name, _ in model.named_parameters()],
            "buffers": [name for name, _ in model.named_buffers()],
            "modules": [name for name, _ in model.named_modules()],
            "children": [name for name, _ in model.named_children()],
            "parent state": list(parent.state_dict()),
            "parent names": [name for name, _ in parent.named_parameters()],
        }

    net = Net()
    for found in on_ranks(2, fn):
        assert found["state"] == KEYS
        assert found["metadata"] == net.state_dict()._metadata
        assert found["parameters"] == [name for name, _ in net.named_parameters()]
        assert found["buffers"] == [name for name, _ in net.named_buffers()]
        assert found["modules"] == [name for name, _ in net.named_modules()]
        assert found["children"] == ["norm", "head"]
        assert found["parent state"] == [f"a.{key}" for key in KEYS] + ["b.weight", "b.bias"]
        assert found["parent names"][:2] == ["a.norm.weight", "a.norm.bias"]


def test_state_dicts_are_loaded_as_the_module_loads_them() -> None:
    def fn(world: World) -> dict[str, Any]:
        model = wrap(world, Net())
        source = {key: torch.full_like(value, 3) for key, value in Net().state_dict().items()}
        given = dict(source)
        model.load_state_dict(source)
        parent = nn.ModuleDict({"a": model})
        parent.load_state_dict({f"a.{key}": value + 1 for key, value in source.items()})
        partial = {"head.weight": source["head.weight"], "extra": torch.zeros(1)}
        report = model.load_state_dict(partial, strict=False)
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "seen", "norm'):
            model.load_state_dict({})
        return {
            "untouched": source == given,
            "bias": model.head.bias.tolist(),
            "weight": model.head.weight.unique().tolist(),
            "missing": report.missing_keys,
            "as plain": report == Net().load_state_dict(partial, strict=False),
            "unexpected": report.unexpected_keys,
        }

    for found in on_ranks(2, fn):
        assert found["untouched"]
        assert found["bias"] == [4, 4]
        assert found["weight"] == [3]
        assert "head.bias" in found["missing"]
        assert found["as plain"]
        assert found["unexpected"] == ["extra"]


def test_a_submodule_called_module_keeps_its_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.module = nn.Module()
            self.module.weight = nn.Parameter(torch.zeros(1))

    def fn(world: World) -> tuple[list[str], Any]:
        model = wrap(world, Odd())
        report = model.load_state_dict(Odd().state_dict())
        return list(model.state_dict()), list(report.missing_keys)

    for keys, missing in on_ranks(2, fn):
        assert keys == ["weight", "module.weight"]
        assert missing == []


def test_attributes_and_methods_reach_the_module() -> None:
    def fn(world: World) -> dict[str, Any]:
        module = Net()
        model = wrap(world, module)
        before = model.temperature, model.dim
        model.temperature = 2
        model.dim = 9
        model.note = "new"
        model.extra = nn.Parameter(torch.ones(1))
        model.register_buffer("count", torch.zeros(1))
        after = module.temperature, module.dim, module.note, module.extra is model.extra
        del model.note
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'note'"):
            model.note  # noqa: B018
        model.eval()
        return {
            "before": before,
            "after": after,
            "keys": list(model.state_dict()),
            "modes": (model.training, module.training, module.norm.training),
            "frozen": model.freeze(),
            "double": model.double().head.weight.dtype,
        }

    for found in on_ranks(2, fn):
        assert found["before"] == (1.0, 7)
        assert found["after"] == (2, 9, "new", True)
        assert set(found["keys"]) - set(KEYS) == {"extra", "count"}
        assert found["modes"] == (False, False, False)
        assert found["frozen"] == 5
        assert found["double"] == torch.float64


def test_containers_stay_containers() -> None:
    def fn(world: World) -> dict[str, Any]:
        inner = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
        model = wrap(world, inner)
        byname = wrap(world, nn.ModuleDict({"a": nn.Linear(1, 1)}))
        plain = wrap(world, nn.Linear(1, 1))
        with pytest.raises(TypeError):
            len(plain)
        model[1] = nn.Tanh()
        found = {
            "len": len(model),
            "items": [type(one).__name__ for one in model],
            "same": model[0] is inner[0] and byname["a"] is unwrap(byname)["a"],
            "in": "a" in byname and "b" not in byname,
            "true": bool(plain),
            "type": isinstance(model, DistributedModel) and type(plain) is DistributedModel,
            "copy": type(copy.deepcopy(model)).__name__,
        }
        model(torch.ones(1, 1)).sum().backward()
        return found

    for found in on_ranks(2, fn):
        assert found == {
            "len": 2, "items": ["Linear", "Tanh"], "same": True, "in": True, "true": True,
            "type": True, "copy": "Sequential",
        }  # fmt: skip


def test_a_name_that_ddp_needs_itself_is_warned_of() -> None:
    class Logging(nn.Linear):
        logger = "mine"

    def fn(world: World) -> str:
        with pytest.warns(UserWarning, match=r"reach it as unwrap\(model\)\.logger") as caught:
            model = wrap(world, Logging(1, 1))
        assert len(caught) == 1
        assert caught[0].filename == __file__
        return unwrap(model).logger

    assert on_ranks(2, fn) == ["mine", "mine"]


def test_copies_and_pickles_are_of_the_plain_module() -> None:
    def fn(world: World) -> list[str]:
        model = wrap(world, seeded(Net, seed=world.rank))
        model(torch.randn(4, 3)).sum().backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = [
            copy.deepcopy(model),
            copy.copy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
            torch.optim.swa_utils.AveragedModel(model).module,
        ]
        for each in copies:
            assert torch.equal(each.head.weight, model.head.weight)
        assert copies[0].head.weight is not model.head.weight
        return [type(each).__name__ for each in copies]

    assert on_ranks(2, fn) == [["Net"] * 5] * 2


def test_a_forward_without_gradients_on_one_rank_makes_no_collective() -> None:
    def fn(world: World) -> list[float]:
        model = wrap(world, Net())
        losses = []
        for _ in range(3):
            if world.rank == 0:
                with torch.no_grad():
                    model(torch.ones(2, 3))
                with torch.inference_mode():
                    model.eval()(torch.ones(2, 3))
                model.train()
            loss = model(torch.full((2, 3), float(world.rank))).square().sum()
            loss.backward()
            losses.append(loss.item())
            assert torch.isfinite(model.head.weight.grad).all()
        # Rank 0's buffers were broadcast at the start of each training forward.
        tracked = [torch.zeros((), dtype=torch.int64) for _ in range(world.world_size)]
        dist.all_gather(tracked, model.norm.num_batches_tracked)
        return [int(count) for count in tracked]

    assert on_ranks(2, fn) == [[6, 6], [6, 6]]


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_a_forward_without_gradients_works_with_the_options_of_ddp(option: str) -> None:
    def fn(world: World) -> list[float]:
        model = wrap(world, seeded(lambda: nn.Linear(1, 1, bias=False)), **{option: True})
        gradients = []
        for _ in range(3):
            if world.rank == 1:
                with torch.no_grad():
                    model(torch.ones(1, 1))
            model.zero_grad()
            model(torch.full((1, 1), float(world.rank))).sum().backward()
            gradients.append(model.weight.grad.item())
        return gradients

    assert on_ranks(2, fn) == [[0.5] * 3] * 2


def test_sync_buffers_gives_every_rank_those_of_rank_0() -> None:
    def fn(world: World) -> tuple[list[float], int]:
        model = wrap(world, Net())
        model(torch.full((2, 3), float(world.rank + 1)))
        model.seen.fill_(300 * (world.rank + 1))
        sync_buffers(world, model)
        return model.norm.running_mean.tolist(), int(model.seen)

    for mean, seen in on_ranks(3, fn):
        torch.testing.assert_close(mean, [0.1] * 3)
        assert seen == 300


def test_no_sync_keeps_gradients_local_until_the_next_forward_outside() -> None:
    def fn(world: World) -> tuple[float, float]:
        model = wrap(world, nn.Linear(1, 1, bias=False))
        x = torch.full((1, 1), float(world.rank + 1))
        with no_sync(model):
            model(x).sum().backward()
        local = model.weight.grad.item()
        model(x).sum().backward()
        return local, model.weight.grad.item()

    assert on_ranks(2, fn) == [(1.0, 3.0), (2.0, 3.0)]


# -- what would not be synchronised ------------------------------------------------------------


def share(world: World) -> torch.Tensor:
    return torch.full((1, 2), float(world.rank + 1))


def agreed(world: World, model: nn.Module) -> bool:
    """Whether all ranks have the same gradients, and have some."""
    mine = torch.cat([one.grad.flatten() for one in unwrap(model).parameters()])
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    dist.all_gather(rows, mine)
    return all(torch.equal(row, mine) for row in rows) and bool(mine.any())


@pytest.mark.parametrize(
    "train",
    [
        lambda model, x: model.encoder(x).sum().backward(),
        lambda model, x: model.loss(x).backward(),
        lambda model, x: unwrap(model)(x).sum().backward(),
    ],
    ids=["part", "method", "unwrapped"],
)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_gradient_past_the_wrapper_is_refused(
    train: Callable[[Any, torch.Tensor], None], after_a_step: bool
) -> None:
    def fn(world: World) -> tuple[str, bool]:
        model = wrap(world, Parts())
        if after_a_step:
            model(share(world)).sum().backward()
        with pytest.raises(RequestError, match="beside the model's own") as caught:
            train(model, share(world))
        model.zero_grad()
        model(share(world)).sum().backward()
        return caught.value.given, agreed(world, model)

    for given, synchronised in on_ranks(2, fn):
        assert re.fullmatch(r"a gradient of parameter '(encoder|head).weight' of Parts", given)
        assert synchronised


def test_a_second_backward_of_one_forward_is_refused() -> None:
    def fn(world: World) -> None:
        model = wrap(world, Parts())
        loss = model(share(world)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RequestError, match="a second backward pass"):
            loss.backward()

    on_ranks(2, fn)


def test_a_second_loss_through_the_same_parameters_is_refused() -> None:
    """As an actor's and a critic's, each with a backward of its own; torch does not say which."""

    class Actor(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(2, 2)  # whose bias has its gradient before its weight
            self.decoder = nn.Linear(2, 2)
            self.decoder.weight = self.encoder.weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.decoder(self.encoder(x))
            return hidden, self.head(hidden)

    def fn(world: World) -> tuple[str, bool]:
        model = wrap(world, Actor())
        hidden, out = model(share(world))
        hidden.sum().backward(retain_graph=True)
        with pytest.raises(RequestError, match="call backward once") as caught:
            out.sum().backward()
        again = wrap(world, Actor())
        hidden, out = again(share(world))
        (hidden.sum() + out.sum()).backward()
        return caught.value.given, agreed(world, again)

    given = "a second gradient of parameter 'decoder.bias' of Actor after one forward pass"
    assert on_ranks(2, fn) == [(given, True)] * 2


def test_what_is_synchronised_after_all_is_let_through() -> None:
    """Parts beside the whole in one loss, losses of several heads, gradients that stay local."""

    class Heads(Parts):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.encoder(x.detach()), self.head(x)

    def fn(world: World) -> list[bool]:
        found = []
        model = wrap(world, Parts())
        x = share(world)
        (model(x).sum() + model.encoder(x).sum()).backward()
        found.append(agreed(world, model))
        heads = wrap(world, Heads())
        for _ in range(2):
            heads.zero_grad()
            one, two = heads(x)
            one.sum().backward()
            two.sum().backward()
            found.append(agreed(world, heads))
        model.zero_grad()
        with no_sync(model):
            model.encoder(x).sum().backward()
        model(x).sum().backward()
        found.append(agreed(world, model))
        with torch.no_grad():
            model.loss(x)
        model.encoder(x).sum()  # nobody asks for its gradient
        return found

    assert on_ranks(2, fn) == [[True] * 4] * 2


def test_the_callers_module_is_free_again_when_the_wrapper_is_gone() -> None:
    def fn(world: World) -> bool:
        module = Parts()
        model = wrap(world, module)
        model(share(world)).sum().backward()
        again = wrap(world, module)
        again(share(world)).sum().backward()  # the first wrapper has nothing against it
        model(share(world)).sum().backward()
        del model, again
        gc.collect()
        module(share(world)).sum().backward()
        return module.head.weight._post_accumulate_grad_hooks is None or not (
            module.head.weight._post_accumulate_grad_hooks
        )

    assert on_ranks(2, fn) == [True, True]


def test_after_the_call_the_module_may_be_trained_by_itself() -> None:
    def fn(world: World) -> list[bool]:
        model = wrap(world, Parts())
        model(share(world)).sum().backward()
        dist.destroy_process_group()
        unwrap(model)(share(world)).sum().backward()
        return [model.head.weight.grad is not None, dist.is_initialized()]

    assert on_ranks(2, fn) == [[True, False]] * 2


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("forward", ["loss", ("loss", "forward")])
def test_a_named_method_is_synchronised_like_forward(
    size: int, forward: str | tuple[str, ...]
) -> None:
    def fn(world: World) -> list[Any]:
        model = wrap(world, seeded(Parts), forward=forward)
        model.loss(share(world), scale=2.0).backward()
        first = model.encoder.weight.grad.tolist()
        model.zero_grad()
        model(share(world)).square().mean().mul(2.0).backward()
        with torch.no_grad():
            if world.rank == 0:
                model.loss(share(world))  # no collective
        return [first, model.encoder.weight.grad.tolist()]

    found = on_ranks(2, fn) if size == 2 else [fn(alone())]
    expected = []
    for rank in range(size):
        module = seeded(Parts)
        (module(torch.full((1, 2), float(rank + 1))).square().mean() * 2).backward()
        expected.append(module.encoder.weight.grad)
    mean = torch.stack(expected).mean(0)
    for first, second in found:
        torch.testing.assert_close(torch.tensor(first), mean)
        torch.testing.assert_close(torch.tensor(second), mean)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_trained_and_looked_after() -> None:
    def fn(world: World) -> bool:
        model = wrap(world, torch.jit.script(Parts()))
        for _ in range(2):
            model.zero_grad()
            model(share(world)).sum().backward()
        with pytest.raises(RequestError, match="beside the model's own"):
            unwrap(model)(share(world)).sum().backward()
        model.zero_grad()
        model(share(world)).sum().backward()
        return agreed(world, model)

    assert on_ranks(2, fn) == [True, True]


def test_parameters_without_gradient_are_named() -> None:
    def fn(world: World) -> str:
        module = Parts()
        module.spare = nn.Linear(1, 1)
        model = wrap(world, module)
        model(share(world)).sum().backward()
        with pytest.raises(RequestError) as caught:
            model(share(world))
        assert isinstance(caught.value.__cause__, RuntimeError)
        module = Parts()
        module.spare = nn.Linear(1, 1)
        unused = wrap(world, module, find_unused_parameters=True)
        for _ in range(3):
            unused.zero_grad()
            unused(share(world)).sum().backward()
        return str(caught.value)

    for rank, message in enumerate(on_ranks(2, fn)):
        assert f"parameters 'spare.weight', 'spare.bias' of Parts on rank {rank}" in message
        assert "pass find_unused_parameters=True to ctx.model" in message


def added(model: Any) -> None:
    model.extra = nn.Parameter(torch.ones(1))


def replaced(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(1, 2))


def layer_added(model: Any) -> None:
    unwrap(model).encoder.bias_free = nn.Linear(1, 1)


def frozen(model: Any) -> None:
    model.encoder.requires_grad_(False)


def unfrozen(model: Any) -> None:
    model.spare.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (added, "parameter 'extra' of Parts, added or replaced after ctx.model"),
        (replaced, "parameter 'head.weight' of Parts, added or replaced after ctx.model"),
        (
            layer_added,
            "parameters 'encoder.bias_free.weight', 'encoder.bias_free.bias' of Parts, added",
        ),
        (frozen, "parameter 'encoder.weight' of Parts, frozen after ctx.model"),
        (unfrozen, "parameter 'spare.weight' of Parts, unfrozen after ctx.model"),
    ],
)
def test_what_ddp_would_not_notice_is_refused_at_the_next_forward(
    change: Callable[[Any], None], said: str
) -> None:
    def fn(world: World) -> tuple[str, bool]:
        module = Parts()
        module.spare = nn.Linear(2, 2, bias=False).requires_grad_(False)
        model = wrap(world, module)
        model(share(world)).sum().backward()
        change(model)
        with torch.no_grad():
            model(share(world))
        with pytest.raises(RequestError) as caught:
            model(share(world))
        again = wrap(world, unwrap(model), find_unused_parameters=True)
        again.zero_grad()
        again(share(world)).sum().backward()
        return str(caught.value), bool(again.head.weight.grad.any())

    for message, trained in on_ranks(2, fn):
        assert said in message
        assert "model = ctx.model(ctx.unwrap(model))" in message
        assert trained


def test_models_that_differ_between_ranks_are_an_error_on_all() -> None:
    def fn(world: World) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            wrap(world, nn.Linear(2, 2 + world.rank))
        wrap(world, nn.Linear(2, 2))
        return str(caught.value)

    for message in on_ranks(2, fn):
        assert "rank 0: model(Linear) with {'bias': float32[2], 'weight': float32[2, 2]}" in message
        assert "rank 1: model(Linear) with {'bias': float32[3], 'weight': float32[3, 2]}" in message
        assert "test_model.py:" in message


# -- accumulation ------------------------------------------------------------------------------


@pytest.mark.parametrize("with_length", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_accumulate_synchronises_at_every_step_and_at_the_last(
    size: int, with_length: bool
) -> None:
    def fn(world: World) -> list[tuple[int, bool, bool]]:
        model = wrap(world, nn.Linear(1, 1, bias=False))
        batches = [1, 2, 3, 4, 5]
        found = []
        for batch, step in accumulate(model, batches if with_length else iter(batches), 2):
            model(torch.full((1, 1), float(batch + world.rank))).sum().backward()
            total = all_gather(world, model.weight.grad)
            found.append((batch, step, all(one == total[0] for one in total)))
            if step:
                model.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        return found

    found = on_ranks(2, fn) if size == 2 else [fn(alone())]
    steps = [False, True, False, True, True]
    for each in found:
        assert each == [(n, step, step or size == 1) for n, step in enumerate(steps, 1)]


def test_a_broken_loop_leaves_synchronising_on() -> None:
    def fn(world: World) -> bool:
        model = wrap(world, Parts())
        for _batch, _step in accumulate([model], range(5), 3):
            break
        gc.collect()
        model(share(world)).sum().backward()
        return agreed(world, model)

    assert on_ranks(2, fn) == [True, True]


def test_accumulate_refuses_what_cannot_be() -> None:
    def fn(world: World) -> None:
        for n in (0, -1, 1.5, True):
            with pytest.raises(RequestError, match="the number of batches of a step"):
                accumulate(nn.ReLU(), [1], n)
        model = wrap(world, Parts(), static_graph=True)
        with pytest.raises(RequestError, match="static_graph=True"):
            accumulate(model, [1], 2)

    on_ranks(2, fn)


# -- modules of other kinds --------------------------------------------------------------------


def test_what_is_on_the_meta_device_gets_memory_and_values() -> None:
    def fn(world: World) -> list[torch.Tensor]:
        torch.manual_seed(world.rank)
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            nameless = nn.Module()
            nameless.weight = nn.Parameter(torch.ones(1))
        kept = nn.Parameter(torch.tensor([7.0]))
        module.register_parameter("kept", kept)
        model = wrap(world, module)
        with pytest.raises(RequestError, match=r"'weight' of Module, on the meta device: .*Module"):
            wrap(world, nameless)
        made = wrap(world, lambda: _on_meta(nn.Linear, 2, 2))
        assert made.weight.device.type == "cpu"
        assert made.weight.abs().max() <= 0.71  # what reset_parameters draws
        assert unwrap(model).kept is kept
        model(torch.randn(4, 2))
        return [one.detach() for one in (model[0].weight, model[1].weight, kept)]

    one, two = on_ranks(2, fn)
    assert all(map(torch.equal, one, two))
    assert one[0].abs().max() <= 0.71
    assert one[0].any()
    assert one[1].tolist() == [1, 1]
    assert one[2].tolist() == [7]
    assert fn_alone().weight.device.type == "cpu"


def _on_meta(kind: Any, *args: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(*args)


def fn_alone() -> nn.Module:
    return wrap(alone(), _on_meta(nn.Linear, 2, 2))


def test_a_frozen_module_is_that_of_rank_0_and_stays_plain() -> None:
    def fn(world: World) -> tuple[bool, list[float], int, float]:
        module = seeded(Net, seed=world.rank).requires_grad_(False)
        module.head.weight.data = module.head.weight.data.t().contiguous().t()
        module.seen = torch.tensor(world.rank + 5, dtype=torch.int16)  # DDP itself could not
        model = wrap(world, module, find_unused_parameters=True)
        bufferless = wrap(world, nn.ReLU())
        with no_sync(model):
            out = model.eval()(torch.ones(1, 3)).sum().item()
        assert type(bufferless) is nn.ReLU
        return model is module, model.head.weight.flatten().tolist(), int(model.seen), out

    found = on_ranks(2, fn)
    assert found[0] == found[1]
    assert found[0][0]
    assert found[0][1] == seeded(Net).head.weight.flatten().tolist()
    assert found[0][2] == 5


def test_a_factory_builds_on_the_device_of_the_rank() -> None:
    devices: list[torch.device] = []

    def build() -> nn.Module:
        devices.append(torch.empty(0).device)
        return Net()

    def fn(world: World) -> tuple[type, str]:
        return type(wrap(world, build)), type(wrap(world, Net)).__name__

    assert on_ranks(2, fn) == [(DistributedModel, "DistributedModel")] * 2
    assert type(wrap(alone(), build)) is Net
    assert devices == [torch.device("cpu")]


def test_ddp_options_reach_ddp() -> None:
    def fn(world: World) -> tuple[bool, bool]:
        model = wrap(world, Net(), gradient_as_bucket_view=True, find_unused_parameters=True)
        return model.gradient_as_bucket_view, model.find_unused_parameters

    assert on_ranks(2, fn) == [(True, True)] * 2


def test_compiled_modules_before_and_after_wrapping() -> None:
    def fn(world: World) -> dict[str, Any]:
        x = torch.full((2, 1), float(world.rank + 1))
        inner = torch.compile(nn.Linear(1, 1, bias=False), backend="eager")
        before = wrap(world, inner)
        outer = wrap(world, nn.Linear(1, 1, bias=False))
        after = torch.compile(outer, backend="eager")
        gradients = []
        for model in (before, after):
            with no_sync(model):
                model(x).mean().backward()
            gradients.append(unwrap(model).weight.grad.item())
            unwrap(model).zero_grad()
            model(x).mean().backward()
            gradients.append(unwrap(model).weight.grad.item())
            if world.rank == 0:
                with torch.no_grad():
                    model(x)
        return {
            "gradients": gradients,
            "types": [type(unwrap(model)).__name__ for model in (before, after, inner)],
            "keys": [*before.state_dict(), *outer.state_dict()],
        }

    for rank, found in enumerate(on_ranks(2, fn)):
        assert found["gradients"] == [rank + 1, 1.5, rank + 1, 1.5]
        assert found["types"] == ["Linear"] * 3
        assert found["keys"] == ["_orig_mod.weight", "weight"]


@pytest.mark.slow
def test_compiling_the_wrapper_makes_as_many_graphs_as_with_plain_ddp() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def fn(world: World) -> list[list[int]]:
        found = []
        for make in (DistributedDataParallel, lambda module: wrap(world, module)):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("aot_eager")
            model = torch.compile(make(Parts()), backend=counter)
            graphs = []
            for _ in range(4):
                model(share(world)).sum().backward()
                graphs.append(counter.frame_count)
            assert agreed(world, model)
            with torch.no_grad():
                model(share(world))
            found.append([*graphs, counter.frame_count])
        with pytest.raises(RequestError, match="beside the model's own"):
            unwrap(model).encoder(share(world)).sum().backward()
        return found

    for plain, ours in on_ranks(2, fn):
        assert plain == ours == [1, 1, 1, 1, 2]


def test_a_world_of_one_gives_the_module_itself() -> None:
    world = alone()
    module = Net()

    assert wrap(world, module, find_unused_parameters=True) is module
    assert unwrap(module) is module
    with no_sync(module):
        module(torch.ones(2, 3)).sum().backward()
    sync_buffers(world, module)


def test_bad_requests_are_refused_in_every_world() -> None:
    def fn(world: World) -> None:
        with pytest.raises(TypeError, match="no option 'find_unused'"):
            wrap(world, Net(), find_unused=True)
        with pytest.raises(RequestError, match="the rank's device; leave it out"):
            wrap(world, Net(), device_ids=[0])
        with pytest.raises(RequestError, match="sync_batchnorm=True on the CPU"):
            wrap(world, Net(), sync_batchnorm=True)
        with pytest.raises(RequestError, match="it made a int"):
            wrap(world, lambda: 3)
        with pytest.raises(RequestError, match="no method of that name; did you mean 'freeze'"):
            wrap(world, Net(), forward="freez")
        with pytest.raises(RequestError, match="pass the name of one of its methods"):
            wrap(world, Net(), forward="temperature")

    fn(alone())
    on_ranks(2, fn)


def test_a_wrapped_module_is_not_wrapped_again() -> None:
    def fn(world: World) -> None:
        model = wrap(world, Net())
        with pytest.raises(RequestError, match="wrapped already"):
            wrap(world, model)

    on_ranks(2, fn)
