"""Freeing rank 0 when it is the caller, whatever it is doing when another rank fails.

The other ranks are forks here, so that hundreds of failures fit into one process; re-exec uses
the same code with other processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from distribute import Context, WorkerDied, engine, forked, rendezvous, worker
from distribute.crew import Crew, make_all, planned_places
from distribute.failure import Failure
from distribute.launchers.fork import _Forker
from distribute.lead import Led
from distribute.plan import Plan
from distribute.request import Request
from distribute.task import Task

STATES: dict[str, Callable[[Context, torch.nn.Module, object], None]] = {}
CAUSES = ("raise", "kill", "exit")
# A call that waits for its end takes longer than a machine may stall.
GRACE = 30.0

events: list[str] = []
# Set by rank 0 where the failure has to find it, else right away.
there = multiprocessing.get_context("fork").Event()


def state(function: Callable[..., None]) -> Callable[..., None]:
    STATES[function.__name__] = function
    return function


@state
def in_a_collective(ctx: Context, model: torch.nn.Module, group: object) -> None:
    while True:
        ctx.all_reduce(torch.ones(1000))


@state
def in_a_backward_pass(ctx: Context, model: torch.nn.Module, group: object) -> None:
    while True:
        model(torch.randn(8, 64)).sum().backward()


@state
def waiting_for_an_asynchronous_collective(
    ctx: Context, model: torch.nn.Module, group: object
) -> None:
    while True:
        dist.all_reduce(torch.ones(10), async_op=True).wait()


@state
def in_a_collective_of_a_subgroup(ctx: Context, model: torch.nn.Module, group: object) -> None:
    while True:
        dist.all_reduce(torch.ones(10), group=group)


@state
def in_a_receive(ctx: Context, model: torch.nn.Module, group: object) -> None:
    dist.recv(torch.ones(3), src=1)


@state
def in_a_monitored_barrier(ctx: Context, model: torch.nn.Module, group: object) -> None:
    dist.monitored_barrier()
    time.sleep(600)


@state
def in_a_sleep(ctx: Context, model: torch.nn.Module, group: object) -> None:
    time.sleep(600)


@state
def in_pure_python(ctx: Context, model: torch.nn.Module, group: object) -> None:
    while True:
        pass


@state
def in_an_except_block(ctx: Context, model: torch.nn.Module, group: object) -> None:
    try:
        there.set()
        in_a_collective(ctx, model, group)
    except RuntimeError:
        time.sleep(0.2)
        events.append("except")
        raise


@state
def in_a_finally_block(ctx: Context, model: torch.nn.Module, group: object) -> None:
    try:
        there.set()
        time.sleep(600)
    finally:
        time.sleep(0.2)
        events.append("finally")


@state
def catching_errors_and_going_on(ctx: Context, model: torch.nn.Module, group: object) -> None:
    while True:
        try:
            in_a_collective(ctx, model, group)
        except Exception:
            pass


@state
def swallowing_everything_a_few_times(ctx: Context, model: torch.nn.Module, group: object) -> None:
    for _ in range(3):
        try:
            time.sleep(600)
        except BaseException:
            pass
    time.sleep(600)


# Rank 0 has to have come into these before they can come to their end.
BLOCKS = ("in_an_except_block", "in_a_finally_block")


class _Endless:
    def __del__(self) -> None:
        while True:
            pass


@state
def in_a_finalizer(ctx: Context, model: torch.nn.Module, group: object) -> None:
    one = _Endless()
    del one
    time.sleep(600)


@state
def destroying_the_failed_group(ctx: Context, model: torch.nn.Module, group: object) -> None:
    try:
        in_a_collective(ctx, model, group)
    finally:
        dist.destroy_process_group()


def body(ctx: Context, name: str, cause: str) -> None:
    model = ctx.model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    group = dist.new_group([0, 1])
    if ctx.rank == 1:
        there.wait()
        time.sleep(0.1 if name in BLOCKS else 0.03)
        if cause == "raise":
            raise ValueError("the cause")
        if cause == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    if name not in BLOCKS:
        there.set()
    STATES[name](ctx, model, group)
    raise AssertionError("rank 0 came to an end by itself")


def led(plan: Plan, task: Task) -> Led:
    """Makes a world whose rank 0 is this process and whose rank 1 is a fork of it."""
    forked.preload()
    listening = rendezvous.listen()
    port = listening.getsockname()[1]
    places = planned_places(plan, port)
    members = make_all(places[1:], _Forker(task).fork, None)
    return Led(Crew(members, port), worker.Seat(places[0], listening.detach()), plan)


def fail(name: str, cause: str) -> float:
    """Has rank 1 fail while rank 0 is in a state; returns the seconds of the whole call."""
    plan = engine.plan(Request(devices=2, start_method="fork", grace=GRACE))
    task = Task(body, (name, cause), {}, 0)
    world = led(plan, task)
    there.clear()
    start = time.monotonic()
    with pytest.raises(Failure) as caught:
        world.call(plan, task, lambda ready: None)
    took = time.monotonic() - start
    told = caught.value.cause
    if cause == "raise":
        assert isinstance(told, ValueError)
        assert str(told) == "the cause"
    else:
        assert isinstance(told, WorkerDied)
        assert (told.rank, told.signal, told.exit_code) == (
            (1, signal.SIGKILL, None) if cause == "kill" else (1, None, 7)
        )
    assert world.failed
    assert not dist.is_initialized()
    return took


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """Checks the signal handlers and the wakeup descriptor, which conftest.py does not know."""
    hook = sys.unraisablehook
    yield
    assert signal.set_wakeup_fd(-1) == -1
    assert sys.unraisablehook is hook
    assert threading.active_count() == 1


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize("name", list(STATES))
def test_rank_0_is_freed(name: str) -> None:
    """Whatever rank 0 does, the call ends with the cause, well within the grace period."""
    events.clear()
    for cause in CAUSES:
        assert fail(name, cause) < GRACE
    if name in BLOCKS:
        assert events == [name.split("_")[2]] * len(CAUSES), "the block did not come to its end"


@pytest.mark.usefixtures("undisturbed")
def test_a_value_comes_back_after_failures() -> None:
    """A process that has seen failures leads a world that succeeds."""
    fail("in_a_collective", "raise")
    plan = engine.plan(Request(devices=2, start_method="fork"))
    task = Task(lambda ctx: ctx.all_gather(ctx.rank), (), {}, 0)
    world = led(plan, task)
    try:
        for _ in range(3):
            outcomes = world.call(plan, task, lambda ready: None)
            assert [one.value() for one in outcomes] == [[0, 1], None]  # rank 1's is not asked for
    finally:
        world.close()


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("undisturbed")
def test_hundreds_of_failures_in_one_process() -> None:
    """No hang, and no growth of descriptors or threads."""
    for name in STATES:
        fail(name, "raise")
    gc.collect()
    descriptors, threads = _counts()
    for _ in range(12):
        for name in STATES:
            for cause in CAUSES:
                fail(name, cause)
    gc.collect()
    now = _counts()
    assert now[0] <= descriptors
    assert now[1] <= threads


def _counts() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
