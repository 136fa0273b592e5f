"""`max_restarts`: the world is started again after a failure that another try may not meet."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distribute import Context, RequestError, WorkerDied, distributed, engine, run
from distribute.request import Request
from tests.scripts import BIN, run_program, write

METHODS = ["fork", "forkserver", "spawn"]


def fail_until(ctx: Context, until: int, how: str, log: str) -> list[int]:
    """Rank 1 fails after a collective, as long as there were fewer restarts than that."""
    with open(f"{log}/{ctx.rank}", "a") as file:
        file.write(f"{ctx.restart_count}\n")
    ctx.barrier()
    if ctx.rank == 1 and ctx.restart_count < until:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"attempt {ctx.restart_count}")
    return ctx.all_gather(ctx.rank)


def attempts(log: Path) -> list[list[str]]:
    return [(log / str(rank)).read_text().split() for rank in (0, 1)]


@pytest.mark.parametrize("method", METHODS)
def test_the_world_is_started_again(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a death and after an exception; the value is that of the attempt that succeeds."""
    how = "raise" if method == "fork" else "kill"
    value = run(fail_until, 2, how, str(tmp_path), devices=2, start_method=method, max_restarts=3)

    assert value == [0, 1]
    assert attempts(tmp_path) == [["0", "1", "2"]] * 2
    told = capfd.readouterr().err
    assert told.count("the world is started again") == 2
    assert "restart 2 of 3" in told
    assert ("ValueError: attempt 0" if how == "raise" else "killed by SIGKILL") in told


def test_the_last_failure_is_the_news_when_restarts_are_used_up(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attempt 1"):
        run(fail_until, 5, "raise", str(tmp_path), devices=2, start_method="fork", max_restarts=1)

    assert attempts(tmp_path) == [["0", "1"]] * 2


def test_a_failure_before_the_first_collective_is_final(tmp_path: Path) -> None:
    """It would come again."""

    def body(ctx: Context) -> None:
        with open(tmp_path / str(ctx.rank), "a") as file:
            file.write("x\n")
        # The first to fail ends the other, wherever that is.
        while not all(one.exists() and one.read_text() for one in (tmp_path / "0", tmp_path / "1")):
            time.sleep(0.002)
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        run(body, devices=2, start_method="fork", max_restarts=3)

    assert attempts(tmp_path) == [["x"]] * 2


@pytest.mark.parametrize(("steps", "restarts"), [(1, 0), (2, 1)])
def test_a_training_step_counts_as_a_collective(steps: int, restarts: int, tmp_path: Path) -> None:
    """The model synchronises by itself; the first step may fail for what never changes."""

    def body(ctx: Context) -> int:
        model = ctx.model(torch.nn.Linear(2, 1))
        for _ in range(steps):
            loss = model(torch.ones(1, 2)).sum()
            if ctx.restart_count == 0 and _ == steps - 1:
                raise ValueError("in a step")
            loss.backward()
        return ctx.restart_count

    if restarts:
        assert run(body, devices=2, start_method="fork", max_restarts=1) == restarts
    else:
        with pytest.raises(ValueError, match="in a step"):
            run(body, devices=2, start_method="fork", max_restarts=1)


def test_an_interrupt_is_not_a_failure_to_start_again_from() -> None:
    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            os.kill(os.getppid(), signal.SIGINT)
        ctx.barrier()
        signal.pause()

    with pytest.raises(KeyboardInterrupt):
        run(body, devices=2, start_method="fork", max_restarts=3)


def test_the_arguments_are_those_of_the_call_each_time() -> None:
    """A model comes as it was given, not as the attempt before left it."""

    def body(ctx: Context, weight: torch.Tensor) -> float:
        before = weight.item()
        weight.add_(1)
        ctx.barrier()
        if ctx.restart_count == 0:
            raise ValueError
        return before

    for method in ("fork", "forkserver"):
        given = torch.tensor(5.0)
        assert run(body, given, devices=2, start_method=method, max_restarts=1) == 5.0


def test_without_restarts_the_count_is_zero() -> None:
    assert run(lambda ctx: ctx.restart_count, devices=2, start_method="fork", returns="all") == [
        0,
        0,
    ]
    assert run(lambda ctx: ctx.restart_count, devices=1) == 0


def test_one_process_is_started_again_too() -> None:
    """It is a process of its own then."""

    def body(ctx: Context) -> tuple[int, bool]:
        ctx.barrier()
        if ctx.restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return ctx.world_size, os.getpid() != int(parent)

    parent = str(os.getpid())
    assert run(body, devices=1, max_restarts=1) == (1, True)
    with pytest.raises(WorkerDied):
        run(body, devices=1, start_method="fork")


def test_re_exec_is_refused_and_never_chosen() -> None:
    @distributed(devices=2, max_restarts=2)
    def train(ctx: Context) -> None: ...

    assert train.plan().method in ("fork", "forkserver")
    with pytest.raises(RequestError, match=r"max_restarts=2 .*forkserver"):
        engine.plan(Request(devices=2, start_method="reexec", max_restarts=2))


@pytest.mark.parametrize("value", [-1, 1.5, "1", True])
def test_the_number_is_checked(value: Any) -> None:
    with pytest.raises(RequestError, match="max_restarts"):
        run(lambda ctx: None, devices=2, max_restarts=value)


@pytest.mark.slow
def test_torchrun_restarts_its_own_ranks(tmp_path: Path) -> None:
    """The option is an assertion there about the agent's own; the count is the agent's."""
    script = write(
        tmp_path,
        """
        import os
        from distribute import RequestError, distributed

        @distributed(max_restarts=1)
        def train(ctx):
            ctx.barrier()
            if ctx.rank == 1 and ctx.restart_count == 0:
                raise ValueError("once")
            ctx.barrier()
            print(f"COUNT {ctx.restart_count}\\n", end="")

        @distributed(max_restarts=2)
        def refused(ctx): ...

        try:
            refused()
        except RequestError as error:
            assert "--max-restarts 2" in str(error)
            assert "starts it again 1 times" in str(error)
        else:
            raise AssertionError
        train()
        """,
    )

    ended = run_program(
        [
            str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "1", str(script),
        ],
        cwd=tmp_path,
    )  # fmt: skip

    assert ended.code == 0, ended.text
    assert ended.lines("COUNT") == ["COUNT 1"] * 2
