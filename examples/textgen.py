"""Trains a small GPT on the characters of a text, and writes some more of it.

$ python examples/textgen.py
$ python examples/textgen.py --steps 1000 --text my_own.txt
$ torchrun --nproc-per-node 2 examples/textgen.py
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from distribute import Context, run

BLOCK = 64  # characters that the model sees


class GPT(nn.Module):
    """Says of every character which may come next."""

    def __init__(self, symbols: int, width: int = 96, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(symbols, width), nn.Embedding(BLOCK, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, norm_first=True, batch_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the scores of the next character at every position."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.token(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def train(ctx: Context, text: str, steps: int) -> None:
    """Trains, and prints a sample."""
    symbols = sorted(set(text))
    codes = torch.tensor([symbols.index(one) for one in text])
    model = ctx.model(GPT(len(symbols)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    windows = codes.unfold(0, BLOCK + 1, 1)  # a view: one row for each place to begin
    loader = ctx.dataloader(windows, global_batch_size=32, shuffle=True)
    for step, batch in enumerate(ctx.progress(islice(loader, steps), total=steps, leave=False)):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            ctx.print(f"step {step}: loss {ctx.all_reduce(loss.item(), op='mean'):.3f}")
    print(f"rank {ctx.rank} of {ctx.world_size} has trained", flush=True)
    written = ctx.on_main(write, ctx.unwrap(model), codes[:1].to(ctx.device), 400)
    ctx.print("".join(symbols[code] for code in written))


@torch.no_grad()
def write(model: nn.Module, codes: torch.Tensor, length: int) -> list[int]:
    """Goes on from some characters, drawing each next one as the model says."""
    for _ in range(length):
        scores = model(codes[None, -BLOCK:])[0, -1]
        codes = torch.cat([codes, torch.multinomial((scores / 0.7).softmax(dim=0), 1)])
    return [int(code) for code in codes]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small GPT on the characters of a text.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", default="cpu", help="auto takes the GPUs")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--text", type=Path, default=Path(__file__).parent / "text.txt")
    options = vars(parser.parse_args())
    run(train, options.pop("text").read_text(), options.pop("steps"), seed=0, **options)
