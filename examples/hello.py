"""Every rank says where it runs.

$ python examples/hello.py
$ python examples/hello.py --devices 4 --strategy ddp_spawn
$ torchrun --nproc-per-node 2 examples/hello.py
"""

from __future__ import annotations

import argparse
import os

from distribute import Context, run


def hello(ctx: Context) -> str:
    """Returns a line about this rank."""
    return f"rank {ctx.rank} of {ctx.world_size} on {ctx.device}, process {os.getpid()}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Every rank says where it runs.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accelerator", default="cpu", help="auto takes the GPUs")
    options = vars(parser.parse_args())

    lines = run(hello, returns="all", **options)
    print(f"process {os.getpid()} called {len(lines)} ranks:", *lines, sep="\n  ", flush=True)
