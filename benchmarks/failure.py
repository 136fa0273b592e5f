"""How soon a failure is known: seconds from its cause on one rank to the exception of the caller.

$ python benchmarks/failure.py
$ python benchmarks/failure.py --quick --method fork

Rank 1 fails while the other rank waits in a collective, or sleeps. The cases are those of the
tests, which check the exceptions as well: tests/failures.py. With SIGSTOP the clock starts when the
timeout or the deadline has passed; with SystemExit(0) beside a sleep, which is no failure, when the
sleep is over.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

FAILURES = Path(__file__).parent.parent / "tests" / "failures.py"
METHODS = ("reexec", "fork", "forkserver", "spawn")
STATES = ("collective", "sleep")
SHORT = {"collective": "coll.", "sleep": "sleep"}
TARGET = 1.5

LINE = re.compile(r"^(?:ok|FAILED) \S+ (\S+) (\S+)$", re.MULTILINE)

Times = dict[tuple[str, str, str], list[float]]  # by method, cause and state


def output(method: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory(prefix="failures-") as folder:
        command = [sys.executable, str(FAILURES), method, folder, *arguments]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        sys.stderr.write(f"{method} {' '.join(arguments)}\n{ended.stdout}{ended.stderr}\n")
    return ended.stdout


def cells(method: str) -> list[str]:
    return [one for one in output(method, "--list").split() if not one.endswith("/rank0")]


def measure(method: str, times: Times) -> None:
    """Takes all cells of a method once; those of re-exec in a script each."""
    names = cells(method)
    runs = [[one] for one in names] if method == "reexec" else [names]
    for one in runs:
        for name, seconds in LINE.findall(output(method, *one)):
            cause, state = name.split("/")
            found = times.setdefault((method, cause, state), [])
            if seconds != "-":
                found.append(float(seconds))


def show(times: Times, methods: list[str]) -> None:
    heads = [f"{method} {SHORT[state]}" for method in methods for state in STATES]
    print(f"{'cause':18}" + "".join(f"{one:>17}" for one in heads) + f"{'target':>8}")
    for cause in dict.fromkeys(cause for _, cause, _ in times):
        row = [times.get((method, cause, state)) for method in methods for state in STATES]
        shown = (f"{median(one):17.3f}" if one else f"{'failed':>17}" for one in row)
        print(f"{cause:18}{''.join(shown)}{TARGET:8.1f}")
    medians = {key: median(one) for key, one in times.items() if one}
    missing = len(times) - len(medians)
    method, cause, state = worst = max(medians, key=lambda key: medians[key])
    print(f"\nworst: {medians[worst]:.3f} s, {method}, {cause}, {state}")
    if missing:
        print(f"{missing} did not fail as promised: see above")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how soon a failure is known.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    methods: list[str] = args.method or [*METHODS]

    times: Times = {}
    for _ in range(repeats):
        for method in methods:
            measure(method, times)

    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, torch {torch.__version__}, 2 ranks, seconds from cause to exception")
    print(f"median of {repeats}; the other rank is in a collective, or in a sleep\n")
    show(times, methods)


if __name__ == "__main__":
    main()
