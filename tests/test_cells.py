"""Code that stands in no file takes its source along to processes that cannot look it up."""

from __future__ import annotations

import inspect
import linecache
import traceback
from typing import Any

import pytest

from distribute import cells
from distribute.payload import pack

SOURCE = "def typed():\n    raise ValueError('boom')  # the line\n"
FILE = "<a cell>"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    lines = SOURCE.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, FILE, (len(SOURCE), None, lines, FILE))
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, FILE, "exec"), found)
    return found["typed"]


def test_a_function_of_a_cell_arrives_with_its_source(typed: Any) -> None:
    payload = pack(typed, main_names=frozenset())
    del linecache.cache[FILE]
    with pytest.raises(OSError, match="could not get source"):
        inspect.getsource(typed)

    arrived = payload.load()

    linecache.checkcache()
    assert inspect.getsource(arrived) == SOURCE
    with pytest.raises(ValueError, match="boom") as caught:
        arrived()
    assert "# the line" in "".join(traceback.format_exception(caught.value))


def test_code_of_a_file_takes_nothing_along() -> None:
    linecache.getlines(__file__)

    assert cells.source(test_code_of_a_file_takes_nothing_along.__code__) == []


def test_without_ipython_names_stay() -> None:
    text = f'  File "{FILE}", line 2, in typed\n  File "/a/b.py", line 3, in c\n'

    assert cells.named(text) == text
    assert cells.short("/a/b.py") == "b.py"
