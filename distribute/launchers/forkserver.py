"""Ranks as forks of a server: a clean interpreter that has torch in memory already.

The server starts with the first call that needs it, stays idle between calls and ends with this
process. It is replaced when a variable has changed that libraries read while they are imported.
"""

from __future__ import annotations

import atexit
import math
import os
import selectors
import subprocess
import sys
import threading
import time

from distribute import ending, process
from distribute.channel import Channel
from distribute.crew import Berth, Crew, assemble, run_once
from distribute.ending import Worker
from distribute.errors import DistributeError, JoinTimeout, signal_name
from distribute.outcome import Outcome
from distribute.plan import Plan
from distribute.process import ChildProcess
from distribute.server import Order
from distribute.task import Task, packed

_IMPORT_TIME = (
    "CUDA_", "GOMP_", "HIP_", "KMP_", "LD_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_",
    "TORCH",
)  # fmt: skip


def run(plan: Plan, task: Task) -> list[Outcome]:
    """Runs a task in forks of the server.

    Raises:
        Failure: The call did not succeed.
    """
    return run_once(plan, packed(task, frozenset()), lambda: launch(plan))


def launch(plan: Plan) -> Crew:
    """Makes workers by forks of the server.

    Raises:
        DistributeError: The server does not start.
    """
    global _server
    with _lock:
        server = _the_server()
        try:
            # Seconds, the first time; an interruption may come here.
            server.wait(min(plan.rendezvous_timeout, plan.deadline or math.inf))
        except DistributeError:
            _server = None
            server.close()
            raise
    return assemble(plan, _fork)


class ServedProcess:
    """A child of the fork server; its end arrives through a pipe."""

    def __init__(self, pid: int, status: int, *, group: bool) -> None:
        self.pid = pid
        self.group = group
        self._status = status
        self._code: int | None = None

    def fileno(self) -> int:
        """Returns a descriptor that is readable once the process has ended, or -1."""
        return self._status

    def poll(self) -> int | None:
        """Returns the exit code (negative: the signal) once it has ended."""
        if self._code is None and self._status >= 0:
            try:
                told = os.read(self._status, 16)
            except BlockingIOError:
                return None
            # Nothing told: the server itself has ended. The rank ends with its channel.
            self._code = int(told) if told else -9
        return self._code

    def close(self) -> None:
        """Closes the handle's descriptors."""
        if self._status >= 0:
            os.close(self._status)
            self._status = -1


class Server:
    """The launcher's side of the fork server."""

    def __init__(self) -> None:
        self.variables = import_time_variables()
        self.owner = os.getpid()
        self.channel, theirs = Channel.pair()
        descriptor, *others = theirs.descriptors
        life, record = others
        self.process: ChildProcess = process.start(
            process.interpreter("distribute.server", theirs.descriptors, sys.path),
            environ={key: value for key, value in os.environ.items() if key != "PYTHONINSPECT"},
            cwd=os.getcwd(),
            life=life,
            descriptors=[descriptor, record],
            stdin=subprocess.DEVNULL,
            group=True,
        )
        theirs.close()
        self._serving = self.broken = False

    def wait(self, seconds: float) -> None:
        """Waits until the server has imported everything.

        Args:
            seconds: How long.

        Raises:
            DistributeError: It has ended, or needs longer. The next call starts another one.
        """
        if self._serving:
            return
        advice = 'what it wrote to stderr may say why; start_method="spawn" does without it'
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.channel, selectors.EVENT_READ)
                if not selector.select(seconds):
                    raise JoinTimeout(
                        f"the fork server did not start within {seconds:g} s (rendezvous_timeout "
                        f"or deadline); {advice}"
                    )
            self.channel.receive()
        except EOFError:
            raise DistributeError(
                f"the fork server {self._end()} while it started; {advice}"
            ) from None
        self._serving = True

    def _end(self) -> str:
        limit = time.monotonic() + 10.0  # it is about to, on whatever machine
        while (code := self.process.poll()) is None and time.monotonic() < limit:
            time.sleep(0.01)
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal_name(-code)}"

    def fork(self, berth: Berth) -> ServedProcess:
        """Has the server make a worker; it has started."""
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        descriptors = [*berth.theirs.descriptors, theirs]
        null = os.open(os.devnull, os.O_RDWR)
        try:
            streams = (None, berth.stdout, berth.stderr)
            wanted = [number if one is None else one for number, one in enumerate(streams)]
            descriptors += [number if _is_open(number) else null for number in wanted]
            if berth.listening is not None:
                descriptors.append(berth.listening.fileno())
            self.channel.send_with(Order(berth.place, berth.group), descriptors)
            pid: int = self.channel.receive()
        except BaseException:
            self.broken = True  # the next answer may be that to this order
            os.close(ours)
            raise
        finally:
            os.close(theirs)
            os.close(null)
        return ServedProcess(pid, ours, group=berth.group)

    def alive(self) -> bool:
        """Tells whether the server can still serve this process."""
        return not self.broken and self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """Ends the server."""
        self.channel.close()
        ending.end([Worker(-1, self.channel, self.process)], 1.0)


_lock = threading.Lock()
_server: Server | None = None
# Replaced, while calls of other threads still run in their forks.
_retired: list[Server] = []


def _start_afresh() -> None:
    """Forgets, in a forked process, what is its parent's; another thread may hold the lock."""
    global _lock, _server
    _lock = threading.Lock()
    _server = None
    _retired.clear()


os.register_at_fork(after_in_child=_start_afresh)


def import_time_variables() -> dict[str, str]:
    """Returns the variables of this moment that libraries read while they are imported."""
    return {
        key: value
        for key, value in os.environ.items()
        # The ranks' number of threads is set in each of them, whatever the server's is.
        if key.startswith(_IMPORT_TIME) and key != "OMP_NUM_THREADS"
    }


def process_id() -> int | None:
    """Returns the process id of the server, if there is one."""
    return None if _server is None else _server.process.pid


def descriptors() -> set[int]:
    """Returns this process's descriptors that belong to the server."""
    return set() if _server is None else {*_server.channel.descriptors, _server.process.fileno()}


def close() -> None:
    """Ends the server, if there is one of this process."""
    global _server
    with _lock:
        if _server is not None and _server.owner == os.getpid():
            _server.close()
        _server = None
        while _retired:
            _retired.pop().close()


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _the_server() -> Server:
    global _server
    if _server is not None and _server.owner != os.getpid():
        _server = None
    if _server is not None and (
        not _server.alive() or _server.variables != import_time_variables()
    ):
        _server.channel.hang_up()
        _retired.append(_server)
        _server = None
    for one in [one for one in _retired if one.process.poll() is not None]:
        _retired.remove(one)
        one.close()
    if _server is None:
        atexit.unregister(close)
        atexit.register(close)
        _server = Server()
    return _server


def _fork(berth: Berth) -> ServedProcess:
    with _lock:
        return _the_server().fork(berth)
