"""What the other threads of this process are doing.

A fork copies the locks that they hold, and nobody opens them in the child. A thread that waits for
something to do holds none that matters; one that computes may hold those of torch's allocator, of
its kernels, of OpenMP, and no list of them exists.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

# A thread that computes shows within one look; one that has just sent a notebook's line is done
# with it by the next.
_LOOK_SECONDS = 0.01
_LOOKS = 5
# One that waits for a core shows nothing: a machine that is busy, or stalls, is looked at longer.
_MOST_LOOKS = 100
# How long a thread may be busy with what is left of an operation.
_REST_SECONDS = 1.0
# What waking up from a wait may take.
_IDLE_NANOSECONDS = 300_000


def at_work() -> str:
    """Returns which other thread is computing, in words, or an empty string when none is.

    Without Python threads beside the caller's there is nothing to look at: those of libraries wait
    for work that nobody gives them.
    """
    if threading.active_count() == 1:
        return ""
    found = ""
    computed = 0
    for _ in range(_MOST_LOOKS):
        found, ran = _seen()
        computed += ran
        if not found or computed >= _LOOKS:
            break
    return found


def rest(name: str) -> None:
    """Waits until the threads of a name wait for something to do, the interpreter's lock aside.

    A library's thread that comes to Python's end while it wants that lock is ended within C++ code
    that allows no such thing, and the process aborts. It wants it to let go of a Python object, in
    the moment after the last operation; here it gets it.
    """
    before: dict[int, tuple[int, bool]] | None = None
    limit = time.monotonic() + _REST_SECONDS
    while time.monotonic() < limit:
        now = dict(_running(name))
        if now == before or not now:
            return
        before = None if any(runs for _, runs in now.values()) else now
        time.sleep(0.002)


def _seen() -> tuple[str, bool]:
    """Returns a thread that is not at rest, or an empty string, and whether one has computed."""
    before = dict(_running())
    time.sleep(_LOOK_SECONDS)
    found, computed = "", False
    for thread, (ran, runs) in _running():
        earlier, ran_before = before.get(thread, (ran, False))
        if runs or ran_before or ran - earlier > _IDLE_NANOSECONDS:
            found = found or _named(thread)
            computed = computed or ran - earlier > _IDLE_NANOSECONDS
    return found, computed


def _running(name: str = "") -> Iterator[tuple[int, tuple[int, bool]]]:
    """Yields other threads: nanoseconds on a core so far, and whether it is on one now.

    Args:
        name: How the system's name of the thread begins.
    """
    own = threading.get_native_id()
    try:
        ids = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return
    for thread in ids:
        if thread == own:
            continue
        try:
            with open(f"/proc/self/task/{thread}/stat", "rb") as stat:
                told, _, state = stat.read().rpartition(b") ")
            if not told.partition(b"(")[2].startswith(name.encode()):
                continue
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as times:
                ran = int(times.read().split()[0])
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
        yield thread, (ran, state[:1] == b"R")


def _named(thread: int) -> str:
    for one in threading.enumerate():
        if one.native_id == thread:
            return f"the thread {one.name!r}"
    return "a thread of a library"
