"""What every rank gets from a collective, and what a world of one gets."""

from __future__ import annotations

import dataclasses
import math
import re
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

from distribute import rendezvous
from distribute.barriers import barrier
from distribute.collectives import (
    all_gather,
    all_gather_object,
    broadcast,
    broadcast_object,
    gather,
    scatter,
)
from distribute.errors import BarrierTimeout, CollectiveMismatch, RequestError
from distribute.groups import cpu_group
from distribute.reduction import all_reduce, reduce
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
            [np.bool_(True), False],
            [("int", 1), ("float", 0.5), ("bool", False), ("bool", True), ("int", 0)],
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
        with pytest.raises(RequestError, match=r"a ndarray .*; pass torch.as_tensor\(\) of it"):
            all_reduce(world, np.ones(3))
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


@pytest.mark.parametrize("value", [True, np.bool_(False), 3, 2.5, np.float32(0.5)])
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


# -- the other collectives ---------------------------------------------------------------------


def test_reduce_and_gather_give_their_result_to_one_rank() -> None:
    def fn(world: World) -> tuple[Any, ...]:
        value = {"n": world.rank + 1, "x": torch.full((2,), float(world.rank)), "i": True}
        return (
            reduce(world, value, 2),
            reduce(world, world.rank + 1.0, op="max"),
            reduce(world, float(world.rank), 1, "mean", weight=world.rank),
            gather(world, torch.full((world.rank,), world.rank), 1),
            gather(world, "x" * world.rank),
        )

    zero, one, two = on_ranks(3, fn)
    assert two[0]["n"] == 6
    assert two[0]["i"] == 3
    assert two[0]["x"].tolist() == [3.0, 3.0]
    assert [each[0] for each in (zero, one)] == [None, None]
    assert [each[1] for each in (zero, one, two)] == [3.0, None, None]
    assert [each[2] for each in (zero, one, two)] == [None, 5 / 3, None]
    assert [each.tolist() for each in one[3]] == [[], [1], [2, 2]]
    assert [each[3] for each in (zero, two)] == [None, None]
    assert [each[4] for each in (zero, one, two)] == [["", "x", "xx"], None, None]


@pytest.mark.parametrize("src", [0, 2])
def test_scatter_deals_out_what_one_rank_has(src: int) -> None:
    def fn(world: World) -> dict[str, Any]:
        values = [
            {"x": torch.arange(rank), "h": torch.ones(1).half() * rank, "s": "a" * rank}
            for rank in range(world.world_size)
        ]
        found = scatter(world, values if world.rank == src else None, src)
        if world.rank == src:
            found["x"].fill_(9)  # it is not what was given
            assert values[src]["x"].tolist() == list(range(src))
            found["x"] = values[src]["x"]
        return found

    for rank, found in enumerate(on_ranks(3, fn)):
        assert found["x"].tolist() == list(range(rank))
        assert found["h"].dtype == torch.float16
        assert found["h"].tolist() == [rank]
        assert found["s"] == "a" * rank


def test_other_collectives_in_a_world_of_one() -> None:
    world = alone()
    x = torch.ones(2)

    assert reduce(world, 3, op="mean") == 3.0
    assert [each.tolist() for each in gather(world, x) or []] == [[1.0, 1.0]]
    assert scatter(world, [{"a": 1, "x": x}])["x"] is not x
    barrier(world, timeout=1, name="end")
    with pytest.raises(RequestError, match="dst=1"):
        reduce(world, 1, 1)


def test_scatter_takes_one_value_for_each_rank() -> None:
    def fn(world: World) -> None:
        for values in ([1], None):
            if world.rank == 0:
                with pytest.raises(RequestError, match="there are 2 ranks"):
                    scatter(world, values)
        barrier(world)

    on_ranks(2, fn)
    with pytest.raises(RequestError, match="scatter of 2 values: there are 1 ranks"):
        scatter(alone(), [1, 2])


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 4.0, 9.0], [1, 2, 0], 3.0),
        ([1, 2, 4], [1, 1, 2], 2.75),
        ([1.0, 3.0, math.nan], [2.5, 2.5, 0], 2.0),
        ([True, False, False], [3, 1, 0], 0.75),
    ],
)
def test_a_weighted_mean_counts_samples(
    values: list[Any], weights: list[float], expected: float
) -> None:
    def fn(world: World) -> list[Any]:
        value, weight = values[world.rank], weights[world.rank]
        both = {"n": value, "x": torch.tensor([value, value]), "m": value}
        found = all_reduce(world, both, "mean", weight=weight)
        assert both["x"].isnan().all() or both["x"].tolist() == [value, value]
        return [
            found["n"],
            found["m"],
            *found["x"].tolist(),
            all_reduce(world, 1, "mean", weight=2),
        ]

    assert on_ranks(3, fn) == [[expected] * 4 + [1.0]] * 3


