"""The process groups that collectives go over, and the smallest message over one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from distribute import rendezvous
from distribute.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distribute.world import World

_dist: Any = dist  # torch annotates its collectives only in part

# Keyed weakly by the default group, because a world has none of its own to keep and a process may
# leave one world and join another.
_cpu_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def cpu_group(world: World) -> dist.ProcessGroup:
    """Returns a group of all ranks that works on the CPU.

    It is the default group where that serves the CPU, else a gloo group. The first call makes
    that group, so all ranks must make it at the same point of their program.

    Raises:
        RequestError: The call has ended.
    """
    default = default_group(world)
    if serves_cpu(world.backend):
        return default
    if default not in _cpu_groups:
        group = _dist.new_group(backend="gloo")
        rendezvous.adopt(group)
        _cpu_groups[default] = group
    return _cpu_groups[default]


def default_group(world: World) -> dist.ProcessGroup:
    """Returns the group of all ranks of a world of more than one.

    Raises:
        RequestError: The call has ended.
    """
    default = dist.group.WORLD
    if default is None:
        raise RequestError(
            f"a collective of rank {world.rank} of {world.world_size}",
            "the call of its context has ended, and the other ranks are not there any more",
            "make it in the function, and return what is needed after the call",
        )
    return default


def serves_cpu(backend: str) -> bool:
    """Tells whether a backend, or a list of them by device type, works on the CPU."""
    devices = [part.partition(":")[0] for part in backend.split(",")]
    return "cpu" in devices or backend in ("gloo", "mpi")


def is_alone(world: World) -> bool:
    """Tells whether there is nobody to talk to."""
    return world.world_size == 1


def all_words(world: World, words: Sequence[int]) -> list[list[int]]:
    """Returns every rank's integers, by rank; as many on each."""
    if is_alone(world):
        return [list(words)]
    mine = torch.tensor(words, dtype=torch.int64)
    table = torch.empty(world.world_size, len(words), dtype=torch.int64)
    _dist.all_gather(list(table.unbind()), mine, group=cpu_group(world))
    return cast("list[list[int]]", cast("Any", table).tolist())


def require_rank(world: World, name: str, rank: int) -> None:
    """Raises RequestError if there is no such rank.

    Args:
        world: The world.
        name: Name of the argument.
        rank: Its value.
    """
    if rank not in range(world.world_size):
        raise RequestError(
            f"{name}={rank!r}",
            f"the ranks of this world are 0 to {world.world_size - 1}",
            "pass one of these",
        )


def pieces(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns views of a flat tensor, as long as other tensors, one after the other."""
    parts: Sequence[torch.Tensor] = cast("Any", flat).split([one.numel() for one in like])
    return parts


def require_dense(tensor: torch.Tensor) -> None:
    """Raises RequestError for a sparse tensor."""
    if tensor.layout is not torch.strided:
        raise RequestError(
            f"a tensor of layout {tensor.layout}",
            "collectives take dense tensors",
            "pass tensor.to_dense()",
        )


def wire(world: World, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a contiguous copy on the world's device."""
    require_dense(tensor)
    copied = torch.empty(tensor.shape, dtype=dtype, device=world.device)
    return copied.copy_(tensor.detach())
