"""The deadline of a call in this process that has no supervisor: in place, or in a world of one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from distribute import notice, record
from distribute.errors import DeadlineExceeded
from distribute.interrupt import LAST_RESORT_SECONDS, Guard

_PERIOD = 0.05


def bounded(seconds: float | None, grace: float, function: Callable[[], Any]) -> Any:
    """Calls a function and has it leave at its deadline.

    Args:
        seconds: The deadline, or None for no limit.
        grace: Seconds that the function's own `except` and `finally` blocks have then.
        function: The function; it runs in the main thread.

    Raises:
        DeadlineExceeded: The deadline came first.
    """
    if seconds is None:
        return function()
    with Guard(grace) as guard:
        watch = _Watch(seconds, grace, guard)
        watch.start()
        try:
            value = guard.run(function)
        except BaseException:
            # After the deadline whatever the function makes of its end is no news.
            if not watch.finish():
                raise
        else:
            if not watch.finish():
                return value
    error = DeadlineExceeded(
        f"the call did not end within {seconds:g} s (deadline); see below where it was, or allow "
        "more time"
    )
    error.add_note(watch.told)
    raise error


class _Watch(threading.Thread):
    def __init__(self, seconds: float, grace: float, guard: Guard) -> None:
        super().__init__(name="distribute-deadline", daemon=True)
        self._seconds = seconds
        self._grace = grace
        self._guard = guard
        self.left = threading.Event()
        self.told = ""

    def finish(self) -> bool:
        """Ends this thread; tells whether the deadline came first."""
        self.left.set()
        self.join()
        return bool(self.told)

    def run(self) -> None:
        if self.left.wait(self._seconds):
            return
        stack = record.stack_of_thread(self._guard.thread)
        self.told = "it was here then:\n" + "".join(stack.format()).rstrip()
        last = time.monotonic() + self._grace + LAST_RESORT_SECONDS
        while not self.left.wait(_PERIOD):
            self._guard.knock()
            if time.monotonic() >= last:
                notice.tell(
                    f"distribute: the call did not end within {self._seconds:g} s (deadline), and "
                    f"its function cannot be made to leave, so its process ends here; {self.told}\n"
                )
                os._exit(1)