def test_a_mean_of_nothing_is_nan() -> None:
    def fn(world: World) -> bool:
        found = all_reduce(world, [1.0, torch.ones(1)], "mean", weight=0)
        return math.isnan(found[0]) and bool(found[1].isnan())

    assert on_ranks(2, fn) == [True, True]
    assert fn(alone())


def test_small_floats_keep_their_weighted_mean() -> None:
    def fn(world: World) -> tuple[str, float]:
        value = torch.tensor([60000.0, 30000.0][world.rank]).half()
        found = all_reduce(world, value, "mean", weight=[3, 1][world.rank])
        return str(found.dtype), found.item()

    assert on_ranks(2, fn) == [("torch.float16", 52512.0)] * 2  # 52500, as halves have it


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "2"])
def test_a_weight_that_makes_no_sense_is_refused(weight: Any) -> None:
    with pytest.raises(RequestError, match="how much a rank's value counts"):
        all_reduce(alone(), 1.0, "mean", weight=weight)
    with pytest.raises(RequestError, match="a weight is for a mean"):
        all_reduce(alone(), 1.0, weight=2)


def test_tensors_of_a_structure_have_memory_of_their_own() -> None:
    def fn(world: World) -> list[int]:
        given = [
            torch.ones(2),
            torch.ones(3).half(),
            torch.ones(4),
            torch.ones(5, dtype=torch.int64),
        ]
        found = all_reduce(world, given)
        assert [each.tolist() for each in found] == [[2.0] * n for n in (2, 3, 4, 5)]
        return [each.untyped_storage().nbytes() for each in found]

    assert on_ranks(2, fn) == [[8, 6, 16, 40]] * 2


# -- gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_through_all_gather_are_those_of_the_sum_of_all_losses(size: int) -> None:
    """Each rank's loss is another function of what all have; shapes differ too."""

    def loss(rank: int, rows: list[torch.Tensor]) -> torch.Tensor:
        joined = torch.cat(rows)
        return (joined.sum() ** 2 + joined[rank]) * (rank + 1)

    def given(rank: int) -> torch.Tensor:
        return torch.arange(rank + 1.0, 2 * rank + 2.0, dtype=torch.float64)

    def fn(world: World) -> tuple[list[float], bool]:
        mine = given(world.rank).requires_grad_()
        rows = all_gather(world, {"z": mine, "n": 1}, differentiable=True)
        assert [each["n"] for each in rows] == [1] * size
        loss(world.rank, [each["z"] for each in rows]).backward()
        return mine.grad.tolist(), all_gather(world, mine)[0].requires_grad

    inputs = [given(rank).requires_grad_() for rank in range(size)]
    sum(loss(rank, inputs) for rank in range(size)).backward()
    found = on_ranks(size, fn) if size > 1 else [fn(alone())]
    assert found == [(one.grad.tolist(), False) for one in inputs]


