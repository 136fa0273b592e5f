"""Ranks as further runs of the caller's own script; the caller itself is rank 0.

The launcher starts its own command once more for every other rank. There the script runs up to
its first distributed call, and stays in it: it serves that call and later ones of the same world,
and leaves when the launcher ends. So what stands above the first call runs in every process, and
what comes after it runs once.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

from distribute import command, environment, outcome, process, rendezvous, scratch, worker
from distribute.channel import Channel
from distribute.crew import Berth, Crew, make_all, planned_places
from distribute.lead import Led
from distribute.link import WatchedLink
from distribute.messages import Ready, Site
from distribute.outcome import Outcome
from distribute.place import Place
from distribute.plan import Plan
from distribute.process import ChildProcess
from distribute.task import Task, check_inherited, pack_arguments, packed_for_script
from distribute.variables import Variables

_IMPORTED = time.monotonic()


# -- the launcher ------------------------------------------------------------------------------


_kept: Led | None = None
_variables = Variables()


def kept() -> tuple[tuple[int, ...], str] | None:
    """Returns device indices and device type of the idle workers, if there are any."""
    if _kept is None or _kept.failed or _kept.seat.place.launcher != os.getpid():
        return None
    return _kept.plan.devices, _kept.plan.accelerator


def run(plan: Plan, task: Task, site: Site) -> list[Outcome]:
    """Runs a task in this process and in further runs of its script.

    Raises:
        Failure: The call did not succeed.
    """
    global _kept
    if _kept is not None:
        task = replace(task, variables=_variables.changed())
        # Before the ranks are called, or harmed: it may be impossible.
        ready = [one.ready for one in _kept.workers.members if one.ready is not None]
        payload = packed_for_script(task, _main_names(ready))
        try:
            return _kept.call(plan, task, lambda _: payload)
        finally:
            _variables.note()
    check_inherited(task)
    _kept = _launch(plan)
    atexit.register(_close)
    try:
        return _kept.call(
            plan,
            task,
            lambda ready: pack_arguments(task, _main_names(ready)),
            site=site,
            # The workers do what this process did up to here, which may have taken its time.
            extra_time=time.monotonic() - _IMPORTED,
        )
    finally:
        _variables.note()


def _main_names(ready: list[Ready]) -> frozenset[str]:
    return frozenset[str]().union(*(one.main_names for one in ready))


def _launch(plan: Plan) -> Led:
    listening = rendezvous.listen()
    places = planned_places(plan, listening.getsockname()[1])
    muted = not environment.shows_all(os.environ)
    members = make_all(places[1:], _Starter(plan.command).start, None, muted=muted)
    crew = Crew(members, listening.getsockname()[1])
    return Led(crew, worker.Seat(places[0], listening.detach()), plan)


class _Starter:
    def __init__(self, script: tuple[str, ...]) -> None:
        self._script = script

    def start(self, berth: Berth) -> ChildProcess:
        """Makes the process of a worker."""
        place = berth.place
        descriptor, life, record = berth.theirs.descriptors
        # Until the call, standard output is another one; the worker changes over.
        assert berth.stdout is not None  # only rank 0 can do without
        numbers = (descriptor, life, record, berth.stdout)
        child = process.start(
            self._script,
            environ=command.environment(place.environ),
            cwd=command.START.cwd,
            life=life,
            descriptors=[descriptor, record, berth.stdout],
            stdin=subprocess.DEVNULL,
            stdout=berth.stdout if berth.muted is None else berth.muted,
            stderr=berth.stderr,
            group=True,
            marker=(environment.WORKER_MARKER, f"{','.join(map(str, numbers))}:{place.port}"),
        )
        berth.ours.send(place)
        return child


def _close() -> None:
    if _kept is not None and _kept.seat.place.launcher == os.getpid():
        _kept.close()


# -- the worker --------------------------------------------------------------------------------


class _Arrival:
    """A worker on the way from the start of the script to its first distributed call."""

    def __init__(self, descriptor: int, life: int, record: int, stdout: int) -> None:
        channel = Channel.inherited(descriptor, life, record)
        worker.show(channel.record)
        self.place: Place = channel.receive()
        scratch.offer(self.place.scratch)
        self.link = WatchedLink(channel, group=True)
        self._stdout = stdout
        os.set_inheritable(stdout, False)
        self._hook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._report

    def join(self, task: Task, site: Site) -> NoReturn:
        """Serves the calls of the launcher; the script does not go on."""
        sys.excepthook = self._hook
        worker.flush()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)
        worker.settle_streams()
        ready = Ready(self.place.rank, site, worker.main_names())
        worker.settle_threads(self.place)
        try:
            worker.serve(self.link, worker.Seat(self.place, None), ready=ready, first=task)
        finally:
            # Not an exception upwards: the script's own `finally` blocks are rank 0's alone.
            worker.flush()
            os._exit(1)

    def _report(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        error.add_note("raised before the script came to its first distributed call")
        result = outcome.raised(self.place.rank, error, local=False)
        try:
            self.link.send(result)
        except OSError:
            self._hook(kind, error, trace)


_arrival: _Arrival | None = None


def arrive(descriptor: int, life: int, record: int, stdout: int) -> None:
    """Begins a worker's life, when the script imports this library."""
    global _arrival
    _arrival = _Arrival(descriptor, life, record, stdout)


def arriving() -> bool:
    """Tells whether this process is a worker that has not come to its call yet."""
    return _arrival is not None


def join(task: Task, site: Site) -> NoReturn:
    """Joins the launcher at the first distributed call."""
    assert _arrival is not None
    _arrival.join(task, site)
