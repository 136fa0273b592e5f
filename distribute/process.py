"""Processes as the launcher sees them: one handle for each worker, whoever is its parent.

A worker leads a process group of its own, so that ending it ends what it started (DataLoader
workers) as well; a lifeline ties it to the launcher.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from distribute import lifeline

_START = """
import json, sys
life, group, marker, command = json.loads(sys.argv[1])
if group:
    os.setpgid(0, 0)
tie(life, group=group)
if marker:
    os.environ[marker[0]] = marker[1] + ":" + str(os.getpid())
os.execv(command[0], command)
"""


# The exit code of a child that somebody else has reaped, as `subprocess` and asyncio have it.
UNKNOWN = 255


class Process(Protocol):
    """A worker's process.

    Attributes:
        pid: Its process id, which also names its process group if `group` is true.
        group: Whether it leads a process group of its own.
    """

    pid: int
    group: bool

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the process has ended, or -1."""
        ...

    def poll(self) -> int | None:
        """Returns the exit code (negative: the signal) once it has ended; ends what it left."""
        ...

    def close(self) -> None:
        """Closes the handle's descriptors."""
        ...


class ChildProcess:
    """A child of this process, made by a fork or through `start`."""

    def __init__(
        self, pid: int, *, group: bool, popen: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self.group = group
        self._popen = popen
        self._code: int | None = None
        self._pidfd = _pidfd(pid)
        if group:
            # Also done by the child: whichever is first, nobody signals a group not yet made.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the process has ended, or -1."""
        return self._pidfd

    def poll(self) -> int | None:
        """Returns the exit code (negative: the signal) once it has ended; ends what it left."""
        if self._code is None:
            self._code = reap(self.pid, group=self.group)
            if self._code is not None and self._popen is not None:
                self._popen.returncode = self._code
        return self._code

    def close(self) -> None:
        """Closes the handle's descriptors."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1  # another system, an old kernel, a sandbox


def reap(pid: int, *, group: bool, block: bool = False) -> int | None:
    """Reaps a child that has ended, after ending the rest of its process group.

    The child is looked at before it is reaped: until then its id cannot name anybody else's group.

    Returns:
        Its exit code, negative for a signal; None if it has not ended.
    """
    options = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
    try:
        if os.waitid(os.P_PID, pid, options) is None:
            return None
    except ChildProcessError:
        pass  # SIGCHLD is ignored, or a handler of the user's has reaped it
    if group:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return UNKNOWN
    return os.waitstatus_to_exitcode(status)


def send_signal(process: Process, *numbers: int) -> None:
    """Sends signals to a process and all that it started; nothing if it has ended."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        for number in numbers:
            if process.group:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)


def stopped(pid: int) -> bool:
    """Tells whether a process is stopped by a signal; false where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def at_work(pid: int) -> bool:
    """Tells whether a process computes, or would if it had a core; false where nobody says."""
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                    return True
    except (OSError, IndexError):
        pass  # it has ended, which its handle says, or another system
    return False


def start(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    cwd: str,
    life: int,
    descriptors: Sequence[int],
    stdin: int | None,
    stdout: int | None = None,
    stderr: int | None = None,
    group: bool,
    marker: tuple[str, str] | None = None,
) -> ChildProcess:
    """Starts a program as a watched child.

    Args:
        command: The program's absolute path and its arguments.
        environ: Its whole environment.
        cwd: Its working directory.
        life: Its end of the lifeline to this process.
        descriptors: What else it inherits, under the same numbers.
        stdin: Its standard input; None for this process's.
        stdout: Its standard output; None for this process's.
        stderr: Its standard error; None for this process's.
        group: Whether it leads a process group of its own.
        marker: A variable and the start of its value, which `:` and its process id complete.
    """
    order = json.dumps([life, group, marker, list(command)])
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _trampoline(), order],
        env=dict(environ),
        cwd=cwd,
        pass_fds=[life, *descriptors],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )
    return ChildProcess(popen.pid, group=group, popen=popen)


@functools.cache
def _trampoline() -> str:
    """Returns what stands between the launcher and the program of a worker.

    It runs before the user's imports, so that these end with the launcher too; the marker needs the
    process id, known only here.
    """
    return inspect.getsource(lifeline) + _START


def interpreter(module: str, descriptors: tuple[int, ...], search_path: Sequence[str]) -> list[str]:
    """Returns the command of an interpreter like this one that runs `main` of our module.

    Args:
        module: The module.
        descriptors: The arguments of `main`: the descriptors of the control channel.
        search_path: Its module search path.
    """
    program = (
        f"import sys; sys.path[:] = {list(search_path)!r}; "
        f"from {module} import main; main(*{descriptors})"
    )
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, "-c", program]


def leads_group(rank: int) -> bool:
    """Tells whether a rank leads a process group of its own.

    All do, except rank 0 on a terminal: outside the terminal's foreground group, `input()` and
    the debugger would stop the process instead of reading.
    """
    return rank != 0 or not is_terminal(0)


def is_terminal(descriptor: int) -> bool:
    """Tells whether a descriptor is a terminal."""
    try:
        return os.isatty(descriptor)
    except OSError:
        return False
