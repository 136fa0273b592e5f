"""How far the ranks have come on their way into a call: ready, joining, joined."""

from __future__ import annotations

import time

from distribute import notice
from distribute.ending import Worker
from distribute.errors import CallMismatch, JoinTimeout
from distribute.failure import NotReady
from distribute.messages import Joined, Joining, Ready, Site
from distribute.process import at_work

# Waiting for ranks gets a line on stderr after this.
_NOTICE_SECONDS = 10.0
# Forks that are late are looked at this often. Those that are at work get this many times as long:
# one that hangs sleeps, unless it spins, and one on a machine that stalls does not.
_LOOK_SECONDS = 0.1
_PATIENCE = 10


class Arrival:
    """Keeps account of the ranks' way into a call.

    Args:
        workers: All ranks in order.
        timeout: Seconds until all have joined.
        ready_timeout: Seconds until all are ready or at work, or None for `timeout`; then
            `NotReady` is the error.
        site: The call site of the launcher, which those of the workers must equal.

    Attributes:
        called: Whether the ranks have been given the call.
        going: Whether they have been told to run it.
    """

    def __init__(
        self,
        workers: list[Worker],
        *,
        timeout: float,
        ready_timeout: float | None,
        site: Site | None,
    ) -> None:
        self._workers = workers
        self._timeout = timeout
        self._ready_timeout = ready_timeout
        self._site = site
        self._began = time.monotonic()
        self._noticed = False
        self._look_at = self._began if ready_timeout is None else self._began + ready_timeout
        self._seen_idle = False
        self._joining: set[int] = set()
        self._joined: set[int] = set()
        self.called = False
        self.going = False

    def note(self, worker: Worker, message: Ready | Joining | Joined) -> None:
        """Takes note of what a rank has said."""
        if isinstance(message, Ready):
            worker.ready = message
        elif isinstance(message, Joining):
            self._joining.add(message.rank)
        else:
            self._joined.add(message.rank)

    @property
    def all_ready(self) -> bool:
        """Whether every rank may be given the call."""
        return all(worker.ready is not None for worker in self._workers)

    @property
    def complete(self) -> bool:
        """Whether every rank has joined."""
        return len(self._joined) == len(self._workers)

    def mismatch(self) -> CallMismatch | None:
        """Returns the error if a rank has come to another call than the launcher's."""
        for worker in self._workers:
            site = worker.ready.site if worker.ready is not None else None
            if self._site is not None and site is not None and site != self._site:
                return CallMismatch(
                    f"rank {worker.rank} called {site} while rank 0 called {self._site}: every "
                    "process of a re-executed script must come to the same first distributed "
                    "call; make the code above it do the same everywhere, or pass "
                    'start_method="forkserver"'
                )
        return None

    def due(self) -> float:
        """Returns when to check next."""
        waits = self._ready_timeout is not None and not self.called
        times = [self._look_at if waits else self._began + self._timeout]
        if not self._noticed:
            times.append(self._began + _NOTICE_SECONDS)
        return min(times)

    def check(self, now: float) -> BaseException | None:
        """Returns the error if ranks are late; says on stderr whom all wait for, once."""
        waited = now - self._began
        if self._ready_timeout is not None and not self.called:
            if now >= self._look_at and self._hangs(now, waited >= _PATIENCE * self._ready_timeout):
                return NotReady(
                    "the forked processes did not start working, as happens when other threads "
                    "were busy at that moment"
                )
        elif waited >= self._timeout:
            return self._late()
        if waited >= _NOTICE_SECONDS and not self._noticed:
            self._noticed = True
            missing = self._missing()
            there = len(self._workers) - len(missing)
            notice.tell(
                f"distribute: {there} of {len(self._workers)} ranks have joined, "
                f"missing {', '.join(map(str, missing))}\n"
            )
        return None

    def shift(self, seconds: float) -> None:
        """Does not count a time in which the whole job did not run."""
        self._began += seconds
        self._look_at += seconds

    def state(self, worker: Worker) -> str:
        """Says what a rank does that has not left the function."""
        if worker.ready is None:
            return "starting" if self._site is None else f"on its way to {self._site}"
        if not self.called:
            return "ready"
        if worker.rank not in self._joining:
            return "unpacking its arguments"
        if worker.rank not in self._joined or not self.going:
            return "joining the others"
        return "running"

    def before(self, worker: Worker) -> str:
        """Says before which step of its way a rank has ended, or nothing if it was through."""
        if worker.ready is None:
            if self._site is None:
                return "before it was ready for the call"
            return f"before its script arrived at {self._site}"
        return "" if worker.rank in self._joined else "before it joined the others"

    def _hangs(self, now: float, too_long: bool) -> bool:
        """Tells whether forks that are late hang; they are looked at again otherwise."""
        missing = [one for one in self._workers if one.ready is None]
        idle = too_long or not any(at_work(one.pid) for one in missing)
        # Twice in a row: one that sleeps may have just said that it is ready.
        hangs = idle and self._seen_idle
        self._seen_idle = idle
        self._look_at = now + _LOOK_SECONDS
        return hangs

    def _missing(self) -> list[int]:
        # Those that have come to the meeting wait there for those that have not.
        late = len(self._joining) < len(self._workers)
        there = self._joining if late else self._joined
        return [
            worker.rank
            for worker in self._workers
            if (worker.ready is None if not self.called else worker.rank not in there)
        ]

    def _late(self) -> BaseException:
        ranks = ", ".join(map(str, self._missing()))
        return JoinTimeout(
            f"rank(s) {ranks} of {len(self._workers)} did not join within "
            f"{self._timeout:g} s (rendezvous_timeout); see whether they are stuck before the "
            "call, or allow more time"
        )
