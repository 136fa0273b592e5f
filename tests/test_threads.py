"""Which thread of this process is computing: a fork beside it would copy what it has locked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from distribute import run, threads, workers


@contextmanager
def beside(work: str) -> Iterator[None]:
    """Has a thread at work, or waiting, in the block."""
    stop, begun = threading.Event(), threading.Event()

    def compute() -> None:
        while not stop.is_set():
            torch.ones(300, 300).mm(torch.ones(300, 300))
            begun.set()

    def loop() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            begun.set()

    def pause() -> None:
        while not stop.is_set():
            torch.ones(300, 300).mm(torch.ones(300, 300))
            begun.set()
            time.sleep(0.004)

    def wait() -> None:
        begun.set()
        stop.wait()

    thread = threading.Thread(target=locals()[work], name=f"thread-{work}")
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def body(ctx):
    return ctx.world_size, ctx.all_gather(ctx.rank)


def test_without_another_thread_nothing_is_at_work():
    assert threads.at_work() == ""


def test_a_thread_that_waits_is_not_at_work():
    with beside("wait"):
        assert threads.at_work() == ""


@pytest.mark.parametrize("work", ["compute", "loop", "pause"])
def test_a_thread_that_computes_is_named(work: str):
    with beside(work):
        found = [threads.at_work() for _ in range(10)]

    assert found == [f"the thread 'thread-{work}'"] * 10
    assert threads.at_work() == ""


def test_a_fork_beside_a_thread_that_waits_is_a_fork(capfd: pytest.CaptureFixture[str]):
    with beside("wait"):
        assert run(body, devices=2, strategy="ddp_fork") == (2, [0, 1])

    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kept", [False, True], ids=["once", "kept"])
def test_a_fork_beside_a_thread_at_work_goes_to_the_fork_server(
    kept: bool, capfd: pytest.CaptureFixture[str]
):
    """The value comes all the same, and one line says which start method it was, and why."""
    with beside("compute"):
        if kept:
            with workers(devices=2, strategy="ddp_fork") as ours:
                assert ours.run(body) == (2, [0, 1])
                assert ours.plan().method == "forkserver"
                assert ours.run(body) == (2, [0, 1])
        else:
            assert run(body, devices=2, strategy="ddp_fork") == (2, [0, 1])

    assert capfd.readouterr().err == (
        "distribute: the thread 'thread-compute' of this process was at work, and a fork copies "
        "what it had locked; the fork server takes over\n"
    )
