"""Ranks as forks of the calling process: they have its memory, so nothing has to be sent."""

from __future__ import annotations

import os
import socket
import traceback
import warnings
from typing import NoReturn

from distribute import forked, openmp, worker
from distribute.channel import Channel, own_fork
from distribute.link import WatchedLink
from distribute.messages import Ready
from distribute.outcome import Outcome
from distribute.place import Place
from distribute.plan import Plan
from distribute.process import ChildProcess, leads_group
from distribute.task import Task
from distribute.workers import run_once

# A healthy child is ready in hundredths of a second; one that hangs was forked at a bad moment.
_READY_SECONDS = 2.0


def run(plan: Plan, task: Task) -> list[Outcome]:
    """Runs a task in forks of this process.

    Raises:
        Failure: The call did not succeed; with `NotReady` as its cause, a child did not work.
    """
    forked.preload()
    worker.flush()
    return run_once(plan, None, _Forker(task).fork, ready_timeout=_READY_SECONDS)


class _Forker:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._paused = openmp.pause()

    def fork(
        self, place: Place, ours: Channel, theirs: Channel, listening: socket.socket | None
    ) -> ChildProcess:
        with warnings.catch_warnings(), own_fork():
            # Python 3.12 warns of a fork beside threads; our children prove that they work.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._child(place, theirs, listening)
        return ChildProcess(pid, group=leads_group(place.rank))

    def _child(self, place: Place, channel: Channel, listening: socket.socket | None) -> NoReturn:
        try:
            channel.keep_only()
            group = leads_group(place.rank)
            forked.enter(place, channel, group=group)
            if not self._paused:
                import torch

                torch.set_num_threads(1)
            link = WatchedLink(channel, group=group)
            seat = worker.Seat(place, None if listening is None else listening.detach())
            worker.prove()
            worker.serve(link, seat, ready=Ready(place.rank), first=self._task)
        except BaseException:
            traceback.print_exc()
            worker.flush()
        finally:
            # Whatever happened, a child must not go on as a second launcher.
            os._exit(1)
