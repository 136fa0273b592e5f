"""Never run: one use of each accepted spelling, checked by mypy and pyright."""

from __future__ import annotations

from typing import assert_type

import torch

from distribute import Context, Distributed, Workers, distributed, run, workers


@distributed
def bare(ctx: Context, x: int, *, y: str = "") -> float:
    return x + len(y)


@distributed(devices=2, strategy="ddp")
def with_options(ctx: Context, x: int) -> float:
    return float(x)


@distributed(devices=2, returns="all")
def of_all(ctx: Context, x: int) -> float:
    return float(x)


@distributed(devices=2)
def plain(lr: float) -> int:
    return int(lr)


class Job:
    @distributed(devices=2)
    def fit(self, ctx: Context, n: int) -> str:
        return str(n)

    @distributed
    def alone(self, ctx: Context, n: int) -> str:
        return str(n)

    @distributed(devices=2)
    def without(self, n: int) -> str:
        return str(n)

    @staticmethod
    @distributed(devices=2)
    def static(ctx: Context, n: int) -> str:
        return str(n)


def train(ctx: Context, x: int) -> bytes:
    return bytes(x)


assert_type(bare(1, y="a"), float)
assert_type(with_options(1), float)
assert_type(of_all(1), list[float])
assert_type(plain(0.1), int)
assert_type(Job().fit(1), str)
assert_type(Job().alone(1), str)
assert_type(Job().without(1), str)
assert_type(Job.static(1), str)
assert_type(run(train, 1, devices=2), bytes)
assert_type(run(train, 1, devices=2, returns="all"), list[bytes])
assert_type(run(plain, 0.1, devices=2), int)
print(bare.plan().method)

with workers(devices=2, seed=1) as kept:
    assert_type(kept, Workers)
    assert_type(kept.run(train, 1), bytes)
    assert_type(kept.run(train, 1, returns="all"), list[bytes])
    assert_type(kept.run(plain, 0.1), int)
    assert_type(kept.run(lambda: 1.5), float)
    assert_type(kept.world_size, int)
    print(kept.plan().method)
    kept.close()


def takes(function: Distributed[[int], float]) -> None:
    function(1)


takes(with_options)


def body(ctx: Context) -> None:
    net = torch.nn.Linear(1, 1)
    assert_type(ctx.model(net), torch.nn.Linear)
    assert_type(ctx.model(lambda: torch.nn.Linear(1, 1)), torch.nn.Linear)
    assert_type(ctx.unwrap(net), torch.nn.Linear)
    assert_type(ctx.all_reduce(1.0), float)
    assert_type(ctx.all_gather(torch.ones(1)), list[torch.Tensor])
    assert_type(ctx.broadcast_object("x"), str)
    assert_type(ctx.on_main(len, "abc"), int)
    assert_type(ctx.rank, int)
    for x in ctx.progress([1, 2]):
        assert_type(x, int)


@distributed(devices=2, check_collectives=False)
def helpers(ctx: Context) -> None:
    net = torch.nn.Linear(1, 1)
    x = torch.ones(1)
    assert_type(ctx.model(net, forward="loss", bucket_cap_mb=1), torch.nn.Linear)
    assert_type(ctx.model(lambda: torch.nn.ReLU(), forward=["a", "b"]), torch.nn.ReLU)
    for batch, step in ctx.accumulate(net, [x], 2):
        assert_type(batch, torch.Tensor)
        assert_type(step, bool)
    assert_type(ctx.all_reduce(x, op="mean", weight=2, differentiable=True), torch.Tensor)
    assert_type(ctx.reduce({"a": 1}, 0), dict[str, int] | None)
    assert_type(ctx.all_gather(x, differentiable=True), list[torch.Tensor])
    assert_type(ctx.gather(1.5), list[float] | None)
    assert_type(ctx.scatter([1, 2]), int)
    ctx.barrier(timeout=1.0, name="x")
