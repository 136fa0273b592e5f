"""The context: what a rank can do besides model, data and collectives."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distribute import BarrierTimeout, CollectiveMismatch, Context, run

FORK: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}


def test_on_main_gives_its_value_and_its_exception_to_all() -> None:
    """It runs on rank 0 only."""

    def body(ctx: Context) -> tuple[int, int, str]:
        pid = ctx.on_main(os.getpid)
        with pytest.raises(ZeroDivisionError) as caught:
            ctx.on_main(lambda x: x / 0, 1)
        return ctx.rank, pid, str(caught.value)

    one, two = run(body, returns="all", **FORK)

    assert (one[0], two[0]) == (0, 1)
    assert one[1] == two[1] != os.getpid()
    assert one[2] == two[2] == "division by zero"


def test_main_process_first_orders_the_ranks(tmp_path: Path) -> None:
    """Rank 0 prepares, the others find it done."""

    def body(ctx: Context) -> bool:
        done = tmp_path / "done"
        with ctx.main_process_first():
            found = done.exists()
            if not found:
                time.sleep(0.3)
                done.touch()
        return found

    assert run(body, returns="all", **FORK) == [False, True]


def test_an_exception_in_main_process_first_frees_the_others() -> None:
    """They do not wait for ever; the caller gets rank 0's own exception."""

    def body(ctx: Context) -> None:
        with ctx.main_process_first():
            if ctx.is_main_process:
                raise KeyError("no such file")

    with pytest.raises(KeyError, match="no such file"):
        run(body, **FORK)


def test_print_is_rank_0_s_alone(capfd: pytest.CaptureFixture[str]) -> None:
    """One whole line."""
    run(lambda ctx: ctx.print("rank", ctx.rank, "of", ctx.world_size), **FORK)

    assert capfd.readouterr().out == "rank 0 of 2\n"


def test_print_takes_the_options_of_print(capfd: pytest.CaptureFixture[str]) -> None:
    def body(ctx: Context) -> None:
        ctx.print("a", end="", flush=False)
        ctx.print("b", 1, sep="-", file=sys.stderr, flush=True)

    run(body, **FORK)

    assert capfd.readouterr() == ("a", "b-1\n")


def test_progress_shows_on_rank_0_and_iterates_on_all(capfd: pytest.CaptureFixture[str]) -> None:
    """A bar for each rank would be noise."""
    values = run(
        lambda ctx: list(ctx.progress(range(3), desc=f"r{ctx.rank}")), returns="all", **FORK
    )

    assert values == [[0, 1, 2], [0, 1, 2]]
    error = capfd.readouterr().err
    assert "r0: 100%" in error
    assert "r1" not in error


