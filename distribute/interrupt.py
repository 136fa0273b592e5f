"""Freeing the calling thread when it is rank 0 and another rank has failed.

Under re-exec the user's function runs in the launcher itself, in a state nobody can know: in a
collective, in `time.sleep`, in pure Python, in its own `finally`. A supervisor thread frees it by
three means, each for what the others do not reach:

- the peers' processes end, so a gloo collective raises (it is deaf to anything else);
- the store's server is dropped, so a wait in the store raises;
- a signal arrives, whose handler raises `WorldEnded` in Python code. It is sent again until the
  function has been left, because callbacks and `__del__` swallow exceptions, but not while the
  function handles an exception: its `except` and `finally` have the grace period.

The signal is a real-time one, or SIGURG where there is none: SIGUSR1 and SIGUSR2 are the user's.

`Signals` is the other direction: what the terminal and others send to the calling process during a
call.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

# When the function has not left by this time after the grace period, it never will.
LAST_RESORT_SECONDS = 5.0

SIGNAL: int = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGURG


class WorldEnded(BaseException):
    """Raised in the function of rank 0 when its world has ended; never seen by the caller.

    Not an `Exception`, so that `except Exception` in a training loop lets it pass.
    """


class Guard:
    """Runs a function in the main thread such that another thread can make it leave.

    Args:
        grace: Seconds that the function's own `except` and `finally` blocks have.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._armed = False
        self._deadline: float | None = None
        self._handled_before: BaseException | None = None
        self._thread = threading.get_ident()
        self._previous: Any = None
        self._hook = sys.unraisablehook

    def __enter__(self) -> Guard:
        self._previous = signal.signal(SIGNAL, self._on_signal)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._unraisable
        return self

    @property
    def thread(self) -> int:
        """Identifier of the thread in which the function runs."""
        return self._thread

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._armed = False
        signal.signal(SIGNAL, self._previous)
        sys.unraisablehook = self._hook

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls the function; only while it runs does the signal mean anything.

        Raises:
            WorldEnded: The function was made to leave.
        """
        self._handled_before = sys.exception()
        if self._deadline is not None:
            raise WorldEnded
        self._armed = True
        try:
            return function()
        finally:
            self._armed = False

    def knock(self) -> None:
        """Asks the function to leave; called by the supervisor, again and again."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace
        if self._armed:
            signal.pthread_kill(self._thread, SIGNAL)

    def _unraisable(self, swallowed: sys.UnraisableHookArgs) -> None:
        # Swallowed by a `__del__` or a callback: not news, since the signal comes again.
        if not isinstance(swallowed.exc_value, WorldEnded):
            self._hook(swallowed)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._armed or self._deadline is None:
            return
        handling = sys.exception() is not self._handled_before
        if handling and time.monotonic() < self._deadline:
            return
        raise WorldEnded


def from_handler(error: BaseException) -> bool:
    """Tells whether an exception was raised by a signal handler of the user."""
    codes = {
        getattr(getattr(one, "__func__", one), "__code__", None)
        for one in map(signal.getsignal, signal.valid_signals())
        if callable(one)
    } - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


@contextmanager
def held() -> Generator[None]:
    """Puts off what SIGINT and SIGTERM do until the block has been left.

    For what must not be left half done: a process between its start and its handle, a message
    between its two halves. A fork in the block drops what arrives at it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before: dict[int, Any] = {}
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        handler = signal.getsignal(number)
        if callable(handler):
            before[number] = handler
            signal.signal(number, lambda one, _: arrived.append(one))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in arrived:
            signal.raise_signal(one)


@contextmanager
def audible() -> Generator[None]:
    """Has Ctrl-C interrupt this thread where an event loop would only cancel what it runs next.

    The handlers of `asyncio.run` and of a notebook's cell with `await` leave it to the loop, which
    is busy with the call. A handler of the user's own stays.
    """
    handler = signal.getsignal(signal.SIGINT)
    inside = getattr(handler, "func", handler)  # asyncio's is a partial
    package = (getattr(inside, "__module__", None) or "").partition(".")[0]
    main = threading.current_thread() is threading.main_thread()
    if not main or package not in ("asyncio", "ipykernel"):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)


_hearing: weakref.WeakSet[Signals] = weakref.WeakSet()


def _forget() -> None:
    for one in list(_hearing):
        one.forget()


os.register_at_fork(after_in_child=_forget)


class Signals:
    """Hears the signals that arrive at this process during a call, whatever its main thread does.

    Python's own handlers wait until the main thread is back in Python code, which it is not while
    it waits in a collective. Their numbers are written to a pipe at once. Ctrl-Z is taken over,
    unless the user has a handler for it: the ranks are in process groups of their own, which the
    terminal does not stop.

    Does nothing outside the main thread, which alone may set handlers.
    """

    def __init__(self) -> None:
        self._ours = self._theirs = self._before = -1
        self._takes_stop = False
        _hearing.add(self)

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._ours, self._theirs = os.pipe()
        os.set_blocking(self._theirs, False)
        os.set_blocking(self._ours, False)
        self._before = signal.set_wakeup_fd(self._theirs, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, _noted)
            self._takes_stop = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours < 0:
            return
        if self._takes_stop and signal.getsignal(signal.SIGTSTP) is _noted:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.set_wakeup_fd(self._before)
        os.close(self._ours)
        os.close(self._theirs)
        self._ours = self._theirs = -1

    def forget(self) -> None:
        """Lets go of everything, in a forked process: its signals are its own."""
        if self._ours >= 0:
            signal.set_wakeup_fd(-1)
            if self._takes_stop:
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.close(self._ours)
            os.close(self._theirs)
            self._ours = self._theirs = -1

    def fileno(self) -> int:
        """Returns a descriptor that is readable when a signal has arrived, or -1."""
        return self._ours

    def arrived(self) -> set[int]:
        """Returns the numbers of the signals that have arrived; the user's own pipe gets them."""
        try:
            numbers = os.read(self._ours, 4096)
        except BlockingIOError:
            return set()
        # Our own knocks are no news for the user.
        theirs = bytes(one for one in numbers if one != SIGNAL)
        if self._before >= 0 and theirs:
            try:
                os.write(self._before, theirs)
            except OSError:
                pass  # full or closed: as if Python itself had failed to write
        return set(numbers)

    def stops(self, numbers: set[int]) -> bool:
        """Tells whether Ctrl-Z is among the numbers and is ours to carry out."""
        return (
            signal.SIGTSTP in numbers
            and self._takes_stop
            and signal.getsignal(signal.SIGTSTP) is _noted
        )


def stop_here() -> None:
    """Stops this process as Ctrl-Z does, until it is continued.

    By SIGTSTP with its default action, which the kernel drops where nobody could continue us (an
    orphaned process group). Sent to this thread: one sent to the process may be taken by another
    thread, and this one would run on for a moment.
    """
    exchange = ctypes.pythonapi.PyOS_setsig  # `signal.signal` is for the main thread only
    exchange.argtypes = [ctypes.c_int, ctypes.c_void_p]
    exchange.restype = ctypes.c_void_p
    handler = exchange(signal.SIGTSTP, None)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
    finally:
        exchange(signal.SIGTSTP, handler)


def _noted(number: int, frame: FrameType | None) -> None:
    """Is a handler in name only: the pipe has the news."""
