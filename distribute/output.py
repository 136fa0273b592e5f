"""The ranks' standard output and error, forwarded in whole lines.

    rank 0    rank 1   ...       each writes into two pipes, whose other ends are its `Tap`
         |    |
        reader                   cuts lines and keeps the last ones; never waits for the consumer
          |
        backlog                  in memory, and beyond some size in a temporary file
          |
        writer                   waits for the consumer
          |
    the launcher's own standard output and error, or a file for each rank

A re-executed worker has a third one up to its call, in place of standard output: what it prints
there is known to its errors, and not shown.

Ranks that had the launcher's descriptors themselves would print into each other's lines, and stop
when the consumer does. Nothing here waits for the end of a pipe: what a rank has started may hold
it open for ever.
"""

from __future__ import annotations

import atexit
import codecs
import contextvars
import fcntl
import os
import selectors
import socket
import sys
import termios
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from pathlib import PurePath

from distribute.consumer import Backlog, Consumer, File, Stream, file_of, own_streams, text

_CHUNK = 1 << 16  # what a pipe holds
_LONGEST_LINE = 1 << 20
# After this an unfinished line of rank 0 is passed on: a progress bar has to move, but a line
# that is printed in pieces had better stay whole.
_PATIENCE = 0.05
# The reader waits for nobody; it is a busy machine that lets it wait.
_CATCH_UP_SECONDS = 2.0
_SLOW_SECONDS = 10.0
_PIECES = 10
_TAIL_LINES = 50
_TAIL_CHARACTERS = 2000
# Consumers are known by numbers: the descriptors 1 and 2, and from here on the files of the ranks.
_FIRST_FILE = 3


class Tap:
    """The launcher's side of one rank's standard output and error; lives as long as its worker.

    Args:
        rank: The rank.
        descriptors: Read ends of its standard output and error, or None for one that it shares
            with the launcher.
    """

    def __init__(self, rank: int, descriptors: Sequence[int | None]) -> None:
        self.rank = rank
        self.pipes = [
            _Pipe(self, number, one) for number, one in enumerate(descriptors, 1) if one is not None
        ]
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque(maxlen=_TAIL_LINES)
        _open_taps.add(self)

    @classmethod
    def open(
        cls, rank: int, *, stdout: bool = True, stderr: bool = True, together: bool = False
    ) -> tuple[Tap, tuple[int | None, int | None]]:
        """Makes the pipes of a rank.

        Args:
            rank: The rank.
            stdout: Whether its standard output is forwarded.
            stderr: Whether its standard error is forwarded.
            together: Whether both go to one place, where they are to be in order: one pipe then.

        Returns:
            The tap, and the write ends for the worker, which the caller closes once the worker
            has them. None stands for a stream that the worker shares with the launcher.
        """
        out = os.pipe() if stdout else (None, None)
        try:
            if together and stderr and out[1] is not None:
                return cls(rank, (out[0], None)), (out[1], os.dup(out[1]))
            error = os.pipe() if stderr else (None, None)
        except OSError:
            for one in out:
                if one is not None:
                    os.close(one)
            raise
        return cls(rank, (out[0], error[0])), (out[1], error[1])

    def muted(self) -> int:
        """Makes a further pipe, of what is to be known and not to be shown.

        Returns:
            The write end for the worker, which the caller closes once the worker has it.
        """
        read, write = os.pipe()
        self.pipes.append(_Pipe(self, 1, read, muted=True))
        return write

    def tail(self, lines: int = 20) -> list[str]:
        """Returns the last lines that the rank has written, as far as they have been read.

        Lines of both streams are in the order in which they arrived; an unfinished one counts.
        Of a line that was rewritten by carriage returns it is the last state.
        """
        with self._lock:
            found = [*self._lines, *(line for pipe in self.pipes if (line := _seen(pipe.last)))]
        return [text(line)[:_TAIL_CHARACTERS] for line in found[-lines:]]

    def keep(self, pipe: _Pipe, data: bytes) -> None:
        """Takes note of what was read from one of the pipes."""
        with self._lock:
            *whole, last = (pipe.last + data).split(b"\n")
            self._lines.extend(_short(_seen(line)) for line in whole[-_TAIL_LINES:])
            pipe.last = _short(_compact(last))

    def close(self) -> None:
        """Closes the pipes; the tail stays."""
        _open_taps.discard(self)
        for pipe in self.pipes:
            pipe.close()


# Forked processes, of ours or of the user's, have no use for the taps.
_open_taps: weakref.WeakSet[Tap] = weakref.WeakSet()


