"""Collectives that move values: every rank passes one and gets new ones.

The functions take tensors, numbers, bools, and nested dicts, lists, tuples and dataclasses of
them; leaves of other kinds, such as strings or None, are allowed and travel by pickle. They never
change what they are given; tensors come back detached, contiguous and on the device where the
given tensor was. In a world of one they return the same types without touching
`torch.distributed`.

How values travel, behind the message by which the ranks agree and learn of sizes: the structure
with its numbers as one object, which tells the shapes (an all-gather of equal structures leaves it
out); then the tensors as one piece of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from distribute import record
from distribute.agreement import Call, agree, digest
from distribute.errors import RequestError
from distribute.gradients import attach, has_gradient
from distribute.groups import cpu_group, is_alone, require_rank
from distribute.parcel import as_parcel, as_tensor, cut, fill, join, pack, specs, split, unpack
from distribute.reduction import summed_gradients

if TYPE_CHECKING:
    from distribute.world import World

T = TypeVar("T")

_dist: Any = dist  # torch annotates its collectives only in part


# -- gathering ---------------------------------------------------------------------------------


def all_gather(world: World, value: T, *, differentiable: bool = False) -> list[T]:
    """Returns the values of all ranks in rank order.

    Tensors may have another shape on every rank, but have the same dtype.

    Args:
        world: The world.
        value: This rank's.
        differentiable: Whether backward leads from what was gathered to the value: to the sum of
            the gradients of all ranks.

    Raises:
        RequestError: A rank's value cannot be sent.
        CollectiveMismatch: The ranks came to different collectives.
    """
    skeleton, tensors = split(value)
    told = [_told(one, differentiable) for one in tensors]
    signature = f"({'differentiable=True' if differentiable else ''}) of {told or 'no tensors'}"
    gathered = _gathered(world, Call("all_gather", signature), skeleton, tensors, None)
    assert gathered is not None
    skeletons, rows = gathered
    if differentiable:
        rows = _linked(world, tensors, rows)
    return [fill(skeleton, row) for skeleton, row in zip(skeletons, rows, strict=True)]


def gather(world: World, value: T, dst: int = 0) -> list[T] | None:
    """Returns the values of all ranks in rank order on rank `dst`, and None on the others."""
    require_rank(world, "dst", dst)
    skeleton, tensors = split(value)
    told = [_told(one, False) for one in tensors]
    call = Call("gather", f"(dst={dst}) of {told or 'no tensors'}")
    gathered = _gathered(world, call, skeleton, tensors, dst)
    if gathered is None:
        return None
    return [fill(skeleton, row) for skeleton, row in zip(*gathered, strict=True)]


def all_gather_object(world: World, obj: T) -> list[T]:
    """Returns the objects of all ranks in rank order; a rank's own is the object itself."""
    gathered = _gathered(world, Call("all_gather_object"), obj, [], None)
    assert gathered is not None
    return gathered[0]


def _told(tensor: torch.Tensor, differentiable: bool) -> str:
    linked = differentiable and torch.is_grad_enabled() and tensor.requires_grad
    return f"{str(tensor.dtype).removeprefix('torch.')}{' with gradient' if linked else ''}"


def _gathered(
    world: World, call: Call, skeleton: Any, tensors: list[torch.Tensor], dst: int | None
) -> tuple[list[Any], list[list[torch.Tensor]]] | None:
    """Returns skeletons and tensors of all ranks, on `dst` or on all; else None."""
    if is_alone(world):
        return [skeleton], [cut(join(world, tensors), specs(skeleton))]
    parcel = pack(skeleton)
    data = join(world, tensors)
    rows = agree(world, call, [digest(parcel), len(parcel), data.numel()])
    parcels = [parcel] * world.world_size
    if any(row[0] != rows[0][0] for row in rows):
        sizes = [row[1] for row in rows]
        sent = _collected(world, as_tensor(parcel), sizes, dst, cpu_group(world))
        parcels = [as_parcel(one) for one in sent]
    pieces = [data] * world.world_size
    if any(row[2] for row in rows):
        pieces = _collected(world, data, [row[2] for row in rows], dst, None)
    if dst not in (None, world.rank):
        return None
    objects = [unpack(one, rank) for rank, one in enumerate(parcels)]
    found = [
        [one.to(mine.device) for one, mine in zip(cut(piece, specs(each)), tensors, strict=True)]
        for piece, each in zip(pieces, objects, strict=True)
    ]
    objects[world.rank] = skeleton
    return objects, found


