"""Bytes in memory files: written by several threads, mapped as one."""

from __future__ import annotations

import gc
import os
import signal
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from distribute import Context, memory, run

MB = 1 << 20


def numbers(size: int) -> memoryview:
    """Bytes of which every page, and every offset within it, is another one."""
    return memoryview(np.random.default_rng(size).bytes(size))


def cut(whole: memoryview, *at: int) -> list[memoryview]:
    """The parts of a view between some places."""
    return [whole[start:end] for start, end in pairwise([0, *at, whole.nbytes])]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many cores there are."""

    def chosen(count: int) -> None:
        monkeypatch.setattr("distribute.devices.usable_cores", lambda: count)

    return chosen


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 4096, 64 * MB - 1, 64 * MB, 128 * MB + 1, 131 * MB + 4097])
def test_what_is_written_is_what_is_mapped(cores: Any, count: int, size: int):
    cores(count)
    whole = numbers(size)

    files = memory.written([whole])
    try:
        assert len(files) == max(1, min(count, size // (32 * MB)))
        assert memory.mapped(files, size) == whole
        lengths = [os.fstat(file).st_size for file in files]
    finally:
        memory.close(files)
    assert sum(lengths) == size
    assert len(set(lengths[:-1])) <= 1


def test_parts_may_lie_across_the_files(cores: Any):
    cores(4)
    whole = numbers(128 * MB + 77)
    # Some within one file, some in two, one in three, some empty.
    parts = cut(whole, 0, 3, 3, 5 * MB + 1, 31 * MB, 33 * MB, 100 * MB + 7, 100 * MB + 8)

    files = memory.written(parts)
    try:
        assert len(files) == 4
        assert memory.mapped(files, whole.nbytes) == whole
    finally:
        memory.close(files)


def test_each_mapping_is_writable_for_itself_alone(cores: Any):
    cores(4)
    whole = numbers(128 * MB)
    files = memory.written([whole])
    try:
        first, second = (memory.mapped(files, whole.nbytes) for _ in range(2))
    finally:
        memory.close(files)
    for place in range(0, whole.nbytes, 8 * MB):
        first[place] ^= 255

    assert second == whole
    assert sum(a != b for a, b in zip(first[:: 8 * MB], second[:: 8 * MB], strict=True)) == 16


def test_a_mapping_is_given_back_whole(cores: Any):
    """Also those of the files after the first."""

    def mapped_bytes() -> int:
        with open("/proc/self/maps") as lines:
            ranges = [line.split()[0].split("-") for line in lines if "memfd:distribute" in line]
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    cores(4)
    gc.collect()  # what earlier tests have left is not given back meanwhile
    before = mapped_bytes()
    files = memory.written([bytes(128 * MB)])
    found = memory.mapped(files, 128 * MB)
    memory.close(files)
    assert mapped_bytes() - before == 128 * MB
    del found

    assert mapped_bytes() == before


def test_a_failure_in_one_file_leaves_nothing(cores: Any, monkeypatch: pytest.MonkeyPatch):
    """Neither a file nor a thread."""

    def full(descriptor: int, data: Any) -> int:
        if descriptor == made[-1]:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    def noted() -> int:
        made.append(new())
        return made[-1]

    cores(4)
    made: list[int] = []
    real, new = os.write, memory.new
    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(memory, "new", noted)
    threads = threading.active_count()

    with pytest.raises(OSError, match="No space left"):
        memory.written([bytes(128 * MB)])
    assert len(made) == 4
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert threading.active_count() == threads


def test_without_threads_it_is_written_all_the_same(cores: Any, monkeypatch: pytest.MonkeyPatch):
    """Where a user may have no more of them."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    cores(4)
    whole = numbers(128 * MB + 5)
    monkeypatch.setattr(threading.Thread, "start", refuse)

    files = memory.written([whole])
    try:
        assert len(files) == 4
        assert memory.mapped(files, whole.nbytes) == whole
    finally:
        memory.close(files)


def test_an_interruption_ends_all_of_them(cores: Any, monkeypatch: pytest.MonkeyPatch):
    """Each stops within a piece; the caller gets the interruption when they have."""

    def write(descriptor: int, data: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGINT)
        written.append(len(data))
        return real(descriptor, data)

    cores(4)
    written: list[int] = []
    real, threads = os.write, threading.active_count()
    monkeypatch.setattr(os, "write", write)

    with pytest.raises(KeyboardInterrupt):
        memory.written([bytes(1 << 30)])
    assert threading.active_count() == threads
    assert sum(written) < 1 << 30


def both(ctx: Context, data: torch.Tensor) -> torch.Tensor:
    assert ctx.world_size == 2
    assert torch.equal(data, torch.arange(data.numel(), dtype=torch.int32))
    data[ctx.rank :: 2] += 1  # this rank's own pages
    return data


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_large_tensor_goes_to_the_ranks_and_back(method: Any):
    data = torch.arange(35 * MB, dtype=torch.int32)

    found = run(both, data, devices=2, accelerator="cpu", start_method=method, returns="all")

    expected = torch.arange(35 * MB, dtype=torch.int32)
    assert torch.equal(data, expected)  # the argument itself: tensors are not written back
    for rank, value in enumerate(found):
        expected = torch.arange(35 * MB, dtype=torch.int32)
        expected[rank::2] += 1
        assert torch.equal(value, expected)
        value += 1  # writable
