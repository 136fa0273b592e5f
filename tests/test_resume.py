"""A loader goes on where another one stood, in whatever world."""

from __future__ import annotations

import dataclasses
import io
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, WeightedRandomSampler

from distribute.data import ShardedLoader, dataloader
from distribute.errors import RequestError
from distribute.world import World
from tests.ranks import on_ranks
from tests.test_data import (
    Buckets,
    Counting,
    Drawing,
    ShuffledBuckets,
    Shuffling,
    Sized,
    draws,
    flat,
    in_turn,
    lists,
    loaders,
    world,
)
from tests.test_data import torchs_signal_handler as torchs_signal_handler  # a fixture


def after(loader: ShardedLoader[Any], steps: int) -> dict[str, Any]:
    """The state after some steps of an epoch, as a program saves it."""
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    saved = io.BytesIO()
    torch.save(loader.state_dict(), saved)
    saved.seek(0)
    state: dict[str, Any] = torch.load(saved, weights_only=True)
    return state


def resumed(size: int, data: Any, state: dict[str, Any], **options: Any) -> list[Any]:
    """Loaders of a new program, whose seed and ordinal are others, that go on from a state."""
    made = [
        dataloader(dataclasses.replace(world(rank, size), seed=99), data, ordinal=5, **options)
        for rank in range(size)
    ]
    for loader in made:
        loader.load_state_dict(state)
    return made


def joined(ranks: list[list[list[Any]]]) -> list[Any]:
    """What all ranks together read; a few samples at the end do not give each a batch."""
    steps = itertools.zip_longest(*ranks, fillvalue=[])
    return [item for step in steps for batch in step for item in batch]


@settings(max_examples=50)
@given(
    st.integers(0, 60),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2),
    st.data(),
)
def test_an_epoch_goes_on_under_any_other_world_and_batch_size(
    total: int,
    size: int,
    batch_size: int,
    other: int,
    other_batch: int,
    shuffle: bool,
    epoch: int,
    data: st.DataObject,
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "uneven": "balance"}
    samples = torch.arange(total)
    made = loaders(size, samples, batch_size=batch_size, **options)
    for loader in made:
        loader.set_epoch(epoch)
    done = data.draw(st.integers(0, len(made[0])))
    begun = [lists(loader)[:done] for loader in made]
    alone = dataloader(world(), samples, ordinal=0, batch_size=1, **options)
    alone.set_epoch(epoch)
    order, following = flat(lists(alone)), flat(lists(alone))
    for loader in made:
        loader.set_epoch(epoch)
    state = after(made[0], done)

    again = resumed(other, samples, state, batch_size=other_batch, **options)

    expected = [len(loader) for loader in again]
    first = [lists(loader) for loader in again]
    taken = 0 if state["place"] is None else state["place"]
    assert joined(begun) + joined(first) == order
    assert joined(begun) == order[:taken]
    assert [len(batches) for batches in first] == expected
    assert [loader.epoch for loader in again] == [epoch] * other
    assert joined([lists(loader) for loader in again]) == following


MORE_THAN_CORES = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@MORE_THAN_CORES
@pytest.mark.parametrize(
    ("workers", "persistent"),
    [(0, False), (3, True), *(pytest.param(n, n == 1, marks=pytest.mark.slow) for n in (1, 3))],
)
def test_what_was_fetched_ahead_is_not_taken_for_read(workers: int, persistent: bool) -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "num_workers": workers}
    options |= {"persistent_workers": True} if workers and persistent else {}
    whole = lists(dataloader(world(), torch.arange(24), ordinal=0, batch_size=2, shuffle=True))
    loader = dataloader(world(), torch.arange(24), ordinal=0, **options)
    iterator = iter(loader)
    begun = [next(iterator).tolist() for _ in range(5)]
    state = loader.state_dict()

    (again,) = resumed(1, torch.arange(24), state, **options)

    assert len(again) == 7
    assert begun + lists(again) == whole
    assert len(again) == 12
    assert [batch.tolist() for batch in iterator] == whole[5:]  # saving has not disturbed it


