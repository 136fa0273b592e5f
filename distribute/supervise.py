"""Watching the ranks of one call: the first failure ends the rest, and nobody waits for ever.

A supervisor is an event loop over the control channels and the process handles of all ranks. It
runs in the caller's thread when the caller is no rank itself, and in a thread of its own under
re-exec. It goes through three phases: all *ready*, all *joined*, all with an *outcome*.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from distribute import report
from distribute.cgroup import oom_kills
from distribute.ending import PERIOD, Ending, Worker
from distribute.errors import (
    CallMismatch,
    DeadlineExceeded,
    DistributeError,
    JoinTimeout,
    RankOutcome,
    WorkerDied,
)
from distribute.interrupt import Guard, Signals
from distribute.messages import Call, Go, Joined, Joining, Ready, Site
from distribute.outcome import Outcome
from distribute.plan import Plan
from distribute.process import send_signal, stopped
from distribute.report import Sighting

# How long an error that looks like an echo waits for its cause.
_ECHO_SECONDS = 1.0
# How long the first failure waits for one that was earlier but is reported later.
_ORDER_SECONDS = 0.02
# Waiting for ranks gets a line on stderr after this.
_NOTICE_SECONDS = 10.0
# How often ranks are looked at that may have been stopped, of which nothing else tells.
_LOOK_SECONDS = 1.0
# Exceptions of signal handlers while the ranks end: then whoever sends them is obeyed.
_MOST_INTERRUPTIONS = 3


@dataclass
class Failure(Exception):
    """Raised when a call did not succeed.

    Attributes:
        cause: The error that is the caller's news.
        rank: The rank that it comes from, or None.
        outcomes: What became of each rank.
        notes: What else belongs to the news.
        restartable: Whether the same call may succeed when it is made again.
    """

    cause: BaseException
    rank: int | None = None
    outcomes: tuple[RankOutcome, ...] = ()
    notes: list[str] = field(default_factory=list[str])
    restartable: bool = False

    @property
    def headline(self) -> str:
        """The news in one line."""
        told = "".join(traceback.format_exception_only(self.cause)).partition("\n")[0]
        return told if self.rank is None else f"rank {self.rank} failed: {told}"

    def news(self) -> BaseException:
        """Returns the error for the caller, with all that belongs to it."""
        for one in self.notes:
            self.cause.add_note(one)
        try:
            self.cause.outcomes = self.outcomes  # type: ignore[attr-defined]
        except AttributeError:
            pass  # a type that allows no more attributes
        return self.cause


class NotReady(DistributeError):
    """Raised when forked workers did not prove themselves in time; another method takes over."""


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
        self._timeout = plan.rendezvous_timeout + extra_time
        self._ready_timeout = ready_timeout
        self._signals = signals
        self._catch_up = catch_up
        self._site = site
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._ends = None if plan.deadline is None else began + plan.deadline
        self._look_at = self._began + _LOOK_SECONDS
        self._oom_kills = oom_kills()
        self._noticed = False
        self._called = False
        self._going = False
        self._joining: set[int] = set()
        self._joined: set[int] = set()
        self._gone: set[int] = set()
        self._stopped: set[int] = set()
        self._told_stopped: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self._suspect: float | None = None
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
        except BaseException:
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
        for key, _ in self._selector.select(self._patience()):
            key.data()
        self._tick(time.monotonic())

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
        if self.cause is None and len(self._joined) < len(self.workers):
            times.append(self._began + self._limit())
            if not self._noticed:
                times.append(self._began + _NOTICE_SECONDS)
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
            elif now >= self._look_at:
                self._look_at = now + _LOOK_SECONDS
                self._look_for_stopped()
            elif len(self._joined) < len(self.workers):
                self._check_joining(now)
            return
        self._ending.go_on(now, self.outcomes.keys())

    # -- events --------------------------------------------------------------------------------

    def _hear(self, worker: Worker) -> None:
        try:
            message = worker.channel.receive()
        except (EOFError, OSError):
            self._selector.unregister(worker.channel)
            return
        if isinstance(message, Ready):
            worker.ready = message
        elif isinstance(message, Joining):
            self._joining.add(message.rank)
        elif isinstance(message, Joined):
            self._joined.add(message.rank)
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
            self._record(self._death(worker, code))

    def _drain(self, worker: Worker) -> None:
        """Hears what a process said before it ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(worker.channel, selectors.EVENT_READ)
            while worker.channel in self._selector.get_map() and selector.select(0):
                self._hear(worker)

    def _death(self, worker: Worker, code: int) -> Outcome:
        if worker.ready is None:
            detail = "before it was in place"
            if self._site is not None:
                detail = f"before its script arrived at {self._site}"
        elif worker.rank not in self._joined:
            detail = "before it joined the others"
        else:
            detail = ""
        found = Outcome(
            worker.rank,
            "killed" if code < 0 else "exited",
            signal=-code if code < 0 else None,
            exit_code=None if code < 0 else code,
            detail=detail,
            stack="".join(worker.channel.record.stack().format()),
            output=report.tail(worker),
        )
        if found.signal == signal.SIGKILL:
            found.hint = self._memory_hint()
        return found

    def _memory_hint(self) -> str:
        hint = "possibly out of memory"
        count = oom_kills()
        if count is None or self._oom_kills is None:
            return hint
        if count > self._oom_kills:
            return f"out of memory: its cgroup counts {count - self._oom_kills} such kill(s) more"
        return f"{hint}, although its cgroup counts no such kill during the call"

    def _hear_signal(self) -> None:
        assert self._signals is not None
        numbers = self._signals.arrived()
        if self._signals.stops(numbers):
            self._suspend()
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        # Where this is the main thread the handler itself has raised.
        if signal.SIGINT in numbers and ours and self._guard is not None and self.cause is None:
            self._settle(KeyboardInterrupt())

    def _suspend(self) -> None:
        """Carries out Ctrl-Z: the whole job stops, and goes on when this process does."""
        before = time.monotonic()
        processes = [one.process for one in self.workers if one.process is not None]
        for one in processes:
            send_signal(one, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for one in processes:
            send_signal(one, signal.SIGCONT)
        away = time.monotonic() - before
        self._began += away
        if self._ends is not None:
            self._ends += away

    def _look_for_stopped(self) -> None:
        now = {
            one.rank
            for one in self.workers
            if one.process is not None and one.rank not in self._gone and stopped(one.process.pid)
        }
        # Twice in a row: whoever stops a whole job stops this process a moment later.
        news = (now & self._stopped) - self._told_stopped
        self._stopped = now
        self._told_stopped = (self._told_stopped & now) | news
        for rank in sorted(news):
            pid = self.workers[rank].pid
            sys.stderr.write(
                f"distribute: the process of rank {rank} is stopped (by SIGSTOP, or it read from a "
                f"terminal in the background); `kill -CONT {pid}` lets it go on\n"
            )

    # -- progress ------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.cause is not None:
            return
        if not self._called and all(worker.ready is not None for worker in self.workers):
            self._called = True
            mismatch = self._mismatch()
            if mismatch is not None:
                self._settle(mismatch)
                return
            self._send_call()
        if self._called and len(self._joined) == len(self.workers) and not self._going:
            self._going = True
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

    def _mismatch(self) -> CallMismatch | None:
        for worker in self.workers:
            site = worker.ready.site if worker.ready is not None else None
            if self._site is not None and site is not None and site != self._site:
                return CallMismatch(
                    f"rank {worker.rank} called {site} while rank 0 called {self._site}: every "
                    "process of a re-executed script must come to the same first distributed "
                    "call; make the code above it do the same everywhere, or pass "
                    'start_method="forkserver"'
                )
        return None

    def _record(self, outcome: Outcome) -> None:
        outcome.consequence = self.cause is not None
        self.outcomes[outcome.rank] = outcome
        if not outcome.failed or self.cause is not None:
            return
        now = time.monotonic()
        if outcome.echo or outcome.kind == "freed":
            if self._suspect is None:
                self._suspect = now + _ECHO_SECONDS
        else:
            self._suspect = min(self._suspect or math.inf, now + _ORDER_SECONDS)

    def _settle_failure(self) -> None:
        failed = [one for one in self.outcomes.values() if one.failed]
        first = min(failed, key=lambda one: (one.kind == "freed", one.echo, one.time))
        self._cause_rank = first.rank
        returned = [one.rank for one in self.outcomes.values() if not one.failed]
        hang = first.raised is not None and first.raised.timed_out
        if first.echo and returned:
            hang = True
            ranks = ", ".join(map(str, sorted(returned)))
            self._notes.append(f"rank(s) {ranks} had returned, while this rank waited for them")
        self._settle(first.error(), hang=hang)

    def _overdue(self) -> BaseException:
        return DeadlineExceeded(
            f"the call did not end within {self._plan.deadline:g} s (deadline); see below where "
            "its ranks were, or allow more time"
        )

    def _state(self, worker: Worker) -> str:
        """Says what a rank does that has not left the function."""
        if worker.ready is None:
            return "starting" if self._site is None else f"on its way to {self._site}"
        if not self._called:
            return "ready"
        if worker.rank not in self._joining:
            return "unpacking its arguments"
        if worker.rank not in self._joined or not self._going:
            return "joining the others"
        return "running"

    def _check_joining(self, now: float) -> None:
        waited = now - self._began
        if waited >= self._limit():
            error = self._late()
            self._settle(error, hang=isinstance(error, JoinTimeout))
        elif waited >= _NOTICE_SECONDS and not self._noticed:
            self._noticed = True
            missing = self._missing()
            there = len(self.workers) - len(missing)
            sys.stderr.write(
                f"distribute: {there} of {len(self.workers)} ranks have joined, "
                f"missing {', '.join(map(str, missing))}\n"
            )

    def _limit(self) -> float:
        if self._ready_timeout is not None and not self._called:
            return self._ready_timeout
        return self._timeout

    def _missing(self) -> list[int]:
        # Those that have come to the meeting wait there for those that have not.
        late = len(self._joining) < len(self.workers)
        there = self._joining if late else self._joined
        return [
            worker.rank
            for worker in self.workers
            if (worker.ready is None if not self._called else worker.rank not in there)
        ]

    def _late(self) -> BaseException:
        ranks = ", ".join(map(str, self._missing()))
        if self._ready_timeout is not None and not self._called:
            return NotReady(f"rank(s) {ranks} not ready")
        return JoinTimeout(
            f"rank(s) {ranks} of {len(self.workers)} did not join within "
            f"{self._timeout:g} s (rendezvous_timeout); see whether they are stuck before the "
            "call, or allow more time"
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
            self._sightings = report.sight(self.workers, self.outcomes, self._state, thread)
            self._notes.append(report.described(self._sightings, self._cause_rank))
        self._ending.begin(cause, self.outcomes.keys())
