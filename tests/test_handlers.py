"""Signal handlers that a function leaves behind do not break its rank's report."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
from torch.utils.data import Dataset

from distribute import Context, run, workers

FORK: dict[str, Any] = {"devices": 2, "start_method": "fork"}


def alarmed(number: int, frame: FrameType | None) -> NoReturn:
    raise RuntimeError("the handler's")


def disturb() -> None:
    """Has the handler run right here."""
    os.kill(os.getpid(), signal.SIGUSR1)


class Disturbing(Exception):
    def __str__(self) -> str:
        disturb()
        return "the function's"


class Value:
    def __reduce__(self) -> tuple[Any, ...]:
        disturb()
        return int, (7,)


def test_an_exception_is_reported_whatever_handlers_raise_meanwhile() -> None:
    def body(ctx: Context) -> None:
        ctx.barrier()
        signal.signal(signal.SIGUSR1, alarmed)
        if ctx.rank == 1:
            raise Disturbing
        ctx.barrier()

    with pytest.raises(Disturbing) as caught:
        run(body, **FORK)

    assert caught.value.outcomes[1].error.endswith("Disturbing: the function's")  # type: ignore[attr-defined]


def test_a_value_comes_back_whatever_handlers_raise_meanwhile() -> None:
    def body(ctx: Context) -> Any:
        signal.signal(signal.SIGUSR1, alarmed)
        return Value()

    assert run(body, **FORK, returns="all") == [7, 7]


def test_a_handler_that_raises_in_the_function_is_an_exception_of_the_function() -> None:
    def body(ctx: Context) -> None:
        signal.signal(signal.SIGUSR1, alarmed)
        disturb()

    with pytest.raises(RuntimeError, match="the handler's"):
        run(body, **FORK)


def test_what_follows_from_a_childs_end_is_told_by_its_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader's worker is missed by its connection before the signal comes."""
    monkeypatch.setattr("distribute.handlers._MOMENT", 30.0)

    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            signal.signal(signal.SIGCHLD, alarmed)
            child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
            assert child.stdin is not None
            try:
                raise ConnectionResetError("felt")
            finally:
                child.stdin.close()  # which ends it
        ctx.barrier()

    with pytest.raises(RuntimeError, match="the handler's") as caught:
        run(body, **FORK)

    assert isinstance(caught.value.__context__, ConnectionResetError)
    assert "raised by rank 1 " in caught.value.__notes__[0]


def test_handlers_are_there_in_the_next_call_of_kept_workers() -> None:
    def first(ctx: Context) -> None:
        signal.signal(signal.SIGUSR1, alarmed)

    def second(ctx: Context) -> bool:
        return signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL

    with workers(**FORK) as kept:
        kept.run(first)
        assert kept.run(second, returns="all") == [True, True]


class Killing(Dataset[torch.Tensor]):
    """Ends the loader's worker that reads it, as the system does when memory is short."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2)


def test_the_death_of_a_loaders_worker_is_told_as_torch_tells_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distribute.handlers._MOMENT", 30.0)

    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            time.sleep(600)
        for _ in ctx.dataloader(Killing(), batch_size=2, num_workers=2):
            pass

    for _ in range(5):
        with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
            run(body, **FORK)
        assert type(caught.value) is RuntimeError
        assert "raised by rank 1 " in caught.value.__notes__[0]
