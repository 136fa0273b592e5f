"""What cannot be sent is named by the way to it, before anything starts."""

from __future__ import annotations

import dataclasses
import io
import logging
import multiprocessing
import socket
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distribute import Context, RequestError, run, workers
from distribute.culprit import find
from distribute.payload import refusal

LOCK = threading.Lock()


class Logger:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    logger: Any = None


class Slots:
    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first, self.second = 1, threading.Lock()


class Named(dict[str, Any]):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.blocks[1].guard = threading.Lock()  # type: ignore[assignment]

    def step(self) -> None: ...


class Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def uses_global() -> Any:
    return [LOCK for _ in range(2)]


def closure() -> Any:
    held = [1, {"guard": threading.Lock()}]
    return lambda: held


class Ring:
    def __init__(self) -> None:
        self.itself = self
        self.lock = threading.Lock()


DEFAULT = partial(dict, guard=threading.Lock())

CASES: list[tuple[Any, str, str]] = [
    (Config(logger=Logger()), "argument `x.logger.lock`", "a thread lock (_thread.lock)"),
    ({"a": [1, 2, Slots()]}, "argument `x['a'][2].second`", "a thread lock (_thread.lock)"),
    (Named(a=threading.RLock()), "argument `x['a']`", "a thread lock (_thread.RLock)"),
    ([0] * 10_000 + [LOCK] + [0] * 9, "argument `x[10000]`", "a thread lock (_thread.lock)"),
    ({LOCK}, "argument `x's element`", "a thread lock (_thread.lock)"),
    ({LOCK: 1}, "argument `x's key`", "a thread lock (_thread.lock)"),
    (Net(), "argument `x.blocks.1.guard`", "a thread lock (_thread.lock)"),
    (Net().step, "argument `x.__self__.blocks.1.guard`", "a thread lock (_thread.lock)"),
    (DEFAULT, "argument `x.keywords['guard']`", "a thread lock (_thread.lock)"),
    (closure(), "argument `x`, variable `held[1]['guard']`", "a thread lock (_thread.lock)"),
    ((i for i in range(3)), "argument `x`", "a generator (generator)"),
    (socket.socket.__new__(socket.socket), "argument `x`", "a socket (socket.socket)"),
    (Stubborn(), "argument `x`", "an object of type tests.test_culprit.Stubborn"),
    (Ring(), "argument `x.lock`", "a thread lock (_thread.lock)"),
]


@pytest.mark.parametrize(("value", "where", "what"), CASES, ids=[one[1] for one in CASES])
def test_the_way_to_what_cannot_be_sent(value: Any, where: str, what: str):
    found = find("argument", "x", value, refusal)

    assert found is not None
    assert (found.where, found.what) == (where, what)
    assert not found.inherited


@pytest.mark.parametrize("mode", ["r", "w", "rb", "wb"])
def test_a_file_cannot_be_sent(mode: str, tmp_path: Path):
    """Not even one that could be read: its copy would be in memory, and no file."""
    (tmp_path / "log").write_text("text")
    with (tmp_path / "log").open(mode) as file:
        found = find("argument", "x", {"log": file}, refusal)

    assert found is not None
    assert found.where == "argument `x['log']`"
    assert found.what.startswith("an open file (_io.")


