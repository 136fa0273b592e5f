"""What it costs to call a function on two processes: seconds from the call to its value.

$ python benchmarks/startup.py
$ python benchmarks/startup.py --quick

The function makes one step of DDP and one all_reduce. Its modules are imported before the clock
starts. A method's first call is measured in fresh processes of their own; the rest are measured in
turn in this one, after a round that does not count, so that a busy moment hits all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import cache
from statistics import median

import torch
from torch import nn

from distribute import Context, Workers, run, workers

KEPT = "kept"
# Start method, the strategy that asks for it, what later calls stand for, their target in seconds.
METHODS = (
    ("reexec", "ddp", "idle workers", 0.05),
    ("fork", "ddp_fork", "new processes", 0.10),
    ("forkserver", "ddp_forkserver", "warm server", 0.20),
    ("spawn", "ddp_spawn", "new processes", None),
    ("kept workers", KEPT, "the same processes", 0.05),
)


def step(ctx: Context) -> float:
    model = ctx.model(nn.Linear(16, 16))
    loss = model(torch.ones(8, 16)).square().mean()
    loss.backward()
    return ctx.all_reduce(loss.item())


@cache
def kept() -> Workers:
    return workers(devices=2, accelerator="cpu")


def seconds(strategy: str) -> float:
    start = time.perf_counter()
    if strategy == KEPT:
        kept().run(step)
    else:
        run(step, devices=2, accelerator="cpu", strategy=strategy)
    return time.perf_counter() - start


def first_call(strategy: str) -> float:
    command = [sys.executable, __file__, "--first", strategy]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how long a call takes to start.")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="two repeats, one first call")
    parser.add_argument("--first", metavar="STRATEGY", help="print the time of one call and end")
    args = parser.parse_args()
    if args.first:
        print(seconds(args.first))
        return
    repeats, firsts = (2, 1) if args.quick else (args.repeats, 3)

    # Re-exec serves only the first distributed call of a script, so it leads the round.
    for _, strategy, _, _ in METHODS:
        seconds(strategy)
    times: dict[str, list[float]] = {name: [] for name, _, _, _ in METHODS}
    for _ in range(repeats):
        for name, strategy, _, _ in METHODS:
            times[name].append(seconds(strategy))

    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, torch {torch.__version__}, 2 ranks, seconds from call to value")
    print(f"median of {firsts} first call(s); median and minimum of {repeats} later calls\n")
    heads = "start method", "first call", "later calls", "median", "min", "target"
    print("{:14}{:>12}  {:20}{:>8}{:>8}{:>8}".format(*heads))
    for name, strategy, later, target in METHODS:
        first = median(first_call(strategy) for _ in range(firsts))
        wanted = "-" if target is None else f"{target:.2f}"
        print(
            f"{name:14}{first:12.2f}  {later:20}"
            f"{median(times[name]):8.3f}{min(times[name]):8.3f}{wanted:>8}",
            flush=True,
        )


if __name__ == "__main__":
    main()
