"""What a wrapped model does on real ranks, and in a world of one."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribute.errors import RequestError
from distribute.model import DistributedModel, no_sync, sync_buffers, unwrap, wrap
from distribute.world import World
from tests.ranks import alone, on_ranks


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

    for rank, found in enumerate(on_ranks(2, fn, timeout=60)):
        assert found["gradients"] == [rank + 1, 1.5, rank + 1, 1.5]
        assert found["types"] == ["Linear"] * 3
        assert found["keys"] == ["_orig_mod.weight", "weight"]


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

    fn(alone())
    on_ranks(2, fn)


def test_a_wrapped_module_is_not_wrapped_again() -> None:
    def fn(world: World) -> None:
        model = wrap(world, Net())
        with pytest.raises(RequestError, match="wrapped already"):
            wrap(world, model)

    on_ranks(2, fn)
