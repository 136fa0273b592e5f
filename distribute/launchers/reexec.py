"""Ranks as further runs of the caller's own script; the caller itself is rank 0.

The launcher starts its own command once more for every other rank. There the script runs up to
its first distributed call, and stays in it: it serves that call and later ones of the same world,
and leaves when the launcher ends. So what stands above the first call runs in every process, and
what comes after it runs once.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

from distribute import command, environment, outcome, process, rendezvous, supervise, worker
from distribute.channel import Channel
from distribute.interrupt import Guard
from distribute.link import WatchedLink
from distribute.messages import Call, Ready, Site
from distribute.outcome import Outcome
from distribute.payload import Payload, pack
from distribute.place import RANK_VARIABLES, Place
from distribute.plan import Plan
from distribute.process import ChildProcess
from distribute.supervise import Failure, Supervisor, Worker
from distribute.task import Task, pack_arguments
from distribute.workers import Workers, make_all, planned_places

_IMPORTED = time.monotonic()


# -- the launcher ------------------------------------------------------------------------------


@dataclass
class _Kept:
    """The world of the first call, which stays."""

    workers: Workers
    seat: worker.Seat
    plan: Plan
    failed: bool = False


_kept: _Kept | None = None


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
    first = _kept is None
    if _kept is None:
        _kept = _launch(plan)
        atexit.register(_close)
    world = _kept
    try:
        return _call(world, plan, task, site if first else None)
    except BaseException:
        world.failed = True
        _close()
        raise


def _launch(plan: Plan) -> _Kept:
    listening = rendezvous.listen()
    places = planned_places(plan, listening.getsockname()[1])
    members = make_all(places[1:], _Starter(plan.command).start, None)
    workers = Workers(members, listening.getsockname()[1])
    return _Kept(workers, worker.Seat(places[0], listening.detach()), plan)


class _Starter:
    def __init__(self, script: tuple[str, ...]) -> None:
        self._script = script

    def start(
        self, place: Place, ours: Channel, theirs: Channel, listening: object
    ) -> ChildProcess:
        child = process.start(
            self._script,
            environ=place.environ,
            cwd=command.START.cwd,
            descriptors=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            group=True,
            marker=(environment.WORKER_MARKER, str(theirs.fileno())),
        )
        ours.send(place)
        return child


def _call(world: _Kept, plan: Plan, task: Task, site: Site | None) -> list[Outcome]:
    ours, theirs = Channel.pair()
    local = Worker(0, ours, None, ready=Ready(0))
    members = [local, *world.workers.members]
    with ExitStack() as stack:
        stack.callback(theirs.close)
        stack.callback(ours.close)
        stack.enter_context(_placed(world.seat.place))
        guard = stack.enter_context(Guard(plan.grace))
        supervisor = Supervisor(
            members,
            lambda: world.workers.next_call(plan, _payload(world, task, first=site is not None)),
            grace=plan.grace,
            # The workers do what this process did up to here, which may have taken its time.
            rendezvous_timeout=plan.rendezvous_timeout
            + (time.monotonic() - _IMPORTED if site is not None else 0.0),
            guard=guard,
            free_store=world.seat.free,
            wakeup=stack.enter_context(_wakeup()),
            site=site,
        )
        watch = _Watch(supervisor)
        watch.start()
        result = _lead(world, task, theirs, guard)
        if not result.failed:
            rendezvous.leave(failed=False)
        interrupted = watch.finish()
        if supervisor.cause is not None or interrupted is not None:
            _forget_frames(result, supervisor.cause)
            rendezvous.leave(failed=True)
        return _conclude(watch, result, interrupted)


def _payload(world: _Kept, task: Task, *, first: bool) -> Payload:
    names = frozenset[str]().union(
        *(member.ready.main_names for member in world.workers.members if member.ready)
    )
    return pack_arguments(task, names) if first else pack(task, main_names=names)


def _lead(world: _Kept, task: Task, link: Channel, guard: Guard) -> Outcome:
    """Is rank 0, up to its outcome."""
    try:
        message = link.receive()
        if isinstance(message, Call):
            streams = message.streams if message.plan.seed is not None else None
            result = worker.run_call(
                world.seat, message, lambda: task, link, local=True, guarded=guard.run
            )
            if streams is not None:
                streams.restore()
            return result
        result = Outcome(0, "freed")
    except BaseException as error:
        # Interrupted outside the user's function.
        result = outcome.raised(0, error, local=True)
    try:
        link.send(replace(result, local=None))
    except OSError:
        pass  # the supervisor has ended already
    return result


def _conclude(
    watch: _Watch, result: Outcome, interrupted: BaseException | None
) -> list[Outcome]:
    if interrupted is not None:
        raise Failure(interrupted)
    if watch.error is None:
        return [result, *watch.outcomes[1:]]
    error = watch.error
    if isinstance(error, Failure) and result.kind == "raised":
        told = result.local
        if isinstance(error.cause, KeyboardInterrupt) and isinstance(told, KeyboardInterrupt):
            error.cause = told
        elif error.rank == 0:
            error.cause = result.error()
    raise error


def _forget_frames(result: Outcome, cause: BaseException | None) -> None:
    """Lets the function's frames die here, unless their exception is the caller's news.

    They may hold the last references to a failed process group, whose destructor must not run
    while its threads still work; see `rendezvous.leave`.
    """
    error = result.local
    if isinstance(error, BaseException) and result.echo:
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            try:
                trace.tb_frame.clear()
            except RuntimeError:
                pass  # still running: one of ours
            trace = trace.tb_next


class _Watch(threading.Thread):
    """Runs the supervisor beside the user's function."""

    def __init__(self, supervisor: Supervisor) -> None:
        super().__init__(name="distribute-supervisor", daemon=True)
        self._supervisor = supervisor
        self.outcomes: list[Outcome] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.outcomes = self._supervisor.run()
        except BaseException as error:
            self.error = error

    def finish(self) -> BaseException | None:
        """Waits for the end; returns an interruption that came meanwhile."""
        interrupted: BaseException | None = None
        while self.is_alive():
            try:
                self.join()
            except BaseException as error:
                interrupted = error
        return interrupted