def _collected(
    world: World,
    mine: torch.Tensor,
    sizes: list[int],
    dst: int | None,
    group: dist.ProcessGroup | None,
) -> list[torch.Tensor]:
    """Returns every rank's bytes, on `dst` or on all; else nothing."""
    padded = torch.nn.functional.pad(mine, (0, max(sizes) - mine.numel()))
    parts = [torch.empty_like(padded) for _ in sizes]
    if dst is None:
        _dist.all_gather(parts, padded, group=group)
    elif world.rank == dst:
        _dist.gather(padded, parts, dst, group=group)
    else:
        _dist.gather(padded, None, dst, group=group)
        return []
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _linked(
    world: World, tensors: list[torch.Tensor], rows: list[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Returns what was gathered such that backward leads from it to this rank's tensors."""
    members = [index for index, one in enumerate(tensors) if has_gradient(one)]
    call = Call("backward of all_gather", site=record.site())

    def adjoint(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        start = world.rank * len(members)
        return summed_gradients(world, call, gradients)[start : start + len(members)]

    results = [row[index] for row in rows for index in members]
    linked = iter(attach([tensors[index] for index in members], results, adjoint))
    return [
        [next(linked) if index in members else one for index, one in enumerate(row)] for row in rows
    ]


# -- from one rank -----------------------------------------------------------------------------


def broadcast(world: World, value: T, src: int = 0) -> T:
    """Returns the value of rank `src` on every rank.

    What the other ranks pass is ignored and may be None. Tensors that are not on the CPU of
    `src` arrive on each rank's own device.
    """
    require_rank(world, "src", src)
    skeleton, tensors = split(value) if world.rank == src else (None, [])
    if is_alone(world):
        alone: T = fill(skeleton, cut(join(world, tensors), specs(skeleton)))
        return alone
    data = join(world, tensors)
    call = Call("broadcast", f"(src={src})")
    skeleton, size = _from_source(world, call, skeleton, data.numel(), src)
    if world.rank != src:
        data = torch.empty(size, dtype=torch.uint8, device=world.device)
    if size:
        _dist.broadcast(data, src)
    received: T = fill(skeleton, _placed(world, cut(data, specs(skeleton)), skeleton, tensors))
    return received


def broadcast_object(world: World, obj: T, src: int = 0, name: str = "broadcast_object") -> T:
    """Returns the object of rank `src` on every rank; on `src` it is the object itself.

    It travels by pickle. A tensor inside that is on an accelerator arrives on the device of the
    same index as the sender's: `broadcast` puts it on the receiver's own.
    """
    require_rank(world, "src", src)
    if is_alone(world):
        return obj
    received: T = _from_source(world, Call(name, f"(src={src})"), obj, 0, src)[0]
    return received


def scatter(world: World, values: Sequence[T] | None, src: int = 0) -> T:
    """Returns to every rank its own of the values that rank `src` passes, one for each rank.

    What the other ranks pass is ignored and may be None. Tensors that are not on the CPU of
    `src` arrive on each rank's own device.
    """
    require_rank(world, "src", src)
    given = list(values) if world.rank == src and isinstance(values, Sequence) else []
    if world.rank == src and len(given) != world.world_size:
        raise RequestError(
            f"scatter of {len(given)} values" if given else f"scatter of {values!r}",
            f"there are {world.world_size} ranks",
            "pass a list with one value for each rank",
        )
    taken = [split(value) for value in given]
    parcels = [pack(skeleton) for skeleton, _ in taken]
    pieces = [join(world, tensors) for _, tensors in taken]
    sizes = [0, max(map(len, parcels), default=0), max(map(len, pieces), default=0)]
    sizes = agree(world, Call("scatter", f"(src={src})"), sizes)[src]
    if is_alone(world):
        data, (skeleton, mine) = pieces[0], taken[0]
    else:
        parcel = _dealt(world, list(map(as_tensor, parcels)), sizes[1], src, on_cpu=True)
        sent = unpack(as_parcel(parcel), src)
        data = _dealt(world, pieces, sizes[2], src, on_cpu=False)
        skeleton, mine = taken[src] if world.rank == src else (sent, [])
    received: T = fill(skeleton, _placed(world, cut(data, specs(skeleton)), skeleton, mine))
    return received


def _from_source(world: World, call: Call, obj: Any, size: int, src: int) -> tuple[Any, int]:
    """Returns the object of `src`, and the integer that it has passed."""
    parcel = pack(obj) if world.rank == src else bytearray()
    _, length, size = agree(world, call, [0, len(parcel), size])[src]
    parcel = parcel if world.rank == src else bytearray(length)
    _dist.broadcast(as_tensor(parcel), src, group=cpu_group(world))
    sent = unpack(parcel, src)
    return obj if world.rank == src else sent, size


def _dealt(
    world: World, parts: list[torch.Tensor], size: int, src: int, *, on_cpu: bool
) -> torch.Tensor:
    """Returns this rank's bytes of those that `src` has for each rank, padded."""
    device = torch.device("cpu") if on_cpu else world.device
    received = torch.empty(size, dtype=torch.uint8, device=device)
    if not size:
        return received
    padded = [torch.nn.functional.pad(part, (0, size - part.numel())) for part in parts]
    group = cpu_group(world) if on_cpu else None
    _dist.scatter(received, padded if world.rank == src else None, src, group=group)
    return received


def _placed(
    world: World, received: list[torch.Tensor], skeleton: Any, mine: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Puts what arrived on the device that it is for: on the source, where its tensors are."""
    if mine:
        return [one.to(own.device) for one, own in zip(received, mine, strict=True)]
    return [
        one.cpu() if spec.on_cpu else one
        for one, spec in zip(received, specs(skeleton), strict=True)
    ]
