"""What the collectives of the context cost beside torch's own: microseconds and their ratio.

$ python benchmarks/collectives.py
$ python benchmarks/collectives.py --quick

Both are measured in the same ranks, taken in turn, and the medians are compared. The yardstick is
what people write without this library, in place and unchecked: `dist.all_reduce(tensor)`, a number
put into a tensor and taken out again, `dist.all_gather_object`. The columns are with the check of
what the ranks are about to do, and without (`check_collectives=False`). The last line is about
forward and backward passes of a model of many layers, in plain DDP and in `ctx.model`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribute import Context, run

SIZES = (1, 1_000, 100_000, 10_000_000)
TARGET = 1.05  # of a training step


def of_number(ctx: Context) -> float:
    value = torch.tensor(1.0)
    dist.all_reduce(value)
    return value.item()


def gathered(ctx: Context, x: torch.Tensor) -> list[torch.Tensor]:
    rows = [torch.empty_like(x) for _ in range(ctx.world_size)]
    dist.all_gather(rows, x)
    return rows


def objects(ctx: Context, obj: object) -> list[Any]:
    found: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(found, obj)
    return found


def step(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


def many(ctx: Context, repeats: int) -> dict[str, tuple[float, float]]:
    """Medians of torch's own and of the context's, by name."""
    jobs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    for size in SIZES:
        x = torch.ones(size)
        jobs[f"all_reduce of {size:,} floats"] = (
            lambda x=x: dist.all_reduce(x.clone()),
            lambda x=x: ctx.all_reduce(x),
        )
    x = torch.ones(1_000)
    jobs["all_reduce of a number"] = (lambda: of_number(ctx), lambda: ctx.all_reduce(1.0))
    jobs["all_gather of 1,000 floats"] = (lambda: gathered(ctx, x), lambda: ctx.all_gather(x))
    mine = {"rank": ctx.rank}
    jobs["all_gather_object"] = (
        lambda: objects(ctx, mine),
        lambda: ctx.all_gather_object(mine),
    )
    jobs["barrier"] = (dist.barrier, ctx.barrier)
    return {name: interleaved(*pair, repeats) for name, pair in jobs.items()}


def train(ctx: Context, repeats: int) -> tuple[float, float]:
    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(150)))

    plain, ours, x = DistributedDataParallel(layers()), ctx.model(layers()), torch.ones(8, 64)
    return interleaved(lambda: step(plain, x), lambda: step(ours, x), repeats)


def interleaved(
    one: Callable[[], Any], two: Callable[[], Any], repeats: int
) -> tuple[float, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 3):
        for action, taken in zip((one, two), times, strict=True):
            start = time.perf_counter()
            action()
            if number >= 3:
                taken.append(time.perf_counter() - start)
    return median(times[0]) * 1e6, median(times[1]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what collectives cost.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="30 repeats")
    args = parser.parse_args()
    repeats: int = 30 if args.quick else args.repeats
    options: dict[str, Any] = {
        "devices": args.devices, "accelerator": "cpu", "start_method": "fork"
    }  # fmt: skip

    checked = run(many, repeats, **options)
    unchecked = run(many, repeats, check_collectives=False, **options)

    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, torch {torch.__version__}, {args.devices} ranks, {repeats} repeats")
    print(
        f"{'microseconds':32}{'torch':>10}{'checked':>10}{'ratio':>8}{'unchecked':>11}{'ratio':>8}"
    )
    for name, (base, ours) in checked.items():
        plain, bare = unchecked[name]
        print(f"{name:32}{base:10.0f}{ours:10.0f}{ours / base:8.2f}{bare:11.0f}{bare / plain:8.2f}")
    base, ours = run(train, max(repeats // 3, 10), **options)
    print(
        f"\n{'a training step of 150 layers':32}{base:10.0f}{ours:10.0f}{ours / base:8.2f}", end=""
    )
    print(f"{'target':>11}{TARGET:8.2f}")


if __name__ == "__main__":
    main()