@contextmanager
def _placed(place: Place) -> Iterator[None]:
    """Gives this process the surroundings of rank 0, and its own back afterwards."""
    import torch

    before = {name: os.environ.get(name) for name in RANK_VARIABLES if name in place.environ}
    threads = torch.get_num_threads()
    os.environ.update({name: place.environ[name] for name in before})
    if place.threads is not None:
        torch.set_num_threads(place.threads)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        torch.set_num_threads(threads)


@contextmanager
def _wakeup() -> Iterator[int]:
    """Has the numbers of arriving signals written to a pipe.

    Python's own handlers wait until the main thread is back in Python code, which it is not while
    it waits in a collective.
    """
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(before)
        os.close(ours)
        os.close(theirs)


def _close() -> None:
    world = _kept
    if world is not None and world.seat.place.launcher == os.getpid():
        world.workers.close(world.plan.grace)
        world.workers.members = []
        world.seat.free()


# -- the worker --------------------------------------------------------------------------------


class _Arrival:
    """A worker on the way from the start of the script to its first distributed call."""

    def __init__(self, descriptor: int) -> None:
        channel = Channel.inherited(descriptor)
        self.place: Place = channel.receive()
        self.link = WatchedLink(channel, group=True)
        self._stdout = _mute()
        self._hook: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._report
        worker.enable_faulthandler()

    def join(self, task: Task, site: Site) -> NoReturn:
        """Serves the calls of the launcher; the script does not go on."""
        sys.excepthook = self._hook
        worker.flush()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)
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


def arrive(descriptor: int) -> None:
    """Begins a worker's life, when the script imports this library."""
    global _arrival
    _arrival = _Arrival(descriptor)


def arriving() -> bool:
    """Tells whether this process is a worker that has not come to its call yet."""
    return _arrival is not None


def join(task: Task, site: Site) -> NoReturn:
    """Joins the launcher at the first distributed call."""
    assert _arrival is not None
    _arrival.join(task, site)


def _mute() -> int:
    """Silences standard output: the launcher prints the same. Returns the real one."""
    real = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    return real
