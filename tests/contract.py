"""What every start method promises, as a script: `python contract.py METHOD [kept]`.

Run by test_contract.py and test_kept.py, and by nothing of pytest: re-exec needs a script of its
own. Each check prints a line; the last line counts them.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import distribute
from distribute import Context, RequestError, WorkerDied, Workers, current, distributed

METHOD = sys.argv[1] if len(sys.argv) > 1 else "fork"
# Re-exec serves the first call of a script; the automatic choice goes on from there.
FIRST = {"start_method": METHOD}
LATER = {} if METHOD == "reexec" else FIRST

# With "kept", what `run` would start afresh each time is kept for the next call with its options.
KEPT: dict[str, Workers] | None = {} if "kept" in sys.argv[2:] else None


def run(fn: Callable[..., Any], *args: Any, returns: Any = "main", **options: Any) -> Any:
    if KEPT is None:
        return distribute.run(fn, *args, returns=returns, **options)
    key = repr(sorted(options.items()))
    if key not in KEPT:
        KEPT[key] = distribute.workers(**options)
    return KEPT[key].run(fn, *args, returns=returns)


VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    lr: float
    color: Color


checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    checks.append(function)
    return function


@distributed(devices=2, returns="all", **FIRST)
def facts(ctx: Context, config: Config, *, scale: int) -> dict[str, object]:
    return {
        "rank": ctx.rank,
        "local_rank": ctx.local_rank,
        "node_rank": ctx.node_rank,
        "world_size": ctx.world_size,
        "local_world_size": ctx.local_world_size,
        "num_nodes": ctx.num_nodes,
        "device": str(ctx.device),
        "backend": ctx.backend,
        "main": ctx.is_main_process,
        "environ": {name: os.environ.get(name) for name in VARIABLES},
        "threads": torch.get_num_threads(),
        "is_config": isinstance(config, Config) and config.color is Color.RED,
        "sum": ctx.all_reduce(scale * (ctx.rank + 1)),
        "pid": os.getpid(),
        "current": current() is ctx,
        "is_worker": distribute.is_worker(),
        "stdin": ctx.rank == 0 or sys.stdin.read() == "",
    }


@check
def every_rank_knows_where_it_stands() -> None:
    before = dict(os.environ)
    threads = torch.get_num_threads()
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    found = facts(Config(0.1, Color.RED), scale=10)
    assert [one["rank"] for one in found] == [0, 1]
    assert len({one["pid"] for one in found}) == 2
    port = found[0]["environ"]["MASTER_PORT"]
    cores = len(os.sched_getaffinity(0))
    for rank, one in enumerate(found):
        assert one["local_rank"] == rank
        assert (one["world_size"], one["local_world_size"], one["num_nodes"]) == (2, 2, 1)
        assert (one["device"], one["backend"]) == ("cpu", "gloo")
        assert one["main"] is (rank == 0)
        assert one["environ"] == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": str(max(1, cores // 2)),
        }
        assert one["threads"] == max(1, cores // 2)
        assert one["is_config"], "the class of __main__ lost its identity"
        assert one["sum"] == 30
        assert one["current"]
        assert one["stdin"]
        assert one["is_worker"] is (METHOD != "reexec" or rank > 0)
    assert (found[0]["pid"] == os.getpid()) is (METHOD == "reexec")
    assert dict(os.environ) == before
    assert torch.get_num_threads() == threads
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


@check
def the_caller_s_objects_come_and_go() -> None:
    offset = 5

    def body(ctx: Context, f: Callable[[int], int], big: torch.Tensor) -> object:
        return f(ctx.world_size) + offset, big.sum().item(), big * 2, Config(1.0, Color.RED)

    number, total, doubled, config = run(
        body, lambda world: world * 100, torch.ones(1 << 20), devices=2, **LATER
    )
    assert number == 205
    assert total == 1 << 20
    assert torch.equal(doubled, torch.full((1 << 20,), 2.0))
    assert type(config) is Config
    assert config.color is Color.RED


@check
def values_arrive_detached_and_large_ones_whole() -> None:
    def body(ctx: Context) -> object:
        weight = torch.nn.Parameter(torch.ones(3))
        return ctx.rank, weight * 2, bytes(300_000), "x" * 300_000

    values = run(body, devices=2, returns="all", **LATER)
    assert [one[0] for one in values] == [0, 1]
    for _, tensor, raw, text in values:
        assert not tensor.requires_grad
        assert tensor.tolist() == [2, 2, 2]
        assert raw == bytes(300_000)
        assert text == "x" * 300_000


class Refused(Exception):
    pass


@check
def an_exception_is_itself_with_the_rank_s_traceback() -> None:
    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            raise Refused("bad sample 17")
        while True:
            ctx.barrier()

    try:
        run(body, devices=2, **LATER)
    except Refused as error:
        assert str(error) == "bad sample 17"
        text = "".join(traceback.format_exception(error))
        assert 'raise Refused("bad sample 17")' in text, text
        assert any("raised by rank 1 " in note for note in error.__notes__)
    else:
        raise AssertionError("nothing was raised")


@check
def an_exception_of_rank_0_is_itself_too() -> None:
    def body(ctx: Context) -> None:
        if ctx.rank == 0:
            raise Refused("rank 0 says no")
        while True:
            ctx.barrier()

    try:
        run(body, devices=2, **LATER)
    except Refused as error:
        text = "".join(traceback.format_exception(error))
        assert 'raise Refused("rank 0 says no")' in text, text
        assert any("raised by rank 0 " in note for note in error.__notes__)
    else:
        raise AssertionError("nothing was raised")


def _ends(how: str) -> WorkerDied:
    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(0)
            sys.exit(3)
        while True:
            ctx.barrier()

    try:
        run(body, devices=2, **LATER)
    except WorkerDied as error:
        return error
    raise AssertionError("nothing was raised")


@check
def a_killed_rank_is_named_with_its_signal() -> None:
    error = _ends("kill")
    assert (error.rank, error.signal, error.exit_code) == (1, signal.SIGKILL, None)
    assert "rank 1 was killed by SIGKILL (possibly out of memory" in str(error)


@check
def a_rank_that_leaves_without_a_word_is_named_with_its_code() -> None:
    error = _ends("exit")
    assert (error.rank, error.signal, error.exit_code) == (1, None, 0)


@check
def sys_exit_with_a_code_is_a_failure_and_without_one_returns_none() -> None:
    assert (_ends("sys.exit").rank, _ends("sys.exit").exit_code) == (1, 3)
    assert run(lambda ctx: sys.exit(), devices=2, returns="all", **LATER) == [None, None]


@check
def a_model_trains_as_one_process_would() -> None:
    torch.manual_seed(3)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 2)

    def body(ctx: Context) -> dict[str, torch.Tensor]:
        model = ctx.model(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        share = slice(ctx.rank * 8 // ctx.world_size, (ctx.rank + 1) * 8 // ctx.world_size)
        loss = torch.nn.functional.mse_loss(model(inputs[share]), targets[share])
        loss.backward()
        optimizer.step()
        return model.state_dict()

    one = run(body, devices=1, seed=1)
    for two in run(body, devices=2, seed=1, returns="all", **LATER):
        assert two.keys() == {"weight", "bias"}
        for name, value in two.items():
            torch.testing.assert_close(value, one[name], atol=1e-6, rtol=0)


@check
def ranks_share_random_numbers_until_the_first_model() -> None:
    def body(ctx: Context) -> tuple[list[float], list[float]]:
        shared = [torch.rand(()).item(), random.random()]
        ctx.model(torch.nn.Linear(1, 1))
        return shared, [torch.rand(()).item(), random.random()]

    torch.manual_seed(11)
    before = torch.get_rng_state()
    (shared0, own0), (shared1, own1) = run(body, devices=2, seed=4, returns="all", **LATER)
    assert torch.equal(torch.get_rng_state(), before), "a seeded call moved the caller's stream"
    assert shared0 == shared1
    assert own0[0] != own1[0]
    assert own0[1] != own1[1]
    torch.manual_seed(4)
    random.seed(4)
    assert shared0 == [torch.rand(()).item(), random.random()]


@check
def without_a_seed_the_caller_s_stream_goes_on() -> None:
    torch.manual_seed(5)
    expected = [torch.rand(()).item() for _ in range(3)]
    torch.manual_seed(5)
    first = torch.rand(()).item()
    middle = run(lambda ctx: torch.rand(()).item(), devices=2, returns="all", **LATER)
    assert middle == [expected[1]] * 2
    assert [first, torch.rand(()).item()] == [expected[0], expected[2]]


@check
def torch_s_settings_hold_in_every_rank() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        kinds = run(lambda ctx: torch.ones(1).dtype, devices=2, returns="all", **LATER)
    finally:
        torch.set_default_dtype(torch.float32)
    assert kinds == [torch.float64] * 2
    assert run(lambda ctx: torch.ones(1).dtype, devices=2, **LATER) == torch.float32


@distributed(devices="auto")
def evaluate(ctx: Context, value: int) -> int:
    return ctx.all_reduce(value)


@check
def a_call_inside_a_call_runs_in_place() -> None:
    def body(ctx: Context) -> tuple[int, str]:
        try:
            distribute.run(lambda: 1, devices=3)
        except RequestError as error:
            return evaluate(21), str(error)
        raise AssertionError("another world was not refused")

    for value, text in run(body, devices=2, returns="all", **LATER):
        assert value == 42
        assert "devices=3" in text
        assert "2 ranks" in text


@check
def another_world_size_works_as_well() -> None:
    def body(ctx: Context, factor: int) -> list[int]:
        return ctx.all_gather(ctx.rank * factor)

    assert run(partial(body, factor=10), devices=3, **LATER) == [0, 10, 20]
    assert run(partial(body, factor=10), devices=2, **LATER) == [0, 10]


@check
def a_function_without_a_context_asks_for_it() -> None:
    def body(x: int) -> tuple[int, int]:
        return x, current().rank

    assert run(body, 7, devices=2, returns="all", **LATER) == [(7, 0), (7, 1)]
    try:
        current()
    except RuntimeError as error:
        assert "no distributed call is running" in str(error)
    else:
        raise AssertionError("current() outside a call did not raise")


class Job:
    def __init__(self, base: int) -> None:
        self.base = base

    @distributed(devices=2, returns="all", **LATER)
    def fit(self, ctx: Context, n: int) -> int:
        return self.base + n * ctx.world_size + ctx.rank

    @staticmethod
    @distributed(devices=2, **LATER)
    def static(ctx: Context, n: int) -> int:
        return n * ctx.world_size

    @classmethod
    @distributed(devices=2, **LATER)
    def of_class(cls, ctx: Context, n: int) -> tuple[str, int]:
        return cls.__name__, n * ctx.world_size


@check
def methods_of_all_kinds_work() -> None:
    assert Job(100).fit(2) == [104, 105]
    assert Job.static(4) == 8
    assert Job(1).static(4) == 8
    assert Job.of_class(3) == ("Job", 6)


if __name__ == "__main__":
    failed = 0
    for one in checks:
        try:
            one()
        except BaseException:
            failed += 1
            print(f"FAILED {one.__name__}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok {one.__name__}", flush=True)
    print(f"{METHOD}: {len(checks) - failed} of {len(checks)}", flush=True)
    sys.exit(failed > 0)