@MORE_THAN_CORES
@pytest.mark.parametrize(
    ("save_workers", "load_workers"),
    [
        (0, 0),
        (2, 3),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((0, 1), (0, 3), (2, 0), (2, 1))),
    ],
)
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(
    save_workers: int, load_workers: int
) -> None:
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True}

    def rows(loader: ShardedLoader[Any]) -> list[list[float]]:
        return [row[:3] for row in draws(loader)]  # the last one is the worker

    for rank in range(2):
        plain = dataloader(world(rank, 2), Drawing(20), ordinal=0, **options)
        epochs = [rows(plain) for _ in range(2)]
        saving = dataloader(
            world(rank, 2), Drawing(20), ordinal=0, num_workers=save_workers, **options
        )
        state = after(saving, 2)
        again = resumed(2, Drawing(20), state, num_workers=load_workers, **options)[rank]

        assert rows(again) == epochs[0][2 * 2 :]
        assert rows(again) == epochs[1]


def test_a_state_between_epochs_and_one_at_the_last_batch() -> None:
    def made() -> ShardedLoader[Any]:
        return dataloader(world(), torch.arange(10), ordinal=0, batch_size=5, shuffle=True)

    plain = made()
    epochs = [lists(plain) for _ in range(3)]
    fresh, saving = made().state_dict(), made()
    last, ended = after(saving, 2), None
    list(saving)
    list(saving)
    ended = saving.state_dict()

    (begun,) = resumed(1, torch.arange(10), fresh, batch_size=5, shuffle=True)
    assert lists(begun) == epochs[0]
    (at_end,) = resumed(1, torch.arange(10), last, batch_size=5, shuffle=True)
    assert len(at_end) == 0
    assert lists(at_end) == []  # what the loop does after an epoch, it does
    assert len(at_end) == 2
    assert lists(at_end) == epochs[1]
    (next_one,) = resumed(1, torch.arange(10), ended, batch_size=5, shuffle=True)
    assert (next_one.epoch, next_one.state_dict()["epoch"]) == (3, 3)
    next_one.set_epoch(2)
    assert lists(next_one) == epochs[2]


def test_setting_the_epoch_that_is_resumed_keeps_the_place_and_another_does_not() -> None:
    def made(**options: Any) -> ShardedLoader[Any]:
        return dataloader(world(), torch.arange(8), ordinal=0, batch_size=2, **options)

    loader = made()
    loader.set_epoch(4)
    state = after(loader, 3)

    for epoch, left in ((4, [[6, 7]]), (5, [[0, 1], [2, 3], [4, 5], [6, 7]])):
        again = made()
        again.load_state_dict(state)
        again.set_epoch(epoch)
        assert lists(again) == left
    sampler = DistributedSampler(torch.arange(8), 1, 0, shuffle=False)  # type: ignore[arg-type, var-annotated]
    again = made(sampler=sampler)
    again.load_state_dict(state)
    sampler.set_epoch(4)
    assert lists(again) == [[6, 7]]


def test_a_state_is_of_the_epoch_that_is_read_whatever_is_set_for_the_next() -> None:
    loader = dataloader(world(), torch.arange(8), ordinal=0, batch_size=2)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(9)
    state = loader.state_dict()
    list(iterator)

    assert (state["epoch"], state["place"]) == (0, 2)
    assert (loader.state_dict()["epoch"], loader.state_dict()["place"]) == (9, None)


