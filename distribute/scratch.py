"""The temporary directory of a rank and of what it starts, which the launcher removes.

The workers of a `DataLoader` send tensors over sockets in a directory that multiprocessing makes in
each of them, and managers and servers of processes have theirs in the rank. They stay behind when
a process is killed, or leaves by `os._exit` as ranks do. So do the named semaphores of queues
between processes that are not forks: what would remove them ends with the rank's process group.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import tempfile
from typing import Any

# What multiprocessing calls its directory, and what we call ours.
_NAME = "tempdir"
_OURS = "distribute-scratch"
# How it begins the names of semaphores, and where Linux has these.
_PREFIX = "semprefix"
_SEMAPHORES = "/dev/shm/sem."


def chosen() -> str:
    """Returns the path of a directory that nobody has made yet; empty where there can be none."""
    try:
        parent = tempfile.gettempdir()
    except OSError:
        return ""
    # No longer than the names of multiprocessing: the path of a socket has 107 characters.
    return os.path.join(parent, f"dist-{secrets.token_urlsafe(6)}")


def offer(path: str) -> None:
    """Has multiprocessing use a directory, in this process and in all that it starts from it.

    Args:
        path: Its path, or empty. It is made when it is needed.
    """
    from multiprocessing import process

    if path:
        current: Any = process.current_process()
        # See `multiprocessing.util.get_temp_dir`.
        current._config = _Settings(current._config)
        current._config[_OURS] = path
        current._config[_PREFIX] = f"/{os.path.basename(path)}"
        current._config.pop(_NAME, None)  # the launcher's, in a fork


def remove(path: str) -> None:
    """Removes a directory and semaphores, if there are any; those who used them are gone."""
    if path:
        shutil.rmtree(path, ignore_errors=True)
        for one in glob.glob(f"{_SEMAPHORES}{glob.escape(os.path.basename(path))}-*"):
            with contextlib.suppress(OSError):
                os.unlink(one)


class _Settings(dict[str, Any]):
    """What multiprocessing knows of a process, and copies to those that it starts."""

    def copy(self) -> _Settings:
        return _Settings(self)

    def get(self, key: str, default: Any = None, /) -> Any:
        if key == _NAME and key not in self:
            try:
                os.makedirs(self[_OURS], mode=0o700, exist_ok=True)
                self[_NAME] = self[_OURS]
            except OSError:
                pass  # it makes one of its own
        return super().get(key, default)
