"""What kept workers have received once is not sent again, and what has changed always is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from distribute import Context, Workers, workers
from distribute.sent import LARGE_BYTES, MOST, Sent

SIZE = LARGE_BYTES // 4  # float32 elements


def two(method: str = "fork") -> Workers:
    return workers(devices=2, accelerator="cpu", start_method=method)


def files() -> int:
    """Memory files that this process has open."""
    return len(
        [
            one
            for one in os.listdir("/proc/self/fd")
            if os.path.exists(path := f"/proc/self/fd/{one}") and "memfd" in os.readlink(path)
        ]
    )


class Sender:
    """Packs as `Workers` does, and counts what goes out."""

    def __init__(self) -> None:
        self.sent = Sent()

    def send(self, *objects: Any) -> tuple[int, int, int]:
        """How many buffers were new, how many forgotten, and how many go in the message."""
        from distribute.payload import pack

        payload = pack(objects, sent=self.sent)
        news = self.sent.news()
        found = (
            len(news.files),
            len(news.forgotten),
            len(payload.sizes) - 1 - len(payload.elsewhere),
        )
        news.close()
        payload.close()
        self.sent.sweep()
        return found


MAKERS: list[Callable[[], Any]] = [lambda: torch.ones(SIZE), lambda: np.ones(SIZE, np.float32)]
each_kind = pytest.mark.parametrize("make", MAKERS, ids=["tensor", "array"])


@each_kind
def test_what_has_not_changed_is_not_sent_again(make: Callable[[], Any]):
    sender, data = Sender(), make()

    assert [sender.send(data) for _ in range(3)] == [(1, 0, 0), (0, 0, 0), (0, 0, 0)]


def through_numpy(data: Any) -> None:
    np.asarray(data)[-1] = 7


def through_data(data: Any) -> None:
    if isinstance(data, torch.Tensor):
        data.data[-1] = 7
    else:
        data[-1] = 7


@each_kind
@pytest.mark.parametrize("write", [through_numpy, through_data])
def test_what_has_changed_is_sent_with_each_message_from_then_on(
    make: Callable[[], Any], write: Callable[[Any], None]
):
    """Also where no version counter has moved."""
    sender, data = Sender(), make()
    sender.send(data)
    write(data)

    assert [sender.send(data) for _ in range(2)] == [(0, 1, 1), (0, 0, 1)]


@each_kind
def test_what_is_gone_is_forgotten(make: Callable[[], Any]):
    sender, data = Sender(), make()
    sender.send(data)
    del data

    sender.sent.sweep()
    assert sender.send() == (0, 1, 0)
    assert sender.send() == (0, 0, 0)


def test_another_object_in_the_same_place_is_sent():
    sender, place = Sender(), torch.zeros(SIZE)
    sender.send(place.numpy())

    place += 1
    assert sender.send(place.numpy()) == (1, 1, 0)


def test_small_buffers_are_always_in_the_message():
    sender, data = Sender(), torch.ones(SIZE - 16)

    assert [sender.send(data) for _ in range(2)] == [(0, 0, 1)] * 2


def test_there_is_a_bound_for_what_is_held():
    sender, many = Sender(), [torch.ones(SIZE) for _ in range(MOST + 5)]

    assert [sender.send(many) for _ in range(2)] == [(MOST, 0, 5), (0, 0, 5)]


def test_nothing_is_left_open():
    before = files()
    sender = Sender()
    for _ in range(3):
        sender.send(torch.ones(SIZE), np.ones(SIZE))

    assert files() == before


# -- with workers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_every_call_sees_the_arguments_as_they_are(method: str):
    """Unchanged, changed by the caller, changed by a rank, and replaced."""

    def body(ctx: Context, data: torch.Tensor, array: Any) -> list[float]:
        found = float(data.sum()), float(array.sum())
        data += ctx.rank + 1  # its own copy
        array += 1
        return ctx.all_gather(found)

    data, array = torch.zeros(SIZE), np.zeros(SIZE)
    with two(method) as kept:
        for change in (0, 0, 1, 0, 2, 2):
            data += change
            array[0] += change
            expected = float(data.sum()), float(array.sum())
            for own in kept.run(body, data, array, returns="all"):
                assert own == [expected, expected]
        data = torch.ones(SIZE)
        assert kept.run(body, data, array)[0][0] == SIZE
    assert float(data.sum()) == SIZE


def test_what_a_rank_keeps_of_an_argument_stays_its_own():
    """A module global that holds an argument is not touched when the caller's object is gone."""

    def keep(ctx: Context, data: torch.Tensor) -> None:
        distribute_test.kept = data  # type: ignore[attr-defined]
        data[0] = ctx.rank + 5

    def kept_sum(ctx: Context) -> list[float]:
        return ctx.all_gather(float(distribute_test.kept.sum()))  # type: ignore[attr-defined]

    import tests.test_sent as distribute_test

    with two() as kept:
        kept.run(keep, torch.ones(SIZE))
        for value in range(3):
            kept.run(len, torch.full((SIZE,), float(value)))
            assert kept.run(kept_sum) == [SIZE + 4, SIZE + 5]


def test_views_stay_tied_and_a_model_goes_on():
    def body(ctx: Context, model: nn.Module, data: torch.Tensor, view: torch.Tensor) -> float:
        data[0] = 3
        assert view[0] == 3
        assert ctx.world_size == 2
        with torch.no_grad():
            return model(torch.ones(1, 600)).detach().sum().item()

    model = nn.Linear(600, 600)
    data = torch.ones(SIZE * 2)
    with two() as kept:
        for _ in range(3):
            assert kept.run(body, model, data, data[:SIZE]) == pytest.approx(
                model(torch.ones(1, 600)).detach().sum().item()
            )
            with torch.no_grad():
                model.weight += 1


def test_after_a_failure_new_processes_get_everything():
    def fail(ctx: Context, data: torch.Tensor) -> None:
        raise ValueError("no")

    def total(ctx: Context, data: torch.Tensor) -> list[float]:
        return ctx.all_gather(float(data.sum()))

    data = torch.ones(SIZE)
    before = files()
    with two() as kept:
        for _ in range(2):
            assert kept.run(total, data) == [SIZE, SIZE]
            with pytest.raises(ValueError, match="no"):
                kept.run(fail, data)
    assert files() == before


def test_ranks_hold_no_file_that_nobody_uses():
    """Calls with ever new data leave nothing growing, in the caller and in the ranks."""

    def held(ctx: Context, data: torch.Tensor) -> list[int]:
        return ctx.all_gather(files())

    with two() as kept:
        first = kept.run(held, torch.ones(SIZE))
        own = files()
        for _ in range(10):
            last = kept.run(held, torch.ones(SIZE))
        assert [one <= old + 1 for one, old in zip(last, first, strict=True)] == [True, True]
        assert files() == own
