"""Which random numbers the ranks of a call draw; the launcher's own are in the contract."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, WeightedRandomSampler, random_split

from distribute import Context, run
from tests.test_data import torchs_signal_handler as torchs_signal_handler  # a fixture


def draw() -> list[float]:
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


class Noise(Dataset[torch.Tensor]):
    def __init__(self, total: int = 24) -> None:
        self.total = total

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, position: int) -> torch.Tensor:
        return torch.tensor(draw(), dtype=torch.float64)


def on(world_size: int, fn: Callable[[Context], Any], seed: int | None = 7) -> list[Any]:
    method: dict[str, Any] = {} if world_size == 1 else {"start_method": "fork", "timeout": 120}
    ranks = run(fn, devices=world_size, returns="all", seed=seed, **method)
    assert len(ranks) == world_size
    return ranks


def training(ctx: Context) -> list[list[float]]:
    """Draws at every point of a program that a rank passes."""
    assert ctx.world_size > ctx.rank
    drawn = [draw()]
    model = ctx.model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)))
    drawn.append(draw())
    loader = ctx.dataloader(Noise(), batch_size=2, shuffle=True)
    for _, batch in zip(range(4), loader, strict=False):
        drawn.append(model(batch.float()).detach().flatten()[:3].bool().tolist())
        drawn.append(draw())
    return drawn


@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_0_draws_what_a_single_process_draws_wherever_it_is(world_size: int) -> None:
    (alone,) = on(1, training)

    ranks = on(world_size, training)

    assert ranks[0][0] == alone[0]
    assert [ranks[0][at] for at in (1, 3, 5, 7, 9)] == [alone[at] for at in (1, 3, 5, 7, 9)]
    assert on(world_size, training) == ranks
    assert on(world_size, training, seed=8) != ranks


def test_ranks_share_their_stream_until_the_first_model_or_batch() -> None:
    def fn(ctx: Context, first: str) -> list[list[float]]:
        drawn = [draw()]
        if first == "model":
            ctx.model(nn.Linear(1, 1))
        else:
            loader = ctx.dataloader(Noise())
            drawn.append(draw())
            next(iter(loader))
        return [*drawn, draw()]

    for first in ("model", "batch"):
        ranks = on(3, lambda ctx, first=first: fn(ctx, first))
        assert all(shared == ranks[0][:-1] for *shared, _ in ranks)
        for (*_, left), (*_, right) in combinations(ranks, 2):
            assert not set(left) & set(right)


def test_a_split_and_a_weighted_sampler_agree_on_all_ranks() -> None:
    def fn(ctx: Context) -> tuple[list[int], list[int], list[int], list[int]]:
        train, held_out = random_split(TensorDataset(torch.arange(40)), [30, 10])
        ctx.model(nn.Linear(1, 1))  # from here on every rank has a stream of its own
        sampler = WeightedRandomSampler([1.0] * 30, 30)
        loader = ctx.dataloader(train, batch_size=5, sampler=sampler)
        read = [n for (batch,) in loader for n in batch.tolist()]
        seen = [n for (batch,) in ctx.dataloader(held_out) for n in batch.tolist()]
        return list(train.indices), list(held_out.indices), read, seen

    left, right = on(2, fn)

    assert left[:2] == right[:2]
    assert not set(left[0]) & set(left[1])
    assert sorted(left[3] + right[3]) == sorted(left[1])  # each held-out sample once
    assert set(left[2] + right[2]) <= set(left[0])
    assert len(left[2] + right[2]) == 30


@pytest.mark.parametrize("workers", [0, 2])
def test_no_two_streams_of_augmentation_are_equal(workers: int) -> None:
    def fn(ctx: Context) -> list[list[float]]:
        options = {"persistent_workers": True} if workers else {}
        loader = ctx.dataloader(Noise(), batch_size=2, num_workers=workers, **options)
        other = ctx.dataloader(Noise(), batch_size=2, num_workers=workers)
        return [row for one in (loader, loader, other) for batch in one for row in batch.tolist()]

    ranks = on(2, fn)

    rows = [row for drawn in ranks for row in drawn]
    assert len(rows) == 3 * 24
    for column in range(3):
        assert len({row[column] for row in rows}) == len(rows)
    assert on(2, fn) == ranks


def test_two_loaders_over_one_dataset_are_not_paired() -> None:
    def fn(ctx: Context) -> list[list[int]]:
        loaders = [ctx.dataloader(torch.arange(40), batch_size=4, shuffle=True) for _ in range(2)]
        return [[n for batch in loader for n in batch.tolist()] for loader in loaders]

    for ranks in (on(1, fn), on(2, fn)):
        orders = [[n for rank in ranks for n in rank[loader]] for loader in range(2)]
        assert [sorted(order) for order in orders] == [list(range(40))] * 2
        assert sum(left == right for left, right in zip(*orders, strict=True)) < 10


def test_a_loader_saved_by_rank_0_goes_on_in_another_world_with_the_same_draws(
    tmp_path: Any,
) -> None:
    path = tmp_path / "loader.pt"

    def loop(ctx: Context, begin: bool, stop: int) -> list[list[float]]:
        loader = ctx.dataloader(Noise(), batch_size=2, shuffle=True, num_workers=1)
        if not begin:
            loader.load_state_dict(ctx.load(path))
        rows = []
        for epoch in range(loader.epoch, 2):
            for step, batch in enumerate(loader):
                rows += batch.tolist()
                if begin and (epoch, step) == (1, stop):
                    ctx.save(loader.state_dict(), path)
                    return rows
        return rows

    whole = on(2, lambda ctx: loop(ctx, True, -1))
    begun = on(2, lambda ctx: loop(ctx, True, 2))
    rest = on(2, lambda ctx: loop(ctx, False, -1), seed=99)

    for rank in range(2):
        assert begun[rank] + rest[rank] == whole[rank]
        assert len(begun[rank]) == 12 + 6
    ((alone),) = on(1, lambda ctx: loop(ctx, False, -1), seed=None)
    assert len(alone) == 12
