"""Watching the ranks of one call: the first failure ends the rest, and nobody waits for ever.

A supervisor is an event loop over the control channels and the process handles of all ranks. It
runs in the caller's thread when the caller is no rank itself, and in a thread of its own under
re-exec. It goes through three phases: all *ready*, all *joined*, all with an *outcome*.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distribute import report, stopping
from distribute.arrival import Arrival
from distribute.cgroup import OutOfMemory
from distribute.ending import PERIOD, Ending, Worker, dismiss
from distribute.errors import DeadlineExceeded, DistributeError, JoinTimeout, WorkerDied
from distribute.failure import Failure
from distribute.interrupt import Guard, Signals
from distribute.messages import Call, Go, Joined, Joining, Leave, Ready, Site
from distribute.outcome import Outcome
from distribute.plan import Plan
from distribute.report import Sighting
from distribute.stopping import Stopped

# How long an error that looks like an echo waits for its cause.
_ECHO_SECONDS = 1.0
# How long the first failure waits for one that was earlier but is reported later.
_ORDER_SECONDS = 0.02
# How long ranks that have returned hold on to a process group that is kept for the next call, while
# others may wait for them in it.
_HOLD_SECONDS = 0.05
# How often ranks are looked at that may have been stopped, of which nothing else tells.
_LOOK_SECONDS = 1.0
# Where this process sleeps longer than it meant to by this, the machine has stalled: the ranks may
# have done nothing either, and for how long they are waited for does not count it.
_STALL_SECONDS = 0.2
# Exceptions of signal handlers while the ranks end: then whoever sends them is obeyed.
_MOST_INTERRUPTIONS = 3


class Supervisor:
    """Takes a set of workers through one call.

    Args:
        workers: All ranks in order.
        call: Makes the call for the workers once they are ready.
        plan: The plan of the call.
        began: When the whole call began, by the monotonic clock.
        extra_time: Seconds that the ranks may need to join beyond `rendezvous_timeout`.
        ready_timeout: Seconds until all are ready, or None for `rendezvous_timeout`; then
            `NotReady` is the cause.
        guard: Frees the rank in the calling process.
        free_store: Frees that rank from a wait in the store.
        signals: What arrives at the calling process.
        catch_up: Reads what the ranks have written so far.
        site: The call site of the launcher, which those of the workers must equal.
    """

    def __init__(
        self,
        workers: list[Worker],
        call: Callable[[], Call],
        plan: Plan,
        *,
        began: float,
        extra_time: float = 0.0,
        ready_timeout: float | None = None,
        guard: Guard | None = None,
        free_store: Callable[[], None] | None = None,
        signals: Signals | None = None,
        catch_up: Callable[[], None] = lambda: None,
        site: Site | None = None,
    ) -> None:
        self.workers = workers
        self._make_call = call
        self._plan = plan
        self._guard = guard
        self._ending = Ending(workers, grace=plan.grace, guard=guard, free_store=free_store)
        self._arrival = Arrival(
            workers,
            timeout=plan.rendezvous_timeout + extra_time,
            ready_timeout=ready_timeout,
            site=site,
        )
        self._signals = signals
        self._catch_up = catch_up
        self._selector = selectors.DefaultSelector()
        self._ends = None if plan.deadline is None else began + plan.deadline
        self._look_at = time.monotonic() + _LOOK_SECONDS
        self._memory = OutOfMemory()
        self._gone: set[int] = set()
        self._stopped = Stopped()
        self.outcomes: dict[int, Outcome] = {}
        self._suspect: float | None = None
        self._leave_at: float | None = None
        self._interruptions = 0
        self.cause: BaseException | None = None
        self._cause_rank: int | None = None
        self._notes: list[str] = []
        self._sightings: list[Sighting] = []

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> list[Outcome]:
        """Runs until every rank has returned, or has been ended after a failure.

        Raises:
            Failure: The call did not succeed.
        """
        try:
            self._register()
            self._advance()
            while not self._finished():
                try:
                    self._turn()
                except BaseException as error:
                    self._interrupt(error)
        except BaseException as error:
            # Of our own, or of what the call cannot be packed by: the rank here must not wait on.
            self._ending.begin(error, self.outcomes.keys())
            self._ending.kill()
            raise
        finally:
            self._selector.close()
        outcomes = [self.outcomes[rank] for rank in sorted(self.outcomes)]
        if self.cause is not None:
            for one in outcomes:
                one.drop()
            raise self._failure(self.cause)
        return outcomes

    def _failure(self, cause: BaseException) -> Failure:
        progress = any(one.channel.record.completed() for one in self.workers)
        again = isinstance(cause, Exception) and (
            isinstance(cause, WorkerDied) or not isinstance(cause, DistributeError)
        )
        return Failure(
            cause,
            self._cause_rank,
            report.outcomes(self.workers, self.outcomes, self._sightings),
            [*self._notes, *report.notes(self.outcomes, self._cause_rank)],
            restartable=progress and again and self._cause_rank is not None,
        )

    def _turn(self) -> None:
        patience, began = self._patience(), time.monotonic()
        events = self._selector.select(patience)
        slept = time.monotonic() - began
        if slept > patience + _STALL_SECONDS:
            self._shift(slept)
        for key, _ in events:
            key.data()
        self._tick(time.monotonic())

    def _shift(self, seconds: float) -> None:
        """Does not count a time in which nobody could do anything."""
        self._arrival.shift(seconds)
        if self._suspect is not None:
            self._suspect += seconds
        if self._leave_at is not None:
            self._leave_at += seconds

    def _interrupt(self, error: BaseException) -> None:
        """Goes on when a signal handler has raised in this thread: an interruption of the call."""
        self._interruptions += 1
        if self.cause is None:
            self._settle(error)
        elif self._interruptions < _MOST_INTERRUPTIONS:
            self._ending.kill()
        else:
            raise error

    def _register(self) -> None:
        for worker in self.workers:
            self._selector.register(
                worker.channel, selectors.EVENT_READ, lambda one=worker: self._hear(one)
            )
            process = worker.process
            if process is not None and process.fileno() >= 0:
                self._selector.register(
                    process.fileno(), selectors.EVENT_READ, lambda one=worker: self._look(one)
                )
        if self._signals is not None and self._signals.fileno() >= 0:
            self._selector.register(self._signals, selectors.EVENT_READ, self._hear_signal)

    def _finished(self) -> bool:
        if self.cause is None:
            return len(self.outcomes) == len(self.workers) and self._suspect is None
        return all(
            worker.rank in (self.outcomes if worker.process is None else self._gone)
            for worker in self.workers
        )

    def _patience(self) -> float:
        now = time.monotonic()
        times = [self._look_at if self.cause is None else now + PERIOD]
        if any(one.process is not None and one.process.fileno() < 0 for one in self.workers):
            times.append(now + PERIOD)
        if self.cause is None and self._suspect is not None:
            times.append(self._suspect)
        if self._ends is not None and self.cause is None:
            times.append(self._ends)
        if self.cause is None and not self._arrival.complete:
            times.append(self._arrival.due())
        if self.cause is None and self._leave_at is not None:
            times.append(self._leave_at)
        return max(0.0, min(times) - now)

    def _tick(self, now: float) -> None:
        for worker in self.workers:
            if worker.process is not None and worker.process.fileno() < 0:
                self._look(worker)
        if self.cause is None:
            everybody = len(self.outcomes) == len(self.workers)
            if self._suspect is not None and (everybody or now >= self._suspect):
                self._settle_failure()
            elif self._ends is not None and now >= self._ends and not everybody:
                self._settle(self._overdue(), hang=True)
            elif self._leave_at is not None and now >= self._leave_at and not everybody:
                self._have_left()
            elif now >= self._look_at:
                self._look_at = now + _LOOK_SECONDS
                self._stopped.look(self.workers, self._gone)
            elif not self._arrival.complete and (late := self._arrival.check(now)) is not None:
                self._settle(late, hang=isinstance(late, JoinTimeout))
            return
        self._ending.go_on(now, self.outcomes.keys())

    # -- events --------------------------------------------------------------------------------

    def _hear(self, worker: Worker) -> None:
        try:
            message = worker.channel.receive()
        except (EOFError, OSError):
            self._selector.unregister(worker.channel)
            return
        if isinstance(message, Ready | Joining | Joined):
            self._arrival.note(worker, message)
        elif isinstance(message, Outcome):
            self._record(message)
        self._advance()

    def _look(self, worker: Worker) -> None:
        process = worker.process
        if process is None or worker.rank in self._gone:
            return
        code = process.poll()
        if code is None:
            return
        self._gone.add(worker.rank)
        if process.fileno() >= 0:
            self._selector.unregister(process.fileno())
        self._drain(worker)
        if worker.rank not in self.outcomes:
            self._catch_up()
            detail = self._arrival.before(worker)
            self._record(report.died(worker, code, detail, self._memory))

    def _drain(self, worker: Worker) -> None:
        """Hears what a process said before it ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(worker.channel, selectors.EVENT_READ)
            while worker.channel in self._selector.get_map() and selector.select(0):
                self._hear(worker)

    def _hear_signal(self) -> None:
        assert self._signals is not None
        numbers = self._signals.arrived()
        if self._signals.stops(numbers):
            away = stopping.suspend(self.workers)
            self._shift(away)
            if self._ends is not None:
                self._ends += away
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # Where this is the main thread the handler itself has raised.
        if signal.SIGINT in numbers and ours and self._guard is not None:
            if self.cause is None:
                self._settle(KeyboardInterrupt())
            else:
                self._ending.kill()

    # -- progress ------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.cause is not None:
            return
        arrival = self._arrival
        if not arrival.called and arrival.all_ready:
            arrival.called = True
            mismatch = arrival.mismatch()
            if mismatch is not None:
                self._settle(mismatch)
                return
            self._send_call()
        if arrival.called and arrival.complete and not arrival.going:
            arrival.going = True
            self._send_all(Go())

    def _send_call(self) -> None:
        call = self._make_call()
        try:
            self._send_all(call)
        finally:
            # Kept where the world may be started again.
            if call.payload is not None and not self._plan.max_restarts:
                call.payload.close()

    def _send_all(self, message: Any) -> None:
        for worker in self.workers:
            # The rank in this process has its task already.
            mine = message
            if worker.process is None and isinstance(message, Call):
                mine = replace(message, payload=None)
            try:
                worker.channel.send(mine)
            except OSError:
                pass  # it has ended; its handle says so

    def _record(self, outcome: Outcome) -> None:
        outcome.consequence = self.cause is not None
        worker = self.workers[outcome.rank]
        if outcome.consequence and worker.process is not None:
            dismiss(worker)
        self.outcomes[outcome.rank] = outcome
        if outcome.holds_group and self._leave_at is None:
            self._leave_at = time.monotonic() + _HOLD_SECONDS
        if not outcome.failed or self.cause is not None:
            return
        now = time.monotonic()
        if outcome.echo or outcome.kind == "freed":
            if self._suspect is None:
                self._suspect = now + _ECHO_SECONDS
        else:
            self._suspect = min(self._suspect or math.inf, now + _ORDER_SECONDS)

    def _have_left(self) -> None:
        """Has the ranks that have returned let go of the group: others may wait in it for them."""
        self._leave_at = None
        for rank, one in self.outcomes.items():
            if one.holds_group:
                one.holds_group = False
                try:
                    self.workers[rank].channel.send(Leave())
                except OSError:
                    pass  # it has ended; its handle says so

    def _settle_failure(self) -> None:
        failed = [one for one in self.outcomes.values() if one.failed]
        first = min(failed, key=lambda one: (one.kind == "freed", one.echo, one.time))
        self._cause_rank = first.rank
        returned = [one.rank for one in self.outcomes.values() if not one.failed]
        hang = first.raised is not None and first.raised.timed_out
        again = first.raised is not None and first.raised.again
        if first.echo and returned and not again:
            hang = True
            ranks = ", ".join(map(str, sorted(returned)))
            self._notes.append(f"rank(s) {ranks} had returned, while this rank waited for them")
        self._settle(first.error(), hang=hang)

    def _overdue(self) -> BaseException:
        return DeadlineExceeded(
            f"the call did not end within {self._plan.deadline:g} s (deadline); see below where "
            "its ranks were, or allow more time"
        )

    def _settle(self, cause: BaseException, *, hang: bool = False) -> None:
        """Fixes the cause of the failure and begins to end everybody.

        Args:
            cause: The cause.
            hang: Whether the news is where all ranks are.
        """
        self.cause = cause
        if hang:
            thread = None if self._guard is None else self._guard.thread
            self._sightings = report.sight(self.workers, self.outcomes, self._arrival.state, thread)
            self._notes.append(report.described(self._sightings, self._cause_rank))
        self._ending.begin(cause, self.outcomes.keys())
