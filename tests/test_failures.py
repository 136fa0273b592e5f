"""How calls fail, for every start method; the causes and what is promised are in failures.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.failures import CHOSEN, STATES, cells
from tests.scripts import run_python

FAILURES = Path(__file__).parent / "failures.py"
SELECTED = [f"{cause}/{state}" for cause in CHOSEN for state in STATES]
OTHERS_OF_REEXEC = [one.name for one in cells("reexec") if one.name not in SELECTED]
# A spawned call takes seconds.
CALLS = {"fork": 500, "forkserver": 500, "spawn": 40}


def take(folder: Path, method: str, *names: str, timeout: float) -> None:
    """Takes cells, or all of a method, in one script."""
    ended = run_python(FAILURES, method, folder, *names, timeout=timeout, cwd=folder)

    print(ended.out)  # the seconds from each cause to its exception
    assert ended.code == 0, ended.text
    number = len(names or cells(method))
    assert f"{method}: {number} of {number}" in ended.out, ended.text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_every_failure_is_told_with_its_rank_and_leaves_nothing(
    method: str, tmp_path: Path
) -> None:
    """Whatever ends a rank and whatever the others do: the right error, all outcomes, no rest.

    And the next call works.
    """
    take(tmp_path, method, timeout=280)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=() if one.startswith(("raise/", "SIGKILL/")) else pytest.mark.slow)
        for one in SELECTED
    ],
)
def test_a_failure_of_a_re_executed_script_is_told(name: str, tmp_path: Path) -> None:
    """The same where the caller is rank 0, for some causes; each is a script of its own."""
    take(tmp_path, "reexec", name, timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failure_of_spawned_ranks_is_told(tmp_path: Path) -> None:
    """The same for fresh interpreters and some causes."""
    take(tmp_path, "spawn", *SELECTED, timeout=280)


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS_OF_REEXEC)
def test_every_other_failure_of_a_re_executed_script_is_told(name: str, tmp_path: Path) -> None:
    """The same for all other causes, and for failures of the caller itself."""
    take(tmp_path, "reexec", name, timeout=100)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_every_failure_of_spawned_ranks_is_told(tmp_path: Path) -> None:
    """The same for all causes."""
    take(tmp_path, "spawn", timeout=580)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", list(CALLS))
def test_many_failing_calls_in_a_row_leave_nothing(method: str, tmp_path: Path) -> None:
    """No growth of descriptors, threads, files or processes; a good call works afterwards.

    The ranks that fail train: their frames hold models, optimizers and a second group. The number
    of calls can be set: FAILING_CALLS.
    """
    calls = os.environ.get("FAILING_CALLS", str(CALLS[method]))

    ended = run_python(FAILURES, method, tmp_path, "--calls", calls, timeout=1780, cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert f"{method}: {calls} failing calls, and a good one" in ended.out, ended.text
