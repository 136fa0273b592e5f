"""The signal handlers of a function, once the function has been left.

A handler may raise: torch's does when a loader's worker has died, a user's when an alarm goes off.
In the function that is its exception; in the report that follows it would end the rank in the
middle, and the caller would see neither the one exception nor the other.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# The end of a loader's worker is felt at once as the end of a connection; its signal, whose handler
# says what it was, is there within this.
_MOMENT = 0.1


class Deferred:
    """Keeps handlers from running from the end of a function to `end`.

    Args:
        active: Whether it does; in the main thread alone.
    """

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self._handlers: dict[int, Any] = {}
        self._child = False  # whether one has ended meanwhile

    def after(self, function: Callable[[], T]) -> T:
        """Calls a function, and begins; what a handler raises that is due then is raised here."""
        try:
            return function()
        finally:
            if self._active:
                self._begin()

    def _begin(self) -> None:
        late: BaseException | None = None
        for number in signal.valid_signals():
            while number not in self._handlers and callable(handler := signal.getsignal(number)):
                try:
                    # Runs first what is due.
                    signal.signal(number, self._note)
                except BaseException as error:
                    late = error
                else:
                    self._handlers[number] = handler
        if late is not None:
            raise late

    def end(self) -> None:
        """Sets the handlers again. What came meanwhile is not theirs any more."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            self._child = True

    def cause(self, error: BaseException) -> BaseException:
        """Returns what a child's end raises if an exception follows from that; else the exception.

        To be called while the exception is handled, and deferred.

        Args:
            error: What the function raised.
        """
        handler = self._handlers.get(signal.SIGCHLD)
        if handler is None or not isinstance(error, ConnectionError | EOFError):
            return error
        limit = time.monotonic() + _MOMENT
        while not self._child and time.monotonic() < limit:
            time.sleep(0.002)
        try:
            if self._child:
                handler(signal.SIGCHLD, None)
        except BaseException as found:
            return found
        return error
