"""Training that survives the loss of a rank: saved every epoch, started again, resumed.

$ python examples/resume.py
$ torchrun --nproc-per-node 2 --max-restarts 2 examples/resume.py --path /tmp/last.pt

The first attempt loses rank 1 in epoch 2, as when memory runs out.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

from distribute import Context, distributed


@distributed(devices=2, max_restarts=2, seed=0)
def train(ctx: Context, epochs: int, path: Path, lose: bool) -> tuple[float, int]:
    """Returns the loss of the last epoch, and how often the ranks were started again."""
    inputs = torch.randn(256, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = ctx.model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = ctx.dataloader(dataset, batch_size=16, shuffle=True)
    first, loss = 0, torch.tensor(0.0)
    if path.exists():
        saved = ctx.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        loader.set_epoch(first)  # the order of the data is a function of the epoch
        ctx.print(f"resumed at epoch {first} after {ctx.restart_count} restart(s)")
    for epoch in range(first, epochs):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if lose and ctx.rank == 1 and epoch == 2 and ctx.restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        ctx.save({**state, "epoch": epoch}, path)
    return ctx.all_reduce(loss.item(), op="mean"), ctx.restart_count


def main() -> None:
    """Trains, losing a rank on the way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--keep", action="store_true", help="lose no rank")
    parser.add_argument("--path", type=Path, help="where to save; resumed from if it is there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = args.path or Path(directory, "last.pt")
        loss, restarts = train(args.epochs, path, not args.keep)
    print(f"loss {loss:.3e} after {restarts} restart(s)")


if __name__ == "__main__":
    main()
