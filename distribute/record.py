"""What a rank is doing, readable from outside while it does it.

A memory file that a rank and its launcher share: one page with the collective that the rank is in
or was in last, and behind it the Python stacks that faulthandler writes, when the rank
crashes or when the launcher asks with a signal. Neither needs the rank's interpreter: a rank that
hangs in C++ still answers.

    bytes 0..4095   _PAGE: version, armed, collectives completed, phase of the last, since, text
    bytes 4096...   stacks, one after the other
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import FrameSummary, StackSummary, extract_stack
from types import FrameType

from distribute import cells, memory

# Asks a rank for its stack. A real-time signal: SIGUSR1 and SIGUSR2 are the user's.
SIGNAL: int = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGQUIT

_SIZE = 4096
# version (odd while it is written), armed, completed, phase, since, length of the text
_PAGE = struct.Struct("<QQQQdQ")
_LEFT, _RUNNING, _FAILED = range(3)
# As the code objects have it: a frozen program's modules are elsewhere, or nowhere.
_OURS = os.path.dirname(sys._getframe().f_code.co_filename) + os.sep
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')


@dataclass(frozen=True)
class Operation:
    """A collective of a rank.

    Attributes:
        name: Its name, such as `all_reduce`.
        file: The file that calls it.
        line: The line there.
        running: Whether the rank is in it; otherwise it has left.
        failed: Whether it left by an exception.
        since: When it was entered or left, by the monotonic clock in seconds.
        completed: How many collectives and training steps the rank has completed.
    """

    name: str
    file: str
    line: int
    running: bool
    failed: bool
    since: float
    completed: int

    def __str__(self) -> str:
        return f"{self.name} at {cells.short(self.file)}:{self.line}"


class Record:
    """One side of a rank's record.

    Args:
        descriptor: A descriptor of the memory file, which this object closes.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._page: mmap.mmap | None = None
        self._version = 0
        self._completed = 0
        self._inside = False

    @classmethod
    def pair(cls) -> tuple[Record, Record]:
        """Returns the launcher's and the rank's side of a new record."""
        descriptor = memory.new()
        os.truncate(descriptor, _SIZE)
        # Both share the position, at which faulthandler writes.
        os.lseek(descriptor, _SIZE, os.SEEK_SET)
        return cls(descriptor), cls(os.dup(descriptor))

    def close(self) -> None:
        """Closes this side."""
        if self._page is not None:
            self._page.close()
            self._page = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    # -- the rank's side -----------------------------------------------------------------------

    def open(self) -> None:
        """Begins to write, in the rank's process or in the one that plays it."""
        self._page = mmap.mmap(self.descriptor, _SIZE)
        self._page[: _PAGE.size] = _PAGE.pack(0, 0, 0, 0, time.monotonic(), 0)

    def show_stacks(self) -> None:
        """Has faulthandler write here when this process crashes or is asked."""
        global _shown
        _shown = True
        faulthandler.enable(file=self.descriptor, all_threads=False)
        faulthandler.register(SIGNAL, file=self.descriptor, all_threads=False, chain=False)
        if self._page is not None:
            self._page[8:16] = struct.pack("<Q", 1)

    def fresh(self) -> None:
        """Forgets the collectives of earlier calls."""
        self._completed = 0
        self._write(b"", _LEFT)

    @contextmanager
    def operation(self, name: str, frame: FrameType | None) -> Generator[None]:
        """Notes that the rank is in a collective; those inside another are no news.

        Args:
            name: The collective.
            frame: Where it is called from; frames of this library are passed over.
        """
        if self._inside:
            yield
            return
        frame = _outside(frame)
        place = "?" if frame is None else f"{frame.f_lineno}\0{frame.f_code.co_filename}"
        text = f"{name}\0{place}".encode(errors="replace")[: _SIZE - _PAGE.size]
        self._inside = True
        self._write(text, _RUNNING)
        end = _FAILED
        try:
            yield
            self._completed += 1
            end = _LEFT
        finally:
            self._inside = False
            self._write(text, end)

    def step(self) -> None:
        """Notes a training step that was synchronised by the model and not by a collective."""
        self._completed += 1
        if self._page is not None:
            self._page[16:24] = struct.pack("<Q", self._completed)

    def _write(self, text: bytes, phase: int) -> None:
        page = self._page
        if page is None:
            return
        armed = struct.unpack_from("<Q", page, 8)[0]
        head = armed, self._completed, phase, time.monotonic(), len(text)
        self._version += 2
        page[:8] = struct.pack("<Q", self._version - 1)
        page[8 : _PAGE.size + len(text)] = _PAGE.pack(0, *head)[8:] + text
        page[:8] = struct.pack("<Q", self._version)

    # -- the launcher's side -------------------------------------------------------------------

    def last(self) -> Operation | None:
        """Returns the rank's running or last collective, or None."""
        for _ in range(100):
            page = os.pread(self.descriptor, _SIZE, 0)
            version, _, completed, phase, since, length = _PAGE.unpack_from(page)
            text = page[_PAGE.size : _PAGE.size + length]
            if version % 2 == 0 and os.pread(self.descriptor, 8, 0) == page[:8]:
                break
        else:
            return None
        if not text:
            return None
        name, line, file = (*text.decode(errors="replace").split("\0"), "0", "?")[:3]
        number = int(line) if line.isdigit() else 0
        running, failed = phase == _RUNNING, phase == _FAILED
        return Operation(name, file, number, running, failed, since, completed)

    def completed(self) -> int:
        """Returns how many collectives and training steps the rank has completed."""
        found: int = _PAGE.unpack_from(os.pread(self.descriptor, _PAGE.size, 0))[2]
        return found

    def ask(self, pid: int) -> bool:
        """Asks the rank's process for its stack, if it can answer."""
        if not _PAGE.unpack_from(os.pread(self.descriptor, _PAGE.size, 0))[1]:
            return False
        try:
            os.kill(pid, SIGNAL)
        except OSError:
            return False
        return True

    def size(self) -> int:
        """Returns the length of the file, which grows with each stack."""
        return os.fstat(self.descriptor).st_size

    def stack(self, start: int = 0) -> StackSummary:
        """Returns the last stack that was written, outermost call first.

        Args:
            start: Only what stands after this position of the file counts.
        """
        start = max(start, _SIZE)
        raw = os.pread(self.descriptor, max(0, self.size() - start), start)
        whole = raw[: raw.rfind(b"\n") + 1]  # the process may be in the middle of a line
        frames: list[FrameSummary] = []
        for line in whole.decode(errors="replace").splitlines():
            found = _FRAME.fullmatch(line)
            if found is not None:
                number = int(found["line"]) if found["line"].isdigit() else None
                frames.append(FrameSummary(found["file"], number, found["name"]))
            elif line.endswith("(most recent call first):"):
                frames = []
        return _trimmed(reversed(frames))


