"""One contract, held by every start method; the checks are in contract.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_python

CONTRACT = Path(__file__).parent / "contract.py"


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        "forkserver",
        "reexec",
        pytest.param("spawn", marks=pytest.mark.slow),
    ],
)
def test_start_method_keeps_the_contract(method: str, tmp_path: Path) -> None:
    """Every check of the contract holds, and the script leaves nothing behind."""
    ended = run_python(CONTRACT, method, cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert f"{method}: 16 of 16" in ended.out, ended.text
