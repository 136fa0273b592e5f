"""Collectives on values: every rank passes one and gets a new one back.

The functions take tensors, numbers, bools, and nested dicts, lists, tuples and dataclasses of
them. They never change what they are given; tensors come back detached, contiguous and on the
device where the given tensor was, numbers come back as numbers. In a world of one they return
the same types without touching `torch.distributed`.

How values travel:

    all_reduce      a tensor by one all-reduce in a wider dtype; a number by an all-gather of two
                    integers, so that ranks may mix ints with floats and ints stay exact
    broadcast,      the structure with its numbers as one object, which tells the shapes; then
    all_gather      every tensor as bytes, so that every dtype works on every backend
    *_object        pickled, over a group that works on the CPU
"""

from __future__ import annotations

import importlib
import math
import numbers
import pickle
import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from distribute.errors import RequestError
from distribute.tree import map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from distribute.world import World

T = TypeVar("T")

_dist: Any = dist  # torch annotates its collectives only in part

# By our names, the operations of torch.distributed that carry them out. A mean is a sum divided
# afterwards: gloo cannot average ints, and in older torch nothing.
_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}

# The dtype in which tensors are reduced: no backend sums small ints and halves without loss, and
# gloo refuses some of them.
_WIDE = {
    torch.bool: torch.int64,
    torch.uint8: torch.int64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


def all_reduce(world: World, value: T, op: str = "sum") -> T:
    """Combines a value over all ranks; every rank gets the result.

    Floats and complex numbers keep their dtype; halves are combined in float32. Integers and
    bools follow `torch.sum`: their sum and product are int64, so the sum of bools is a count.
    Their mean is float64. `min` and `max` keep the dtype, so they are "all" and "any" of bools.
    Python ints are exact, however large the result.

    Args:
        world: The world.
        value: A tensor of the same shape and dtype on every rank, a number, or a nested structure.
        op: `"sum"`, `"mean"`, `"min"`, `"max"` or `"product"`.

    Returns:
        A new value of the same structure.
    """
    if op not in _OPS:
        raise RequestError(
            f"op={op!r}", f"the operations are {', '.join(_OPS)}", "pass one of these"
        )
    reduced: T = map_leaves(lambda leaf: _reduce(world, leaf, op), value)
    return reduced


def all_gather(world: World, value: T) -> list[T]:
    """Returns the values of all ranks in rank order.

    Tensors may have another shape on every rank, but have the same dtype. Leaves that are neither
    tensors nor numbers, such as strings or None, are allowed and travel by pickle.
    """
    skeleton, tensors = _split(value)
    skeletons = all_gather_object(world, skeleton)
    specs = [_specs(each) for each in skeletons]
    _require_same_dtypes(specs)
    rows = [
        _gather_tensor(world, tensor, [of_rank[i] for of_rank in specs])
        for i, tensor in enumerate(tensors)
    ]
    return [_fill(each, [row[rank] for row in rows]) for rank, each in enumerate(skeletons)]


def broadcast(world: World, value: T, src: int = 0) -> T:
    """Returns the value of rank `src` on every rank.

    What the other ranks pass is ignored and may be None. Tensors that are not on the CPU of
    `src` arrive on each rank's own device. Leaves that are neither tensors nor numbers, such as
    strings or None, are allowed and travel by pickle.
    """
    _require_rank(world, src)
    skeleton, tensors = _split(value) if world.rank == src else (None, [])
    skeleton = broadcast_object(world, skeleton, src)
    received = [
        _broadcast_tensor(world, tensors[i] if tensors else None, spec, src)
        for i, spec in enumerate(_specs(skeleton))
    ]
    filled: T = _fill(skeleton, received)
    return filled


def broadcast_object(world: World, obj: T, src: int = 0) -> T:
    """Returns the object of rank `src` on every rank; on `src` it is the object itself.

    It travels by pickle. A tensor inside that is on an accelerator arrives on the device of the
    same index as the sender's: `broadcast` puts it on the receiver's own.
    """
    _require_rank(world, src)
    if _is_alone(world):
        return obj
    parcels: list[Any] = [_pack(obj) if world.rank == src else None]
    _dist.broadcast_object_list(parcels, src=src, group=cpu_group(world))
    _require_sent(parcels[0], src)
    received: T = obj if world.rank == src else pickle.loads(parcels[0])
    return received


def from_main(world: World, obj: T) -> T:
    """Returns rank 0's object on every rank, however long rank 0 takes to come.

    The others do not wait in a collective, which its timeout would bound, but look for a mark in
    the group's store; so a signal reaches them at once.
    """
    if _is_alone(world):
        return obj
    group = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    turn = _turn(group)
    if world.rank == 0:
        store.set(_MAIN, str(turn))
    else:
        pause = _SHORTEST_PAUSE
        while not (store.check([_MAIN]) and int(store.get(_MAIN)) >= turn):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
    return broadcast_object(world, obj)


# Rank 0's turn in the store: one key, however often it is waited for.
_MAIN = "distribute/main"
# How often each default group has waited for rank 0.
_turns: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_SHORTEST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.02


def _turn(group: Any) -> int:
    _turns[group] = _turns.get(group, 0) + 1
    return _turns[group]


def all_gather_object(world: World, obj: T) -> list[T]:
    """Returns the objects of all ranks in rank order; a rank's own is the object itself."""
    if _is_alone(world):
        return [obj]
    parcels: list[Any] = [None] * world.world_size
    _dist.all_gather_object(parcels, _pack(obj), group=cpu_group(world))
    for rank, parcel in enumerate(parcels):
        _require_sent(parcel, rank)
    return [
        obj if rank == world.rank else pickle.loads(parcel) for rank, parcel in enumerate(parcels)
    ]


def barrier(world: World) -> None:
    """Returns when every rank has called it."""
    if _is_alone(world):
        return
    # Without its index NCCL guesses the device, and warns; gloo refuses an index.
    with_index = world.device.type != "cpu" and not _serves_cpu(world.backend)
    _dist.barrier(device_ids=[world.device.index] if with_index else None)


# Keyed weakly by the default group, because a world has none of its own to keep and a process may
# leave one world and join another.
_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def cpu_group(world: World) -> dist.ProcessGroup:
    """Returns a group of all ranks that works on the CPU.

    It is the default group where that serves the CPU, else a gloo group. The first call makes
    that group, so all ranks must make it at the same point of their program.
    """
    default = dist.group.WORLD
    assert default is not None, "a world of more than one rank has a process group"
    if _serves_cpu(world.backend):
        return default
    if default not in _cpu_groups:
        _cpu_groups[default] = _dist.new_group(backend="gloo")
    return _cpu_groups[default]


def _serves_cpu(backend: str) -> bool:
    # A backend may be a list by device type, as in "cpu:gloo,cuda:nccl".
    devices = [part.partition(":")[0] for part in backend.split(",")]
    return "cpu" in devices or backend in ("gloo", "mpi")


def _is_alone(world: World) -> bool:
    return world.world_size == 1


def _require_rank(world: World, src: int) -> None:
    if src not in range(world.world_size):
        raise RequestError(
            f"src={src!r}",
            f"the ranks of this world are 0 to {world.world_size - 1}",
            "pass one of these",
        )


def _reduce(world: World, leaf: Any, op: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _reduce_tensor(world, leaf, op)
    if isinstance(leaf, numbers.Real):
        return _reduce_number(world, leaf, op)
    raise RequestError(
        f"a {type(leaf).__qualname__} in the value of all_reduce",
        "tensors, ints, floats and bools can be reduced",
        "pass one of these, or use all_gather_object",
    )


def _reduce_tensor(world: World, tensor: torch.Tensor, op: str) -> torch.Tensor:
    if tensor.dtype not in _WIDE or (tensor.is_complex() and op not in ("sum", "mean")):
        raise RequestError(
            f"all_reduce of a tensor of {tensor.dtype} with op={op!r}",
            "this operation is not defined for this dtype",
            "convert the tensor first",
        )
    wire = _wire(world, tensor, _WIDE[tensor.dtype])
    if not _is_alone(world):
        wire = _reduced_wire(wire, op)
    dtype = _result_dtype(tensor.dtype, op, wire.device)
    if op == "mean":
        wire = wire.to(torch.promote_types(wire.dtype, dtype)) / world.world_size
    return wire.to(device=tensor.device, dtype=dtype)


def _reduced_wire(wire: torch.Tensor, op: str) -> torch.Tensor:
    if op not in ("min", "max") or not wire.is_floating_point():
        _dist.all_reduce(wire, op=getattr(dist.ReduceOp, _OPS[op]))
        return wire
    # As ints of the same order, with NaN at the end that wins: gloo keeps or loses it by chance.
    ints = _in_order(wire.view(torch.int64 if wire.dtype == torch.float64 else torch.int32))
    ends = torch.iinfo(ints.dtype)
    ints.masked_fill_(wire.isnan(), ends.min if op == "min" else ends.max)
    _dist.all_reduce(ints, op=getattr(dist.ReduceOp, _OPS[op]))
    return _in_order(ints).view(wire.dtype)


def _in_order(bits: torch.Tensor) -> torch.Tensor:
    """Turns the bits of floats into ints of the same order, and back."""
    sign = bits >> (8 * bits.itemsize - 1)
    return bits ^ (sign & torch.iinfo(bits.dtype).max)


def _result_dtype(dtype: torch.dtype, op: str, device: torch.device) -> torch.dtype:
    if op in ("min", "max") or dtype.is_floating_point or dtype.is_complex:
        return dtype
    if op == "mean":
        return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    return torch.int64


# The kinds of number in the order in which they widen, and a mark for an int that does not fit.
_KINDS = (bool, int, float)
_TOO_LARGE = len(_KINDS)

_FOLDS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
    "product": math.prod,
}


def _reduce_number(world: World, value: Any, op: str) -> bool | int | float:
    words = _all_words(world, _encode(value))
    too_large = [rank for rank, (kind, _) in enumerate(words) if kind == _TOO_LARGE]
    if too_large:
        raise RequestError(
            f"all_reduce of an int on rank {too_large[0]}",
            "it does not fit into 64 bits",
            "pass a float, or use all_gather_object",
        )
    widest = _KINDS[max(kind for kind, _ in words)]
    values = [widest(_decode(kind, word)) for kind, word in words]
    if op in ("min", "max") and any(value != value for value in values):
        return math.nan  # as torch does; Python's result would depend on the order
    result: bool | int | float = _FOLDS[op](values)
    return result


def _encode(value: Any) -> list[int]:
    if isinstance(value, bool):
        return [0, int(value)]
    if isinstance(value, numbers.Integral):
        number = int(value)
        return [1, number] if -(2**63) <= number < 2**63 else [_TOO_LARGE, 0]
    return [2, *struct.unpack("<q", struct.pack("<d", float(value)))]


def _decode(kind: int, word: int) -> bool | int | float:
    bits: float = struct.unpack("<d", struct.pack("<q", word))[0]
    return bits if _KINDS[kind] is float else word


def _all_words(world: World, words: list[int]) -> list[list[int]]:
    if _is_alone(world):
        return [words]
    device = torch.device("cpu") if _serves_cpu(world.backend) else world.device
    mine = torch.tensor(words, dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(world.world_size)]
    _dist.all_gather(rows, mine)
    table: Any = torch.stack(rows)
    return cast("list[list[int]]", table.tolist())


class _Spec:
    """Stands for a tensor in a structure that travels as an object.

    A leaf, and therefore no dataclass.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def _split(value: Any) -> tuple[Any, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Spec(leaf)

    return map_leaves(take, value), tensors


def _specs(skeleton: Any) -> list[_Spec]:
    specs: list[_Spec] = []
    map_leaves(lambda leaf: specs.append(leaf) if isinstance(leaf, _Spec) else None, skeleton)
    return specs


def _fill(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    rest = iter(tensors)
    return map_leaves(lambda leaf: next(rest) if isinstance(leaf, _Spec) else leaf, skeleton)


def _require_same_dtypes(specs: list[list[_Spec]]) -> None:
    dtypes = [[str(spec.dtype) for spec in of_rank] for of_rank in specs]
    for rank, other in enumerate(dtypes):
        if other != dtypes[0]:
            raise RequestError(
                f"all_gather of tensors of {', '.join(other) or 'no dtype'} on rank {rank}",
                f"on rank 0 they are {', '.join(dtypes[0]) or 'none'}",
                "pass the same dtypes on every rank, or use all_gather_object",
            )


def _gather_tensor(world: World, tensor: torch.Tensor, specs: list[_Spec]) -> list[torch.Tensor]:
    mine = _wire(world, tensor, tensor.dtype).reshape(-1).view(torch.uint8)
    parts = [mine]
    if not _is_alone(world):
        longest = max(spec.nbytes for spec in specs)
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        parts = [torch.empty_like(padded) for _ in specs]
        _dist.all_gather(parts, padded)
    return [
        _from_bytes(part, spec).to(tensor.device) for part, spec in zip(parts, specs, strict=True)
    ]


def _broadcast_tensor(
    world: World, tensor: torch.Tensor | None, spec: _Spec, src: int
) -> torch.Tensor:
    if tensor is None:
        wire = torch.empty(spec.nbytes, dtype=torch.uint8, device=world.device)
    else:
        wire = _wire(world, tensor, tensor.dtype).reshape(-1).view(torch.uint8)
    if not _is_alone(world):
        _dist.broadcast(wire, src)
    received = _from_bytes(wire, spec)
    if tensor is not None:
        return received.to(tensor.device)
    return received.cpu() if spec.on_cpu else received


def _wire(world: World, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a contiguous copy on the world's device."""
    if tensor.layout is not torch.strided:
        raise RequestError(
            f"a tensor of layout {tensor.layout}",
            "collectives take dense tensors",
            "pass tensor.to_dense()",
        )
    wire = torch.empty(tensor.shape, dtype=dtype, device=world.device)
    return wire.copy_(tensor.detach())


def _from_bytes(wire: torch.Tensor, spec: _Spec) -> torch.Tensor:
    if wire.numel() > spec.nbytes:
        wire = wire[: spec.nbytes].clone()  # lets go of the padding
    return wire.view(spec.dtype).reshape(spec.shape)


@dataclass(frozen=True)
class _Unsendable:
    """Sent in the place of an object that cannot be pickled, so that every rank learns of it."""

    type_name: str
    reason: str


def _pack(obj: object) -> bytes | _Unsendable:
    try:
        return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        # Lambdas and classes that only this process has travel by value.
        cloudpickle = importlib.import_module("cloudpickle")
        try:
            return bytes(cloudpickle.dumps(obj))
        except Exception as error:
            return _Unsendable(type(obj).__qualname__, f"{type(error).__name__}: {error}")


def _require_sent(parcel: bytes | _Unsendable, rank: int) -> None:
    if isinstance(parcel, _Unsendable):
        raise RequestError(
            f"a {parcel.type_name} from rank {rank}",
            f"it cannot be pickled ({parcel.reason})",
            "send plain data",
        )