def test_save_writes_once_and_whole_and_all_can_load(tmp_path: Path) -> None:
    """The file has rank 0's state, plain names, and is there on every rank's return."""
    path = tmp_path / "new" / "state.pt"

    def body(ctx: Context) -> tuple[list[str], float]:
        model = ctx.model(torch.nn.Linear(2, 1))
        ctx.save({"model": model.state_dict(), "rank": ctx.rank, "epoch": 3}, path)
        state = ctx.load(path)
        assert state["rank"] == 0
        assert state["epoch"] == 3
        torch.nn.Linear(2, 1).load_state_dict(state["model"])
        return sorted(state["model"]), float(state["model"]["weight"].sum())

    one, two = run(body, returns="all", **FORK)

    assert one == two
    assert one[0] == ["bias", "weight"]
    assert os.listdir(path.parent) == ["state.pt"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    """Atomic: the file appears whole or not at all."""
    path = tmp_path / "state.pt"

    def body(ctx: Context) -> None:
        ctx.save({"value": 1}, path)
        ctx.save({"value": lambda: 1}, path)

    with pytest.raises(Exception, match="pickle"):
        run(body, **FORK)
    assert os.listdir(tmp_path) == ["state.pt"]
    assert torch.load(path) == {"value": 1}


def test_every_member_works_in_a_world_of_one(tmp_path: Path) -> None:
    """No process is started and no group is needed, and values have the same types."""

    def body(ctx: Context) -> dict[str, Any]:
        module = torch.nn.Linear(2, 1)
        model = ctx.model(module)
        with ctx.no_sync(model):
            model(torch.ones(1, 2)).sum().backward()
        ctx.sync_buffers(model)
        ctx.barrier()
        with ctx.main_process_first():
            pass
        ctx.save({"x": 1}, tmp_path / "x.pt")
        return {
            "pid": os.getpid(),
            "same": model is module and ctx.unwrap(model) is module,
            "facts": (ctx.rank, ctx.local_rank, ctx.node_rank, ctx.world_size, ctx.num_nodes),
            "reduce": [ctx.all_reduce(3, op) for op in ("sum", "mean", "min", "max", "product")],
            "gather": (ctx.all_gather(3), ctx.all_gather_object("x")),
            "broadcast": (ctx.broadcast(3), ctx.broadcast_object("x")),
            "main": ctx.on_main(lambda: 5),
            "load": ctx.load(tmp_path / "x.pt"),
            "batches": [len(one) for one in ctx.dataloader(torch.arange(5), batch_size=2)],
        }

    assert run(body, devices=1) == {
        "pid": os.getpid(),
        "same": True,
        "facts": (0, 0, 0, 1, 1),
        "reduce": [3, 3.0, 3, 3, 3],
        "gather": ([3], ["x"]),
        "broadcast": (3, "x"),
        "main": 5,
        "load": {"x": 1},
        "batches": [2, 2, 1],
    }


def test_the_loader_shares_out_and_the_model_averages() -> None:
    """One epoch: every sample once, gradients as in one process."""

    def body(ctx: Context) -> tuple[list[int], int]:
        loader = ctx.dataloader(torch.arange(10), batch_size=2, shuffle=True)
        return [int(x) for batch in loader for x in batch], len(loader)

    one, two = run(body, returns="all", **FORK)

    assert one[1] == two[1] == 3
    assert set(one[0]) | set(two[0]) == set(range(10))


def test_one_file_holds_all_that_a_run_goes_on_from(tmp_path: Path) -> None:
    """Model, optimizer, scheduler, scaler, random numbers: the resumed run is the uninterrupted."""
    path = tmp_path / "run.pt"
    numpy = pytest.importorskip("numpy")

    def body(ctx: Context, steps: range, resume: bool) -> tuple[list[float], Any]:
        model = ctx.model(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if resume:
            state = ctx.load(path)
            assert state["where"] == path
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            streams = state["streams"][ctx.rank]
            torch.set_rng_state(streams["torch"])
            random.setstate(streams["python"])
            numpy.random.set_state(streams["numpy"])
        drawn: list[float] = []
        for step in steps:
            optimizer.zero_grad()
            model(torch.ones(2, 3) * step).square().sum().backward()
            optimizer.step()
            scheduler.step()
            drawn += [random.random(), float(numpy.random.rand()), scheduler.get_last_lr()[0]]
            streams = {
                "torch": torch.get_rng_state(),
                "python": random.getstate(),
                "numpy": numpy.random.get_state(),
            }
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "streams": ctx.all_gather_object(streams),
                "where": path,
                "step": step,
            }
            if step == 2:
                ctx.save(state, path)
        return drawn, [one.tolist() for one in model.parameters()]

    whole = run(body, range(6), False, seed=3, returns="all", **FORK)
    rest = run(body, range(3, 6), True, seed=99, returns="all", **FORK)

    for one, two in zip(whole, rest, strict=True):
        assert one[0][9:] == two[0]
        assert one[1] == two[1]
    assert whole[0][0] != whole[1][0]
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_barrier_that_is_not_reached_says_where_the_missing_rank_is() -> None:
    """The caller gets the barrier's error with the report of a hang."""

    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            time.sleep(600)
        ctx.barrier(timeout=2, name="data ready")

    with pytest.raises(BarrierTimeout) as caught:
        run(body, **FORK)

    assert "barrier 'data ready': rank(s) 1 had not come within 2 s" in str(caught.value)
    (report,) = (note for note in caught.value.__notes__ if "rank 1 is at" in note)
    assert "test_context.py" in report
    assert "time.sleep(600)" in report
    assert caught.value.outcomes[0].collective.startswith("barrier 'data ready' at ")


def test_a_mismatch_that_reaches_the_caller_is_one_failure() -> None:
    def body(ctx: Context) -> None:
        ctx.all_reduce(torch.ones(2 + ctx.rank))

    with pytest.raises(CollectiveMismatch, match=r"rank 1: all_reduce.* of float32\[3\]") as caught:
        run(body, **FORK)

    assert not any("as well" in note for note in caught.value.__notes__)
    assert {one.kind for one in caught.value.outcomes} == {"raised"}


def test_a_caught_mismatch_leaves_the_call_in_order() -> None:
    """Under every kind of collective of the context, on_main too."""

    def body(ctx: Context) -> tuple[int, list[str]]:
        found = []
        for other in (ctx.barrier, lambda: ctx.all_gather(1), lambda: ctx.scatter([1, 2])):
            with pytest.raises(CollectiveMismatch) as caught:
                ctx.on_main(str) if ctx.rank == 0 else other()
            found.append(str(caught.value))
        return ctx.all_reduce(1), found

    one, two = run(body, returns="all", **FORK)
    assert one == two
    assert one[0] == 2
    assert all("rank 0: on_main(src=0) at" in each for each in one[1])


def test_check_collectives_reaches_the_ranks() -> None:
    def body(ctx: Context) -> bool:
        return ctx._world.check

    assert run(body, returns="all", check_collectives=False, **FORK) == [False, False]
    assert run(body, returns="all", **FORK) == [True, True]
