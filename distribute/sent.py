"""What the receivers of earlier messages still have: large buffers are not sent twice.

A buffer is known by where it lies in the sender's memory. Whether its content is still the same is
found by comparing all of it, which takes a tenth of the time of a copy: a tensor's version counter
misses what is written through a NumPy view or `.data`, and an array has none.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

from distribute import memory

# Smaller ones are sent faster than they are looked after.
LARGE_BYTES = 1 << 20
# Descriptors that every receiver holds for them.
MOST = 64


@dataclass
class _Buffer:
    """A buffer that has been sent.

    Attributes:
        number: Its number, or None if it has changed since: it is sent with every message then.
        files: How many memory files it is in.
        copy: What was sent.
        alive: Returns the object that it belongs to, or None when that is gone.
        used: Whether the last message had it.
    """

    number: int | None
    files: int
    copy: memoryview
    alive: weakref.ref[Any] | None
    used: bool = True


@dataclass(frozen=True)
class News:
    """What the receivers have to be told before the next message.

    Attributes:
        files: Numbers, sizes and memory files of the buffers that are new.
        forgotten: Numbers that no message will use again.
    """

    files: list[tuple[int, int, list[int]]]
    forgotten: list[int]

    def close(self) -> None:
        """Closes this process's descriptors of the memory files."""
        while self.files:
            memory.close(self.files.pop()[2])


class Sent:
    """The buffers that all receivers of a sender's messages hold."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._count = 0
        self._files: list[tuple[int, int, list[int]]] = []
        self._forgotten: list[int] = []

    def number(self, view: memoryview, owner: object) -> int | None:
        """Returns the number of a buffer that the receivers hold, or will.

        Args:
            view: The buffer.
            owner: The object that it belongs to. It is looked after while that lives.

        Returns:
            None for a buffer that has to be in the message itself.
        """
        size = view.nbytes
        if size < LARGE_BYTES:
            return None
        address = _address(view)
        found = self._buffers.get((address, size))
        if found is None:
            return self._add(address, view, owner)
        found.used = True
        if found.number is not None and _same(address, found.copy):
            found.alive = _reference(owner)  # another view of the same memory, perhaps
            return found.number
        if found.number is not None:
            self._forget(found)
        if found.alive is not None and found.alive() is not owner:
            return self._add(address, view, owner)
        return None

    def _add(self, address: int, view: memoryview, owner: object) -> int | None:
        held = sum(one.files for one in self._buffers.values() if one.number is not None)
        if held + memory.files_of(view.nbytes) > MOST:
            return None
        number, self._count = self._count, self._count + 1
        files = memory.written([view])
        self._files.append((number, view.nbytes, files))
        copy = memory.mapped(files, view.nbytes)
        self._buffers[address, view.nbytes] = _Buffer(number, len(files), copy, _reference(owner))
        return number

    def _forget(self, one: _Buffer) -> None:
        assert one.number is not None
        self._forgotten.append(one.number)
        one.number, one.copy = None, memoryview(b"")

    def news(self) -> News:
        """Returns what has to be told, once."""
        news = News(self._files, self._forgotten)
        self._files, self._forgotten = [], []
        return news

    def sweep(self) -> None:
        """Forgets what no message is likely to have again, after each one."""
        for key, one in list(self._buffers.items()):
            lives = one.used if one.alive is None else one.alive() is not None
            one.used = False
            if not lives:
                if one.number is not None:
                    self._forget(one)
                del self._buffers[key]


def _reference(owner: object) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(owner)
    except TypeError:
        return None


class _View(ctypes.Structure):
    """Python's `Py_buffer`, which has the address also of a buffer that cannot be written to."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("rest", ctypes.c_ssize_t * 10),
    )


def _address(view: memoryview) -> int:
    found = _View()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(found), 0)
    try:
        return int(found.buf or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(found))


def _same(address: int, copy: memoryview) -> bool:
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return int(compare(address, _address(copy), copy.nbytes)) == 0
