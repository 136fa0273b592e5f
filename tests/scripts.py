"""Runs programs as a user would, and sees to it that nothing of them is left."""

from __future__ import annotations

import glob
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import textwrap
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

# For tests of whole programs: others stand for these, which take seconds more.
SLOW_METHODS = [pytest.param(one, marks=pytest.mark.slow) for one in ("forkserver", "spawn")]
METHODS = ["reexec", "fork", *SLOW_METHODS]

ROOT = Path(__file__).parent.parent
# The environment's own launchers, such as torchrun, are beside its interpreter.
BIN = Path(sys.executable).parent
# How many seconds a program may take that hangs otherwise: of a machine that is slow and stalls.
LIMIT = 300


# What a call says on standard error when its ranks take long to start, as on a busy machine.
_WAITING = re.compile(r"distribute: \d+ of \d+ ranks have joined, missing [\d, ]+\r?\n")


@dataclass
class Ended:
    """A program that has ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def lines(self, start: str) -> list[str]:
        """Returns the lines of standard output that begin with a word, sorted.

        Of the lines of ranks above 0 it is the part behind the rank.
        """
        lines = (re.sub(r"^\[\d+\] ", "", line) for line in self.out.splitlines())
        return sorted(line for line in lines if line.startswith(start))


def write(directory: Path, source: str, name: str = "s.py") -> Path:
    """Writes a script."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip())
    return path


def run_python(
    *command: str | Path,
    timeout: float = LIMIT,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> Ended:
    """Runs `python COMMAND...` under a hard limit; nothing of it may be left soon after its end."""
    return run_program([sys.executable, *map(str, command)], timeout, cwd, environ, stdin)


def run_program(
    command: Sequence[str],
    timeout: float = LIMIT,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> Ended:
    """Runs a program under a hard limit; nothing of it may be left soon after its end."""
    tag = str(uuid.uuid4())
    full = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    path = os.pathsep.join(filter(None, [str(ROOT), full.get("PYTHONPATH")]))
    full |= {"CASE_TAG": tag, "PYTHONPATH": path, **(environ or {})}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=full,
        text=True,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(stdin, timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _kill(tagged(tag))
        out, err = process.communicate()
        raise AssertionError(f"no end after {timeout} s\n{out}\n{err}") from None
    limit = time.monotonic() + 30
    while (left := tagged(tag)) and time.monotonic() < limit:
        time.sleep(0.02)
    _kill(left)
    assert not left, f"processes left: {left}\n{out}\n{err}"
    return Ended(process.returncode, out, _WAITING.sub("", err))


def on_terminal(
    *command: str | Path, columns: int = 80, cwd: Path | None = None, timeout: float = LIMIT
) -> str:
    """Runs `python COMMAND...` with output to a terminal, and returns what that has got."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        text = b""
        limit = time.monotonic() + timeout
        try:
            while select.select([screen], [], [], max(0.0, limit - time.monotonic()))[0]:
                try:
                    text += screen.read(65536)
                except OSError:
                    break  # nobody has the terminal open any more
            else:
                raise AssertionError(f"no end after {timeout} s\n{text.decode()}")
        finally:
            process.kill()
            process.wait()
    return _WAITING.sub("", text.decode())


def tagged(tag: str) -> list[int]:
    """Returns the processes that carry a tag in their environment."""
    found: list[int] = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        pid = int(path.split("/")[2])
        try:
            environ = Path(path).read_bytes()
        except OSError:
            continue
        if f"CASE_TAG={tag}".encode() in environ and pid != os.getpid():
            found.append(pid)
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
