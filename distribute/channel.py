"""The control channel between a launcher and one worker: whole messages over a socket pair.

A frame is a header (length of the message, number of descriptors), the descriptors themselves as
ancillary data of that header, and the pickled message. Messages are small: what is large is in
memory files whose descriptors are sent (see `payload`). The pair is anonymous, so nobody else can
take part, and nothing from elsewhere is ever unpickled.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from distribute import lifeline
from distribute.payload import Payload
from distribute.record import Record

_HEADER = struct.Struct("!QB")
_MOST_DESCRIPTORS = 12
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Channel:
    """One end of a control channel.

    Beside the stream of messages it has a lifeline: a socket pair on which nothing is ever sent,
    whose end the kernel itself turns into the end of the worker (see `tie`).

    Attributes:
        record: What the worker is doing, shared by both ends.
    """

    def __init__(self, end: socket.socket, life: socket.socket, record: Record) -> None:
        self._socket = end
        self._life = life
        self.record = record
        _open_ends.add(self)

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Returns the two ends of a new channel: the launcher's and the worker's."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        our_life, their_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        our_record, their_record = Record.pair()
        return cls(ours, our_life, our_record), cls(theirs, their_life, their_record)

    @classmethod
    def inherited(cls, descriptor: int, life: int, record: int) -> Channel:
        """Takes the end that this process was started with, by its `descriptors`."""
        for one in (descriptor, life, record):
            os.set_inheritable(one, False)
        ends = socket.socket(fileno=descriptor), socket.socket(fileno=life)
        return cls(*ends, Record(record))

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """The descriptors of this end: of the messages, the lifeline and the record."""
        return self._socket.fileno(), self._life.fileno(), self.record.descriptor

    def tie(self, *, group: bool) -> None:
        """Has the kernel end this process when the other end is gone, however that went.

        Args:
            group: Whether to end the process group that this process leads.
        """
        lifeline.tie(self._life.fileno(), group=group)

    def fileno(self) -> int:
        """Returns the descriptor: readable when a message or the end has arrived; -1 if closed."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Sends a message, with the memory files of its payload if it has any.

        Raises:
            OSError: The other end is gone.
        """
        payload = getattr(message, "payload", None)
        self.send_with(message, payload.files if isinstance(payload, Payload) else [])

    def receive(self) -> Any:
        """Waits for a message.

        Raises:
            EOFError: The other end is gone.
        """
        message, descriptors = self.receive_with()
        if descriptors:
            message.payload.files = descriptors
        return message

    def send_with(self, message: Any, descriptors: Sequence[int]) -> None:
        """Sends a message with descriptors, of which the receiver gets its own copies.

        Raises:
            OSError: The other end is gone.
        """
        body = pickle.dumps(message, protocol=5)
        header = _HEADER.pack(len(body), len(descriptors))
        sent = socket.send_fds(self._socket, [header], descriptors)
        self._socket.sendall(header[sent:] + body)

    def receive_with(self) -> tuple[Any, list[int]]:
        """Waits for a message and its descriptors.

        Raises:
            EOFError: The other end is gone.
        """
        try:
            header, descriptors = self._header()
            if not header:
                raise EOFError
            header += self._exactly(_HEADER.size - len(header))
            size, count = _HEADER.unpack(header)
            message = pickle.loads(self._exactly(size))
        except ConnectionError as error:
            raise EOFError from error
        return message, descriptors[:count]

    def _header(self) -> tuple[bytes, list[int]]:
        # Not socket.recv_fds: it ignores its flags, and what a rank starts would inherit them.
        room = socket.CMSG_LEN(_MOST_DESCRIPTORS * struct.calcsize("i"))
        header, extra, _, _ = self._socket.recvmsg(_HEADER.size, room, _CLOEXEC)
        found: list[int] = []
        for level, kind, data in extra:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) // struct.calcsize("i")
                found += struct.unpack(f"{whole}i", data[: whole * struct.calcsize("i")])
        return header, found

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            part = self._socket.recv(min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def hang_up(self) -> None:
        """Says that no message will come any more; the lifeline stays."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes this end; the other one reads the end of the stream."""
        _open_ends.discard(self)
        self._socket.close()
        self._life.close()
        self.record.close()

    def keep_only(self) -> None:
        """Closes every other end that this process inherited by a fork."""
        for end in list(_open_ends):
            if end is not self:
                end.close()


# A copy of an end in some other forked process (a DataLoader worker, say) would keep the stream
# open after its owner died, and nobody would notice the death.
_open_ends: weakref.WeakSet[Channel] = weakref.WeakSet()
_forking: list[bool] = []


def _close_inherited_ends() -> None:
    if not _forking:
        for end in list(_open_ends):
            end.close()


class own_fork:
    """Marks a fork of our own, whose child chooses which ends to keep."""

    def __enter__(self) -> None:
        _forking.append(True)

    def __exit__(self, *_: object) -> None:
        _forking.pop()


os.register_at_fork(after_in_child=_close_inherited_ends)
