"""Tries numbers of devices and learning rates, then trains for longer with the best.

    python examples/sweep.py
    python examples/sweep.py --devices 1 --lr 0.03 0.1 0.3 1.0
    torchrun --nproc-per-node 2 examples/sweep.py --devices 2

torchrun has fixed the number of processes already, so `--devices` names that one there.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from distribute import Context, distributed


def train(ctx: Context, lr: float, epochs: int) -> float:
    """Fits a small net to a wavy surface, and returns its mean squared error there."""
    points = torch.rand(4096, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    heights = points.prod(dim=1, keepdim=True).sin()
    data = TensorDataset(points, heights)

    model = ctx.model(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for x, y in ctx.dataloader(data, global_batch_size=256, shuffle=True):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

    total = 0.0
    with torch.no_grad():
        for x, y in ctx.dataloader(data, batch_size=1024):
            total += F.mse_loss(model(x), y, reduction="sum").item()
    print(f"  rank {ctx.rank} of {ctx.world_size} done", flush=True)
    return ctx.all_reduce(total) / len(data)


def trial(devices: int, lr: float, epochs: int) -> float:
    """Trains in processes of its own choice, and says what came of it."""
    start = time.perf_counter()
    error = distributed(devices=devices, accelerator="cpu", seed=0)(train)(lr=lr, epochs=epochs)
    seconds = time.perf_counter() - start
    print(f"devices={devices} lr={lr}: error {error:.5f} in {seconds:.2f} s", flush=True)
    return error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Finds the best learning rate.")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    errors = {
        (devices, lr): trial(devices, lr, args.epochs)
        for devices, lr in product(args.devices, args.lr)
    }
    devices, lr = min(errors, key=lambda tried: errors[tried])
    print(f"best: devices={devices} lr={lr}", flush=True)
    final = trial(devices, lr, 4 * args.epochs)
    print(f"error {errors[devices, lr]:.5f} before, {final:.5f} now", flush=True)
