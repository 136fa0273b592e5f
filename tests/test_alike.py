"""Ranks that would read different data are told so, and those that read the same are not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, RandomSampler, Subset, TensorDataset, random_split

from distribute import Context, run, workers
from distribute.errors import CollectiveMismatch, RequestError
from tests.ranks import on_ranks

HUNDRED = torch.arange(100)


def _numbers(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([one for (one,) in samples])


def on_two(fn: Callable[[Context], Any]) -> Any:
    return run(fn, devices=2, start_method="fork", returns="all", timeout=120)


def read(loader: Iterable[Any]) -> list[int]:
    return [item for batch in loader for item in batch.tolist()]


def different_length(ctx: Context) -> Any:
    return ctx.dataloader(HUNDRED[: 100 - 10 * ctx.rank], batch_size=5)


def split_after_the_model(ctx: Context) -> Any:
    ctx.model(nn.Linear(1, 1))  # from here on every rank has a random stream of its own
    train, _ = random_split(TensorDataset(HUNDRED), [80, 20])
    return ctx.dataloader(train, collate_fn=_numbers)


def split_inside(ctx: Context) -> Any:
    ctx.model(nn.Linear(1, 1))
    train, _ = random_split(TensorDataset(HUNDRED), [80, 20])
    both = ConcatDataset([TensorDataset(HUNDRED), Subset(train, range(40))])
    return ctx.dataloader(both, collate_fn=_numbers)


def different_seed(ctx: Context) -> Any:
    return ctx.dataloader(HUNDRED, shuffle=True, seed=random.SystemRandom().randrange(10**9))


def different_batch(ctx: Context) -> Any:
    return ctx.dataloader(HUNDRED, batch_size=5 + ctx.rank)


def a_loader_more_on_one_rank(ctx: Context) -> Any:
    if ctx.is_main_process:
        ctx.dataloader(HUNDRED)
    return ctx.dataloader(HUNDRED, shuffle=True)


def different_epoch(ctx: Context) -> Any:
    loader = ctx.dataloader(HUNDRED, shuffle=True)
    loader.set_epoch(ctx.rank)
    return loader


def different_sampler(ctx: Context) -> Any:
    return ctx.dataloader(HUNDRED, sampler=range(50 + ctx.rank))


def different_generator(ctx: Context) -> Any:
    generator = torch.Generator().manual_seed(ctx.rank)
    return ctx.dataloader(HUNDRED, sampler=RandomSampler(range(100), generator=generator))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (different_length, "a dataset length of (90|100) on rank"),
        (split_after_the_model, r"a Subset with indices \w+ on rank"),
        (split_inside, r"a Subset with indices \w+ on rank"),
        (different_seed, "a seed of"),
        (different_batch, "a global batch size of 1[02] on rank"),
        (a_loader_more_on_one_rank, "an order of (shuffled )?samples on rank"),
        (different_epoch, "an epoch of [01] on rank"),
        (different_generator, r"a sampler's generator in state \w+ on rank"),
        (different_sampler, "a sampler length of 5[01] on rank"),
    ],
)
def test_data_that_differ_between_ranks_are_an_error(
    make: Callable[[Context], Any], what: str
) -> None:
    with pytest.raises(RequestError, match=what):
        on_two(lambda ctx: read(make(ctx)))


def test_what_only_one_rank_reads_is_its_own() -> None:
    def fn(ctx: Context) -> list[int]:
        both = ctx.dataloader(HUNDRED, batch_size=25)
        if ctx.is_main_process:
            read(ctx.dataloader(HUNDRED[:7], sharded=False))
        return read(both)

    assert on_two(fn) == [[*range(25), *range(50, 75)], [*range(25, 50), *range(75, 100)]]


def test_a_split_before_the_model_agrees_and_so_do_many_epochs_and_loaders() -> None:
    def fn(ctx: Context) -> list[int]:
        train, held_out = random_split(TensorDataset(HUNDRED), [80, 20])
        ctx.model(nn.Linear(1, 1))
        loaders = [
            ctx.dataloader(one, batch_size=5, shuffle=True, collate_fn=_numbers)
            for one in (train, held_out, train)
        ]
        return [item for _ in range(3) for loader in loaders for item in read(loader)]

    left, right = on_two(fn)

    assert len(left) == len(right) == 3 * 90


def test_kept_workers_compare_within_a_call() -> None:
    def fn(ctx: Context, total: int, mine: bool) -> int:
        if ctx.is_main_process or not mine:
            return len(read(ctx.dataloader(HUNDRED[:total])))
        return 0

    with workers(devices=2, start_method="fork") as kept:
        assert kept.run(fn, 10, False) == 5
        assert kept.run(fn, 20, True) == 10
        assert kept.run(fn, 30, False) == 15


def test_without_a_call_nothing_is_compared() -> None:
    """The pieces work on their own, as tests of the library use them."""
    from distribute.data import dataloader

    counts = on_ranks(
        2, lambda here: len(list(dataloader(here, HUNDRED[: 10 + here.rank], ordinal=0)))
    )

    assert counts == [5, 6] or counts == [5, 5]


def test_loaders_at_different_epochs_are_an_error_at_the_next_collective() -> None:
    def fn(ctx: Context) -> None:
        loader = ctx.dataloader(HUNDRED, shuffle=True)
        if ctx.is_main_process:
            next(iter(loader))  # to look at a batch: rank 0 is an epoch ahead from here on
        ctx.all_reduce(1)

    with pytest.raises(CollectiveMismatch) as caught:
        on_two(fn)

    assert "loaders: 0 in epoch 0" in str(caught.value)