@pytest.mark.parametrize(("op", "weighted"), [("sum", False), ("mean", False), ("mean", True)])
def test_gradients_through_all_reduce(op: str, weighted: bool) -> None:
    weights = [1.0, 3.0] if weighted else [1.0, 1.0]

    def combined(inputs: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(inputs, weights, strict=True)
        summed = sum(one * weight for one, weight in pairs)
        return summed if op == "sum" else summed / sum(weights)

    def fn(world: World) -> tuple[list[float], float]:
        mine = torch.tensor([1.0, 2.0 + world.rank], requires_grad=True)
        half = torch.ones(1).half().requires_grad_()
        weight = weights[world.rank] if weighted else None
        value = {"x": mine, "i": torch.tensor(1), "n": 2, "h": half}
        found = all_reduce(world, value, op, weight=weight, differentiable=True)
        # On rank 1 nothing depends on "h": the backward of both is one collective nevertheless.
        loss = found["x"].square().sum() + (found["h"].sum() if world.rank == 0 else 0)
        loss.backward()
        return mine.grad.tolist(), half.grad.item()

    inputs = [torch.tensor([1.0, 2.0 + rank], requires_grad=True) for rank in range(2)]
    halves = [torch.ones(1, requires_grad=True) for _ in range(2)]
    (2 * combined(inputs).square().sum() + combined(halves).sum()).backward()
    found = on_ranks(2, fn)
    assert found == [
        (one.grad.tolist(), half.grad.item()) for one, half in zip(inputs, halves, strict=True)
    ]


def test_what_has_no_gradient_is_refused_or_constant() -> None:
    with pytest.raises(RequestError, match="gradients go through sums and means"):
        all_reduce(alone(), torch.ones(1), "max", differentiable=True)

    def fn(world: World) -> list[bool]:
        x = torch.ones(1, requires_grad=True)
        linked = all_reduce(world, x, differentiable=True)
        with torch.no_grad():
            unlinked = all_reduce(world, x, differentiable=True)
        return [linked.requires_grad, unlinked.requires_grad, all_reduce(world, x).requires_grad]

    assert on_ranks(2, fn) == [[True, False, False]] * 2
    assert fn(alone()) == [True, False, False]


# -- mismatches: every row of what goes wrong in torch without a word, or for ever ---------------


def at(line: str) -> str:
    """A call site in this file."""
    return rf"{line} at \S*test_collectives\.py:\d+"


MISMATCHES: dict[str, tuple[Callable[[World], Any], str, str]] = {
    "number of elements": (
        lambda world: all_reduce(world, torch.ones(2 + world.rank)),
        r"all_reduce\(op='sum'\) of float32\[2\]",
        r"all_reduce\(op='sum'\) of float32\[3\]",
    ),
    "shape": (
        lambda world: all_reduce(world, torch.ones([(2, 3), (3, 2)][world.rank])),
        r"all_reduce\(op='sum'\) of float32\[2, 3\]",
        r"all_reduce\(op='sum'\) of float32\[3, 2\]",
    ),
    "dtype": (
        lambda world: all_reduce(
            world, torch.ones(2, dtype=[torch.float32, torch.int64][world.rank])
        ),
        r"all_reduce\(op='sum'\) of float32\[2\]",
        r"all_reduce\(op='sum'\) of int64\[2\]",
    ),
    "operation": (
        lambda world: all_reduce(world, 1, ["sum", "mean"][world.rank]),
        r"all_reduce\(op='sum'\) of a number",
        r"all_reduce\(op='mean'\) of a number",
    ),
    "weight": (
        lambda world: all_reduce(world, 1, "mean", weight=[None, 3][world.rank]),
        r"all_reduce\(op='mean'\) of a number",
        r"all_reduce\(op='mean', weight=...\) of a number",
    ),
    "number or tensor": (
        lambda world: all_reduce(world, [1, torch.tensor(1)][world.rank]),
        r"all_reduce\(op='sum'\) of a number",
        r"all_reduce\(op='sum'\) of int64\[\]",
    ),
    "structure": (
        lambda world: all_reduce(world, {"ab"[world.rank]: 1, "n": 1}),
        r"all_reduce\(op='sum'\) of {'a': a number, 'n': a number}",
        r"all_reduce\(op='sum'\) of {'b': a number, 'n': a number}",
    ),
    "collective": (
        lambda world: [all_reduce, all_gather][world.rank](world, torch.ones(1)),
        r"all_reduce\(op='sum'\) of float32\[1\]",
        r"all_gather\(\) of \['float32'\]",
    ),
    "collective of numbers": (
        lambda world: [all_reduce, all_gather_object][world.rank](world, 1),
        r"all_reduce\(op='sum'\) of a number",
        "all_gather_object",
    ),
    "collective or barrier": (
        lambda world: barrier(world) if world.rank == 0 else broadcast(world, 1),
        "barrier",
        r"broadcast\(src=0\)",
    ),
    "source": (
        lambda world: broadcast(world, 1, world.rank),
        r"broadcast\(src=0\)",
        r"broadcast\(src=1\)",
    ),
    "destination": (
        lambda world: reduce(world, 1, world.rank),
        r"reduce\(op='sum', dst=0\) of a number",
        r"reduce\(op='sum', dst=1\) of a number",
    ),
    "name of a barrier": (
        lambda world: barrier(world, name="ab"[world.rank]),
        r"barrier\(name='a'\)",
        r"barrier\(name='b'\)",
    ),
    "dtype of what is gathered": (
        lambda world: all_gather(world, torch.ones(1, dtype=FLOATS[world.rank])),
        r"all_gather\(\) of \['float16'\]",
        r"all_gather\(\) of \['bfloat16'\]",
    ),
    "gradient": (
        lambda world: all_reduce(
            world, torch.ones(1, requires_grad=world.rank == 1), differentiable=True
        ),
        r"all_reduce\(op='sum', differentiable=True\) of float32\[1\]",
        r"all_reduce\(op='sum', differentiable=True\) of float32\[1\] with gradient",
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_is_an_error_on_every_rank_and_the_next_collective_works(kind: str) -> None:
    make, first, second = MISMATCHES[kind]

    def fn(world: World) -> tuple[str, int, bool]:
        with pytest.raises(CollectiveMismatch) as caught:
            make(world)
        again = all_reduce(world, torch.ones(3)), all_gather(world, world.rank), barrier(world)
        assert again[0].tolist() == [2.0] * 3
        assert again[1] == [0, 1]
        return str(caught.value), world.world_size, hasattr(caught.value, "_distribute_rank")

    (one, *_), (two, *_) = found = on_ranks(2, fn)
    assert [rest for _, *rest in found] == [[2, True]] * 2
    assert one == two
    assert re.search(at(f"rank 0: {first}"), one), one
    assert re.search(at(f"rank 1: {second}"), one), one
    assert "make the same ones in the same order on every rank" in one


def test_another_order_names_both_lines_and_call_sites_are_never_compared() -> None:
    def fn(world: World) -> tuple[str, list[int]]:
        def reduces() -> None:
            all_reduce(world, 1)

        def waits() -> None:
            barrier(world)

        with pytest.raises(CollectiveMismatch) as caught:
            (reduces if world.rank == 0 else waits)()
        # From two lines, and yet the same collective.
        total = all_reduce(world, 1) if world.rank == 0 else all_reduce(world, 2)
        return str(caught.value), [total, *all_gather(world, world.rank)]

    for message, values in on_ranks(3, fn):
        lines = re.findall(r"(ranks? [\d, ]+): .*? at \S*test_collectives\.py:(\d+)", message)
        assert [ranks for ranks, _ in lines] == ["rank 0", "ranks 1, 2"]
        assert int(lines[1][1]) == int(lines[0][1]) + 3
        assert values == [5, 0, 1, 2]


def test_of_long_structures_the_difference_is_shown() -> None:
    def fn(world: World) -> str:
        state = {f"layer{number:03}": torch.ones(1) for number in range(300)}
        if world.rank == 1:
            state["layer250"] = torch.ones(2)
        with pytest.raises(CollectiveMismatch) as caught:
            all_reduce(world, state)
        return str(caught.value)

    for message in on_ranks(2, fn):
        assert "'layer250': float32[1]" in message
        assert "'layer250': float32[2]" in message
        assert len(message) < 1200


def test_a_mismatch_in_backward_names_the_lines_of_the_forwards() -> None:
    def fn(world: World) -> str:
        x = torch.ones(1, requires_grad=True)
        summed = all_reduce(world, x, differentiable=True)
        with pytest.raises(CollectiveMismatch) as caught:
            summed.sum().backward() if world.rank == 0 else barrier(world)
        barrier(world)
        return str(caught.value)

    for message in on_ranks(2, fn):
        assert re.search(at("rank 0: backward of all_reduce"), message)
        assert re.search(at("rank 1: barrier"), message)


def test_without_the_check_right_programs_run_as_with_it() -> None:
    def fn(world: World) -> tuple[Any, ...]:
        world = dataclasses.replace(world, check=False)
        x = torch.ones(2, requires_grad=True)
        all_reduce(world, x, differentiable=True).sum().backward()
        barrier(world)
        return (
            all_reduce(world, {"a": 1, "b": 2.5, "x": torch.tensor([True])}),
            all_reduce(world, 4, "mean", weight=3),
            all_reduce(world, torch.ones(1)).item(),
            reduce(world, torch.ones(1)) is None,
            x.grad.tolist(),
            len(all_gather(world, "x")),
        )

    for rank, found in enumerate(on_ranks(2, fn)):
        assert (found[0]["a"], found[0]["b"], found[0]["x"].tolist()) == (2, 5.0, [2])
        assert found[1:] == (4.0, 2.0, rank == 1, [2.0, 2.0], 2)


def test_the_check_is_one_small_message_or_none() -> None:
    """Counted in calls of torch.distributed, which all collectives go through."""

    def fn(world: World) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        x = torch.ones(1000)
        for check in (True, False):
            here = dataclasses.replace(world, check=check)
            for name, call in {
                "tensor": lambda here=here: all_reduce(here, x),
                "tensors": lambda here=here: all_reduce(here, {"a": x, "b": [x, x]}),
                "number": lambda here=here: all_reduce(here, 1),
                "weighted": lambda here=here: all_reduce(here, x, "mean", weight=2),
                "gather": lambda here=here: all_gather(here, x),
                "barrier": lambda here=here: barrier(here),
            }.items():
                with torch.profiler.profile() as profile:
                    call()
                sent = [one.name for one in profile.events() if one.name.startswith("gloo:")]
                found[f"{name} {check}"] = sorted(name.removeprefix("gloo:") for name in sent)
        return found

    for found in on_ranks(2, fn):
        assert found == {
            "tensor True": ["all_gather", "all_reduce"],
            "tensor False": ["all_reduce"],
            "tensors True": ["all_gather", "all_reduce"],
            "tensors False": ["all_reduce"],
            "number True": ["all_gather"],
            "number False": ["all_gather"],
            "weighted True": ["all_gather", "all_reduce"],
            "weighted False": ["all_gather", "all_reduce"],
            "gather True": ["all_gather", "all_gather"],
            "gather False": ["all_gather", "all_gather"],
            "barrier True": ["all_gather"],
            "barrier False": ["all_gather"],
        }


def test_the_group_on_the_cpu_beside_another_is_made_once_and_is_no_users_group() -> None:
    """Workers that are kept go on with their groups, as long as these are the library's."""

    def fn(world: World) -> list[bool]:
        rendezvous.hold_groups()
        other = dataclasses.replace(world, backend="nccl")  # as if the default were none of the CPU
        group = cpu_group(other)
        assert all_gather_object(other, world.rank) == [0, 1]
        found = [group is cpu_group(other), group is not dist.group.WORLD, rendezvous.only_group()]
        dist.new_group(backend="gloo")
        return [*found, rendezvous.only_group()]

    assert on_ranks(2, fn) == [[True, True, True, False]] * 2


# -- a barrier with a limit --------------------------------------------------------------------


def test_a_barrier_names_who_did_not_come_on_every_rank_and_the_next_one_works() -> None:
    def fn(world: World) -> list[str]:
        store = dist.distributed_c10d._get_default_store()
        found = []
        for name in ("load", ""):
            barrier(world)
            if world.rank == 1:
                store.wait([f"given up {name}"])
            with pytest.raises(BarrierTimeout) as caught:
                barrier(world, timeout=3, name=name)
            store.set(f"given up {name}", "")
            found.append(str(caught.value))
            barrier(world, timeout=30, name=name)
        return found

    for named, nameless in on_ranks(3, fn):
        here = r"waiting were rank\(s\) 0, 2 at \S*test_collectives\.py:\d+; "
        assert re.match(rf"barrier 'load': rank\(s\) 1 had not come within 3 s; {here}", named)
        assert re.match(r"barrier: rank\(s\) 1 had not come", nameless)
    assert issubclass(BarrierTimeout, TimeoutError)


def test_barriers_leave_little_in_the_store() -> None:
    def fn(world: World) -> int:
        store = dist.distributed_c10d._get_default_store()
        before = store.num_keys()
        for _ in range(20):
            barrier(world, timeout=30)
        barrier(world)
        return store.num_keys() - before

    assert max(on_ranks(2, fn)) <= 3


@pytest.mark.parametrize("timeout", [0, -1, math.nan])
def test_a_limit_that_makes_no_sense_is_refused(timeout: float) -> None:
    with pytest.raises(RequestError, match="it is a number of seconds"):
        barrier(alone(), timeout=timeout)
