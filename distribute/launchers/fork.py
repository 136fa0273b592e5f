"""Ranks as forks of the calling process: they have its memory, so nothing has to be sent."""

from __future__ import annotations

import os
import traceback
import warnings
from typing import NoReturn

from distribute import forked, openmp, threads, worker
from distribute.channel import own_fork
from distribute.crew import Berth, Crew, assemble, run_once
from distribute.failure import Failure, NotReady
from distribute.link import WatchedLink
from distribute.messages import Ready
from distribute.outcome import Outcome
from distribute.plan import Plan
from distribute.process import ChildProcess
from distribute.task import Task

# A healthy child is ready in hundredths of a second; one that hangs was forked at a bad moment.
_READY_SECONDS = 2.0


def run(plan: Plan, task: Task) -> list[Outcome]:
    """Runs a task in forks of this process.

    Raises:
        Failure: The call did not succeed; with `NotReady` as its cause, a fork is no good now.
    """
    forked.preload()  # takes seconds at the first call, which are not the function's
    return run_once(plan, None, lambda: launch(plan, task))


def launch(plan: Plan, task: Task | None = None) -> Crew:
    """Makes workers by forks of this process.

    Args:
        plan: The plan.
        task: What they run at a call that carries no task.

    Raises:
        Failure: With `NotReady` as its cause: a fork is no good now.
    """
    forked.preload()
    worker.flush()
    busy = threads.at_work()
    if busy:
        raise Failure(
            NotReady(f"{busy} of this process was at work, and a fork copies what it had locked")
        )
    return assemble(plan, _Forker(task).fork, ready_timeout=_READY_SECONDS)


class _Forker:
    def __init__(self, task: Task | None) -> None:
        self._task = task
        self._paused = openmp.pause()

    def fork(self, berth: Berth) -> ChildProcess:
        """Makes the process of a worker."""
        with warnings.catch_warnings(), own_fork():
            # Python 3.12 warns of a fork beside threads; our children prove that they work.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._child(berth)
        return ChildProcess(pid, group=berth.group)

    def _child(self, berth: Berth) -> NoReturn:
        try:
            place, channel, listening = berth.place, berth.theirs, berth.listening
            channel.keep_only()
            for number, one in ((1, berth.stdout), (2, berth.stderr)):
                if one is not None:
                    os.dup2(one, number)
                    os.close(one)
            forked.enter(place, channel, group=berth.group)
            if not self._paused:
                import torch

                torch.set_num_threads(1)
            link = WatchedLink(channel, group=berth.group)
            seat = worker.Seat(place, None if listening is None else listening.detach())
            worker.prove()
            worker.serve(link, seat, ready=Ready(place.rank), first=self._task)
        except BaseException:
            traceback.print_exc()
            worker.flush()
        finally:
            # Whatever happened, a child must not go on as a second launcher.
            os._exit(1)
