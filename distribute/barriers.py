"""Waiting for each other, some of it in the group's store: nobody is held up who gives up."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from distribute import record
from distribute.agreement import Call, agree
from distribute.collectives import broadcast_object
from distribute.errors import BarrierTimeout, RequestError
from distribute.groups import default_group, is_alone, serves_cpu

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distribute.world import World

T = TypeVar("T")

_dist: Any = dist  # torch annotates its collectives only in part


def from_main(world: World, obj: T, name: str) -> T:
    """Returns rank 0's object on every rank, however long rank 0 takes to come.

    The others do not wait in a collective, which its timeout would bound, but look for a mark in
    the group's store; so a signal reaches them at once.

    Args:
        world: The world.
        obj: Rank 0's.
        name: What it is for, such as `on_main`.
    """
    if is_alone(world):
        return obj
    default_group(world)  # there is a store as long as there is this
    store = dist.distributed_c10d._get_default_store()
    turn = _turn(_MAIN)
    if world.rank == 0:
        store.set(_MAIN, str(turn))
    else:
        for _ in _pauses(math.inf):
            if store.check([_MAIN]) and int(store.get(_MAIN)) >= turn:
                break
    return broadcast_object(world, obj, 0, name)


def barrier(world: World, *, timeout: float | None = None, name: str = "") -> None:
    """Returns when every rank has called it.

    Args:
        world: The world.
        timeout: Seconds to wait for the others. By default as long as for any collective.
        name: What it is for, in errors; the same on all ranks.

    Raises:
        BarrierTimeout: On every rank, when some had not come in time.
        CollectiveMismatch: The ranks came to different collectives.
    """
    if timeout is not None and not timeout > 0:
        raise RequestError(
            f"timeout={timeout!r}", "it is a number of seconds", "pass one above 0, or leave it out"
        )
    if is_alone(world):
        return
    if timeout is not None:
        _meet(world, timeout, name)
    agree(world, Call("barrier", f"(name={name!r})" if name else ""))
    if world.device.type != "cpu" and not serves_cpu(world.backend):
        # What the device has to do yet. Without its index NCCL guesses it, and warns.
        _dist.barrier(device_ids=[world.device.index])


def _meet(world: World, timeout: float, name: str) -> None:
    """Waits in the store, where nobody is held up who gives up waiting."""
    default_group(world)  # there is a store as long as there is this
    store = dist.distributed_c10d._get_default_store()
    turn = _turn(_BARRIER)
    key = f"{_BARRIER}/{turn}"
    everyone = range(world.world_size)
    store.set(f"{key}/{world.rank}", record.site())
    for _ in _pauses(timeout):
        # The verdict is set once; so all ranks come to the same one.
        if store.check([key]):
            break
        if all(store.check([f"{key}/{rank}"]) for rank in everyone):
            store.compare_set(key, "", _ALL)
            break
    if not store.check([key]):
        store.compare_set(key, "", _missing(store, key, everyone, timeout, name))
    verdict = store.get(key).decode()
    if verdict != _ALL:
        raise BarrierTimeout(verdict)
    # All have come here, so nobody looks at the barrier before any more.
    store.delete_key(f"{_BARRIER}/{turn - 1}")
    store.delete_key(f"{_BARRIER}/{turn - 1}/{world.rank}")


_ALL = "all"


def _missing(store: Any, key: str, everyone: range, timeout: float, name: str) -> str:
    came = [rank for rank in everyone if store.check([f"{key}/{rank}"])]
    if len(came) == len(everyone):
        return _ALL
    sites: dict[str, list[str]] = {}
    for rank in came:
        sites.setdefault(store.get(f"{key}/{rank}").decode(), []).append(str(rank))
    there = "; ".join(f"rank(s) {', '.join(ranks)} at {site}" for site, ranks in sites.items())
    late = ", ".join(str(rank) for rank in everyone if rank not in came)
    label = f"barrier {name!r}" if name else "barrier"
    return (
        f"{label}: rank(s) {late} had not come within {timeout:g} s; waiting were {there}; see "
        "where the others are, or allow more time"
    )


# Rank 0's turn in the store: one key, however often it is waited for.
_MAIN = "distribute/main"
_BARRIER = "distribute/barrier"
# How often each default group has waited in the store for something.
_turns: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
_SHORTEST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.02


def _turn(kind: str) -> int:
    turns = _turns.setdefault(dist.group.WORLD, {})
    turns[kind] = turns.get(kind, 0) + 1
    return turns[kind]


def _pauses(seconds: float) -> Iterator[None]:
    """Yields until the time is up, with pauses that grow."""
    limit = time.monotonic() + seconds
    pause = _SHORTEST_PAUSE
    while time.monotonic() < limit:
        yield
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
