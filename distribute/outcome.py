"""What became of a rank, and how an exception travels with its traceback."""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, cast

from distribute import cells, interrupt
from distribute.culprit import find
from distribute.errors import (
    BarrierTimeout,
    DistributeError,
    RankOutcome,
    RemoteTraceback,
    RequestError,
    WorkerDied,
    WorkerError,
)
from distribute.home import home
from distribute.payload import Payload, pack, refusal

if TYPE_CHECKING:
    from distribute.state import Held

# An attribute of an exception that was raised on one rank and raised again on others: its rank.
ORIGIN = "_distribute_rank"

Kind = Literal["returned", "raised", "exited", "killed", "freed"]

# How gloo and the store say that a peer has gone. Such an error is usually the echo of a failure
# elsewhere, so the supervisor waits a moment for the cause.
_ECHOES = (
    "closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "connection was likely closed",
    "connection was closed",
    "recvvalue failed",
    "connectfullmesh failed",
)
# What every traceback begins with.
_IN_TRACEBACK = "Traceback (most recent call last)"
# How gloo, NCCL and the store say that they have waited long enough.
_TIMEOUTS = ("timed out", "timeout")


@dataclass
class Raised:
    """An exception as a rank reports it.

    Attributes:
        type_name: Qualified name of its type.
        text: Its text.
        traceback: The formatted traceback, chain and notes included.
        where: Process id and host of the rank.
        timed_out: Whether it says that a collective, or a wait in the store, took too long.
        again: Whether another rank raised it, and this one was told.
        unsent: Why the exception itself is not in the payload, or empty.
    """

    type_name: str
    text: str
    traceback: str
    where: str
    timed_out: bool = False
    again: bool = False
    unsent: str = ""

    def __str__(self) -> str:
        """Says it as the last line of a traceback does."""
        return f"{plain(self.type_name)}: {self.text}" if self.text else plain(self.type_name)


@dataclass
class Outcome:
    """What became of one rank in one call.

    Attributes:
        rank: The rank.
        kind: `returned` (a value), `raised` (an exception), `exited` or `killed` (the process
            ended without either), `freed` (made to leave because another rank had failed).
        time: When, by the machine's monotonic clock in seconds.
        payload: The value or the exception, when it comes from another process.
        local: The value or the exception itself, when the rank is the calling process.
        raised: Facts about the exception.
        exit_code: Exit code of the process, or of the function's `SystemExit`.
        signal: The signal that ended the process.
        detail: What the process was doing, for `exited` and `killed`.
        hint: What may have been the reason, for `killed`.
        stack: The Python stack at the crash, for `exited` and `killed`.
        output: The last lines of its output, for `exited` and `killed`.
        echo: Whether it looks like the consequence of another rank's failure.
        consequence: Whether it came after the call had failed, and is part of its end.
        streams: Final states of the random-number generators (rank 0 only).
        holds_group: Whether the rank still holds the process group of the call, as it was made.
        parts: The caller's objects whose state is in the payload beside the value (rank 0 only).
    """

    rank: int
    kind: Kind
    time: float = field(default_factory=time.monotonic)
    payload: Payload | None = None
    local: Any = None
    raised: Raised | None = None
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    hint: str = ""
    stack: str = ""
    output: tuple[str, ...] = ()
    echo: bool = False
    consequence: bool = False
    streams: Any = None
    holds_group: bool = False
    parts: Sequence[Any] = ()

    @property
    def failed(self) -> bool:
        """Whether the call cannot succeed with this outcome."""
        return self.kind != "returned"

    def drop(self) -> None:
        """Lets go of what was sent, if nobody wants it."""
        if self.payload is not None:
            self.payload.close()

    def value(self) -> Any:
        """Returns the value of a rank that returned; the state that came with it is there then."""
        if self.payload is None:
            return self.local
        try:
            changes, value = self.payload.load(self.parts)
        except Exception as error:
            note(error, f"raised while the value of rank {self.rank} was rebuilt in the caller")
            raise
        finally:
            self.payload.close()
        if changes:
            from distribute import state

            with interrupt.held():
                state.apply(changes, self.parts)
        return value

    def error(self) -> BaseException:
        """Returns the exception that tells the caller about this failure."""
        if self.kind in ("exited", "killed", "freed"):
            return WorkerDied(
                self.rank,
                self.exit_code,
                self.signal,
                self.detail,
                self.hint,
                self.stack,
                self.output,
            )
        assert self.raised is not None
        local = isinstance(self.local, BaseException)
        error: BaseException = self.local if local else self._rebuilt(self.raised)
        note(error, f"raised by rank {self.rank} ({self.raised.where})")
        return error

    def _rebuilt(self, raised: Raised) -> BaseException:
        error: BaseException | None = None
        reason = raised.unsent
        told = cells.named(raised.traceback)
        if self.payload is not None:
            try:
                error = _arrive(self.payload.load())
            except Exception as problem:
                reason = f"it cannot be rebuilt here: {type(problem).__name__}: {problem}"
            finally:
                self.payload.close()
        if error is None:
            error = WorkerError(self.rank, raised.type_name, raised.text, told, reason)
        if _IN_TRACEBACK in told:
            _link(_farthest(error), "__cause__", RemoteTraceback(told))
        return error


