"""Watching the ranks of one call: the first failure ends the rest, and nobody waits for ever.

A supervisor is an event loop over the control channels and the process handles of all ranks. It
runs in the caller's thread when the caller is no rank itself, and in a thread of its own under
re-exec. It goes through three phases: all *ready*, all *joined*, all with an *outcome*.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from distribute.ending import PERIOD, Ending, Worker
from distribute.errors import CallMismatch, DistributeError, JoinTimeout
from distribute.interrupt import Guard
from distribute.messages import Call, Go, Joined, Joining, Ready, Site
from distribute.outcome import Outcome

# How long an error that looks like an echo waits for its cause.
_ECHO_SECONDS = 1.0
# Waiting for ranks gets a line on stderr after this.
_NOTICE_SECONDS = 10.0


@dataclass
class Failure(Exception):
    """Raised when a call did not succeed.

    Attributes:
        cause: The error that is the caller's news.
        rank: The rank that it comes from, or None.
        outcomes: What became of each rank, as far as known.
    """

    cause: BaseException
    rank: int | None = None
    outcomes: list[Outcome] = field(default_factory=list[Outcome])


class NotReady(DistributeError):
    """Raised when forked workers did not prove themselves in time; another method takes over."""


class Supervisor:
    """Takes a set of workers through one call.

    Args:
        workers: All ranks in order.
        call: Makes the call for the workers once they are ready.
        grace: Seconds between SIGTERM and SIGKILL.
        rendezvous_timeout: Seconds until all have joined.
        ready_timeout: Seconds until all are ready, or None for `rendezvous_timeout`; then
            `NotReady` is the cause.
        guard: Frees the rank in the calling process.
        free_store: Frees that rank from a wait in the store.
        wakeup: A descriptor that receives the numbers of arriving signals, or -1.
        site: The call site of the launcher, which those of the workers must equal.
    """

    def __init__(
        self,
        workers: list[Worker],
        call: Callable[[], Call],
        *,
        grace: float,
        rendezvous_timeout: float,
        ready_timeout: float | None = None,
        guard: Guard | None = None,
        free_store: Callable[[], None] | None = None,
        wakeup: int = -1,
        site: Site | None = None,
    ) -> None:
        self.workers = workers
        self._make_call = call
        self._ending = Ending(workers, grace=grace, guard=guard, free_store=free_store)
        self._timeout = rendezvous_timeout
        self._ready_timeout = ready_timeout
        self._wakeup = wakeup
        self._site = site
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._noticed = False
        self._called = False
        self._going = False
        self._joining: set[int] = set()
        self._joined: set[int] = set()
        self._gone: set[int] = set()
        self.outcomes: dict[int, Outcome] = {}
        self._suspect: float | None = None
        self.cause: BaseException | None = None
        self._cause_rank: int | None = None

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
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._tick(time.monotonic())
        except BaseException:
            self._ending.kill()
            raise
        finally:
            self._selector.close()
        outcomes = [self.outcomes[rank] for rank in sorted(self.outcomes)]
        if self.cause is not None:
            for one in outcomes:
                one.drop()
            raise Failure(self.cause, self._cause_rank, outcomes)
        return outcomes

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
        if self._wakeup >= 0:
            self._selector.register(self._wakeup, selectors.EVENT_READ, self._hear_signal)

    def _finished(self) -> bool:
        if self.cause is None:
            return len(self.outcomes) == len(self.workers) and self._suspect is None
        return all(
            worker.rank in (self.outcomes if worker.process is None else self._gone)
            for worker in self.workers
        )

    def _patience(self) -> float | None:
        now = time.monotonic()
        times: list[float] = []
        if any(one.process is not None and one.process.fileno() < 0 for one in self.workers):
            times.append(now + PERIOD)
        if self.cause is not None:
            times.append(now + PERIOD)
        elif self._suspect is not None:
            times.append(self._suspect)
        elif len(self._joined) < len(self.workers):
            times.append(self._began + self._limit())
            if not self._noticed:
                times.append(self._began + _NOTICE_SECONDS)
        return max(0.0, min(times) - now) if times else None

    def _tick(self, now: float) -> None:
        for worker in self.workers:
            if worker.process is not None and worker.process.fileno() < 0:
                self._look(worker)
        if self.cause is None:
            everybody = len(self.outcomes) == len(self.workers)
            if self._suspect is not None and (everybody or now >= self._suspect):
                self._settle(self._first_failure())
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
        if code < 0:
            return Outcome(worker.rank, "killed", signal=-code, detail=detail)
        return Outcome(worker.rank, "exited", exit_code=code, detail=detail)

    def _hear_signal(self) -> None:
        numbers = os.read(self._wakeup, 4096)
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if signal.SIGINT in numbers and ours and self.cause is None:
            self._settle(KeyboardInterrupt())

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
            if call.payload is not None:
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
        self.outcomes[outcome.rank] = outcome
        if not outcome.failed or self.cause is not None:
            return
        if outcome.echo or outcome.kind == "freed":
            if self._suspect is None:
                self._suspect = time.monotonic() + _ECHO_SECONDS
        else:
            self._suspect = outcome.time

    def _first_failure(self) -> BaseException:
        failed = [one for one in self.outcomes.values() if one.failed]
        first = min(failed, key=lambda one: (one.kind == "freed", one.echo, one.time))
        self._cause_rank = first.rank
        error = first.error()
        returned = [one.rank for one in self.outcomes.values() if not one.failed]
        if first.echo and returned:
            ranks = ", ".join(map(str, sorted(returned)))
            error.add_note(f"rank(s) {ranks} had returned, while this rank waited for them")
        return error

    def _check_joining(self, now: float) -> None:
        waited = now - self._began
        if waited >= self._limit():
            self._settle(self._late())
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

    def _settle(self, cause: BaseException) -> None:
        """Fixes the cause of the failure and begins to end everybody."""
        self.cause = cause
        self._ending.begin(cause, self.outcomes.keys())
