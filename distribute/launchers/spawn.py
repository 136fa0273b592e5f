"""Ranks as fresh interpreters: nothing of the caller but what is sent."""

from __future__ import annotations

import socket
import subprocess

from distribute import process
from distribute.channel import Channel
from distribute.outcome import Outcome
from distribute.payload import pack
from distribute.place import Place
from distribute.plan import Plan
from distribute.process import ChildProcess, leads_group
from distribute.task import Task
from distribute.workers import run_once


def run(plan: Plan, task: Task) -> list[Outcome]:
    """Runs a task in fresh interpreters.

    Raises:
        Failure: The call did not succeed.
    """
    return run_once(plan, pack(task, main_names=frozenset()), _start)


def _start(
    place: Place, ours: Channel, theirs: Channel, listening: socket.socket | None
) -> ChildProcess:
    descriptor, life = theirs.descriptors
    number = None if listening is None else listening.fileno()
    child = process.start(
        process.interpreter("distribute.worker", theirs.descriptors, place.sys_path),
        environ=place.environ,
        cwd=place.cwd,
        life=life,
        descriptors=[descriptor] if number is None else [descriptor, number],
        stdin=None if place.rank == 0 else subprocess.DEVNULL,
        group=leads_group(place.rank),
    )
    ours.send(place)
    ours.send(number)
    return child
