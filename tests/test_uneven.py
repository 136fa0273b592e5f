"""Training on data that do not divide evenly is that of one process on the global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from distribute import Context, run

STEPS = 50
BATCH = 12  # of all ranks together, which 2, 3 and 4 ranks share evenly

SLOW_WORLDS = [pytest.param(size, marks=pytest.mark.slow) for size in (2, 3)]


def samples(total: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(total, 5, dtype=torch.float64, generator=generator)
    return x, torch.randn(total, 1, dtype=torch.float64, generator=generator) + x.sum(1, True)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def alone(total: int, batches: Iterable[list[int]]) -> torch.Tensor:
    """What a plain loop in one process makes of these global batches."""
    x, y = samples(total)
    model = network()
    optimizer = optimizer_of(model)
    steps = 0
    for positions in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(x[positions]), y[positions]).backward()
        optimizer.step()
        steps += 1
    assert steps == STEPS
    return parameters(model)


def on_ranks(
    world_size: int, total: int, weighted: bool, **options: Any
) -> list[tuple[int, torch.Tensor, list[list[int]]]]:
    """World size, parameters and what was read, of each rank that trained for `STEPS` steps."""

    def train(ctx: Context) -> tuple[int, torch.Tensor, list[list[int]]]:
        x, y = samples(total)
        model = ctx.model(network())
        optimizer = optimizer_of(model)
        loader = ctx.dataloader(range(total), **options)
        read: list[list[int]] = []
        while len(read) < STEPS:
            for positions in loader:
                loss = functional.mse_loss(model(x[positions]), y[positions])
                optimizer.zero_grad()
                (loss * loader.weight if weighted else loss).backward()
                optimizer.step()
                read.append(positions.tolist())
        return ctx.world_size, parameters(ctx.unwrap(model)), read

    return run(train, devices=world_size, start_method="fork", returns="all", seed=5, timeout=120)


def same(ranks: list[Any], reference: torch.Tensor, world_size: int) -> None:
    assert [size for size, _, _ in ranks] == [world_size] * world_size
    for _, found, _ in ranks:
        torch.testing.assert_close(found, reference, rtol=1e-6, atol=1e-12)


def global_batches(ranks: list[Any]) -> list[list[int]]:
    """What the ranks together read at each step."""
    steps = zip(*(read for _, _, read in ranks), strict=True)
    return [list(chain.from_iterable(step)) for step in steps]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("total", "tail", "shuffle"),
    [
        (55, 7, True),
        *(
            pytest.param(48 + tail, tail, shuffle, marks=pytest.mark.slow)
            for tail in (4, 6, 9, 12)
            for shuffle in (False, True)
        ),
    ],
)
def test_balanced_and_weighted_steps_are_those_of_one_process(
    world_size: int, total: int, tail: int, shuffle: bool
) -> None:
    ranks = on_ranks(
        world_size, total, True, global_batch_size=BATCH, shuffle=shuffle, uneven="balance"
    )

    batches = global_batches(ranks)
    assert [len(batch) for batch in batches] == [*[BATCH] * 4, tail] * (STEPS // 5)
    plain: list[list[int]] = []

    def read(ctx: Context) -> None:
        loader = ctx.dataloader(range(total), batch_size=BATCH, shuffle=shuffle, uneven="balance")
        while len(plain) < STEPS:
            plain.extend(batch.tolist() for batch in loader)

    run(read, devices=1, seed=5)
    assert batches == plain
    same(ranks, alone(total, plain), world_size)


@pytest.mark.parametrize("world_size", [*SLOW_WORLDS, 4])
def test_a_tail_of_fewer_samples_than_ranks_is_shared_out_with_the_step_before(
    world_size: int,
) -> None:
    total = 4 * BATCH + 1
    ranks = on_ranks(world_size, total, True, global_batch_size=BATCH, uneven="balance")

    batches = global_batches(ranks)
    assert batches[:5] == [
        *[list(range(n, n + BATCH)) for n in (0, 12, 24)],
        list(range(36, 43)),
        list(range(43, 49)),
    ]
    same(ranks, alone(total, batches), world_size)


@pytest.mark.slow
def test_a_global_batch_that_does_not_divide_is_exact_too() -> None:
    ranks = on_ranks(3, 50, True, global_batch_size=10, uneven="balance")

    assert {len(batch) for _, _, read in ranks for batch in read} == {3, 4}
    same(ranks, alone(50, global_batches(ranks)), 3)


def test_without_the_weight_it_is_not_the_mean_over_the_samples() -> None:
    """Otherwise the tests above would show nothing."""
    ranks = on_ranks(2, 55, False, global_batch_size=BATCH, uneven="balance")

    reference = alone(55, global_batches(ranks))
    assert not torch.allclose(ranks[0][1], reference, rtol=1e-4)
    assert torch.equal(ranks[0][1], ranks[1][1])


@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def test_padding_trains_on_the_repeated_samples_as_well(world_size: int) -> None:
    total = 55  # 7 are left for the last step
    ranks = on_ranks(world_size, total, False, global_batch_size=BATCH, uneven="pad")

    batches = global_batches(ranks)
    repeated = -7 % world_size
    assert batches[4] == [*range(48, 55), *range(repeated)]
    same(ranks, alone(total, batches), world_size)


@pytest.mark.parametrize(
    ("world_size", "make"),
    [
        (2, lambda ctx, total: ctx.dataloader(range(total), batch_size=2)),
        (3, lambda ctx, total: ctx.dataloader(range(total), batch_size=2, shuffle=True)),
        (3, lambda ctx, total: ctx.dataloader(range(total), batch_size=2, drop_last=True)),
        (2, lambda ctx, total: ctx.dataloader(range(total), sampler=range(total))),
    ],
)
def test_no_length_leaves_one_rank_waiting(
    world_size: int, make: Callable[[Context, int], Any]
) -> None:
    def train(ctx: Context) -> list[int]:
        model = ctx.model(nn.Linear(1, 1))
        counts: list[int] = []
        for total in range(world_size, 20):
            loader = make(ctx, total)
            steps = 0
            for batch in loader:
                model(batch.float().view(-1, 1)).sum().backward()
                steps += 1
            assert steps == len(loader)
            counts.append(steps)
        return counts

    ranks = run(train, devices=world_size, start_method="fork", returns="all", timeout=120)

    assert ranks == [ranks[0]] * world_size
    assert sum(ranks[0]) > 0
