"""Every error that the library itself raises.

The tree, so that one can catch broadly or narrowly:

    DistributeError
    +-- RequestError (ValueError)     the request cannot be carried out; nothing was started
    +-- CallMismatch (RuntimeError)   ranks did not arrive at the same call
    +-- WorkerError (RuntimeError)    a rank raised something that could not be rebuilt here
    +-- WorkerDied (RuntimeError)     a rank's process ended without a value or an exception
    +-- JoinTimeout (TimeoutError)    some ranks did not join in time

An exception raised by the user's function is none of these: it reaches the caller as itself.
"""

from __future__ import annotations

import signal


class DistributeError(Exception):
    """The root of the library's own errors."""


class RequestError(DistributeError, ValueError):
    """Raised when a request cannot be carried out, before anything is started.

    Args:
        given: What was asked for.
        fact: What is true.
        advice: What to do.
    """

    def __init__(self, given: str, fact: str, advice: str) -> None:
        super().__init__(given, fact, advice)
        self.given = given
        self.fact = fact
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.given}: {self.fact}; {self.advice}"


class CallMismatch(DistributeError, RuntimeError):
    """Raised when the processes of a re-executed script did not arrive at the same call."""


class JoinTimeout(DistributeError, TimeoutError):
    """Raised when some ranks did not join their world within `rendezvous_timeout`."""


class WorkerError(DistributeError, RuntimeError):
    """Raised in place of a rank's exception that could not be sent or rebuilt.

    Attributes:
        rank: The rank that raised; -1 for a link of another exception's chain.
        type_name: Qualified name of the exception's type.
        text: The exception's text.
        traceback: The formatted traceback of the rank.
    """

    def __init__(self, rank: int, type_name: str, text: str, traceback: str, reason: str) -> None:
        super().__init__(rank, type_name, text, traceback, reason)
        self.rank = rank
        self.type_name = type_name
        self.text = text
        self.traceback = traceback
        self.reason = reason

    def __str__(self) -> str:
        who = f"rank {self.rank} raised " if self.rank >= 0 else ""
        return f"{who}{self.type_name}: {self.text} (shown as WorkerError because {self.reason})"


class WorkerDied(DistributeError, RuntimeError):
    """Raised when a rank's process ended without a value or an exception.

    Attributes:
        rank: The rank whose process ended.
        exit_code: Its exit code, or None when a signal ended it.
        signal: Number of the signal that ended it, or None.
        detail: What else is known, such as the point in the worker's life.
    """

    def __init__(
        self, rank: int, exit_code: int | None, signal: int | None, detail: str = ""
    ) -> None:
        super().__init__(rank, exit_code, signal, detail)
        self.rank = rank
        self.exit_code = exit_code
        self.signal = signal
        self.detail = detail

    def __str__(self) -> str:
        if self.signal is not None:
            end = f"was killed by {signal_name(self.signal)}"
            if self.signal == signal.SIGKILL:
                end += " (possibly out of memory)"
        else:
            end = f"ended with exit code {self.exit_code}"
        detail = f" {self.detail}" if self.detail else " before it returned or raised"
        return f"rank {self.rank} {end}{detail}"


class RemoteTraceback(Exception):
    """Not raised: it stands at the far end of the cause chain and shows a rank's own traceback."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}\n"


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as `SIGKILL`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
