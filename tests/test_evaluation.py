"""Evaluation on several ranks gives the numbers of one process, however uneven the shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from distribute import Context, run

# Of three ranks with batches of 4: full and short steps, ranks without a batch, hardly any data.
TOTALS = [2, 11, 25, 40]
SLOW_TOTALS = [pytest.param(total, marks=pytest.mark.slow) for total in (11, 40)]


def samples(total: int, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(total, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] * 2 + x[:, 1]).long() % 3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def on(world_size: int, fn: Callable[[Context], Any]) -> list[Any]:
    return run(fn, devices=world_size, start_method="fork", returns="all", timeout=120)


# -- the pattern of docs/data.md -------------------------------------------------------------------


def evaluate(ctx: Context, model: nn.Module, total: int) -> tuple[float, float, int]:
    """Accuracy, mean loss and number of samples, as the page has it."""
    ctx.sync_buffers(model)
    model.eval()
    loss = torch.zeros((), dtype=torch.float64)
    right = seen = 0
    with torch.no_grad():
        for x, y in ctx.dataloader(samples(total, 2), batch_size=4):
            out = model(x)
            loss += functional.cross_entropy(out, y, reduction="sum")
            right += int((out.argmax(1) == y).sum())
            seen += len(y)
    loss, right, seen = ctx.all_reduce((loss, right, seen))
    return right / seen, float(loss) / seen, seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_documented_pattern_is_exact_with_batch_norm_and_uneven_shares(
    world_size: int,
) -> None:
    def train_and_evaluate(ctx: Context) -> tuple[Any, dict[str, torch.Tensor]]:
        model = ctx.model(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in ctx.dataloader(samples(50), batch_size=5, shuffle=True):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        own = [one.clone() for one in model.buffers()]
        results = [evaluate(ctx, model, total) for total in TOTALS]
        return (results, own), {key: one.clone() for key, one in model.state_dict().items()}

    ranks = on(world_size, train_and_evaluate)

    # Each rank normalised by statistics of its own until they were brought together.
    assert len(ranks) == world_size
    assert not torch.equal(ranks[0][0][1][0], ranks[1][0][1][0])
    state = ranks[0][1]
    assert all(torch.equal(one, state[key]) for _, other in ranks for key, one in other.items())
    model = network()
    model.load_state_dict(state)
    model.eval()
    for i, total in enumerate(TOTALS):
        x, y = samples(total, 2).tensors
        with torch.no_grad():
            out = model(x)
        expected = float((out.argmax(1) == y).double().mean())
        loss = float(functional.cross_entropy(out, y))
        for (results, _), _ in ranks:
            accuracy, mean, seen = results[i]
            assert (accuracy, seen) == (expected, total)
            assert mean == pytest.approx(loss, rel=1e-5)


def test_a_padded_loader_would_not_be_exact() -> None:
    """Otherwise the test above would show nothing about the tail."""

    def count(ctx: Context) -> int:
        loader = ctx.dataloader(samples(11), batch_size=4, uneven="pad")
        return ctx.all_reduce(sum(len(y) for _, y in loader))

    assert on(2, count) == [12, 12]


# -- torchmetrics ----------------------------------------------------------------------------------


def metrics(total: int) -> Any:
    classification = torchmetrics.classification
    # This one keeps all samples, and torchmetrics can't bring those together if a rank has none.
    keeping = {"auroc": classification.MulticlassAUROC(3)} if total >= 3 else {}
    return torchmetrics.MetricCollection(
        {
            "accuracy": classification.MulticlassAccuracy(3),
            "micro": classification.MulticlassAccuracy(3, average="micro"),
            "f1": classification.MulticlassF1Score(3, average="none"),
            "confusion": classification.MulticlassConfusionMatrix(3),
            "mean": torchmetrics.MeanMetric(),
            **keeping,
        }
    )


def measured(ctx: Context, total: int) -> dict[str, torch.Tensor]:
    """What torchmetrics makes of each rank's share; it talks over the call's process group."""
    model = ctx.model(network()).eval()
    collection = metrics(total).to(ctx.device)
    mean = collection["mean"]
    with torch.no_grad():
        for x, y in ctx.dataloader(samples(total), batch_size=4):
            out = model(x)
            for name, metric in collection.items():
                if name != "mean":
                    metric.update(out.softmax(1), y)
            mean.update(functional.cross_entropy(out, y, reduction="none"))
    return {name: metric.compute() for name, metric in collection.items()}


@pytest.mark.filterwarnings("ignore:The ``compute`` method")  # of a rank without a sample
@pytest.mark.parametrize("total", [2, 25, *SLOW_TOTALS])
def test_torchmetrics_has_the_values_of_one_process(total: int) -> None:
    expected = run(measured, total, devices=1)

    for world_size in (2, 3):
        ranks = on(world_size, lambda ctx: (ctx.world_size, measured(ctx, total)))
        assert [size for size, _ in ranks] == [world_size] * world_size
        for _, found in ranks:
            assert set(found) == set(expected)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, msg=lambda m, n=name: f"{n}: {m}")
    assert int(expected["confusion"].sum()) == total
