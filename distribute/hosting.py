"""Who runs the code that makes the call, as its stack shows.

A script that is run again comes to the call again. But where a test runner, a sweep or a task queue
has called the user's code, running the program again would start all of its work again.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

# Modules whose frames mean that they run the user's code, and what of theirs a further run of the
# program would start again.
_RUNNERS = {
    "_pytest": ("pytest", "tests"),
    "unittest.case": ("unittest", "tests"),
    "doctest": ("doctest", "tests"),
    "hydra.main": ("hydra", "job, or the whole sweep,"),
    "optuna.study": ("Optuna", "trials"),
}
# How pip and its like begin what they put into `bin`: with an import from the package.
_STUB = re.compile(r"^(?:from|import)\s+([\w.]+)", re.MULTILINE)


def _stack() -> Iterator[types.FrameType]:
    """Returns the frames of the call outside this package, the caller's first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if name != "distribute" and not name.startswith("distribute."):
            yield frame
        frame = frame.f_back


def runner() -> str:
    """Returns what runs the call and would run its work again, as half a sentence, or nothing."""
    for frame in _stack():
        module = frame.f_globals.get("__name__") or ""
        for prefix, (name, work) in _RUNNERS.items():
            if module == prefix or module.startswith(prefix + "."):
                return f"{name} runs this, and would run its {work} again"
    return ""


def script() -> dict[str, Any]:
    """Returns the namespace of the script that makes the call.

    Some profilers run it in a namespace that is not that of the module `__main__`.
    """
    for frame in _stack():
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame.f_globals
    return vars(sys.modules["__main__"])  # the call is made as the interpreter ends, say


@contextmanager
def script_as_main() -> Generator[None]:
    """Has the script that makes the call be the module `__main__` meanwhile.

    Its classes and functions can be sent then, and keep their identity.
    """
    namespace, main = script(), sys.modules["__main__"]
    if namespace is vars(main):
        yield
        return
    module = types.ModuleType("__main__")
    vars(module).update(namespace)
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def runs_foreign_code() -> bool:
    """Tells whether an installed program has called code that is not installed.

    That is so in a worker of a task queue, in a server, in a test runner; a program that makes a
    distributed call itself is none of these.
    """
    frames = list(_stack())
    if not frames or installed(frames[0].f_code.co_filename):
        return False
    for frame in reversed(frames):
        file = frame.f_code.co_filename
        if not file.startswith("<frozen "):  # runpy's
            return installed(file) or installed(_behind_stub(file))
    return False


@functools.cache
def _behind_stub(file: str) -> str:
    """Returns the file of the package that a console script is the door of, or nothing."""
    if os.path.splitext(file)[1] or not os.path.isfile(file):
        return ""
    with open(file, encoding="utf-8", errors="replace") as stub:
        imported = _STUB.findall(stub.read(4096))
    for name in reversed(imported):
        root = name.partition(".")[0]
        if root not in sys.stdlib_module_names:
            return getattr(sys.modules.get(root), "__file__", None) or ""
    return ""


def installed(file: str) -> bool:
    """Tells whether a file is of Python's library or of an installed package."""
    parts = file.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return file.startswith(os.path.join(os.path.dirname(os.__file__), ""))
