"""Who takes the ranks' output, and what waits until it is taken.

The launcher's own standard output and error are consumers, and so is a file for each rank. Any of
them may stall for hours; what waits is in order, in memory and beyond some size in a temporary
file.
"""

from __future__ import annotations

import io
import os
import select
import struct
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, Protocol, TextIO

from distribute.errors import RequestError

_MOST_IN_MEMORY = 8 << 20
_MOST_AT_ONCE = 1 << 18


class Backlog:
    """What waits for the consumer, in order: some in memory, what is more in a temporary file."""

    _HEAD = struct.Struct("!IQ")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parts: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._file: IO[bytes] | None = None
        self._begin = self._end = 0
        self._lost = 0
        self._closed = False

    def put(self, number: int, data: bytes) -> None:
        """Adds data for a stream; does not wait for the consumer."""
        with self._changed:
            if self._file is None and self._size + len(data) <= _MOST_IN_MEMORY:
                self._parts.append((number, data))
                self._size += len(data)
            else:
                self._spill(self._HEAD.pack(number, len(data)) + data)
            self._changed.notify()

    def _spill(self, record: bytes) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
            if os.pwrite(self._file.fileno(), record, self._end) == len(record):
                self._end += len(record)
                return
        except OSError:
            pass
        self._lost += len(record)

    def get(self) -> tuple[int, bytes] | None:
        """Waits for data, and returns it with the number of its stream; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._parts or self._begin < self._end or self._lost or self._closed
            )
            if self._parts:
                return self._pile()
            if self._file is not None and self._begin < self._end:
                return self._read_back(self._file)
            self._close_file()
            if self._lost:
                lost, self._lost = self._lost, 0
                return 2, f"distribute: no room for {lost} bytes of output, lost\n".encode()
            return None

    def _pile(self) -> tuple[int, bytes]:
        """Takes what has piled up for one stream: a notebook sends a message for each write."""
        number, data = self._parts.popleft()
        pile, size = [data], len(data)
        while self._parts and self._parts[0][0] == number and size < _MOST_AT_ONCE:
            pile.append(self._parts.popleft()[1])
            size += len(pile[-1])
        self._size -= size
        return number, b"".join(pile)

    def _read_back(self, file: IO[bytes]) -> tuple[int, bytes]:
        head = os.pread(file.fileno(), self._HEAD.size, self._begin)
        number, size = self._HEAD.unpack(head)
        data = os.pread(file.fileno(), size, self._begin + len(head))
        self._begin += len(head) + size
        if self._begin == self._end:
            self._close_file()
        return number, data

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._begin = self._end = 0

    def close(self) -> None:
        """Says that nothing more will come."""
        with self._changed:
            self._closed = True
            self._changed.notify()


class Consumer(Protocol):
    """Something that takes output; once it fails nothing more is written to it."""

    def write(self, data: bytes) -> None:
        """Writes, for as long as it takes."""
        ...

    def close(self) -> None:
        """Lets go of it."""
        ...


class Stream:
    """One of the launcher's own streams.

    Attributes:
        place: What it writes to; the same for two streams that share a terminal.
        real: Whether it is the process's own, to which bytes can be written.
    """

    def __init__(self, number: int, stream: TextIO | None) -> None:
        self._number = number
        self._broken = stream is None
        self._stream = stream
        self.real = _is_real(stream, number)
        self.place: Hashable = id(stream)
        try:
            status = os.fstat(_descriptor(stream))
            self.place = status.st_dev, status.st_ino
            if stream is not None:
                stream.flush()
        except Exception:
            pass  # the place is known as well as can be; writing will show what is wrong

    def write(self, data: bytes) -> None:
        """Writes, for as long as it takes."""
        if self._broken or self._stream is None:
            return
        try:
            if self.real:
                for piece in _pieces(data):
                    _write_all(self._number, piece)
            else:
                self._stream.write(text(data))
                self._stream.flush()
        except Exception:
            self._broken = True

    def close(self) -> None:
        """Leaves the stream open: it is not ours."""


def own_streams() -> dict[int, Stream]:
    """Returns what are `sys.stdout` and `sys.stderr` at this moment, by their numbers."""
    return {1: Stream(1, sys.stdout), 2: Stream(2, sys.stderr)}


def together() -> bool:
    """Tells whether standard output and error are this process's own, and one file."""
    out, error = own_streams().values()
    return out.real and error.real and out.place == error.place


@contextmanager
def by_lines() -> Generator[None]:
    """Has this process's own streams write line by line meanwhile, as the ranks' are shown.

    For a rank in this process: what is held back for a pipe or file goes out at the end of a block,
    in the middle of a line, and other ranks' lines come after it.
    """
    changed: list[Any] = []
    streams: dict[int, Any] = {1: sys.stdout, 2: sys.stderr}
    for number, stream in streams.items():
        if _is_real(stream, number) and not stream.line_buffering:
            stream.reconfigure(line_buffering=True)
            changed.append(stream)
    try:
        yield
    finally:
        for stream in changed:
            try:
                stream.reconfigure(line_buffering=False)
            except (OSError, ValueError):
                pass  # closed, or nobody reads


class File:
    """The file of one rank's output, at the end of what it has already.

    Args:
        path: The file.
    """

    def __init__(self, path: PurePath) -> None:
        self._path = path
        self._descriptor = -1
        try:
            self._descriptor = _open(path)
        except OSError as error:
            self._give_up(error)

    def write(self, data: bytes) -> None:
        """Writes, for as long as it takes."""
        if self._descriptor < 0:
            return
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            self.close()
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # What a rank prints is not worth the call, but nobody should look for it in vain.
        try:
            sys.stderr.write(
                f"distribute: {self._path} cannot be written ({error.strerror}); what its rank "
                "prints from now on is lost\n"
            )
        except Exception:
            pass  # nobody there to be told

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def file_of(directory: PurePath, rank: int) -> PurePath:
    """Returns the path of a rank's file."""
    return directory / f"rank-{rank}.log"


def make_files(directory: PurePath, ranks: Iterable[int]) -> None:
    """Makes the files of ranks, where they are not there yet.

    Raises:
        RequestError: That is not possible.
    """
    path = directory
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            path = file_of(directory, rank)
            os.close(_open(path))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(
            f"output={str(directory)!r}",
            f"{path} cannot be {'made' if path is directory else 'written'} ({why})",
            "pass a directory in which this process may write",
        ) from None


def _open(path: PurePath) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _is_real(stream: TextIO | None, number: int) -> bool:
    # An object of another kind is somebody's wish to see the text, whatever it wraps.
    return _descriptor(stream) == number and isinstance(stream, io.TextIOWrapper)


def _descriptor(stream: TextIO | None) -> int:
    try:
        return -1 if stream is None else stream.fileno()
    except Exception:
        return -1


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cuts lines into parts that a pipe takes whole, so that others' come between lines only."""
    begin = 0
    while begin < len(data):
        end = begin + select.PIPE_BUF
        if end < len(data):
            end = data.rfind(b"\n", begin, end) + 1 or data.find(b"\n", begin) + 1 or len(data)
        yield data[begin:end]
        begin = end


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            # Somebody has made the terminal or pipe non-blocking; whoever shares it may.
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()


def text(data: bytes) -> str:
    """Returns output as text, whatever it is."""
    return data.decode("utf-8", "backslashreplace")
