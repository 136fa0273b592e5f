"""What the person who made a call sees its output on: a terminal, a notebook, or text in a file.

Ranks write into pipes, which are none of these; so the launcher tells them what stands behind.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Literal

from distribute import cells


@dataclass(frozen=True)
class Display:
    """What a progress bar is shown on.

    Attributes:
        kind: `"terminal"`, `"notebook"`, or `"plain"` for everything that keeps lines.
        columns: The width of a terminal, where it is known.
    """

    kind: Literal["terminal", "notebook", "plain"] = "plain"
    columns: int | None = None


PLAIN = Display()


def here() -> Display:
    """Returns what this process's own standard streams are shown on at this moment."""
    if cells.kernel() is not None:
        return Display("notebook")
    try:
        # Standard error, where bars go: what is printed may be on its way into a file.
        if not sys.stderr.isatty():
            return PLAIN
    except (AttributeError, ValueError):
        return PLAIN  # None, or closed
    try:
        return Display("terminal", os.get_terminal_size(sys.stderr.fileno()).columns or None)
    except (AttributeError, OSError, ValueError):
        return Display("terminal")  # it has no descriptor that knows a width
