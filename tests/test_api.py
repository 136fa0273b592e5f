"""The two doors: what is decorated, injected, refused and shown."""

from __future__ import annotations

import inspect
import os
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist

import distribute
from distribute import Context, RequestError, WorkerDied, current, distributed, run

FORK = {"strategy": "ddp_fork"}


@distributed
def bare(ctx: Context, x: int) -> tuple[int, int]:
    """Says where it is."""
    return x, ctx.world_size


@distributed(devices=2, **FORK)
def two(ctx: Context, x: int, *, y: int = 1) -> list[int]:
    """Gathers."""
    return ctx.all_gather(x * y * (ctx.rank + 1))


class Job:
    def __init__(self, base: int) -> None:
        self.base = base

    @distributed(devices=2, **FORK)
    def fit(self, ctx: Context, n: int) -> list[int]:
        return ctx.all_gather(self.base + n + ctx.rank)

    @distributed(devices=2, **FORK)
    @classmethod
    def outside(cls, ctx: Context, n: int) -> tuple[str, int]:
        return cls.__name__, n * ctx.world_size


def test_the_bare_decorator_runs_on_what_is_there() -> None:
    """Without accelerators that is one process, this one."""
    assert bare(3) == (3, max(1, torch.accelerator.device_count()))


def test_two_processes_see_arguments_and_each_other() -> None:
    """Positional and keyword arguments reach both ranks."""
    assert two(3, y=2) == [6, 12]


def test_a_decorated_function_looks_like_the_function() -> None:
    """Name, docstring and signature are the function's, without the context."""
    assert two.__name__ == "two"
    assert two.__doc__ == "Gathers."
    assert str(inspect.signature(two)) == "(x: 'int', *, y: 'int' = 1) -> 'list[int]'"
    assert list(inspect.signature(Job.fit).parameters) == ["self", "n"]
    assert list(inspect.signature(Job(1).fit).parameters) == ["n"]


def test_decorated_functions_and_methods_pickle_by_reference() -> None:
    """As plain functions do."""
    assert pickle.loads(pickle.dumps(two)) is two
    assert pickle.loads(pickle.dumps(Job(7).fit))(1) == [8, 9]


def test_methods_get_the_context_after_self() -> None:
    """Bound, through the class, and as a classmethod under the decorator."""
    assert Job(10).fit(1) == [11, 12]
    assert Job.fit(Job(20), 1) == [21, 22]
    assert Job.outside(4) == ("Job", 8)


def test_run_takes_functions_of_every_kind() -> None:
    """Lambdas, partials, decorated functions, and objects that can be called."""

    class Callable:
        def __call__(self, ctx: Context, x: int) -> int:
            return x + ctx.world_size

    assert run(lambda ctx: ctx.world_size, devices=2, **FORK) == 2
    assert run(partial(lambda ctx, x, y: (x, y), y=5), 4, devices=2, **FORK) == (4, 5)
    assert run(bare, 1, devices=2, **FORK) == (1, 2)
    assert run(Callable(), 1, devices=2, **FORK) == 3


def test_an_existing_function_needs_no_context() -> None:
    """`current()` gives it inside, and refuses outside with advice."""

    def train(lr: float) -> tuple[float, int]:
        return lr, current().rank

    assert distributed(devices=2, returns="all", **FORK)(train)(0.5) == [(0.5, 0), (0.5, 1)]
    with pytest.raises(RuntimeError, match="no distributed call is running here; call it inside"):
        current()


