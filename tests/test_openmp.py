"""A fork after torch has worked on several threads, with real work on both sides."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from distribute import openmp

LIMIT = 60.0  # seconds that a healthy child never needs


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def work() -> float:
    """Works on several threads, in torch's own loops and in its linear algebra."""
    ones = torch.ones(800, 800)
    return float((ones @ ones).sum() + torch.ones(1 << 20).add_(1).sum())


RESULT = 800.0**3 + 2 * (1 << 20)


def forked(child: Callable[[], bool]) -> int | str:
    """The exit code of a fork, 0 when the function returned true; or that it hung."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if pid == 0:
        try:
            code = 0 if child() else 3
        except BaseException:
            code = 4
        os._exit(code)
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def test_torchs_library_is_found_and_can_be_paused():
    assert work() == pytest.approx(RESULT)

    assert openmp.pause()


def test_a_fork_after_a_pause_works_on_all_threads():
    assert work() == pytest.approx(RESULT)
    openmp.pause()

    def child() -> bool:
        return torch.get_num_threads() == 2 and work() == pytest.approx(RESULT)

    assert forked(child) == 0


def test_the_process_that_paused_works_on():
    work()
    openmp.pause()

    assert work() == pytest.approx(RESULT)
    assert torch.get_num_threads() == 2


def test_forks_may_follow_one_another_with_work_between_them():
    for _ in range(3):
        assert work() == pytest.approx(RESULT)
        openmp.pause()
        assert forked(lambda: work() == pytest.approx(RESULT)) == 0


def test_a_child_may_fork_in_its_turn():
    work()
    openmp.pause()

    def child() -> bool:
        work()
        openmp.pause()
        return forked(lambda: work() == pytest.approx(RESULT)) == 0

    assert forked(child) == 0
