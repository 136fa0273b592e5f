"""Trains a small CNN on handwritten digits, with the same result on any number of processes.

$ python examples/digits.py
$ python examples/digits.py --devices 1
$ python examples/digits.py --strategy ddp_spawn --epochs 3 --save digits.pt
$ torchrun --nproc-per-node 2 examples/digits.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

from distribute import Context, run


def train(ctx: Context, epochs: int, path: str | None) -> float:
    """Trains, and returns the accuracy on the images that were held out."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.get_default_dtype()).view(-1, 1, 8, 8)
    split = torch.Generator().manual_seed(0)
    known, held_out = random_split(TensorDataset(inputs, torch.tensor(labels)), [0.8, 0.2], split)

    model = ctx.model(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 10),
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = ctx.dataloader(known, global_batch_size=64, shuffle=True, uneven="balance")
    for epoch in range(epochs):
        total = 0.0
        for x, y in ctx.progress(loader, desc=f"epoch {epoch}", leave=False):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            # DDP takes the mean over ranks. The weight makes it one over images in the last,
            # smaller step too, of which one rank may have more than the other.
            (loss * loader.weight).backward()
            optimizer.step()
            total += loss.item() * len(y)
        ctx.print(f"epoch {epoch}: loss {ctx.all_reduce(total) / len(known):.4f}")

    right = seen = 0
    with torch.no_grad():
        for x, y in ctx.dataloader(held_out, batch_size=128):
            right += int((model(x).argmax(1) == y).sum())
            seen += len(y)
    print(f"rank {ctx.rank} of {ctx.world_size}: {right} of {seen} right", flush=True)
    right, seen = ctx.all_reduce((right, seen))
    ctx.print(f"held-out accuracy {right / seen:.4f} on {seen} images")
    if path:
        ctx.save({"accuracy": right / seen, "model": ctx.unwrap(model).state_dict()}, path)
    return right / seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small CNN on handwritten digits.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", default="cpu", help="auto takes the GPUs")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="PATH")
    options = vars(parser.parse_args())

    # Two ranks add the same gradients up in another order than one. AdamW amplifies what that
    # rounds off: in ten epochs to 0.1 in some parameter in float32, but to 1e-14 in float64.
    torch.set_default_dtype(torch.float64)
    run(train, options.pop("epochs"), options.pop("save"), **options)
