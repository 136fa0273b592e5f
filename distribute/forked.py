"""The first steps of a worker that is a fork, of the launcher or of the fork server."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

from distribute import worker
from distribute.channel import Channel
from distribute.place import Place

# What the first DDP model of a process imports takes seconds: once before the forks, not in each.
PRELOADED = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")


def preload() -> None:
    """Imports what every rank will need; the environment and the files are as before."""
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
    worker.show(channel.record)
    worker.settle(place)
    if not group:
        # Ctrl-C on the terminal reaches this process too; the launcher decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if place.rank != 0:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
    _forget_children()


def _forget_children() -> None:
    """Drops what multiprocessing knows about the parent: its children, its being a daemon."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children = set()  # type: ignore[attr-defined]
        process.current_process()._config.pop("daemon", None)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