def test_a_context_of_another_library_is_left_alone() -> None:
    """Only our own annotation, or the bare name `ctx`, asks for the context."""

    class Other:
        pass

    def command(ctx: Other, x: int) -> tuple[str, int]:
        return type(ctx).__name__, x

    assert run(command, Other(), 3, devices=2, **FORK) == ("Other", 3)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"devices": 0}, ("devices=0", "at least 1")),
        ({"devices": [0, 0]}, ("devices=[0, 0]", "twice", "two ranks cannot share a device")),
        ({"devices": 99, "accelerator": "cuda"}, ("cuda",)),
        ({"strategy": "dpp"}, ("strategy='dpp'", "did you mean 'ddp'?")),
        ({"accelerator": "gpuu"}, ("accelerator='gpuu'", "did you mean 'gpu'?")),
        ({"backend": "glu"}, ("backend='glu'", "gloo")),
        ({"returns": "both"}, ("returns='both'", "'main', 'all'")),
        ({"num_nodes": 2}, ("num_nodes=2", "torchrun --nnodes 2")),
        ({"start_method": "reexec", "devices": 2}, ("reexec", "pytest")),
        ({"timeout": -1}, ("timeout=-1",)),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    options: dict[str, object], parts: tuple[str, ...]
) -> None:
    """The message says what was given, what is true and what to do."""
    ran: list[int] = []
    with pytest.raises(RequestError) as caught:
        run(lambda: ran.append(1), **options)
    for part in parts:
        assert part in str(caught.value)
    assert caught.value.given
    assert caught.value.fact
    assert caught.value.advice
    assert not ran
    assert isinstance(caught.value, ValueError)


def test_what_is_not_callable_is_refused_with_a_hint() -> None:
    """Most often the function was called by mistake."""
    with pytest.raises(RequestError, match=r"pass the function itself, distribute.run\(fn\)"):
        run(None)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match=r"distribute.distributed\(fn\) and not"):
        distributed(devices=2)(3)  # type: ignore[call-overload]


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    """At decoration already."""
    with pytest.raises(TypeError, match="'device' is not an option: did you mean 'devices'"):
        distributed(device=2)  # type: ignore[call-overload]


def test_wrong_arguments_are_the_caller_s_type_error() -> None:
    """Nothing is started for a call that cannot succeed."""
    with pytest.raises(TypeError, match=r"two\(\): missing a required argument: 'x'"):
        two()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        two(1, z=3)  # type: ignore[call-arg]


def test_the_plan_says_what_would_happen_and_starts_nothing() -> None:
    """`print(train.plan())`."""
    text = str(two.plan())

    assert "start method  fork: it was asked for" in text
    assert "world         2 ranks on 1 node(s), backend gloo" in text
    assert "rank 0 on cpu, rank 1 on cpu" in text
    assert "RANK=0..1" in text


def test_pytest_is_no_worker_and_a_rank_is_one() -> None:
    """`is_worker` tells the processes that the library started."""
    assert not distribute.is_worker()
    assert run(distribute.is_worker, devices=2, returns="all", **FORK) == [True, True]


def test_a_held_process_group_is_used_and_kept() -> None:
    """Whoever made the group before owns it."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert bare.plan().method == "attached"
        assert bare(3) == (3, 1)
        assert dist.is_initialized()
        with pytest.raises(RequestError, match="the process group that this process holds has 1"):
            run(lambda: None, devices=2)
    finally:
        dist.destroy_process_group()


def test_a_failed_call_leaves_the_next_one_alone() -> None:
    """Each call has a world of its own."""

    def body(ctx: Context, die: bool) -> int:
        if die and ctx.rank == 1:
            os._exit(9)
        return ctx.all_reduce(1)

    for _ in range(3):
        with pytest.raises(WorkerDied, match="rank 1 ended with exit code 9"):
            run(body, True, devices=2, **FORK)
        assert run(body, False, devices=2, **FORK) == 2


def test_a_thread_may_call_beside_another() -> None:
    """Two worlds at once, from two threads: the fork server serves both."""
    import threading

    values: dict[int, object] = {}

    def call(number: int) -> None:
        values[number] = run(lambda ctx: ctx.all_gather(ctx.rank + number), devices=2)

    threads = [threading.Thread(target=call, args=(number,)) for number in (10, 20)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert values == {10: [10, 11], 20: [20, 21]}