def test_a_state_taken_before_anything_is_read_again_is_the_one_that_was_loaded() -> None:
    loader = dataloader(world(), torch.arange(8), ordinal=0, batch_size=2)
    state = after(loader, 3)
    again = dataloader(world(), torch.arange(8), ordinal=0, batch_size=2)
    again.load_state_dict(state)

    assert again.state_dict() == state
    iterator = iter(again)
    assert again.state_dict() == state
    next(iterator)
    assert again.state_dict()["place"] == 8


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["weighted", "generator", "buckets", "random buckets", "own"])
def test_samplers_of_the_user_go_on(kind: str, size: int) -> None:
    def options() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        sampled: dict[str, dict[str, Any]] = {
            "weighted": {"sampler": WeightedRandomSampler([1.0, 2.0] * 12, 24)},
            "generator": {"shuffle": True, "generator": generator},
            "buckets": {"batch_sampler": Buckets([[n, n + 1] for n in range(0, 24, 2)])},
            "random buckets": {
                "batch_sampler": ShuffledBuckets([[n, n + 1] for n in range(0, 24, 2)])
            },
            "own": {
                "sampler": WeightedRandomSampler([1.0, 2.0] * 12, 24, generator=generator),
            },
        }
        return sampled[kind]

    batch: dict[str, Any] = {} if "buckets" in kind else {"batch_size": 2}
    alone = dataloader(world(), torch.arange(24), ordinal=0, **options(), **batch)
    epochs = [lists(alone) for _ in range(3)]
    saving = dataloader(world(), torch.arange(24), ordinal=0, **options(), **batch)
    list(saving)
    state = after(saving, 6)

    again = [
        dataloader(world(rank, size), torch.arange(24), ordinal=0, **options(), **batch)
        for rank in range(size)
    ]
    for loader in again:
        loader.load_state_dict(state)

    assert in_turn([lists(loader) for loader in again]) == flat(epochs[1][6:])
    assert in_turn([lists(loader) for loader in again]) == flat(epochs[2])


class Wavering(Shuffling):
    """A stream whose items are drawn when they are read."""

    def __iter__(self) -> Iterator[int]:
        return (1000 * item + random.randrange(1000) for item in super().__iter__())


def test_a_stream_goes_on_under_another_world_and_other_workers() -> None:
    whole = flat(lists(dataloader(world(), Wavering(60), ordinal=0, batch_size=1)))
    state: dict[str, Any] | None = None
    read: list[int] = []

    def run(size: int, workers: int, batch_size: int, steps: int | None) -> None:
        options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
        options |= {"persistent_workers": True} if workers else {}

        def of_rank(here: World) -> tuple[list[int], int, dict[str, Any]]:
            here = dataclasses.replace(here, seed=world().seed)
            loader = dataloader(here, Wavering(60), ordinal=0, **options)
            if state is not None:
                loader.load_state_dict(state)
            batches = [batch.tolist() for batch in itertools.islice(loader, steps)]
            return flat(batches), len(batches), loader.state_dict()

        nonlocal state, read
        found = on_ranks(size, of_rank)
        assert {count for _, count, _ in found} == {steps or found[0][1]}
        assert [one for _, _, one in found] == [found[0][2]] * size
        read += [item for items, _, _ in found for item in items]
        state = found[0][2]

    run(2, 2, 2, 3)  # not a multiple of the workers
    run(1, 0, 3, 2)
    run(2, 1, 2, None)

    assert len(read) == 60
    assert sorted(read) == sorted(whole)


def test_the_length_of_a_resumed_stream() -> None:
    loader = dataloader(world(), Sized(20), ordinal=0, batch_size=3, num_workers=2)
    state = after(loader, 3)

    (again,) = resumed(1, Sized(20), state, batch_size=2)

    assert len(again) == 6
    assert len(lists(again)) == 6
    assert len(again) == 10


def test_the_place_in_a_stream_that_shards_itself_is_not_known_here() -> None:
    loader = dataloader(world(), Counting(6), ordinal=0, sharded=True)
    assert loader.state_dict()["place"] is None
    iterator = iter(loader)
    next(iterator)

    with pytest.raises(RuntimeError, match="sharded=True"):
        loader.state_dict()
    list(iterator)
    assert loader.state_dict()["epoch"] == 1


def test_states_of_other_data_are_refused() -> None:
    def made(total: int, **options: Any) -> ShardedLoader[Any]:
        return dataloader(world(), torch.arange(total), ordinal=0, batch_size=2, **options)

    state = after(made(8), 2)
    for other in (made(9), made(8, shuffle=True), made(8, sampler=range(8))):
        with pytest.raises(RequestError, match="8 samples"):
            other.load_state_dict(state)
    with pytest.raises(RequestError, match="generators"):
        made(8, generator=torch.Generator()).load_state_dict(state)
    with pytest.raises(RequestError, match="keys"):
        made(8).load_state_dict({"epoch": 3})
    between = made(8)
    list(between)
    grown = made(9)
    grown.load_state_dict(between.state_dict())
    assert grown.epoch == 1
