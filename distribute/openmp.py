"""Pausing OpenMP before a fork.

A forked child has one thread. If its parent ever ran a parallel operation, the child's OpenMP
library believes in a pool of threads that do not exist there, and waits for them for ever. A
pause releases the pool; the next operation, on either side, makes a new one.
"""

from __future__ import annotations

import ctypes
import os

_HARD = 2  # omp_pause_hard of OpenMP 5.0, section 3.6
_LIBRARIES = ("libgomp", "libomp", "libiomp5")


def pause() -> bool:
    """Releases the thread pools of all OpenMP libraries in this process.

    Returns:
        Whether every one of them could be paused.
    """
    return all(_pause(path) for path in _loaded())


def _loaded() -> set[str]:
    try:
        with open("/proc/self/maps") as maps:
            # Address, rights, offset, device, inode, and the path, which may hold spaces.
            paths = {parts[5].rstrip() for line in maps if len(parts := line.split(None, 5)) == 6}
    except OSError:
        return set()
    return {path for path in paths if os.path.basename(path).startswith(_LIBRARIES)}


def _pause(path: str) -> bool:
    try:
        pause_all = ctypes.CDLL(path).omp_pause_resource_all
    except (OSError, AttributeError):
        return False
    return int(pause_all(_HARD)) == 0