def _trimmed(frames: Iterable[FrameSummary]) -> StackSummary:
    """Drops the library's own frames, and those that only lead to the user's function."""
    kept: list[FrameSummary] = []
    for one in frames:
        if one.filename.startswith(_OURS):
            if one.name == "run" and os.path.basename(one.filename) == "task.py":
                kept = []
            continue
        kept.append(one)
    return StackSummary.from_list(kept)


def stack_of_thread(thread: int) -> StackSummary:
    """Returns the stack of a thread of this process, outermost call first."""
    frame = sys._current_frames().get(thread)
    return _trimmed([] if frame is None else extract_stack(frame))


_shown = False


def _show_elsewhere() -> None:
    """Has what this process forks (a DataLoader worker) crash on stderr.

    It closes the record, whose number its next file may get.
    """
    if _shown:
        faulthandler.enable(file=2, all_threads=False)
        faulthandler.unregister(SIGNAL)


os.register_at_fork(after_in_child=_show_elsewhere)


def begin(descriptor: int) -> None:
    """Has this process answer for its stack before it imports anything large.

    Args:
        descriptor: Of the record; the channel takes it over later.
    """
    early = Record(descriptor)
    early.open()
    early.show_stacks()


# The record of the rank that this process is, while it is one.
_mine: Record | None = None


def use(record: Record | None) -> None:
    """Makes a record that of this process."""
    global _mine
    _mine = record


def fresh() -> None:
    """Forgets this rank's collectives of earlier calls."""
    if _mine is not None:
        _mine.fresh()


@contextmanager
def operation(name: str) -> Generator[None]:
    """Notes that this rank is in a collective which its caller's caller asked for."""
    if _mine is None:
        yield
        return
    with _mine.operation(name, sys._getframe(2)):
        yield


def site() -> str:
    """Returns where this library was called from, as `file:line`."""
    frame = _outside(sys._getframe(1))
    return "?" if frame is None else f"{cells.short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _outside(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame that is not this library's."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def step() -> None:
    """Notes a training step that was synchronised by the model."""
    if _mine is not None:
        _mine.step()
