"""The types that users see, under both checkers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "checker",
    [
        ["mypy", "--strict", "tests/typing/api.py"],
        ["pyright", "--pythonpath", sys.executable, "tests/typing"],
    ],
    ids=["mypy", "pyright"],
)
def test_the_types_of_every_spelling_are_as_promised(checker: list[str]) -> None:
    """`tests/typing/api.py` holds one of each."""
    done = subprocess.run(
        [sys.executable, "-m", *checker], cwd=ROOT, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_the_checkers_would_find_a_mistake(tmp_path: Path) -> None:
    """A wrong argument type of a decorated function is an error."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from distribute import Context, distributed\n"
        "@distributed(devices=2)\n"
        "def f(ctx: Context, x: int) -> int: return x\n"
        "f('a')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(wrong)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert 'has incompatible type "str"; expected "int"' in done.stdout, done.stdout + done.stderr
