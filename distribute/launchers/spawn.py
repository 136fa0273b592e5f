"""Ranks as fresh interpreters: nothing of the caller but what is sent."""

from __future__ import annotations

import subprocess

from distribute import process
from distribute.outcome import Outcome
from distribute.payload import pack
from distribute.plan import Plan
from distribute.process import ChildProcess
from distribute.task import Task
from distribute.workers import Berth, run_once


def run(plan: Plan, task: Task) -> list[Outcome]:
    """Runs a task in fresh interpreters.

    Raises:
        Failure: The call did not succeed.
    """
    return run_once(plan, pack(task, main_names=frozenset()), _start)


def _start(berth: Berth) -> ChildProcess:
    place = berth.place
    descriptor, life, record = berth.theirs.descriptors
    number = None if berth.listening is None else berth.listening.fileno()
    child = process.start(
        process.interpreter("distribute.worker", berth.theirs.descriptors, place.sys_path),
        environ=place.environ,
        cwd=place.cwd,
        life=life,
        descriptors=[descriptor, record] if number is None else [descriptor, record, number],
        stdin=None if place.rank == 0 else subprocess.DEVNULL,
        stdout=berth.stdout,
        stderr=berth.stderr,
        group=berth.group,
    )
    berth.ours.send(place)
    berth.ours.send(number)
    return child
