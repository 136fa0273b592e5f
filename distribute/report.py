"""What is told about a failed call: every rank's state, and whose failure followed from whose."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from traceback import FrameSummary, StackSummary
from typing import Any

from distribute import cells, hosting, record
from distribute.cgroup import OutOfMemory
from distribute.ending import Worker
from distribute.errors import RankOutcome, signal_name
from distribute.outcome import Outcome, plain, public
from distribute.process import at_work, stopped
from distribute.record import Operation

# How long ranks have to answer with their stacks, on a machine that has other things to do: all of
# them answer within milliseconds on one that has not. A process that is stopped never does.
_ANSWER_SECONDS = 3.0
# A stack has been written in full when nothing has come for this long; the longer one is for a
# process at work, which may have lost its core in the middle.
_QUIET_SECONDS = 0.01
_QUIET_SECONDS_AT_WORK = 0.1


@dataclass(frozen=True)
class Sighting:
    """Where a rank was when the call was found to hang.

    Attributes:
        rank: The rank.
        pid: Its process.
        state: What it was doing, as far as the launcher knows.
        operation: Its last collective.
        stack: Its Python stack; empty where it did not answer.
        left: Whether it has left the function.
        traceback: Its formatted traceback, if it raised.
    """

    rank: int
    pid: int
    state: str
    operation: Operation | None
    stack: StackSummary
    left: bool = False
    traceback: str = ""

    @property
    def where(self) -> str:
        """The rank's place in a few words, to follow its name."""
        if self.operation is not None and self.operation.running:
            return f"is in {self.operation}"
        if self.operation is not None and self.operation.failed and not self.stack:
            return f"{self.state} in {self.operation}"
        inside, frame = _call(self.stack)
        if frame is None:
            return self.state if self.left else f"is {self.state}"
        place = f"{cells.short(frame.filename)}:{frame.lineno}"
        return f"is in {inside} at {place}" if inside else f"is at {place}, in {frame.name}"


def sight(
    workers: Sequence[Worker],
    found: Mapping[int, Outcome],
    state: Callable[[Worker], str],
    main_thread: int | None,
) -> list[Sighting]:
    """Looks where all ranks are; takes `_ANSWER_SECONDS` at most.

    Args:
        workers: The ranks.
        found: What became of those that have left the function.
        state: Says what one of the others does.
        main_thread: The thread of the rank in this process.
    """
    asked: dict[int, int] = {}
    there = [one for one in workers if one.rank not in found]
    for worker in there:
        size = worker.channel.record.size()
        process = worker.process
        if process is None or process.poll() is not None:
            continue
        if worker.channel.record.ask(process.pid):
            asked[worker.rank] = size
    _wait(workers, asked)
    return [
        _gone(one, found[one.rank])
        if one.rank in found
        else _sighting(one, state(one), asked.get(one.rank), main_thread)
        for one in workers
    ]


def _gone(worker: Worker, found: Outcome) -> Sighting:
    state = {"returned": "returned", "freed": "left"}.get(found.kind, "ended")
    traceback = ""
    if found.raised is not None:
        state = f"raised {plain(found.raised.type_name)}"
        traceback = found.raised.traceback
    last = worker.channel.record.last()
    return Sighting(worker.rank, worker.pid, state, last, StackSummary(), True, traceback)


def _wait(workers: Sequence[Worker], asked: Mapping[int, int]) -> None:
    limit = time.monotonic() + _ANSWER_SECONDS
    before = {rank: (size, 0.0) for rank, size in asked.items()}
    missing = set(asked)
    while missing and time.monotonic() < limit:
        time.sleep(_QUIET_SECONDS)
        for rank in list(missing):
            process = workers[rank].process
            silent = process is None or process.poll() is not None or stopped(process.pid)
            quiet = _QUIET_SECONDS_AT_WORK if at_work(workers[rank].pid) else _QUIET_SECONDS
            size, now = workers[rank].channel.record.size(), time.monotonic()
            if size != before[rank][0]:
                before[rank] = size, now
            if silent or (size > asked[rank] and now - before[rank][1] >= quiet):
                missing.discard(rank)


def _sighting(worker: Worker, state: str, start: int | None, main_thread: int | None) -> Sighting:
    stack = StackSummary()
    if worker.process is None:
        if main_thread is not None:
            stack = record.stack_of_thread(main_thread)
    elif start is not None:
        stack = worker.channel.record.stack(start)
        if stopped(worker.process.pid):
            state = f"{state}, but its process is stopped (SIGSTOP, SIGTSTP or SIGTTIN)"
    return Sighting(worker.rank, worker.pid, state, worker.channel.record.last(), stack)