@pytest.mark.parametrize(
    "value",
    [3, "text", Config(), nn.Linear(2, 2), torch.ones(3), lambda: 3, logging.getLogger("x"),
     io.StringIO("text"), Path("x"), [], None],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
def test_what_can_be_sent_has_no_culprit(value: Any):
    assert find("argument", "x", value, refusal) is None


# -- in calls ----------------------------------------------------------------------------------


class Connected:
    def __getstate__(self) -> Any:
        raise ValueError("it is connected")  # here it is refused


def give_connected(ctx: Context) -> Any:
    return [Connected()] if ctx.rank == 0 else None


WAYS: dict[str, Callable[[], Any]] = {
    "argument": lambda: run(body, [Connected()], devices=2, start_method="forkserver"),
    "value": lambda: run(give_connected, devices=2, start_method="fork"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_error_of_the_object_s_own_is_shown_from_there_on(way: Callable[[], Any]):
    with pytest.raises(RequestError) as caught:
        way()

    assert type(caught.value.__cause__) is ValueError
    shown = "".join(traceback.format_exception(caught.value))
    assert "# here it is refused" in shown
    assert "cloudpickle.py" not in shown


def test_what_pickle_says_is_no_traceback_of_the_user():
    with pytest.raises(RequestError) as caught:
        run(lambda ctx: {"lock": threading.Lock()}, devices=2, start_method="fork")

    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback (most recent call last)") == 1
    assert "payload.py" not in shown


def body(ctx: Context, cfg: Any, log: Any = None, *more: Any) -> int:
    return ctx.all_reduce(1)


def refused(*args: Any, method: str = "forkserver", **kwargs: Any) -> str:
    with pytest.raises(RequestError) as caught:
        run(partial(body, **kwargs), *args, devices=2, start_method=method)
    assert caught.value.__cause__ is None  # pickle's own frames say nothing more
    assert not hasattr(caught.value, "outcomes")  # nothing has been started
    return f"{caught.value.given}: {caught.value.fact}"


def test_the_argument_has_the_name_of_its_parameter():
    told = "a thread lock (_thread.lock) cannot be sent to another process"

    assert refused(Config(logger=Logger())).startswith(f"argument `cfg.logger.lock`: {told}")
    assert refused(1, LOCK).startswith(f"argument `log`: {told}")
    assert refused(1, 2, 3, LOCK).startswith(f"argument `4`: {told}")
    assert run(body, 1, devices=2, start_method="forkserver") == 2


def test_a_variable_of_the_function_is_named():
    held = Logger()

    def uses(ctx: Context) -> Any:
        return held, uses_global

    with pytest.raises(RequestError) as caught:
        run(uses, devices=2, start_method="forkserver")

    name = "test_a_variable_of_the_function_is_named.<locals>.uses"
    assert caught.value.given == f"function `{name}`, variable `held.lock`"


def test_kept_workers_name_it_too():
    with workers(devices=2, start_method="fork") as kept:
        assert kept.run(body, 1) == 2
        with pytest.raises(RequestError, match=r"argument `log`: a thread lock"):
            kept.run(body, 1, LOCK)
        assert kept.run(body, 1) == 2


def test_a_value_is_named_by_its_rank():
    def give(ctx: Context) -> Any:
        return {"model": nn.Linear(1, 1), "hooks": [1, threading.Lock()]}

    with pytest.raises(RequestError) as caught:
        run(give, devices=2, start_method="fork")

    assert caught.value.given == "the value of rank 0 `['hooks'][1]`"
    assert [one.rank for one in caught.value.outcomes] == [0, 1]  # type: ignore[attr-defined]


def test_a_value_that_nobody_asked_for_need_not_be_sent():
    def give(ctx: Context) -> Any:
        return LOCK if ctx.rank else ctx.world_size

    assert run(give, devices=2, start_method="fork") == 2
    with pytest.raises(RequestError, match="the value of rank 1: a thread lock"):
        run(give, devices=2, start_method="fork", returns="all")


@pytest.mark.parametrize(
    "make",
    [multiprocessing.Queue, multiprocessing.Lock, multiprocessing.SimpleQueue],
    ids=["queue", "lock", "simple queue"],
)
def test_what_processes_inherit_is_refused_with_the_way_that_works(make: Any):
    shared = make()
    try:
        with pytest.raises(RequestError) as caught:
            run(body, 1, shared, devices=2, start_method="forkserver")
    finally:
        if hasattr(shared, "close"):
            shared.close()

    assert caught.value.given == "argument `log`"
    assert caught.value.advice == ('it is for processes that inherit it: use start_method="fork"')


def test_what_processes_inherit_works_in_forks():
    queue: Any = multiprocessing.SimpleQueue()

    def put(ctx: Context, shared: Any) -> int:
        shared.put(ctx.rank)
        return ctx.world_size

    assert run(put, queue, devices=2, start_method="fork") == 2
    assert sorted([queue.get(), queue.get()]) == [0, 1]
    queue.close()
