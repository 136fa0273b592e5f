"""A worker's side of its control channel."""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import Any, Protocol

from distribute.channel import Channel


class Link(Protocol):
    """A worker's side of its control channel."""

    def send(self, message: Any) -> None:
        """Sends a message to the launcher."""
        ...

    def receive(self) -> Any:
        """Waits for a message of the launcher."""
        ...


class WatchedLink:
    """A control channel that is read at all times, so that the launcher's end is noticed at once.

    When the launcher is gone, so is any reason for this process to live: it ends with its group.
    """

    def __init__(self, channel: Channel, *, group: bool) -> None:
        self._channel = channel
        self._group = group
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="distribute-watch", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends a message to the launcher."""
        self._channel.send(message)

    def receive(self) -> Any:
        """Waits for a message of the launcher."""
        return self._messages.get()

    def receive_within(self, seconds: float) -> Any:
        """Waits for a message of the launcher for a while; returns None if there is none."""
        try:
            return self._messages.get(timeout=seconds)
        except queue.Empty:
            return None

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._channel.receive())
        except (EOFError, OSError):
            if self._group:
                os.killpg(0, signal.SIGKILL)
            os._exit(1)
