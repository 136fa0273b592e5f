"""The examples, run as their headers say; and the same result on any number of processes."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import ROOT, Ended, run_python

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# On a port of its own: two of them on one machine would take the same otherwise.
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# Two threads of OpenMP that wait for each other on busy cores make one process slower than two.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run_example(name: str, *arguments: str | Path, launcher: tuple[str, ...] = ()) -> Ended:
    script = ROOT / "examples" / name
    ended = run_python(*launcher, script, *arguments, environ=ONE_THREAD)

    assert ended.code == 0, ended.text
    return ended


def ranks_seen(ended: Ended) -> set[tuple[int, int]]:
    return {(int(r), int(size)) for r, size in re.findall(r"rank (\d+) of (\d+)", ended.out)}


def losses(ended: Ended) -> list[float]:
    return [float(loss) for loss in re.findall(r": loss (\d+\.\d+)", ended.out)]


def train_digits(path: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> Any:
    ended = run_example("digits.py", *arguments, "--save", path, launcher=launcher)
    size = 1 if "1" in arguments else 2

    assert ranks_seen(ended) == {(rank, size) for rank in range(size)}, ended.text
    # Every image that was held out is counted once, however the ranks share them.
    assert sum(int(seen) for seen in re.findall(r"\d+ of (\d+) right", ended.out)) == 359
    assert losses(ended)[-1] < losses(ended)[0] / 10
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What one process learns on the whole batches."""
    return train_digits(tmp_path_factory.mktemp("alone") / "digits.pt", "--devices", "1")


def test_one_process_learns_the_digits(alone: Any) -> None:
    """At the default number of epochs."""
    assert alone["accuracy"] >= 0.95


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        pytest.param((), "ddp", id="reexec"),
        pytest.param((), "ddp_fork", id="fork"),
        pytest.param((), "ddp_forkserver", id="forkserver", marks=pytest.mark.slow),
        pytest.param((), "ddp_spawn", id="spawn", marks=pytest.mark.slow),
        pytest.param(TORCHRUN, "ddp", id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_two_processes_learn_the_same_as_one(
    alone: Any, launcher: tuple[str, ...], strategy: str, tmp_path: Path
) -> None:
    """The accuracy is equal, and every parameter after the last epoch within 1e-6."""
    found = train_digits(
        tmp_path / "digits.pt", "--devices", "2", "--strategy", strategy, launcher=launcher
    )

    assert found["accuracy"] == alone["accuracy"]
    assert found["model"].keys() == alone["model"].keys()
    for name, parameter in alone["model"].items():
        torch.testing.assert_close(
            found["model"][name], parameter, rtol=0, atol=1e-6, msg=lambda text, n=name: n + text
        )


def test_every_rank_says_hello() -> None:
    """Each in a process of its own, and their words come back in rank order."""
    ended = run_example("hello.py", "--devices", "3")
    lines = re.findall(r"  rank (\d) of 3 on cpu, process (\d+)", ended.out)

    assert [rank for rank, _ in lines] == ["0", "1", "2"]
    assert len({process for _, process in lines}) == 3


@pytest.mark.slow
def test_the_text_generator_learns_and_writes() -> None:
    """Its loss falls within a few steps, and a sample stands beside what the ranks said."""
    ended = run_example("textgen.py", "--steps", "25")
    sample = re.sub(r"step \d+: loss [\d.]+|rank \d of \d has trained", "", ended.out).strip()

    assert ranks_seen(ended) == {(0, 2), (1, 2)}, ended.text
    assert losses(ended)[-1] < losses(ended)[0] - 0.5
    assert len(sample) > 380


@pytest.mark.slow
def test_the_sweep_trains_again_with_the_best() -> None:
    """Worlds of two and of one follow each other in one script."""
    ended = run_example("sweep.py", "--steps", "10", "--lr", "0.0", "0.03")
    trials = re.findall(r"devices=(\d) lr=([\d.]+): error ([\d.]+) in", ended.out)
    *tried, (devices, lr, error) = trials
    best = min(float(one[2]) for one in tried)

    assert ranks_seen(ended) == {(0, 2), (1, 2), (0, 1)}, ended.text
    assert [one[:2] for one in tried] == [("2", "0.0"), ("2", "0.03"), ("1", "0.0"), ("1", "0.03")]
    assert (devices, lr) in {one[:2] for one in tried if float(one[2]) == best}
    assert lr == "0.03"
    assert float(error) < best


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "--max-restarts", "2")], ids=["", "torchrun"])
def test_training_is_resumed_after_a_rank_was_lost(
    launcher: tuple[str, ...], tmp_path: Path
) -> None:
    """It ends with the loss of a training that lost none."""
    path = str(tmp_path / "last.pt")
    lost = run_example("resume.py", "--path", path, launcher=launcher)
    whole = run_example("resume.py", "--keep")

    assert "after 1 restart(s)" in lost.out
    # Under torchrun both processes print it, perhaps on one line.
    expected = whole.lines("loss")[0].replace(" 0 re", " 1 re")
    assert lost.out.count(expected) == (2 if launcher else 1)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    """Its header holds the commands, as a script and under torchrun."""
    source = path.read_text()
    header = ast.get_docstring(ast.parse(source)) or ""
    commands = [shlex.split(line[2:]) for line in header.splitlines() if line.startswith("$ ")]
    script = os.fspath(path.relative_to(ROOT))

    assert len(source.splitlines()) < 80
    assert ["python", script] in commands
    launched = [one for one in commands if one[:3] == ["torchrun", "--nproc-per-node", "2"]]
    assert any(script in one for one in launched)


def test_there_are_examples() -> None:
    """The tests above have something to look at."""
    assert {path.name for path in EXAMPLES} >= {"digits.py", "hello.py", "sweep.py", "textgen.py"}
