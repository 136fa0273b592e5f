"""How this program was started, so that it can be started again; recorded at import.

Programs change their `sys.argv` and working directory later on; what the interpreter itself was
given is in `sys.orig_argv`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from distribute import cells

# Programs that host the user's code: running them again would not lead to the user's call.
_HOSTS = (
    "bpython", "cProfile", "coverage", "debugpy", "ipykernel", "ipykernel_launcher",
    "kernprof", "pdb", "profile", "ptipython", "ptpython", "py.test", "pydevconsole", "pydevd",
    "pytest", "trace", "unittest", "viztracer",
)  # fmt: skip


@dataclass(frozen=True)
class Start:
    """How the interpreter was started.

    Attributes:
        executable: Its path.
        arguments: Its arguments, interpreter flags included.
        cwd: Its working directory.
    """

    executable: str
    arguments: tuple[str, ...]
    cwd: str


START = Start(sys.executable, tuple(sys.orig_argv[1:]), os.getcwd())


def interactive() -> str:
    """Returns what kind of notebook or prompt this is, or an empty string."""
    if cells.kernel() is not None:
        return "a notebook kernel"
    shell = cells.shell()
    if shell is not None:
        return "an IPython prompt" if _prompts(shell) else ""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive prompt"
    return ""


def _prompts(shell: Any) -> bool:
    """Tells whether somebody types at this shell of IPython."""
    # An embedded one prompts in the middle of a script. `ipython script.py` runs a file and leaves
    # no prompt, at a prompt `%run script.py` looks the same but for this.
    interact = getattr(shell, "embedded", False) or getattr(shell.parent, "interact", None)
    return not _main_file() if interact is None else bool(interact)


def command() -> tuple[tuple[str, ...], str]:
    """Returns the command that runs this program again, or why there is none.

    The command is to run in `START.cwd`.
    """
    why_not = _why_not()
    if why_not:
        return (), why_not
    return (START.executable, *START.arguments), ""


def _why_not() -> str:
    if getattr(sys, "frozen", False):
        return "a frozen program has no script to run again"
    # A program that a test starts inherits the variable, and is no test.
    if "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules:
        return "pytest runs this, and would run its tests again"
    parent = sys.modules.get("multiprocessing.process")
    if parent is not None and parent.parent_process() is not None:
        return "this is a child process of multiprocessing"
    target = _target()
    if target in ("-c", "-"):
        return "there is no script on disk"
    if target in _HOSTS:
        return f"the program is {target}, which hosts the code that makes the call"
    if not _main_file():
        return "there is no script on disk"
    return ""


def _target() -> str:
    """Returns what the interpreter runs: a module's name, a program's, "-c" or "-"."""
    arguments = list(START.arguments)
    while arguments:
        one = arguments.pop(0)
        if one == "-m" or (one.startswith("-m") and len(one) > 2):
            name = one[2:] or arguments[0]
            return name.partition(".")[0]
        if one == "-" or not one.startswith("-"):
            return one if one == "-" else os.path.splitext(os.path.basename(one))[0]
        if one.startswith("-c"):
            return "-c"
        if one in ("-X", "-W", "--check-hash-based-pycs"):
            arguments.pop(0)
    return "-"


def _main_file() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return path if path and os.path.exists(os.path.join(START.cwd, path)) else ""
