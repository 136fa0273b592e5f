"""What it costs to send values: seconds for an argument to two ranks, and for a result of one.

$ python benchmarks/values.py
$ python benchmarks/values.py --quick

The yardstick is `clone()` of the same tensor in the same run, taken in turn with the calls. From
each call the time of the call before it with an empty tensor is taken off: that of the processes;
from that of a result the time in which the rank makes the tensor. The last lines are about kept
workers: a small argument, and a large one that has not changed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from distribute import Context, run, workers

METHODS = ("fork", "forkserver", "spawn")
TARGET = 1.5
SMALL_TARGET = 0.005


def take(ctx: Context, data: torch.Tensor) -> int:
    return data.numel()


def give(ctx: Context, size: int) -> tuple[float, torch.Tensor] | None:
    if not ctx.is_main_process:
        return None  # it would take a core meanwhile, for a value that nobody asked for
    start = time.perf_counter()
    data = torch.ones(size)
    return time.perf_counter() - start, data


def read(ctx: Context, data: torch.Tensor) -> float:
    return data[:: 1 << 10].sum().item()  # touches every page


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what values cost.")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="64 MB, two repeats, no spawn")
    args = parser.parse_args()
    megabytes: int = 64 if args.quick else args.megabytes
    repeats: int = 2 if args.quick else args.repeats
    methods = METHODS[:2] if args.quick else METHODS

    data = torch.ones(megabytes << 18)
    empty = torch.ones(0)
    times: dict[tuple[str, str], list[float]] = {}

    def note(name: str, kind: str, action: Callable[..., Any], *given: Any, **options: Any) -> None:
        start = time.perf_counter()
        result = action(*given, **options)
        taken = time.perf_counter() - start
        made = result[0] if kind == "result" else 0.0
        times.setdefault((name, kind), []).append(taken - made)

    for turn in range(repeats + 1):
        note("clone", "", data.clone)
        for method in methods:
            options: dict[str, Any] = {
                "devices": 2, "accelerator": "cpu", "start_method": method
            }  # fmt: skip
            note(method, "empty", run, take, empty, **options)
            note(method, "argument", run, take, data, **options)
            note(method, "result", run, give, data.numel(), **options)
        if turn == 0:
            times.clear()  # a round that does not count

    cores = len(os.sched_getaffinity(0))
    clone = median(times["clone", ""])
    print(f"{cores} cores, torch {torch.__version__}, 2 ranks, {megabytes} MB, {repeats} repeats")
    print(f"clone() {clone:.3f} s\n")
    print(f"{'':14}{'argument':>10}{'ratio':>8}{'result':>10}{'ratio':>8}{'target':>8}")
    for method in methods:
        row = ""
        for kind in ("argument", "result"):
            pairs = zip(times[method, kind], times[method, "empty"], strict=True)
            taken = median(whole - empty for whole, empty in pairs)
            row += f"{taken:10.3f}{taken / clone:8.2f}"
        print(f"{method:14}{row}{TARGET:8.1f}")

    print(f"\n{'kept workers':24}{'seconds':>10}{'target':>8}")
    with workers(devices=2, accelerator="cpu", start_method="fork") as kept:
        kept.run(take, empty)
        small = median(seconds(lambda: kept.run(take, empty)) for _ in range(50))
        print(f"{'a small argument':24}{small:10.4f}{SMALL_TARGET:8.3f}")
        first = seconds(lambda: kept.run(read, data))
        print(f"{'large, first call':24}{first:10.4f}")
        again = median(seconds(lambda: kept.run(read, data)) for _ in range(repeats))
        print(f"{'large, unchanged':24}{again:10.4f}")


if __name__ == "__main__":
    main()
