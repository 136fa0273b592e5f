"""What holds for every test: nothing is left behind."""

from __future__ import annotations

import gc
import glob
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from torch.distributed import TCPStore

from distribute.launchers import forkserver

# Shells start background jobs with it ignored, and then nothing here could be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Images of containers set it. A program then writes each piece of a `print` by itself, and lines of
# others come in between.
os.environ.pop("PYTHONUNBUFFERED", None)

# Each run tries the same examples, and a machine that stalls meanwhile is no news about the code.
settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")

_TEMPORARY = ("distribute-", "dist-")
_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD]


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks that a test leaves no process, descriptor, temporary file, variable or handler.

    The fork server may stay: it is there for the next call and ends with this process.
    """
    before = _Left()
    yield
    if not (problems := _Left().beyond(before)):
        return
    gc.collect()
    limit = time.monotonic() + 15
    while (problems := _Left().beyond(before)) and time.monotonic() < limit:
        time.sleep(0.02)  # a killed process takes a moment to go
    assert not problems, problems


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ranks take long to start, as they do on a busy machine, without a word about it."""
    monkeypatch.setattr("distribute.arrival._NOTICE_SECONDS", 100.0)
    monkeypatch.setattr("distribute.launchers.fork._READY_SECONDS", 60.0)


class _Left:
    def __init__(self) -> None:
        server = forkserver.process_id()
        self.processes = {pid for pid in _descendants(os.getpid()) if pid != server}
        self.descriptors = _descriptors() - forkserver.descriptors()
        self.files = {
            name for name in os.listdir(tempfile.gettempdir()) if name.startswith(_TEMPORARY)
        }
        self.environ = {key: value for key, value in os.environ.items() if "PYTEST" not in key}
        self.handlers = [signal.getsignal(number) for number in _SIGNALS]

    def beyond(self, before: _Left) -> list[str]:
        problems = [f"process {pid}: {_command(pid)}" for pid in self.processes - before.processes]
        new = self.descriptors - before.descriptors
        problems += [f"descriptor {number}: {_target(number)}" for number in sorted(new)]
        problems += [f"temporary file {name}" for name in self.files - before.files]
        problems += [
            f"variable {name}"
            for name in self.environ.keys() | before.environ.keys()
            if self.environ.get(name) != before.environ.get(name)
        ]
        if self.handlers != before.handlers:
            problems.append("a signal handler")
        return problems


def _descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            children = {int(one) for one in Path(path).read_text().split()}
        except OSError:
            continue
        for child in children - found:
            found |= {child} | _descendants(child)
    return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "?"


def _descriptors() -> set[int]:
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    # The listing's own descriptor is closed again by now.
    return {number for number in found if os.path.lexists(f"/proc/self/fd/{number}")}


def _target(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return "?"


@pytest.fixture(scope="session", autouse=True)
def session() -> Iterator[None]:
    """Makes what a process has once and for all, and ends the fork server with the session."""
    # libuv, under torch's store, makes a pipe with its first server and keeps it.
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield
    forkserver.close()
