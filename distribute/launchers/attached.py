"""Somebody else started the processes: each runs the function in place, as the rank that it is."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any, cast

import cloudpickle
import torch
import torch.distributed as dist

from distribute import ambient, collectives, devices, display, outcome, rendezvous, stateful
from distribute.context import Context
from distribute.deadline import bounded
from distribute.environment import External
from distribute.errors import CallMismatch
from distribute.failure import carry
from distribute.home import home
from distribute.meeting import Meeting
from distribute.messages import Site
from distribute.outcome import Outcome
from distribute.plan import Plan
from distribute.rendezvous import Rendezvous
from distribute.task import Task
from distribute.worker import run_user
from distribute.world import World

_rendezvous: Rendezvous | None = None
_calls = 0


def run(plan: Plan, task: Task, site: Site) -> list[Outcome]:
    """Runs a task in this process as one rank of an existing world.

    Every process gets rank 0's plain arguments and rank 0's value, so that the script takes the
    same branches everywhere.
    """
    held = dist.is_initialized()
    world = _world(plan, _device(plan))
    if not held and plan.world_size > 1:
        _join(plan, world)
    try:
        world = dataclasses.replace(world, grouped=dist.is_initialized())
        value = _in_world(plan, world, task, site)
    except BaseException as error:
        # What became of the others, nobody here knows.
        carry(error, (outcome.public(outcome.raised(world.rank, error, local=True)),))
        if not held:
            rendezvous.leave(failed=True)
        raise
    if not held:
        rendezvous.leave(failed=False)
    return [outcome.returned(0, value, local=True)]


def _in_world(plan: Plan, world: World, task: Task, site: Site) -> Any:
    before = ambient.Streams.capture()
    sites, arguments, streams = zip(
        *collectives.all_gather_object(world, (str(site), _plain(task), before)), strict=True
    )
    _check_sites(world, sites)
    if plan.seed is None:
        streams[0].restore()
    else:
        ambient.seed_all(plan.seed)
    seed = streams[0].seed() if plan.seed is None else plan.seed
    try:
        context = Context(dataclasses.replace(world, seed=seed), display.here())
        mine = _with_plain(task, arguments[0])
        parts = stateful.parts(mine.stateful()) if plan.write_back else ()
        value = bounded(
            plan.deadline,
            plan.grace,
            lambda: run_user(context, mine, write_back=plan.write_back),
        )
        if plan.returns == "all":
            return collectives.all_gather_object(world, home(value))
        return _of_main(world, home(value), parts)
    finally:
        if plan.seed is not None:
            before.restore()


def _check_sites(world: World, sites: tuple[str, ...]) -> None:
    for rank, other in enumerate(sites):
        if other != sites[0]:
            raise CallMismatch(
                f"rank {rank} called {other} while rank 0 called {sites[0]}: every process of "
                "this job must make the same distributed calls in the same order"
            )


def _of_main(world: World, value: Any, parts: Sequence[Any]) -> Any:
    """Returns rank 0's value, or this rank's own where that cannot be sent.

    Args:
        world: The world.
        value: This rank's value.
        parts: What the function was given to train, here. Where the value holds any of rank 0's,
            it holds this rank's own instead, which its optimizer knows.
    """
    sent: tuple[bool, Any] | None = None
    if world.rank == 0:
        stream = io.BytesIO()
        try:
            _Pickler(stream, parts).dump(value)
            sent = True, stream.getvalue()
        except Exception:
            sent = False, None
    can, packed = cast("tuple[bool, Any]", collectives.broadcast_object(world, sent))
    if not can or world.rank == 0:
        return value
    return _Unpickler(io.BytesIO(packed), parts).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, stream: io.BytesIO, parts: Sequence[Any]) -> None:
        super().__init__(stream)
        self._numbers = {id(one): number for number, one in enumerate(parts)}

    def persistent_id(self, obj: Any) -> int | None:
        """Returns the number of a part."""
        return self._numbers.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, parts: Sequence[Any]) -> None:
        super().__init__(stream)
        self._parts = parts

    def persistent_load(self, pid: int) -> Any:
        """Returns the part of a number."""
        return self._parts[pid]


def _device(plan: Plan) -> torch.device:
    if plan.accelerator in ("cpu", "mps"):
        return devices.device(plan.accelerator, None)
    local_rank = 0 if plan.external is None else plan.external.local_rank
    # A launcher that shows each process one device only has chosen already.
    return devices.device(plan.accelerator, plan.devices[local_rank % len(plan.devices)])


def _world(plan: Plan, device: torch.device) -> World:
    external = plan.external or _of_group()
    return World(
        rank=external.rank,
        local_rank=external.local_rank,
        node_rank=external.node_rank,
        world_size=external.world_size,
        local_world_size=external.local_world_size,
        num_nodes=external.num_nodes,
        device=device,
        backend=plan.backend,
        seed=0,
        grouped=False,
        restart_count=external.restarts,
        check=plan.check_collectives,
    )


def _of_group() -> External:
    rank, size = dist.get_rank(), dist.get_world_size()
    return External("the caller", rank, rank, 0, size, size, 1, "", 0, False)


def _join(plan: Plan, world: World) -> None:
    global _rendezvous, _calls
    external = plan.external
    assert external is not None
    meeting = Meeting(external, plan.rendezvous_timeout)
    if _rendezvous is None:
        server = world.rank == 0 and not external.hosted
        if not server:
            meeting.find_store()
        _rendezvous = Rendezvous(
            external.master_addr,
            external.master_port,
            server=server,
            listening=None,
            timeout=plan.rendezvous_timeout,
        )
    # An elastic agent keeps its store when it starts the processes again.
    key = f"distribute/{external.restarts}/{_calls}"
    meeting.wait_for_all(_rendezvous, key)
    _rendezvous.join(
        key,
        backend=plan.backend,
        rank=world.rank,
        world_size=world.world_size,
        timeout=plan.timeout,
        device=world.device,
    )
    _calls += 1


_PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath)


def _is_plain(value: object) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, cast("Iterable[object]", value)))
    if isinstance(value, dict):
        pairs = cast("dict[object, object]", value).items()
        return all(_is_plain(key) and _is_plain(one) for key, one in pairs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_is_plain(getattr(value, one.name)) for one in dataclasses.fields(value))
    return False


def _plain(task: Task) -> tuple[dict[int, Any], dict[str, Any]]:
    return (
        {index: one for index, one in enumerate(task.args) if _is_plain(one)},
        {name: one for name, one in task.kwargs.items() if _is_plain(one)},
    )


def _with_plain(task: Task, plain: tuple[dict[int, Any], dict[str, Any]]) -> Task:
    args = tuple(plain[0].get(index, one) for index, one in enumerate(task.args))
    kwargs = {name: plain[1].get(name, one) for name, one in task.kwargs.items()}
    return dataclasses.replace(task, args=args, kwargs=kwargs)
