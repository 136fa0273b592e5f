"""How workers end: asked, then made to; and the rank in the calling process freed meanwhile."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass

from distribute import notice, scratch
from distribute.channel import Channel
from distribute.interrupt import LAST_RESORT_SECONDS, Guard, held
from distribute.messages import Close, Ready, Stop
from distribute.output import Tap
from distribute.process import Process, send_signal

# How often processes that end are looked at where they have no descriptor to wait for, and the
# rank in the calling process is asked to leave.
PERIOD = 0.05
# Whoever waits for ranks that take long to end is told what for.
_TELL_SECONDS = 2.0


@dataclass
class Worker:
    """The launcher's side of one rank.

    Attributes:
        rank: Its rank.
        channel: The launcher's end of its control channel.
        process: Its process, or None for the rank in the calling process.
        ready: What it reported when it was in place.
        tap: Its standard output and error, or None where they are this process's own.
        scratch: Path of the directory that is removed when it has ended, or empty.
    """

    rank: int
    channel: Channel
    process: Process | None
    ready: Ready | None = None
    tap: Tap | None = None
    scratch: str = ""

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return os.getpid() if self.process is None else self.process.pid


class Ending:
    """The end of all workers of a failed call: SIGTERM, the grace period, SIGKILL.

    Args:
        workers: All ranks.
        grace: Seconds between the two signals.
        guard: Frees the rank in the calling process from Python code.
        free_store: Frees it from a wait in the store.
    """

    def __init__(
        self,
        workers: list[Worker],
        *,
        grace: float,
        guard: Guard | None,
        free_store: Callable[[], None] | None,
    ) -> None:
        self._workers = workers
        self._grace = grace
        self._guard = guard
        self._free_store = free_store
        self._kill_at = 0.0
        self._knock_at = 0.0
        self._tell_at = 0.0
        self._told = False
        self._killed = False
        self._cause: BaseException | None = None

    def begin(self, cause: BaseException, left: Collection[int]) -> None:
        """Asks all ranks to end.

        Args:
            cause: Why.
            left: Ranks that have left the function.
        """
        self._cause = cause
        now = time.monotonic()
        self._kill_at = now + self._grace
        self._tell_at = now + _TELL_SECONDS
        if self._free_store is not None:
            self._free_store()
        for worker in self._workers:
            if worker.process is not None:
                if worker.rank in left:
                    dismiss(worker)
                # One that is stopped ends when it goes on.
                send_signal(worker.process, signal.SIGTERM, signal.SIGCONT)
            elif worker.rank not in left:
                try:
                    worker.channel.send(Stop())
                except OSError:
                    pass  # it has just left by itself

    def go_on(self, now: float, left: Collection[int]) -> None:
        """Does what is due by now."""
        if not self._told and now >= self._tell_at:
            self._tell(left)
        if not self._killed and now >= self._kill_at:
            self.kill()
        here = [one for one in self._workers if one.process is None and one.rank not in left]
        if self._guard is not None and here:
            if now >= self._knock_at:
                self._knock_at = now + PERIOD
                self._guard.knock()
            if now >= self._kill_at + LAST_RESORT_SECONDS:
                self._give_up()

    def _tell(self, left: Collection[int]) -> None:
        self._told = True
        ranks = [
            one.rank
            for one in self._workers
            if (one.process is None and one.rank not in left)
            or (one.process is not None and one.process.poll() is None)
        ]
        if not ranks:
            return
        assert self._cause is not None
        told = "".join(traceback.format_exception_only(self._cause)).rstrip()
        notice.tell(
            f"distribute: the call has failed, and rank(s) {', '.join(map(str, ranks))} take long "
            f"to end; SIGKILL comes {self._grace:g} s (grace) after SIGTERM. The cause:\n{told}\n"
        )

    def kill(self) -> None:
        """Ends all other processes at once."""
        self._killed = self._told = True
        for worker in self._workers:
            if worker.process is not None:
                send_signal(worker.process, signal.SIGKILL)

    def _give_up(self) -> None:
        assert self._cause is not None
        notice.tell(
            "distribute: rank 0 cannot be freed, so its process ends here. The cause:\n"
            + "".join(traceback.format_exception(self._cause))
        )
        notice.tell(_all_stacks())
        self.kill()
        os._exit(1)


def _all_stacks() -> str:
    names = {one.ident: one.name for one in threading.enumerate()}
    return "".join(
        f"Thread {names.get(key, key)} (most recent call last):\n"
        + "".join(traceback.format_stack(frame))
        for key, frame in sys._current_frames().items()
    )


def close(workers: list[Worker], grace: float) -> None:
    """Lets idle workers leave, ends those that do not, and reaps them all."""
    for worker in workers:
        dismiss(worker)
    end(workers, grace)


def dismiss(worker: Worker) -> None:
    """Lets a worker leave that has left the function, whatever SIGTERM means to it."""
    try:
        worker.channel.send(Close())
    except OSError:
        pass  # it has left


def end(workers: list[Worker], grace: float) -> None:
    """Waits for the processes of workers to end, by force after the grace period.

    An interruption meanwhile ends them at once, and is passed on when they are gone.
    """
    processes = [worker.process for worker in workers if worker.process is not None]
    try:
        _wait(processes, time.monotonic() + grace)
    except BaseException:
        _wait(processes, time.monotonic())
        raise
    finally:
        with held():
            for worker in workers:
                worker.channel.close()
                if worker.tap is not None:
                    worker.tap.close()
                scratch.remove(worker.scratch)
            for one in processes:
                one.close()


def _wait(processes: list[Process], limit: float) -> None:
    while running := [one for one in processes if one.poll() is None]:
        left = limit - time.monotonic()
        if left <= 0:
            for one in running:
                send_signal(one, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            for one in running:
                if one.fileno() >= 0:
                    selector.register(one.fileno(), selectors.EVENT_READ)
            selector.select(PERIOD if left <= 0 else min(left, PERIOD))