def returned(rank: int, value: Any, *, local: bool, held: Held | None = None) -> Outcome:
    """Makes the outcome of a rank whose function returned.

    Args:
        rank: The rank.
        value: What it returned.
        local: Whether the rank is the calling process, to which the value itself goes.
        held: What it holds of the caller's objects, whose state goes with the value.
    """
    if local:
        return Outcome(rank, "returned", local=home(value))
    payload = None if held is None else _with_changes(value, held)
    if payload is not None:
        return Outcome(rank, "returned", payload=payload)
    try:
        return Outcome(rank, "returned", payload=pack(((), value), home=True))
    except Exception as error:
        problem = error
    try:
        # Not while the first error is handled, which would become part of what the search finds.
        found = find(f"the value of rank {rank}", "", value, partial(refusal, home=True))
        if found is None:
            raise problem
    finally:
        del problem
    raise RequestError(
        found.where, found.reason, "return numbers, tensors, state dicts and other plain data"
    ) from found.cause


def _with_changes(value: Any, held: Held) -> Payload | None:
    """Packs a value with the changes of the caller's objects; None if the value cannot be sent."""
    changes = held.changes()
    try:
        return pack((changes, value), home=True, known=held.parts)
    except Exception:
        pass  # and again without what cannot be sent
    try:
        return pack((held.sendable(changes), value), home=True, known=held.parts)
    except Exception:
        return None


def system_exit(rank: int, error: SystemExit, *, local: bool, held: Held | None = None) -> Outcome:
    """Makes the outcome of a rank whose function called `sys.exit`.

    Args:
        rank: The rank.
        error: What that raised; without a code, or with 0, the function has returned None.
        local: Whether the rank is the calling process.
        held: See `returned`.
    """
    if error.code is None or (isinstance(error.code, int) and error.code == 0):
        return returned(rank, None, local=local, held=held)
    code = error.code if isinstance(error.code, int) else 1
    text = "" if isinstance(error.code, int) else f" with {_text(error)!r}"
    return Outcome(
        rank, "exited", exit_code=code, detail=f"when its function called sys.exit{text}"
    )


def raised(rank: int, error: BaseException, *, local: bool) -> Outcome:
    """Makes the outcome of a rank whose function raised.

    Args:
        rank: The rank.
        error: What it raised.
        local: Whether the rank is the calling process, to which the exception itself goes.
    """
    kind = type(error)
    facts = Raised(
        type_name=f"{kind.__module__}.{kind.__qualname__}",
        text=_text(error),
        traceback="".join(traceback.format_exception(_without_ours(error))),
        where=f"process {os.getpid()} on {socket.gethostname()}",
        timed_out=isinstance(error, BarrierTimeout) or _says(error, RuntimeError, _TIMEOUTS),
    )
    facts.again = _held(error, ORIGIN, rank) != rank
    echo = facts.again or _says(error, RuntimeError, _ECHOES)
    outcome = Outcome(rank, "raised", raised=facts, echo=echo)
    if local:
        outcome.local = error
        return outcome
    facts.unsent = obstacle(error)
    if not facts.unsent:
        outcome.payload = pack(_links(error), home=True)
    return outcome


def public(found: Outcome, **more: Any) -> RankOutcome:
    """Returns what the caller sees of an outcome.

    Args:
        found: The outcome.
        **more: Attributes of `RankOutcome` that are known from elsewhere.
    """
    raised = found.raised
    facts: dict[str, Any] = {
        "kind": "killed" if found.kind == "freed" else found.kind,
        "stack": found.stack,
        "output": found.output,
    }
    return RankOutcome(
        rank=found.rank,
        error="" if raised is None else str(raised),
        exit_code=found.exit_code,
        signal=found.signal,
        consequence=found.consequence or found.echo,
        traceback="" if raised is None else cells.named(raised.traceback),
        time=found.time,
        **(facts | more),
    )