def _close_inherited() -> None:
    for tap in list(_open_taps):
        tap.close()


os.register_at_fork(after_in_child=_close_inherited)


class _Pipe:
    """The read end of one stream of a rank.

    Attributes:
        number: 1 for standard output, 2 for standard error.
        descriptor: The read end, or -1 if closed.
        muted: Whether it is read for the tail only.
        rest: The unfinished line, as far as it has not been passed on.
        due: When the rest is passed on although it is unfinished, or None.
        last: The unfinished line for the tail.
    """

    def __init__(self, tap: Tap, number: int, descriptor: int, *, muted: bool = False) -> None:
        os.set_blocking(descriptor, False)
        self.muted = muted
        self.tap = tap
        self.number = number
        self.descriptor = descriptor
        self.rest = b""
        self.due: float | None = None
        self.last = b""

    def read(self, most: int) -> bytes | None:
        """Returns what is there, nothing at the end of the pipe, or None if it is empty."""
        try:
            data = os.read(self.descriptor, most)
        except BlockingIOError:
            return None
        self.tap.keep(self, data)
        return data

    def available(self) -> int:
        """Returns how much is in the pipe."""
        answer = fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4))
        return int.from_bytes(answer, sys.byteorder)

    def whole(self, data: bytes) -> bytes:
        """Adds data to the rest and cuts off what can be passed on, in the form that is shown."""
        data = self.rest + data
        cut = data.rfind(b"\n") + 1
        lines, self.rest = data[:cut], data[cut:]
        if self.tap.rank == 0:
            if len(self.rest) > _LONGEST_LINE:
                lines += self.early()
            if self.due is None or lines:
                self.due = time.monotonic() + _PATIENCE if self.rest else None
            return lines
        self.rest = _compact(self.rest)
        if len(self.rest) > _LONGEST_LINE:
            lines += self.early() + b"\n"
        return self._marked(lines)

    def early(self) -> bytes:
        """Cuts off what there is of the unfinished line, but for half a character."""
        self.due = None
        cut = _whole_characters(self.rest)
        line, self.rest = self.rest[:cut], self.rest[cut:]
        return line

    def end(self) -> bytes:
        """Cuts off the unfinished line."""
        line, self.rest, self.due = self.rest, b"", None
        return self._marked(line + b"\n") if line and self.tap.rank else line

    def _marked(self, lines: bytes) -> bytes:
        if not lines:
            return lines
        if b"\r" in lines:
            lines = b"\n".join(map(_seen, lines.split(b"\n")))
        mark = b"[%d] " % self.tap.rank
        return mark + lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Forwarder:
    """Forwards the output of all ranks during one call.

    Args:
        taps: Those of the ranks. They stay open until `finish` has returned.
        output: `"all"`; `"main"` for rank 0's only, or `"none"`; or the directory of their files.
            The tails are kept in any case.
    """

    def __init__(self, taps: Sequence[Tap], output: str | PurePath = "all") -> None:
        self._pipes = [pipe for tap in taps for pipe in tap.pipes if pipe.descriptor >= 0]
        self._output = output
        self._backlog = Backlog()
        self._streams: dict[int, Stream] = {}
        self._consumers: dict[int, Consumer] = {}
        # Where the cursor stands in an unfinished line of rank 0: the stream that it came from.
        self._unfinished: dict[Hashable, int] = {}
        self._asked: deque[threading.Event] = deque()
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self._taken = 0  # parts, by the consumers

    def start(self) -> None:
        """Begins to forward, to what are `sys.stdout` and `sys.stderr` at this moment."""
        self._streams = own_streams()
        self._consumers = {**self._streams}
        if isinstance(self._output, PurePath):
            for rank in {pipe.tap.rank for pipe in self._pipes}:
                self._consumers[_FIRST_FILE + rank] = File(file_of(self._output, rank))
        self._selector = selectors.DefaultSelector()
        self._knock, self._knocked = socket.socketpair()
        for end in (self._knock, self._knocked):
            end.setblocking(False)
        self._selector.register(self._knocked, selectors.EVENT_READ)
        for pipe in self._pipes:
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        for name, work in (("reader", self._read), ("writer", self._write)):
            # In the caller's context, by which a notebook knows the cell that output belongs to.
            within = contextvars.copy_context().run
            thread = threading.Thread(
                target=within, args=(work,), name=f"distribute-output-{name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def catch_up(self) -> None:
        """Sees to it that the tails have what the ranks have written until now; for any thread.

        It waits for the reader, which is there in a moment, and not for the consumer.
        """
        if self._threads:
            done = threading.Event()
            self._asked.append(done)
            self._wake()
            done.wait(_CATCH_UP_SECONDS)

    def finish(self, seconds: float = 1.0) -> None:
        """Forwards what the ranks have written until now, and stops.

        What the consumer has not taken by then is written when it does, by a thread that stays:
        before what the next call writes, and before the interpreter ends.

        Args:
            seconds: How long to wait for a consumer that takes nothing; one that is slow, as a
                notebook's page is with many lines, has `_SLOW_SECONDS`.
        """
        global _late
        if not self._threads:
            return
        reader, writer = self._threads
        self._stopping = True
        self._wake()
        _late = writer
        reader.join()
        limit = time.monotonic() + _SLOW_SECONDS
        idle = 0
        while writer.is_alive() and idle < _PIECES and time.monotonic() < limit:
            taken = self._taken
            # In pieces, of which a machine that stalls uses up one.
            writer.join(seconds / _PIECES)
            idle = idle + 1 if self._taken == taken else 0
        self._selector.close()
        self._knock.close()
        self._knocked.close()
        self._threads = []

    def _wake(self) -> None:
        try:
            self._knock.send(b"\0")
        except OSError:
            pass  # it has been woken often enough, or has finished

    # -- the reader ----------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while not self._stopping:
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        self._knocked.recv(_CHUNK)
                    else:
                        self._take(key.data, _CHUNK)
                self._pass_on_late()
                self._answer()
            self._take_all()
            # Rank 0 last: its unfinished line is left as it is.
            for pipe in sorted(self._pipes, key=lambda one: one.tap.rank, reverse=True):
                self._put(pipe, pipe.end())
        finally:
            self._backlog.close()

    def _patience(self) -> float | None:
        due = [pipe.due for pipe in self._pipes if pipe.due is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _pass_on_late(self) -> None:
        now = time.monotonic()
        for pipe in self._pipes:
            if pipe.due is not None and now >= pipe.due:
                self._put(pipe, pipe.early())

    def _answer(self) -> None:
        if self._asked:
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            self._take_all()
            for done in asked:
                done.set()

    def _take_all(self) -> None:
        """Takes what is in the pipes, but not what is being added."""
        for pipe in self._pipes:
            left = pipe.available()
            while left > 0 and (taken := self._take(pipe, min(left, _CHUNK))):
                left -= taken

    def _take(self, pipe: _Pipe, most: int) -> int:
        data = pipe.read(most)
        if data:
            if pipe.muted:
                pass
            elif isinstance(self._output, PurePath):
                self._backlog.put(_FIRST_FILE + pipe.tap.rank, data)
            elif self._output == "all" or (self._output == "main" and pipe.tap.rank == 0):
                self._put(pipe, pipe.whole(data))
            return len(data)
        if data is not None:
            self._selector.unregister(pipe.descriptor)
        return 0

    def _put(self, pipe: _Pipe, data: bytes) -> None:
        if not data:
            return
        place = self._streams[pipe.number].place
        if pipe.tap.rank == 0:
            if data.endswith(b"\n"):
                self._unfinished.pop(place, None)
            else:
                self._unfinished[place] = pipe.number
        elif place in self._unfinished:
            self._backlog.put(self._unfinished.pop(place), b"\n")
        self._backlog.put(pipe.number, data)

    # -- the writer ----------------------------------------------------------------------------

    def _write(self) -> None:
        if _late is not None:
            _late.join()
        while (part := self._backlog.get()) is not None:
            number, data = part
            self._consumers[number].write(data)
            self._taken += 1
        for consumer in self._consumers.values():
            consumer.close()


# The last writer, whose consumer may not have taken everything; it has waited for those before it.
_late: threading.Thread | None = None


@atexit.register
def _wait_for_consumer() -> None:
    # As the interpreter does itself, when it flushes standard output at its end.
    if _late is not None:
        _late.join()


def _seen(line: bytes) -> bytes:
    """Returns what was seen last of a line that carriage returns rewrote."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


def _compact(rest: bytes) -> bytes:
    """Shortens an unfinished line to what matters for how it goes on."""
    before, mark, after = rest.rpartition(b"\r")
    return after if after.strip() else _seen(before) + mark + after


def _short(line: bytes) -> bytes:
    return line[: 4 * _TAIL_CHARACTERS]


def _whole_characters(data: bytes) -> int:
    """Returns the length of data without the half character at its end, if there is one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])
    return len(data) - len(decoder.getstate()[0])
