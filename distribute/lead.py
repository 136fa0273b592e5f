"""Rank 0 in the calling process: the function runs here, and a thread watches the other ranks.

main thread                      supervisor thread
   |  run the function               |  hear the other ranks, look at their processes
   |                                 |  a rank fails: end the others, free this one
   |  <- peers' sockets close ------ |    a collective raises
   |  <- server of the store gone -- |    a wait in the store raises
   |  <- signal, again and again --- |    Python code raises WorldEnded
   |  outcome ---------------------> |
   |  wait for the thread            |  all have ended
   |  let the failed group die       |
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType

from distribute import consumer, outcome, record, rendezvous, worker
from distribute.channel import Channel
from distribute.crew import Crew
from distribute.ending import Worker
from distribute.failure import Failure
from distribute.interrupt import Guard, Signals
from distribute.messages import Call, Ready, Site
from distribute.outcome import Outcome
from distribute.payload import Payload
from distribute.place import RANK_VARIABLES, Place
from distribute.plan import Plan
from distribute.record import Record
from distribute.supervise import Supervisor
from distribute.task import Task


@dataclass
class Led:
    """A world whose rank 0 is the calling process.

    Attributes:
        workers: The other ranks.
        seat: Rank 0.
        plan: The plan of its first call.
        failed: Whether a call has failed; its processes are gone then.
    """

    workers: Crew
    seat: worker.Seat
    plan: Plan
    failed: bool = False

    def call(
        self,
        plan: Plan,
        task: Task,
        pack: Callable[[list[Ready]], Payload | None],
        *,
        site: Site | None = None,
        extra_time: float = 0.0,
    ) -> list[Outcome]:
        """Has every rank run a task; this process's own first part of it is the task itself.

        Args:
            plan: The plan.
            task: What rank 0 runs.
            pack: Makes the payload for the other ranks from what they reported.
            site: The call site at which they must arrive.
            extra_time: Seconds they may need beyond `rendezvous_timeout`.

        Raises:
            Failure: The call did not succeed, and the other processes have been ended.
        """
        began = time.monotonic()
        try:
            return self._call(plan, task, pack, site, extra_time, began)
        except BaseException:
            self.failed = True
            self.close()
            raise

    def _call(
        self,
        plan: Plan,
        task: Task,
        pack: Callable[[list[Ready]], Payload | None],
        site: Site | None,
        extra_time: float,
        began: float,
    ) -> list[Outcome]:
        workers = self.workers

        def next_call() -> Call:
            ready = [one.ready for one in workers.members if one.ready is not None]
            return workers.next_call(plan, pack(ready))

        ours, theirs = Channel.pair()
        with ExitStack() as stack:
            stack.callback(theirs.close)
            stack.callback(ours.close)
            stack.enter_context(_placed(self.seat.place))
            stack.enter_context(_recorded(theirs.record))
            guard = stack.enter_context(Guard(plan.grace))
            signals = stack.enter_context(Signals())
            stack.enter_context(consumer.by_lines())
            forwarder = stack.enter_context(workers.forwarded(plan))
            supervisor = Supervisor(
                [Worker(0, ours, None, ready=Ready(0)), *workers.members],
                next_call,
                plan,
                began=began,
                extra_time=extra_time,
                guard=guard,
                free_store=self.seat.free,
                signals=signals,
                catch_up=forwarder.catch_up,
                site=site,
            )
            watch = _Watch(supervisor)
            watch.start()
            early: BaseException | None = None
            try:
                result = _lead(self.seat, task, theirs, guard)
            except BaseException as error:
                early, result = error, Outcome(0, "freed")
                theirs.send(result)  # the supervisor waits for one
            try:
                try:
                    if not result.failed:
                        self.seat.leave()
                        if not watch.over(rendezvous.MOMENT):
                            rendezvous.free_others()
                except BaseException as error:
                    early = error
                interrupted = watch.finish() or early
                if watch.error is not None or interrupted is not None:
                    _forget_frames(result)
                    rendezvous.leave(failed=True)
                return _conclude(watch, result, interrupted)
            finally:
                del result  # as in `worker.run_call`

    def close(self) -> None:
        """Lets the other ranks leave; they are gone afterwards."""
        self.workers.close(self.plan.grace)
        self.workers.members = []
        self.seat.close()


def _lead(seat: worker.Seat, task: Task, link: Channel, guard: Guard) -> Outcome:
    """Is rank 0, up to its outcome."""
    try:
        message = link.receive()
        if isinstance(message, Call):
            streams = message.streams if message.plan.seed is not None else None
            try:
                return worker.run_call(
                    seat, message, lambda: task, link, local=True, guarded=guard.run
                )
            finally:
                if streams is not None:
                    streams.restore()
        result = Outcome(0, "freed")
    except BaseException as error:
        # Interrupted outside the user's function.
        result = outcome.raised(0, error, local=True)
    try:
        link.send(replace(result, local=None))
    except OSError:
        pass  # the supervisor has ended already
    try:
        return result
    finally:
        del result


def _conclude(watch: _Watch, result: Outcome, interrupted: BaseException | None) -> list[Outcome]:
    if interrupted is not None:
        known = watch.error.outcomes if isinstance(watch.error, Failure) else ()
        raise Failure(interrupted, outcomes=known)
    if watch.error is None:
        return [result, *watch.outcomes[1:]]
    error, watch.error = watch.error, None
    try:
        if isinstance(error, Failure) and result.kind == "raised":
            interrupts = isinstance(result.local, KeyboardInterrupt)
            if isinstance(error.cause, KeyboardInterrupt) and interrupts:
                error.cause = result.local
                # The end of the peers may have been felt first; it is no news.
                error.cause.__context__ = None
            elif error.rank == 0:
                error.cause = result.error()
        raise error
    finally:
        del error, result


def _forget_frames(result: Outcome) -> None:
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
        self._done = threading.Event()

    def run(self) -> None:
        try:
            self.outcomes = self._supervisor.run()
        except BaseException as error:
            self.error = error
        finally:
            self._done.set()

    def over(self, seconds: float) -> bool:
        """Tells whether the end comes within some seconds."""
        return self._done.wait(seconds)

    def finish(self) -> BaseException | None:
        """Waits for the end; returns an interruption that came meanwhile."""
        interrupted: BaseException | None = None
        # Not by `join`, which takes a thread for ended when it is interrupted (until Python 3.13).
        while not self._done.is_set():
            try:
                self._done.wait()
            except BaseException as error:
                interrupted = error
        self.join()
        return interrupted


@contextmanager
def _placed(place: Place) -> Generator[None]:
    """Gives this process the surroundings of rank 0, and its own back afterwards."""
    import torch

    # torch's compiler, which a first DDP model imports, sets the last one.
    names = (*RANK_VARIABLES, "TORCHINDUCTOR_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    threads = torch.get_num_threads()
    os.environ.update({name: place.environ[name] for name in names if name in place.environ})
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
def _recorded(own: Record) -> Generator[None]:
    """Has rank 0 tell what it is doing."""
    own.open()
    record.use(own)
    try:
        yield
    finally:
        record.use(None)
