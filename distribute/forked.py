"""The first steps of a worker that is a fork, of the launcher or of the fork server."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from distribute import cells, memory, worker
from distribute.channel import Channel
from distribute.place import Place

# What the first DDP model of a process imports takes seconds: once before the forks, not in each.
PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")


def preload() -> None:
    """Imports what every rank will need; the environment and the files are as before."""
    if all(name in sys.modules for name in PRELOADED):
        return
    before = set(os.listdir(tempfile.gettempdir()))
    with unchanged_environment():
        for name in PRELOADED:
            importlib.import_module(name)
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # torch's compiler makes its cache while it is imported, and again when it has something.
    if cache and os.path.basename(cache) not in before:
        try:
            os.rmdir(cache)
        except OSError:
            pass  # elsewhere, or in use


@contextmanager
def unchanged_environment() -> Generator[None]:
    """Drops the variables that torch's compiler sets while it is imported."""
    had = set(os.environ)
    try:
        yield
    finally:
        for name in [one for one in os.environ if one not in had and one.startswith("TORCH")]:
            del os.environ[name]


def enter(place: Place, channel: Channel, *, group: bool) -> None:
    """Turns a forked process into a worker with nothing of its parent's state.

    Args:
        place: The worker's place.
        channel: Its control channel.
        group: Whether it leads a process group of its own.
    """
    if group:
        os.setpgid(0, 0)
    else:
        # A child of the fork server is in the server's group, which the terminal stops when it
        # reads.
        os.setpgid(0, os.getpgid(place.launcher))
    channel.tie(group=group)
    memory.close_inherited()
    worker.show(channel.record)
    theirs = sys.stdout, sys.stderr
    worker.settle(place)
    _redirect(theirs[0], sys.stdout)
    _redirect(theirs[1], sys.stderr)
    if not group:
        worker.share_group()
    if not place.reads:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    _leave_kernel()
    _forget_children()


def _redirect(theirs: Any, ours: Any) -> None:
    """Has whoever holds a stream of the caller's, as log handlers do, write to the rank's own.

    A notebook's stream hands its text to a thread that does not exist here, under a lock that was
    copied in whatever state it was in.
    """
    if theirs is None or theirs is ours:
        return
    try:
        theirs.write, theirs.flush = ours.write, ours.flush
    except AttributeError:
        pass  # an object of another make


def _leave_kernel() -> None:
    """Gives back what a notebook's kernel has replaced for the cells."""
    kernel = cells.kernel()
    if kernel is None:
        return
    # The kernel's own would wait for an answer that its parent gets.
    builtins.input = _input
    getpass: Any = sys.modules.get("getpass")
    if getpass is not None:
        getpass.getpass = _getpass
    # What a rank displays, such as figures, goes through the parent to the page, which the kernel
    # can do; against senders it does not know of it has this check.
    kernel.session.check_pid = False


def _input(prompt: object = "", /) -> str:
    sys.stdout.write(str(prompt))
    sys.stdout.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError("EOF when reading a line")
    return line.removesuffix("\n")


def _getpass(prompt: str = "Password: ", stream: object = None, **_: object) -> str:
    return _input(prompt)


def _forget_children() -> None:
    """Drops what multiprocessing knows about the parent: its children, its being a daemon."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children = set()  # type: ignore[attr-defined]
        process.current_process()._config.pop("daemon", None)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
