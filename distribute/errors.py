"""Every error that the library itself raises.

The tree, so that one can catch broadly or narrowly:

    DistributeError
    +-- RequestError (ValueError)     the request cannot be carried out; nothing was started
    +-- CallMismatch (RuntimeError)   ranks did not arrive at the same call
    +-- CollectiveMismatch (RuntimeError)   ranks came to different collectives of `Context`
    +-- BarrierTimeout (TimeoutError) some ranks did not come to a barrier in time
    +-- WorkerError (RuntimeError)    a rank raised something that could not be rebuilt here
    +-- WorkerDied (RuntimeError)     a rank's process ended without a value or an exception
    +-- JoinTimeout (TimeoutError)    some ranks did not join in time
    +-- DeadlineExceeded (TimeoutError)   the whole call took longer than `deadline`
    +-- MainFailed (RuntimeError)     rank 0 left `main_process_first` by an exception

An exception raised by the user's function is none of these: it reaches the caller as itself.
What reaches the caller once the ranks have been started has an attribute `outcomes`: one
`RankOutcome` for each rank.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What became of one rank of a call that failed; the exception has them all in `outcomes`.

    Attributes:
        rank: The rank.
        kind: `"returned"`, `"raised"`, `"exited"` (its process or `sys.exit` ended it), `"killed"`
            (by a signal, or by the launcher after another rank had failed), `"never started"` (it
            ended or was ended before it was ready for the call).
        error: Qualified name of the exception's type and its text, or empty.
        exit_code: Exit code of the process or of `sys.exit`, or None.
        signal: Number of the signal that ended the process, or None.
        consequence: Whether this is only the result of another rank's failure.
        collective: The rank's last collective of `Context` with its call site, or empty.
        traceback: Its formatted traceback when it raised, or empty.
        stack: Its Python stack, outermost call first, when it crashed or when the call was found
            to hang; else empty.
        output: The last lines of its standard output and error; empty where these are the
            terminal's or the calling process's own.
        time: When it ended, by the machine's monotonic clock in seconds.
    """

    rank: int
    kind: Literal["returned", "raised", "exited", "killed", "never started"]
    error: str = ""
    exit_code: int | None = None
    signal: int | None = None
    consequence: bool = False
    collective: str = ""
    traceback: str = ""
    stack: str = ""
    output: tuple[str, ...] = ()
    time: float = 0.0


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


class CollectiveMismatch(DistributeError, RuntimeError):
    """Raised on every rank when the ranks came to different collectives; all are in step again."""


class BarrierTimeout(DistributeError, TimeoutError):
    """Raised on every rank when some did not come to a barrier within its `timeout`.

    Those that come later raise it as well, so that all are in step again.
    """


class JoinTimeout(DistributeError, TimeoutError):
    """Raised when some ranks did not join their world within `rendezvous_timeout`."""


class DeadlineExceeded(DistributeError, TimeoutError):
    """Raised when a call has not ended within its `deadline`."""


class MainFailed(DistributeError, RuntimeError):
    """Raised on the other ranks when rank 0 leaves `main_process_first` by an exception."""


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
        text = f": {self.text}" if self.text else ""
        return f"{who}{self.type_name}{text} (shown as WorkerError because {self.reason})"


class WorkerDied(DistributeError, RuntimeError):
    """Raised when a rank's process ended without a value or an exception.

    Attributes:
        rank: The rank whose process ended.
        exit_code: Its exit code, or None when a signal ended it.
        signal: Number of the signal that ended it, or None.
        detail: What else is known, such as the point in the worker's life.
        hint: What may have been the reason, or empty.
        stack: Its Python stack at the crash, or empty.
        output: The last lines of its output.
    """

    def __init__(
        self,
        rank: int,
        exit_code: int | None,
        signal: int | None,
        detail: str = "",
        hint: str = "",
        stack: str = "",
        output: tuple[str, ...] = (),
    ) -> None:
        super().__init__(rank, exit_code, signal, detail, hint, stack, output)
        self.rank = rank
        self.exit_code = exit_code
        self.signal = signal
        self.detail = detail
        self.hint = hint
        self.stack = stack
        self.output = output

    def __str__(self) -> str:
        if self.signal is not None:
            end = f"was killed by {signal_name(self.signal)}"
        else:
            end = f"ended with exit code {self.exit_code}"
        hint = f" ({self.hint})" if self.hint else ""
        detail = self.detail or "before it returned or raised"
        text = f"rank {self.rank} {end}{hint} {detail}"
        if self.stack:
            text += f"\nIts stack (most recent call last):\n{self.stack.rstrip()}"
        if self.output:
            text += "\nThe last lines of its output:\n" + "\n".join(
                f"  {line}" for line in self.output
            )
        return text


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
