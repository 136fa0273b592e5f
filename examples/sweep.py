"""Tries numbers of devices and learning rates, then trains for longer with the best.

$ python examples/sweep.py
$ python examples/sweep.py --devices 1 --lr 0.003 0.01 0.03 0.1
$ torchrun --nproc-per-node 2 examples/sweep.py --devices 2

More devices make a larger batch here, which may want another learning rate. torchrun has settled
the number of processes already, so `--devices` names that one there.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice, product

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from distribute import Context, distributed


def train(ctx: Context, lr: float, steps: int) -> float:
    """Fits a small net to a wavy surface, and returns its mean squared error there."""
    points = torch.rand(2**16, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    heights = points.prod(dim=1, keepdim=True).sin()
    data = TensorDataset(points, heights)

    model = ctx.model(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = ctx.dataloader(data, batch_size=16, shuffle=True)
    for x, y in islice(loader, steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    total = 0.0
    with torch.no_grad():
        for x, y in ctx.dataloader(data, batch_size=4096):
            total += F.mse_loss(model(x), y, reduction="sum").item()
    print(f"  rank {ctx.rank} of {ctx.world_size} done", flush=True)
    return ctx.all_reduce(total) / len(data)


def trial(devices: int, lr: float, steps: int) -> float:
    """Trains in processes of its own choice, and says what came of it."""
    start = time.perf_counter()
    error = distributed(devices=devices, accelerator="cpu", seed=0)(train)(lr=lr, steps=steps)
    seconds = time.perf_counter() - start
    print(f"devices={devices} lr={lr}: error {error:.5f} in {seconds:.2f} s", flush=True)
    return error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Finds the best learning rate.")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.01, 0.03, 0.1])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    errors = {
        (devices, lr): trial(devices, lr, args.steps)
        for devices, lr in product(args.devices, args.lr)
    }
    devices, lr = min(errors, key=lambda tried: errors[tried])
    print(f"best: devices={devices} lr={lr}", flush=True)
    final = trial(devices, lr, 5 * args.steps)
    print(f"error {errors[devices, lr]:.5f} before, {final:.5f} now", flush=True)
