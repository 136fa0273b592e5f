"""Pausing OpenMP before a fork.

A forked child has one thread. If its parent ever ran a parallel operation, the child's OpenMP
library believes in a pool of threads that do not exist there, and waits for them for ever. A
pause releases the pool; the next operation, on either side, makes a new one.
"""

from __future__ import annotations

import ctypes
import re

_HARD = 2  # omp_pause_hard of OpenMP 5.0, section 3.6
_LIBRARY = re.compile(r"\S*/lib(?:gomp|omp|iomp5)\b[^/\s]*\.so\S*")


def pause() -> bool:
    """Releases the thread pools of all OpenMP libraries in this process.

    Returns:
        Whether every one of them could be paused.
    """
    return all(_pause(path) for path in _loaded())


def _loaded() -> set[str]:
    try:
        with open("/proc/self/maps") as maps:
            return {found[0] for line in maps if (found := _LIBRARY.search(line))}
    except OSError:
        return set()


def _pause(path: str) -> bool:
    try:
        pause_all = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, AttributeError):
        return False
    return int(pause_all(_HARD)) == 0
