"""What every rank gets from a collective, and what a world of one gets."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distribute.barriers import barrier
from distribute.collectives import (
    all_gather,
    all_gather_object,
    broadcast,
    broadcast_object,
)
from distribute.errors import CollectiveMismatch, RequestError
from distribute.groups import cpu_group
from distribute.reduction import all_reduce
from distribute.tree import map_leaves
from distribute.world import World
from tests.ranks import alone, on_ranks

OPS = ("sum", "mean", "min", "max", "product")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Metrics:
    loss: Any
    count: Any = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", 3)


def described(value: Any) -> tuple[str, Any]:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    return type(value).__name__, value


# -- all_reduce --------------------------------------------------------------------------------


def per_op(world: World, values: list[Any]) -> list[tuple[str, Any]]:
    return [described(all_reduce(world, values[world.rank], op)) for op in OPS]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2, 5], [("int", 7), ("float", 3.5), ("int", 2), ("int", 5), ("int", 10)]),
        ([2.0, 5.0], [("float", x) for x in (7.0, 3.5, 2.0, 5.0, 10.0)]),
        ([0, 2.5], [("float", x) for x in (2.5, 1.25, 0.0, 2.5, 0.0)]),
        (
            [True, True],
            [("int", 2), ("float", 1.0), ("bool", True), ("bool", True), ("int", 1)],
        ),
        (
            [2**62 + 1, 2**62],
            [
                ("int", 2**63 + 1),
                ("float", float(2**62)),
                ("int", 2**62),
                ("int", 2**62 + 1),
                ("int", (2**62 + 1) * 2**62),
            ],
        ),
        (
            [np.float32(0.5), np.int64(2)],
            [("float", x) for x in (2.5, 1.25, 0.5, 2.0, 1.0)],
        ),
    ],
)
def test_numbers_come_back_as_numbers(values: list[Any], expected: list[Any]) -> None:
    assert on_ranks(2, lambda world: per_op(world, values)) == [expected, expected]


@pytest.mark.parametrize("values", [[math.nan, 1.0], [1.0, math.nan]])
def test_a_nan_on_one_rank_is_not_lost(values: list[float]) -> None:
    def fn(world: World) -> list[float]:
        value = values[world.rank]
        forms = [value, *(torch.tensor(value, dtype=dtype) for dtype in FLOATS)]
        return [float(all_reduce(world, form, op)) for form in forms for op in OPS]

    for found in on_ranks(2, fn):
        assert len(found) == 25
        assert all(map(math.isnan, found))


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_order_every_float(op: str) -> None:
    floats = [-math.inf, -3.5, -(2.0**-14), -0.0, 0.0, 2.0**-14, 1.0, 60000.0, math.inf]

    def fn(world: World) -> bool:
        for dtype in FLOATS:
            rows = torch.tensor(floats, dtype=dtype).expand(len(floats), -1)
            expected = getattr(torch, op + "imum")(rows, rows.t())
            assert torch.equal(all_reduce(world, [rows, rows.t()][world.rank], op), expected)
        return world.world_size == 2

    assert on_ranks(2, fn) == [True, True]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("bool", [1, 1], [("int64", 2), ("float64", 1), ("bool", 1), ("bool", 1), ("int64", 1)]),
        (
            "uint8",
            [200, 250],
            [("int64", 450), ("float64", 225), ("uint8", 200), ("uint8", 250), ("int64", 50000)],
        ),
        (
            "int8",
            [-100, -101],
            [
                ("int64", -201),
                ("float64", -100.5),
                ("int8", -101),
                ("int8", -100),
                ("int64", 10100),
            ],
        ),
        (
            "int16",
            [30000, 30001],
            [
                ("int64", 60001),
                ("float64", 30000.5),
                ("int16", 30000),
                ("int16", 30001),
                ("int64", 900030000),
            ],
        ),
        (
            "int32",
            [2**30, 2**31 - 1],
            [
                ("int64", 3 * 2**30 - 1),
                ("float64", (3 * 2**30 - 1) / 2),
                ("int32", 2**30),
                ("int32", 2**31 - 1),
                ("int64", 2**30 * (2**31 - 1)),
            ],
        ),
        (
            "int64",
            [2**53, 3],
            [
                ("int64", 2**53 + 3),
                ("float64", (2**53 + 4) / 2),
                ("int64", 3),
                ("int64", 2**53),
                ("int64", 3 * 2**53),
            ],
        ),
        ("float16", [40000, 30016], [("float16", x) for x in (math.inf, 35008, 30016, 40000)]),
        ("bfloat16", [256, 1], [("bfloat16", x) for x in (256, 128, 1, 256, 256)]),
        ("float32", [1.5, 2], [("float32", x) for x in (3.5, 1.75, 1.5, 2, 3)]),
        ("float64", [1 + 1e-12, 1], [("float64", x) for x in (2 + 1e-12, 1 + 5e-13, 1)]),
        ("complex64", [1j, 2], [("complex64", 2 + 1j), ("complex64", 1 + 0.5j)]),
    ],
)
def test_tensors_keep_what_their_dtype_can_lose(
    dtype: str, values: list[Any], expected: list[tuple[str, Any]]
) -> None:
    def fn(world: World) -> list[tuple[str, Any]]:
        tensor = torch.tensor(values[world.rank], dtype=getattr(torch, dtype))
        ops = OPS[: len(expected)]
        return [described(all_reduce(world, tensor, op)) for op in ops]

    wanted = [(f"torch.{kind}", value) for kind, value in expected]
    assert on_ranks(2, fn) == [wanted, wanted]


def test_three_bfloat16_ranks_are_summed_in_float32() -> None:
    def fn(world: World) -> float:
        return all_reduce(world, torch.tensor([256.0, 1, 1][world.rank]).bfloat16()).item()

    assert on_ranks(3, fn) == [258.0] * 3  # 256 + 1 is 256 in bfloat16


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "scalar": lambda: torch.tensor(2.0),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "strided": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.tensor([1.0]).expand(3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "bool": lambda: torch.tensor([[True], [False]]),
    "int16": lambda: torch.tensor([3], dtype=torch.int16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.parametrize("size", [1, 2])
def test_every_collective_takes_any_tensor_and_leaves_it_alone(kind: str, size: int) -> None:
    def fn(world: World) -> int:
        tensor = TENSORS[kind]()
        before = tensor.detach().clone()
        everywhere = broadcast(world, tensor)
        gathered = all_gather(world, tensor)
        results = [everywhere, *gathered]
        for result in results:
            assert result.dtype == tensor.dtype
            assert result.shape == tensor.shape
            assert result.tolist() == before.tolist()
        if kind != "float8":
            summed = all_reduce(world, tensor)
            torch.testing.assert_close(summed, before * size, check_dtype=False)
            results.append(summed)
        for result in results:
            assert not result.requires_grad
            assert result.is_contiguous()
            result.fill_(0)
        assert tensor.tolist() == before.tolist()
        return world.world_size

    found = on_ranks(2, fn) if size == 2 else [fn(alone())]
    assert found == [size] * size


def test_structures_keep_their_types() -> None:
    def value(rank: int) -> dict[str, Any]:
        entries = {
            "pair": Pair(torch.tensor([rank]), [rank, (True,)]),
            "metrics": Metrics(loss=rank + 0.5),
            "ordered": OrderedDict(a=rank),
            "counter": Counter(x=rank),
            "default": defaultdict(list, k=[rank]),
        }
        # Every rank filled its dict in another order.
        return entries if rank == 0 else dict(reversed(entries.items()))

    def fn(world: World) -> tuple[Any, ...]:
        mine = value(world.rank)
        return (
            list(mine),
            all_reduce(world, mine),
            all_gather(world, mine),
            broadcast(world, mine, src=1),
        )

    summed = Metrics(loss=2.0)
    object.__setattr__(summed, "count", 6)
    for order, reduced, gathered, everywhere in on_ranks(2, fn):
        assert list(reduced) == order
        assert reduced["pair"] == Pair(torch.tensor([1]), [1, (2,)])
        assert reduced["metrics"] == summed
        assert reduced["ordered"] == OrderedDict(a=1)
        assert isinstance(reduced["counter"], Counter)
        assert reduced["default"].default_factory is list
        assert reduced["default"]["k"] == [1]
        assert gathered == [value(0), value(1)]
        assert everywhere == value(1)


# -- all_gather and broadcast ------------------------------------------------------------------


def test_all_gather_takes_other_sizes_and_ranks_of_tensor_on_every_rank() -> None:
    shapes = [(0, 2), (3, 2), (1,)]

    def fn(world: World) -> list[dict[str, Any]]:
        shape = shapes[world.rank]
        return all_gather(world, {"x": torch.full(shape, world.rank), "n": world.rank, "s": "a"})

    for found in on_ranks(3, fn):
        assert [each["n"] for each in found] == [0, 1, 2]
        assert [each["s"] for each in found] == ["a"] * 3
        for rank, each in enumerate(found):
            assert torch.equal(each["x"], torch.full(shapes[rank], rank))
            assert each["x"].untyped_storage().nbytes() == each["x"].numel() * 8


def test_all_gather_of_other_dtypes_is_refused_on_every_rank() -> None:
    def fn(world: World) -> str:
        dtype = [torch.float32, torch.float64][world.rank]
        with pytest.raises(CollectiveMismatch) as caught:
            all_gather(world, torch.zeros(2, dtype=dtype))
        barrier(world)
        return str(caught.value)

    for message in on_ranks(2, fn):
        assert "rank 0: all_gather() of ['float32'] at" in message
        assert "rank 1: all_gather() of ['float64'] at" in message


@pytest.mark.parametrize("src", [0, 1, 2])
def test_broadcast_ignores_what_the_others_pass(src: int) -> None:
    def fn(world: World) -> dict[str, Any]:
        value = {"x": torch.arange(3)[:, None] + world.rank, "n": world.rank, "lr": 0.1}
        return broadcast(world, value if world.rank == src else None, src)

    for found in on_ranks(3, fn):
        assert found["x"].tolist() == [[src], [src + 1], [src + 2]]
        assert (found["n"], found["lr"]) == (src, 0.1)


# -- objects and the rest ----------------------------------------------------------------------


def test_objects_reach_every_rank() -> None:
    def fn(world: World) -> tuple[Any, ...]:
        class Local:
            rank = world.rank

        mine = Local()
        objects = all_gather_object(world, mine)
        assert objects[world.rank] is mine
        double = broadcast_object(world, (lambda x: 2 * x) if world.rank == 1 else None, src=1)
        return [each.rank for each in objects], double(4), cpu_group(world) is dist.group.WORLD

    assert on_ranks(3, fn) == [([0, 1, 2], 8, True)] * 3


def test_an_object_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    def unsendable(rank: int) -> Any:
        return (each for each in ()) if rank == 1 else None

    def fn(world: World) -> list[str]:
        messages = []
        for send in (
            lambda: all_gather_object(world, unsendable(world.rank)),
            lambda: broadcast_object(world, unsendable(world.rank), src=1),
            lambda: broadcast(world, {"it": unsendable(world.rank)}, src=1),
        ):
            with pytest.raises(RequestError, match="cannot be pickled") as caught:
                send()
            messages.append(caught.value.given)
        barrier(world)
        return messages

    expected = ["a generator from rank 1", "a generator from rank 1", "a dict from rank 1"]
    assert on_ranks(2, fn) == [expected, expected]


def test_a_barrier_waits_for_the_last_rank() -> None:
    def fn(world: World) -> tuple[float, float]:
        if world.rank == 1:
            time.sleep(0.3)
        before = time.monotonic()
        barrier(world)
        return before, time.monotonic()

    times = on_ranks(2, fn)
    assert min(after for _, after in times) >= max(before for before, _ in times)


def test_bad_requests_are_refused_in_every_world() -> None:
    def fn(world: World) -> None:
        last = world.world_size - 1
        with pytest.raises(RequestError, match="sum, mean, min, max, product"):
            all_reduce(world, 1, "avg")
        with pytest.raises(RequestError, match="a str in the value"):
            all_reduce(world, {"name": "x"})
        with pytest.raises(RequestError, match="complex64 with op='max'"):
            all_reduce(world, torch.tensor(1j), "max")
        with pytest.raises(RequestError, match="float8"):
            all_reduce(world, torch.ones(1).to(torch.float8_e4m3fn))
        with pytest.raises(RequestError, match="dense"):
            all_reduce(world, torch.eye(2).to_sparse())
        for src in (-1, world.world_size, None):
            for send in (broadcast, broadcast_object):
                with pytest.raises(RequestError, match=f"are 0 to {last}"):
                    send(world, 1, src)
        with pytest.raises(RequestError, match=f"an int on rank {last}: it does not fit"):
            all_reduce(world, 2**63 if world.rank == last else 1)
        barrier(world)

    fn(alone())
    on_ranks(2, fn)


@pytest.mark.parametrize("value", [True, 3, 2.5, np.float32(0.5)])
def test_a_world_of_one_gives_the_same_types(value: Any) -> None:
    grouped = on_ranks(1, lambda world: per_op(world, [value]))

    assert [per_op(alone(), [value])] == grouped
    assert not dist.is_initialized()


def test_a_world_of_one_gathers_itself() -> None:
    world = alone()
    obj = object()

    assert all_gather_object(world, obj) == [obj]
    assert broadcast_object(world, obj) is obj
    assert all_gather(world, {"a": [1, None]}) == [{"a": [1, None]}]
    assert broadcast(world, {"a": [1, None]}) == {"a": [1, None]}
    assert all_reduce(world, torch.tensor([True])).tolist() == [1]
    barrier(world)


# -- structures --------------------------------------------------------------------------------

LEAVES = st.integers() | st.none() | st.text(max_size=3)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Metrics, inner)
    ),
    max_leaves=10,
)


@given(TREES)
def test_mapping_the_identity_gives_an_equal_structure(tree: Any) -> None:
    mapped = map_leaves(lambda leaf: leaf, tree)

    assert mapped == tree
    assert type(mapped) is type(tree)


def test_leaves_are_visited_in_an_order_that_the_structure_alone_decides() -> None:
    def visited(tree: Any) -> list[Any]:
        seen: list[Any] = []
        map_leaves(seen.append, tree)
        return seen

    assert visited({"b": [1, 2], "a": 0}) == visited({"a": 0, "b": [1, 2]}) == [0, 1, 2]
    assert visited({1: "one", "a": "a"}) == ["one", "a"]
    assert visited(Metrics) == [Metrics]
