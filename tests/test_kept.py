"""Workers that are kept for one call after the other."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import selectors
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distribute
from distribute import Context, RequestError, WorkerDied, Workers, distributed, forked, run, workers
from distribute.machine import Machine
from distribute.plan import resolve
from distribute.request import Request
from tests.notebook import Notebook
from tests.scripts import SLOW_METHODS, run_python, write

METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
CONTRACT = Path(__file__).parent / "contract.py"

every_method = pytest.mark.parametrize("method", METHODS)
# Of whole programs, which start a server of their own.
every_program = pytest.mark.parametrize("method", ["fork", *SLOW_METHODS])


def two(method: str = "fork", **options: Any) -> Workers:
    return workers(devices=2, accelerator="cpu", start_method=method, **options)


def pids(kept: Workers) -> list[int]:
    return kept.run(os.getpid, returns="all")


def gone(ended: list[int]) -> bool:
    """Whether processes end within some seconds."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        if not any(os.path.exists(f"/proc/{pid}") for pid in ended):
            return True
        time.sleep(0.01)
    return False


# -- one call after the other ------------------------------------------------------------------


@every_program
def test_kept_workers_hold_the_contract_of_their_start_method(method: str, tmp_path: Path) -> None:
    """Whatever a call promises it promises on kept workers too; nothing is left behind."""
    ended = run_python(CONTRACT, method, "kept", cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert f"{method}: 16 of 16" in ended.out, ended.text


@every_method
def test_calls_share_processes_and_return_values(method: str) -> None:
    with two(method) as kept:
        first = pids(kept)
        assert kept.run(lambda ctx, x: ctx.all_reduce(x + ctx.rank), 10) == 21
        assert kept.run(lambda ctx: ctx.rank, returns="all") == [0, 1]
        assert pids(kept) == first
    assert len({os.getpid(), *first}) == 3
    assert gone(first)


@every_method
def test_processes_start_with_the_first_call(method: str) -> None:
    with two(method) as kept:
        assert repr(kept) == "<distribute.Workers: 2 on cpu, not started>"
        assert kept.world_size == 2
        assert kept.plan().method == method
        pids(kept)
        assert repr(kept) == f"<distribute.Workers: 2 on cpu, {method}>"
    assert repr(kept) == "<distribute.Workers: 2 on cpu, closed>"


@every_method
def test_state_of_imported_modules_stays(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of a module works on the worker's own globals."""
    write(
        tmp_path,
        """
        seen = []

        def see(ctx, value):
            seen.append((ctx.rank, value))
            return seen
        """,
        f"state_of_{method}.py",
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"state_of_{method}")

    with two(method) as kept:
        kept.run(module.see, "a")
        found = kept.run(module.see, "b", returns="all")

    assert found == [[(0, "a"), (0, "b")], [(1, "a"), (1, "b")]]
    assert module.seen == []


@every_program
def test_a_function_is_sent_as_it_is_at_each_call(method: str, tmp_path: Path) -> None:
    """Functions, classes and globals of a script or notebook may change between the calls."""
    script = write(
        tmp_path,
        f"""
        import dataclasses, enum, distribute

        @dataclasses.dataclass
        class Config:
            lr: float
            class Mode(enum.Enum):
                A = 1

        FACTOR = 2

        COUNT = 0

        def count(ctx):
            global COUNT
            COUNT += 1
            return COUNT

        def step(ctx, config, mode):
            same = isinstance(config, Config) and mode is Config.Mode.A
            return same, config.lr * FACTOR, Config(config.lr + 1), mode

        def check(lr, old=None):
            same, value, made, mode = kept.run(step, Config(lr), Config.Mode.A)
            assert same and type(made) is Config and mode is Config.Mode.A
            assert made == Config(lr + 1)
            return value

        if __name__ == "__main__":
            kept = distribute.workers(devices=2, start_method="{method}")
            print("GOT", check(1.0), check(2.0))
            assert (kept.run(count), kept.run(count), COUNT) == (1, 1, 0)

            FACTOR = 3
            print("GOT", check(1.0))

            @dataclasses.dataclass
            class Config:
                lr: float
                more: int = 7
                class Mode(enum.Enum):
                    A = 2

            def step(ctx, config, mode):
                same = isinstance(config, Config) and mode is Config.Mode.A
                return same, (config.more, mode.value), Config(config.lr + 1), mode

            print("GOT", check(1.0), check(2.0))
            assert issubclass(kept.run(lambda: Config), Config)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT (7, 2) (7, 2)", "GOT 2.0 4.0", "GOT 3.0"]


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    """Of one test: the others fork this process, and its client has threads."""
    with Notebook(tmp_path) as made:
        yield made


def test_a_variable_keeps_them_over_the_cells_of_a_notebook(notebook: Notebook) -> None:
    """Cells are edited and run again, or stopped."""
    cell = """
    class Net(torch.nn.Linear):
        version = {version}

    def train(ctx, net):
        assert isinstance(net, Net) and net.version == {version}
        print(f"rank {{ctx.rank}}")
        return Net(2, 2)
    """
    alone = notebook.processes()
    assert notebook.run("import distribute; w = distribute.workers(devices=2)").error is None
    assert notebook.processes() == alone
    for version in (1, 2):
        assert notebook.run(cell.format(version=version)).error is None
        trained = notebook.run("isinstance(w.run(train, Net(2, 2)), Net)")
        assert trained.value == "True", trained
        assert trained.lines == ["[1] rank 1", "rank 0"]
    kept = notebook.processes()
    assert len(kept - alone) == 2

    stopped = notebook.start("w.run(lambda ctx: print('sleeps') or time.sleep(600))")
    notebook.until(lambda: stopped.out.count("sleeps") == 2, stopped)
    notebook.interrupt(group=True)
    notebook.finish(stopped)
    assert stopped.error is not None
    assert stopped.error[0] == "KeyboardInterrupt"
    notebook.only(alone)

    assert notebook.value("w.run(lambda ctx: ctx.all_reduce(1))") == "2"
    second = notebook.processes()
    assert len(second - alone) == 2
    assert not second & (kept - alone)
    # The cell that makes them is run again: the first ones end.
    assert notebook.run("w = distribute.workers(devices=2)").error is None
    notebook.only(alone)
    assert notebook.value("w.run(lambda ctx: ctx.all_reduce(1))") == "2"
    assert notebook.run("w.close()").error is None
    notebook.only(alone)


def train(ctx: Context, epochs: int) -> dict[str, torch.Tensor]:
    inputs = torch.arange(64.0).reshape(16, 4) / 64
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = ctx.model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in ctx.dataloader(data, batch_size=4, shuffle=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


@every_method
def test_training_twice_gives_what_two_runs_give(method: str) -> None:
    expected = run(train, 2, devices=2, seed=5, strategy="ddp_fork")

    with two(method, seed=5) as kept:
        found = [kept.run(train, 2), kept.run(train, 2)]

    for one in found:
        for name, value in expected.items():
            assert torch.equal(one[name], value)


@every_method
def test_random_numbers_go_on_from_call_to_call(method: str) -> None:
    """As if the function had run in the caller."""
    torch.manual_seed(1)
    random.seed(1)
    expected = [(torch.rand(()).item(), random.random()) for _ in range(4)]

    def draw() -> tuple[float, float]:
        return torch.rand(()).item(), random.random()

    torch.manual_seed(1)
    random.seed(1)
    with two(method) as kept:
        found = [kept.run(draw), draw(), kept.run(draw), draw()]

    assert found == expected


def test_the_settings_of_torch_are_those_of_each_call() -> None:
    def kind() -> torch.dtype:
        return torch.ones(1).dtype

    with two() as kept:
        kinds = [kept.run(kind)]
        torch.set_default_dtype(torch.float64)
        try:
            kinds.append(kept.run(kind))
        finally:
            torch.set_default_dtype(torch.float32)
        kinds.append(kept.run(kind))

    assert kinds == [torch.float32, torch.float64, torch.float32]


def test_a_large_argument_and_a_large_value() -> None:
    big = torch.ones(1 << 20)
    with two() as kept:
        for factor in (2, 3):
            assert torch.equal(kept.run(lambda x, f: x * f, big, factor), big * factor)


def test_one_worker_is_a_process_of_its_own() -> None:
    with workers(devices=1) as kept:
        first = kept.run(os.getpid)
        assert first != os.getpid()
        assert kept.run(os.getpid) == first
        assert kept.run(lambda ctx: ctx.all_reduce(3)) == 3


def test_a_decorated_function_runs_on_the_kept_workers() -> None:
    """Its own options are for calling it."""

    @distributed(devices=3)
    def inner(ctx: Context) -> int:
        return ctx.world_size

    with two() as kept:
        assert kept.run(inner) == 2


def test_other_calls_and_other_kept_workers_between_the_calls() -> None:
    with two() as one, workers(devices=3, start_method="fork") as other:
        first = pids(one)
        assert len(pids(other)) == 3
        assert run(lambda ctx: ctx.all_reduce(1), devices=2, strategy="ddp_fork") == 2
        assert run(lambda ctx: ctx.all_reduce(1), devices=2, strategy="ddp_forkserver") == 2
        assert pids(one) == first
        others = pids(other)
        one.close()
        assert gone(first)
        assert pids(other) == others


@every_method
def test_a_hundred_calls_leave_nothing_growing(method: str) -> None:
    def own() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def work(ctx: Context, x: torch.Tensor) -> tuple[int, int]:
        ctx.all_reduce(x)
        return own()

    big = torch.ones(1 << 16)
    with two(method) as kept:
        for _ in range(5):
            kept.run(work, big)
        before = [own(), *kept.run(work, big, returns="all")]
        for _ in range(100):
            kept.run(work, big)
        after = [own(), *kept.run(work, big, returns="all")]

    # A thread that has been joined may be seen for a moment.
    for (files, threads), (files_before, threads_before) in zip(after, before, strict=True):
        assert files <= files_before + 2
        assert threads <= threads_before + 2


@pytest.mark.soak
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_thousand_calls_leave_nothing_growing(method: str) -> None:
    """Memory, descriptors, threads; of the caller and of the ranks."""

    def own() -> tuple[float, int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages / 256, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def work(ctx: Context, x: torch.Tensor, net: nn.Module) -> tuple[float, int, int]:
        assert ctx.all_reduce(1) == 2
        return own()

    same, net = torch.ones(1 << 19), nn.Linear(100, 100)
    with two(method) as kept:
        for turn in range(1100):
            kept.run(work, same if turn % 3 else torch.ones(1 << 19), net)
            if turn == 99:
                before = [own(), *kept.run(work, same, net, returns="all")]
        after = [own(), *kept.run(work, same, net, returns="all")]

    assert len(after) == 3
    for (memory, files, threads), (memory_before, files_before, threads_before) in zip(
        after, before, strict=True
    ):
        assert memory <= memory_before + 16, (before, after)
        assert files <= files_before + 2
        assert threads <= threads_before + 2


# -- the process group -------------------------------------------------------------------------


def group(ctx: Context) -> tuple[int, int, str]:
    """What tells a process group from the one before it, and that it works."""
    return id(dist.group.WORLD), ctx.all_reduce(ctx.rank + 1), dist.get_backend()


@every_method
def test_the_process_group_is_kept_from_call_to_call(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks let go of it that end further apart.
    monkeypatch.setattr("distribute.supervise._HOLD_SECONDS", 60)
    with two(method) as kept:
        first = kept.run(group, returns="all")
        assert [one[1:] for one in first] == [(3, "gloo")] * 2
        for _ in range(3):
            assert kept.run(group, returns="all") == first


def more_groups(ctx: Context) -> None:
    dist.new_group([0])


def no_group(ctx: Context) -> None:
    dist.destroy_process_group()


def other_group(ctx: Context) -> None:
    store = dist.HashStore()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def other_on_one(ctx: Context) -> None:
    if ctx.rank == 1:
        other_group(ctx)


@pytest.mark.parametrize("change", [more_groups, no_group, other_group, other_on_one])
def test_a_process_group_that_the_function_has_changed_is_made_anew(
    change: Callable[[Context], None],
) -> None:
    """And nothing that it has made is left."""
    with two() as kept:
        kept.run(group)
        kept.run(change)
        for _ in range(3):
            assert [one[1:] for one in kept.run(group, returns="all")] == [(3, "gloo")] * 2
        assert kept.run(lambda: len(dist.distributed_c10d._world.pg_map), returns="all") == [1, 1]


def test_a_rank_that_has_returned_does_not_let_others_wait_in_a_kept_group() -> None:
    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.barrier()

    with two(timeout=120) as kept:
        kept.run(group)
        with pytest.raises(RuntimeError) as caught:
            kept.run(body)
        assert "rank(s) 0 had returned, while this rank waited for them" in str(
            caught.value.__notes__
        )
        assert kept.run(group)[1:] == (3, "gloo")


def test_ranks_that_end_far_apart_meet_again_in_the_next_call() -> None:
    def body(ctx: Context) -> int:
        time.sleep(0.5 * ctx.rank)
        return ctx.rank

    with two() as kept:
        for _ in range(2):
            assert kept.run(body, returns="all") == [0, 1]
            assert kept.run(group)[1:] == (3, "gloo")


def test_a_kept_world_of_one_has_no_group() -> None:
    def body(ctx: Context) -> tuple[int, bool]:
        return ctx.all_reduce(5), dist.is_initialized()

    with workers(devices=1, start_method="fork") as kept:
        assert [kept.run(body) for _ in range(3)] == [(5, False)] * 3


# -- what a report says ------------------------------------------------------------------------


def test_a_report_tells_of_this_call_only() -> None:
    """Collectives of an earlier call are no news."""

    def hang(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.all_reduce(1)
        time.sleep(600)

    with two(deadline=5) as kept:
        kept.run(lambda ctx: [ctx.all_gather(1) for _ in range(5)])
        with pytest.raises(distribute.DeadlineExceeded) as caught:
            kept.run(hang)

    told = "\n".join(caught.value.__notes__)
    assert "no collective of ctx so far" in told
    assert "after 0 completed" in told
    assert "all_gather at" not in told


# -- failure -----------------------------------------------------------------------------------


@every_method
def test_after_a_failure_the_next_call_starts_new_processes(method: str) -> None:
    def fail(ctx: Context) -> None:
        if ctx.rank == 1:
            raise ValueError("no")
        ctx.barrier()

    with two(method) as kept:
        first = pids(kept)
        with pytest.raises(ValueError, match="no") as caught:
            kept.run(fail)
        assert [one.rank for one in caught.value.outcomes] == [0, 1]  # type: ignore[attr-defined]
        assert gone(first)
        second = pids(kept)
        assert not set(first) & set(second)
        assert pids(kept) == second


def test_a_worker_that_dies_between_calls_is_told() -> None:
    with two() as kept:
        first = pids(kept)
        os.kill(first[1], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank 1 was killed by SIGKILL"):
            pids(kept)
        assert gone(first)
        assert len(pids(kept)) == 2


@every_method
def test_after_an_interruption_the_next_call_works(method: str) -> None:
    def interrupt(ctx: Context, caller: int) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            os.kill(caller, signal.SIGINT)
        time.sleep(600)

    with two(method) as kept:
        first = pids(kept)
        with pytest.raises(KeyboardInterrupt):
            kept.run(interrupt, os.getpid())
        assert gone(first)
        assert kept.run(lambda ctx: ctx.all_reduce(1)) == 2


def test_each_call_has_the_whole_deadline() -> None:
    with two(deadline=7) as kept:
        for _ in range(3):
            kept.run(time.sleep, 2.5)
        with pytest.raises(distribute.DeadlineExceeded):
            kept.run(time.sleep, 30)
        assert kept.run(lambda: 1) == 1


def test_what_cannot_be_sent_harms_nobody() -> None:
    with two() as kept:
        first = pids(kept)
        with pytest.raises(RequestError, match="argument `lock`: a thread lock"):
            kept.run(lambda lock: None, threading.Lock())
        with pytest.raises(RequestError, match="workers belong to the process that made them"):
            kept.run(lambda: kept.world_size)
        assert pids(kept) == first


def test_forks_that_do_not_start_working_are_replaced_by_the_fork_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("distribute.launchers.fork._READY_SECONDS", 0.5)
    monkeypatch.setattr("distribute.worker.prove", lambda: time.sleep(600))
    with two() as kept:
        first = pids(kept)
        assert kept.plan().method == "forkserver"
        assert pids(kept) == first
    assert "the fork server takes over" in capfd.readouterr().err


def test_forks_that_are_slow_to_start_working_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine that is busy, or stalls for seconds, is no sign of a bad fork."""

    def compute() -> None:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass

    monkeypatch.setattr("distribute.launchers.fork._READY_SECONDS", 1.0)
    monkeypatch.setattr("distribute.worker.prove", compute)
    with two() as kept:
        assert kept.run(lambda ctx: ctx.all_reduce(ctx.rank + 1), returns="all") == [3, 3]
        assert kept.plan().method == "fork"
    assert capfd.readouterr().err == ""


def test_a_machine_that_stalls_does_not_change_what_the_news_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is the rank that dies, and not its peer's error, after which nobody could wait for it."""
    failed, stalled = tmp_path / "failed", tmp_path / "stalled"
    away: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(away))

    class Stalling(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> Any:
            events = super().select(0.2)
            if not events and failed.exists() and not away:
                away.append(1000.0)
                stalled.touch()
            return events

    def body(ctx: Context) -> None:
        if ctx.is_main_process:
            failed.touch()
            raise RuntimeError("Connection closed by peer")
        while not stalled.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        os._exit(5)

    with two() as kept:
        pids(kept)
        module = SimpleNamespace(DefaultSelector=Stalling, EVENT_READ=selectors.EVENT_READ)
        monkeypatch.setattr("distribute.supervise.selectors", module)
        monkeypatch.setattr("distribute.supervise.time", clock)
        monkeypatch.setattr("distribute.supervise._ECHO_SECONDS", 30.0)
        with pytest.raises(WorkerDied, match="rank 1 ended with exit code 5"):
            kept.run(body)


# -- the end -----------------------------------------------------------------------------------


def test_closing_is_for_good_and_may_be_done_twice() -> None:
    kept = two()
    first = pids(kept)
    kept.close()
    assert gone(first)
    kept.close()
    with pytest.raises(RequestError, match=r"closed.*make new ones"):
        pids(kept)
    two().close()


@every_method
def test_the_end_of_the_object_is_theirs(method: str) -> None:
    kept = two(method)
    with pytest.raises(ZeroDivisionError) as held:
        kept.run(lambda: 1 / 0)
    first = pids(kept)
    cycle = [kept]
    cycle.append(cycle)  # type: ignore[arg-type]
    del kept, cycle
    gc.collect()
    assert gone(first)
    assert held.tb is not None  # as a prompt keeps the last one


@every_method
def test_an_object_without_a_name_ends_with_its_call(method: str) -> None:
    # Not in the assertion: pytest would hold the object to show it.
    ended = two(method).run(os.getpid, returns="all")
    assert gone(ended)
    with pytest.raises(ZeroDivisionError):
        two(method).run(lambda: 1 / 0)


SCRIPT = """
import os, signal, sys, distribute

if __name__ == "__main__":
    kept = distribute.workers(devices=2, start_method={method!r})
    print("PIDS", kept.run(os.getpid, returns="all"))
    {end}
"""
ENDS = {
    "exit": "",
    "kill": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
@every_program
def test_the_end_of_the_program_is_theirs(method: str, end: str, tmp_path: Path) -> None:
    """Without `close`, however it ends; `run_python` looks for what is left."""
    script = write(tmp_path, SCRIPT.format(method=method, end=ENDS[end]))

    ended = run_python(script)

    assert len(ended.lines("PIDS")) == 1, ended.text
    if end == "exit":
        assert ended.code == 0
        assert not ended.err


@every_method
def test_a_fork_of_the_caller_does_not_end_them(method: str) -> None:
    """A loader's worker or a process of multiprocessing has a copy of the object, and leaves."""

    def leave(copy: Workers) -> None:
        copy.close()
        del copy
        gc.collect()

    with two(method) as kept:
        first = pids(kept)
        process = multiprocessing.get_context("fork").Process(target=leave, args=(kept,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        process.join()
        assert process.exitcode == 0
        process.close()
        assert pids(kept) == first


def test_a_fork_of_the_caller_that_ends_as_a_program_does_not_end_them(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, sys, distribute

        if __name__ == "__main__":
            kept = distribute.workers(devices=2, start_method="fork")
            first = kept.run(os.getpid, returns="all")
            if not (child := os.fork()):
                assert kept.run(os.getpid, returns="all") != first
                sys.exit(5)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
            assert kept.run(os.getpid, returns="all") == first
            print("SAME")
        """,
    )

    ended = run_python(script)

    assert ended.lines("SAME") == ["SAME"], ended.text


# -- choices and refusals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "method"),
    [
        ({}, "fork"),
        ({"interactive": "a notebook kernel", "other_threads": True}, "fork"),
        ({"other_threads": True}, "forkserver"),
        ({"live_accelerator": "CUDA"}, "forkserver"),
        ({"main_thread": False}, "forkserver"),
        ({"kept": (0, 1), "kept_accelerator": "cpu"}, "fork"),
        ({"group": (0, 2, "gloo")}, "attached"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_start_method_is_never_reexec_or_inline(
    facts: dict[str, Any], method: str, devices: int
) -> None:
    machine = Machine(script=("python", "train.py"), **facts)
    if machine.group is not None:
        devices = 2

    assert resolve(Request(devices=devices), {}, machine, keep=True).method == method


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start_method": "reexec"}, "start method 'reexec': kept workers are processes beside"),
        ({"max_restarts": 1}, "max_restarts=1 for kept workers: a call that fails ends them"),
        ({"returns": "all"}, "returns='all' for kept workers: it is the affair of each call"),
        ({"devices": 0}, "devices=0: "),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError) as caught:
        workers(**{"devices": 2, **options})

    assert text in str(caught.value)


def test_calls_that_make_no_sense_are_refused() -> None:
    with two() as kept:
        with pytest.raises(RequestError, match="it is not callable"):
            kept.run(3)  # type: ignore[call-overload]
        with pytest.raises(RequestError, match="returns='some'"):
            kept.run(len, [], returns="some")  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="missing a required argument"):
            kept.run(lambda ctx, x: None)
        assert "not started" in repr(kept)


@pytest.mark.parametrize("devices", [1, 2])
def test_inside_a_running_call_they_are_refused(devices: int) -> None:
    with pytest.raises(RequestError, match="rank 0 of it is a worker itself"):
        run(lambda: workers(devices=2), devices=devices)


def test_a_second_thread_is_refused(tmp_path: Path) -> None:
    """The first one's call goes on."""
    errors: list[RequestError] = []
    running, refused = tmp_path / "running", tmp_path / "refused"

    def body(ctx: Context) -> int:
        if ctx.is_main_process:
            running.touch()
        while not refused.exists():
            time.sleep(0.01)
        return ctx.all_reduce(1)

    def intrude(kept: Workers) -> None:
        while not running.exists():
            time.sleep(0.01)
        for use in (lambda: kept.run(len, []), kept.close):
            try:
                use()
            except RequestError as error:
                errors.append(error)
        refused.touch()

    with two("forkserver") as kept:
        pids(kept)
        thread = threading.Thread(target=intrude, args=(kept,))
        thread.start()
        assert kept.run(body) == 2
        thread.join()
        assert kept.run(lambda ctx: ctx.all_reduce(1)) == 2

    assert [one.given for one in errors] == [
        "run of workers in a call",
        "close of workers in a call",
    ]


def test_a_thread_may_use_them_for_itself() -> None:
    """They may be made by one thread and used by another."""
    found: list[list[int]] = []
    with two() as kept:
        first = pids(kept)
        thread = threading.Thread(target=lambda: found.append(pids(kept)))
        thread.start()
        thread.join()
        assert found == [first]


def test_a_script_that_keeps_workers_is_not_run_again_by_a_later_call(tmp_path: Path) -> None:
    """Their first call is the script's first distributed call."""
    script = write(
        tmp_path,
        """
        import distribute

        print("ABOVE", distribute.is_worker())
        with distribute.workers(devices=2) as kept:
            print("KEPT", kept.run(lambda ctx: ctx.all_reduce(1)), kept.plan().method)

        @distribute.distributed(devices=2)
        def train(ctx):
            return ctx.all_reduce(1)

        print("LATER", train(), train.plan().method)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("") == ["ABOVE False", "KEPT 2 fork", "LATER 2 fork"]


def test_workers_made_above_the_first_call_of_a_script(tmp_path: Path) -> None:
    """The script's other runs make the object too, and no process."""
    script = write(
        tmp_path,
        """
        import os, distribute

        kept = distribute.workers(devices=2)

        @distribute.distributed(devices=2)
        def train(ctx):
            return ctx.all_reduce(1)

        print("TRAINED", train(), kept.run(lambda ctx: ctx.all_reduce(1)))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("TRAINED") == ["TRAINED 2 2"]


def test_under_torchrun_calls_run_in_place(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, distribute

        with distribute.workers() as kept:
            pids = kept.run(os.getpid, returns="all")
            assert pids == kept.run(os.getpid, returns="all")
            assert os.getpid() in pids
            ranks = kept.run(lambda ctx: ctx.rank, returns="all")
            print(f"RANK {ranks} {kept}\\n", end="")  # at once: others print as well
        """,
    )

    ended = run_python("-m", "torch.distributed.run", "--nproc-per-node", "2", script)

    assert ended.code == 0, ended.text
    line = "RANK [0, 1] <distribute.Workers: 2 on cpu, attached>"
    assert ended.lines("RANK") == [line] * 2


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    """What the first fork imports takes seconds, of which a deadline is not to be spent."""
    forked.preload()


@pytest.fixture(autouse=True)
def streams() -> Iterator[None]:
    """Leaves the random-number generators as they were."""
    before = torch.get_rng_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