def described(sightings: Sequence[Sighting], cause: int | None) -> str:
    """Describes all ranks: one line that says where each is, then the details.

    Args:
        sightings: Where they are.
        cause: The rank whose traceback is shown anyway.
    """
    lines = ["; ".join(f"rank {one.rank} {one.where}" for one in sightings)]
    for one in sightings:
        lines.append(f"rank {one.rank} (process {one.pid}): {one.state}{_last(one.operation)}")
        lines += _text(one.stack).splitlines()
        if one.rank != cause:
            lines += [f"  {line}" for line in cells.named(one.traceback).splitlines()]
    return "\n".join(lines)


def _text(stack: StackSummary) -> str:
    return cells.named("".join(stack.format()))


def _last(operation: Operation | None) -> str:
    if operation is None:
        return "; no collective of ctx so far"
    seconds = time.monotonic() - operation.since
    if operation.running:
        return f"; for {seconds:.1f} s in {operation}, after {operation.completed} completed"
    return (
        f"; last collective {operation}, left {seconds:.1f} s ago, {operation.completed} completed"
    )


def _call(stack: StackSummary) -> tuple[str, FrameSummary | None]:
    """Returns what torch is doing for the user, if anything, and the user's own frame.

    That is the innermost one that is not of an installed package, or else not torch's.
    """
    inside = ""
    own: FrameSummary | None = None
    certain = False
    for frame in stack:
        if not frame.filename.startswith(_torch()):
            users = not hosting.installed(frame.filename) and not frame.filename.startswith(
                "<frozen "
            )
            if users or not certain:
                own, inside, certain = frame, "", users
        elif not inside:
            if frame.filename.endswith("distributed_c10d.py"):
                inside = frame.name
            elif frame.name == "_engine_run_backward":
                inside = "backward"
    return inside, own


@cache
def _torch() -> str:
    """Returns torch's directory; this process need not have imported it."""
    found = find_spec("torch")
    places = None if found is None else found.submodule_search_locations
    return os.path.join(places[0] if places else os.sep, "")


def outcomes(
    workers: Sequence[Worker], found: Mapping[int, Outcome], sightings: Sequence[Sighting]
) -> tuple[RankOutcome, ...]:
    """Returns the public outcomes of all ranks."""
    seen = {one.rank: one for one in sightings}
    return tuple(
        _outcome(one, found[one.rank], seen.get(one.rank)) for one in workers if one.rank in found
    )


def _outcome(worker: Worker, found: Outcome, seen: Sighting | None) -> RankOutcome:
    more: dict[str, Any] = {}
    if worker.ready is None and found.kind not in ("returned", "raised"):
        more["kind"] = "never started"
    if not found.stack and seen is not None:
        more["stack"] = _text(seen.stack)
    operation = worker.channel.record.last()
    return public(
        found,
        collective="" if operation is None else str(operation),
        output=found.output or tail(worker),
        **more,
    )


def died(worker: Worker, code: int, detail: str, memory: OutOfMemory) -> Outcome:
    """Makes the outcome of a rank whose process ended without one.

    Args:
        worker: The rank.
        code: Its exit code, negative for a signal.
        detail: What it was doing.
        memory: Tells of lack of memory.
    """
    number = -code if code < 0 else None
    return Outcome(
        worker.rank,
        "exited" if number is None else "killed",
        signal=number,
        exit_code=code if number is None else None,
        detail=detail,
        hint=memory.hint() if number == signal.SIGKILL else "",
        stack=_text(worker.channel.record.stack()),
        output=tail(worker),
    )


def tail(worker: Worker) -> tuple[str, ...]:
    """Returns the last lines of a rank's output."""
    return () if worker.tap is None else tuple(worker.tap.tail())


def notes(found: Mapping[int, Outcome], cause: int | None) -> list[str]:
    """Says of each rank that failed as well how that belongs to the cause.

    Args:
        found: What became of the ranks.
        cause: The rank that failed first, or None if that was no rank.
    """
    told: list[str] = []
    for rank in sorted(found):
        one = found[rank]
        if rank == cause or not one.failed or (one.consequence and one.kind != "raised"):
            continue
        if one.raised is not None and one.raised.again:
            continue
        if one.echo:
            if cause is not None:
                told.append(f"rank {rank} lost its connection because of the above")
        elif one.raised is not None:
            # An interruption of the caller is felt by a rank 0 that it is itself.
            if cause is not None or one.raised.type_name != "builtins.KeyboardInterrupt":
                told.append(f"rank {rank} raised as well: {one.raised}")
        elif one.signal is not None:
            told.append(f"rank {rank} was killed by {signal_name(one.signal)} as well")
        elif one.exit_code is not None:
            told.append(f"rank {rank} ended with exit code {one.exit_code} as well")
    return told
