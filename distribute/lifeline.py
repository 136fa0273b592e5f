"""A lifeline: a socket whose other end is the launcher's, tied to the life of a process group.

Linux sends a signal of our choice to a whole process group when a socket hangs up. So a worker and
all that it started end with the launcher, at once, however it ended, whatever thread started them,
and whatever they are doing. (`PR_SET_PDEATHSIG` ends the worker alone, and is tied to a thread.)
Elsewhere the worker notices the end of its control channel.

This module is also the start of the program that stands before a worker's own (see `process`), so
it imports nothing of the library.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys


def tie(life: int, *, group: bool) -> None:
    """Ties this process, or the process group that it leads, to a lifeline.

    Args:
        life: Descriptor of this process's end of the lifeline; it must stay open.
        group: Whether to tie the whole process group.
    """
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpid() if group else os.getpid())
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    with socket.socket(fileno=os.dup(life)) as end:
        try:
            gone = end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            gone = False
    if gone:
        os._exit(1)  # it hung up before it was tied


def end_forks() -> None:
    """Has what this process forks end with it, as a process group of its own would.

    Only forks that the main thread makes: for the kernel, the end of the thread is what counts.
    """
    if sys.platform != "linux":
        return
    import ctypes
    import threading

    libc = ctypes.CDLL(None)
    parents: list[int] = []

    def before() -> None:
        main = threading.current_thread() is threading.main_thread()
        parents[:] = [os.getpid()] if main else []

    def after() -> None:
        if parents:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() != parents[0]:
                os._exit(1)  # it has ended before

    os.register_at_fork(before=before, after_in_child=after)
