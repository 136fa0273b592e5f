"""Memory files: anonymous, shared by descriptor, mapped copy-on-write."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence


def written(parts: Sequence[bytes | memoryview]) -> int:
    """Writes bytes into a new memory file and returns its descriptor, for `close`."""
    descriptor = new()
    _written.add(descriptor)
    try:
        _write_all(descriptor, parts)
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def close(descriptor: int) -> None:
    """Closes a memory file; its mappings stay valid."""
    _written.discard(descriptor)
    os.close(descriptor)


def close_inherited() -> None:
    """Closes what this process has as a fork of one that was sending: it gets its own copies."""
    for descriptor in list(_written):
        close(descriptor)


_written: set[int] = set()


def mapped(descriptor: int, size: int) -> memoryview:
    """Maps a memory file: readable by all who map it, writable for each alone.

    The descriptor is not needed any longer. Python's own `mmap` keeps a copy of it for as long as
    the mapping lives, and a program that keeps many results would run out of descriptors.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    address = libc.mmap(None, size, rights, mmap.MAP_PRIVATE, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(
            number,
            f"{os.strerror(number)}: {size} bytes of an argument or a value cannot be mapped; see "
            "`ulimit -v` and the kernel's vm.max_map_count",
        )
    whole = (ctypes.c_char * size).from_address(address)
    # Not at exit: objects may use the memory until the process is gone.
    weakref.finalize(whole, libc.munmap, address, size).atexit = False
    return memoryview(whole).cast("B")


def new() -> int:
    """Makes an empty memory file and returns its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("distribute", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="distribute-")  # mode 0600
    os.unlink(path)
    return descriptor


def _write_all(descriptor: int, parts: Iterable[bytes | memoryview]) -> None:
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest.nbytes:
            rest = rest[os.write(descriptor, rest) :]