def plain(type_name: str) -> str:
    """Returns the name of a type as people write it."""
    return type_name.removeprefix("builtins.")


def obstacle(error: BaseException) -> str:
    """Returns why an exception cannot travel, or an empty string; its chain apart."""
    verb = "pickled"
    try:
        payload = pack(error, home=True)
        verb = "rebuilt here"
        try:
            payload.load()
        finally:
            payload.close()
    except Exception as problem:
        return f"it cannot be {verb}: {type(problem).__name__}: {_text(problem)}"
    return ""


# An exception with what pickle leaves behind: cause, context, suppression of the context, notes,
# and its `args`, where pickle has made others of them.
_Link = tuple[
    BaseException,
    BaseException | None,
    BaseException | None,
    bool,
    list[str],
    tuple[Any, ...] | None,
]


def _links(error: BaseException) -> list[_Link]:
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in found:
            continue
        found[id(one)] = one
        waiting += [one.__context__, one.__cause__]
        if isinstance(one, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", one).exceptions
    sent = {key: _stand_in(one) for key, one in found.items()}
    return [
        (
            sent[key],
            one.__cause__ and sent[id(one.__cause__)],
            one.__context__ and sent[id(one.__context__)],
            one.__suppress_context__,
            _notes(one),
            _own_args(sent[key]),
        )
        for key, one in found.items()
    ]


def _stand_in(error: BaseException) -> BaseException:
    """Returns the exception itself, or one that tells of it where it cannot travel."""
    reason = obstacle(error)
    if not reason:
        return error
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    return WorkerError(-1, name, _text(error), "", reason)


def _own_args(error: BaseException) -> tuple[Any, ...] | None:
    """Returns the `args` of an exception that pickle makes again by calling its class with them.

    One whose `__init__` makes a text of what it is given would make a text of that text.
    """
    kind = type(error)
    remade = isinstance(kind.__init__, FunctionType) and kind.__reduce__ is BaseException.__reduce__
    return error.args if remade and kind.__reduce_ex__ is object.__reduce_ex__ else None


def _arrive(links: list[_Link]) -> BaseException:
    for error, cause, context, suppress, notes, args in links:
        if args is not None:
            _link(error, "args", args)
        _link(error, "__cause__", cause)
        _link(error, "__context__", context)
        _link(error, "__suppress_context__", suppress)
        if notes and not _notes(error):
            object.__setattr__(error, "__notes__", notes)
    return links[0][0]


def _link(error: BaseException, name: str, value: object) -> None:
    # Past the exception's own `__setattr__`: it may be a frozen dataclass.
    vars(BaseException)[name].__set__(error, value)


def _notes(error: BaseException) -> list[str]:
    found = _held(error, "__notes__", [])
    return [*map(str, cast("list[object]", found))] if isinstance(found, list | tuple) else []


def note(error: BaseException, text: str) -> None:
    """Adds a note, where the exception allows it."""
    notes = _held(error, "__notes__", [])
    if isinstance(notes, list):
        # Not by `add_note`: the exception may be a frozen dataclass.
        object.__setattr__(error, "__notes__", [*cast("list[object]", notes), text])


def _held(error: BaseException, name: str, default: Any) -> Any:
    # Not by getattr: an exception may answer for any name.
    return error.__dict__.get(name, default)


def _farthest(error: BaseException) -> BaseException:
    seen = {id(error)}
    while True:
        following = error.__cause__
        if following is None and not error.__suppress_context__:
            following = error.__context__
        if following is None or id(following) in seen:
            return error
        seen.add(id(following))
        error = following


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<its text cannot be shown: {type(problem).__name__}>"


def _without_ours(error: BaseException) -> BaseException:
    """Cuts the library's own frames off the start of the traceback: they are nobody's news.

    Of an error that is not the library's own, nothing but those is the trace of a fault in it.
    """
    # As the code objects have it: a frozen program's modules are elsewhere, or nowhere.
    here = os.path.dirname(_without_ours.__code__.co_filename) + os.sep
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    if trace is None and not isinstance(error, DistributeError):
        return error
    return error.with_traceback(trace)


def _says(error: BaseException, kind: Any, words: tuple[str, ...]) -> bool:
    # By words: torch raises a plain RuntimeError for what gloo meets.
    if not isinstance(error, kind):
        return False
    text = _text(error).lower()
    return any(one in text for one in words)
