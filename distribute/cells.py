"""Code that was typed and stands in no file: cells of a notebook, lines at IPython's prompt.

The process in which it was typed knows its text and the name under which the notebook shows it; a
rank that is no fork of that process knows neither.
"""

from __future__ import annotations

import linecache
import marshal
import os
import re
import sys
import types
from typing import Any

# A frame's place in a formatted traceback.
_PLACE = re.compile(r'\bFile "([^"\n]+)", line (?=\d)')


def shell() -> Any:
    """Returns IPython's shell, if this process is one, or None."""
    find = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if find is None else find()


def kernel() -> Any:
    """Returns the kernel of a notebook (Jupyter, Colab, Kaggle), if this is one, or None."""
    return getattr(shell(), "kernel", None)


def source(code: types.CodeType) -> list[str]:
    """Returns the lines of the cell that code is from; none where they are in a file."""
    known = linecache.cache.get(code.co_filename)
    # Without a time of modification: text that nobody could read again.
    return known[2] if known is not None and len(known) == 4 and known[1] is None else []


def rebuilt(code: bytes, file: str, lines: list[str]) -> types.CodeType:
    """Rebuilds marshalled code in another process and makes its source known there.

    Tracebacks, `inspect.getsource` and the debugger find it, and so does torch's compiler.

    Args:
        code: The code.
        file: The name of the cell.
        lines: Its source.
    """
    linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    found: types.CodeType = marshal.loads(code)
    return found


def label(file: str) -> str:
    """Returns what the notebook calls the cell that has such a file name, or an empty string."""
    try:
        found = shell().compile.format_code_name(file)
    except Exception:
        return ""  # no shell, or one of another make
    return " ".join(found) if found else ""


def short(file: str) -> str:
    """Returns a short name of a file or a cell, for messages."""
    return label(file) or os.path.basename(file)


def named(text: str) -> str:
    """Returns a formatted traceback with cells under the names that the notebook shows."""
    return _PLACE.sub(lambda found: f"{label(found[1]) or found[0][:-7]}, line ", text)
