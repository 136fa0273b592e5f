"""Ranks as fresh interpreters: nothing of the caller but what is sent."""

from __future__ import annotations

import subprocess

from distribute import process
from distribute.crew import Berth, Crew, assemble, run_once
from distribute.outcome import Outcome
from distribute.plan import Plan
from distribute.process import ChildProcess
from distribute.task import Task, packed


def run(plan: Plan, task: Task) -> list[Outcome]:
    """Runs a task in fresh interpreters.

    Raises:
        Failure: The call did not succeed.
    """
    return run_once(plan, packed(task, frozenset()), lambda: launch(plan))


def launch(plan: Plan) -> Crew:
    """Makes workers that are fresh interpreters."""
    return assemble(plan, _start)


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
        stdin=None if place.reads else subprocess.DEVNULL,
        stdout=berth.stdout,
        stderr=berth.stderr,
        group=berth.group,
    )
    berth.ours.send(place)
    berth.ours.send(number)
    return child
