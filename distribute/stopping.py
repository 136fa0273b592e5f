"""Ranks that are stopped: by Ctrl-Z with the whole job, or one of them by somebody else."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection

from distribute import notice
from distribute.ending import Worker
from distribute.interrupt import stop_here
from distribute.process import send_signal, stopped


def suspend(workers: list[Worker]) -> float:
    """Stops all ranks and this process; returns when this process goes on.

    Returns:
        The seconds meanwhile.
    """
    before = time.monotonic()
    processes = [one.process for one in workers if one.process is not None]
    for one in processes:
        send_signal(one, signal.SIGSTOP)
    stop_here()
    for one in processes:
        send_signal(one, signal.SIGCONT)
    return time.monotonic() - before


class Stopped:
    """Looks for ranks that somebody has stopped, and says so once for each."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._told: set[int] = set()

    def look(self, workers: list[Worker], gone: Collection[int]) -> None:
        """Looks at all ranks but those that have ended."""
        now = {
            one.rank
            for one in workers
            if one.process is not None and one.rank not in gone and stopped(one.process.pid)
        }
        # Twice in a row: whoever stops a whole job stops this process a moment later.
        news = (now & self._before) - self._told
        self._before = now
        self._told = (self._told & now) | news
        for rank in sorted(news):
            notice.tell(
                f"distribute: the process of rank {rank} is stopped (by SIGSTOP, or it read from a "
                f"terminal in the background); `kill -CONT {workers[rank].pid}` lets it go on\n"
            )
