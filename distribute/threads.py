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
    for _ in range(_LOOKS):
        found = _seen()
        if not found:
            break
    return found


def _seen() -> str:
    before = dict(_running())
    time.sleep(_LOOK_SECONDS)
    for thread, (ran, runs) in _running():
        earlier, ran_before = before.get(thread, (ran, False))
        if runs or ran_before or ran - earlier > _IDLE_NANOSECONDS:
            return _named(thread)
    return ""


def _running() -> Iterator[tuple[int, tuple[int, bool]]]:
    """Yields other threads: nanoseconds on a core so far, and whether it is on one now."""
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
                state = stat.read().rpartition(b") ")[2][:1]
            with open(f"/proc/self/task/{thread}/schedstat", "rb") as times:
                ran = int(times.read().split()[0])
        except (OSError, IndexError, ValueError):
            continue  # it has ended meanwhile
        yield thread, (ran, state == b"R")


def _named(thread: int) -> str:
    for one in threading.enumerate():
        if one.native_id == thread:
            return f"the thread {one.name!r}"
    return "a thread of a library"
