"""What `import distribute` gives, and what it does not do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import distribute

HERE = str(Path(__file__).parent.parent)
LAZY = {"Context", "current"}  # they need torch


def fresh(program: str) -> Any:
    """What a fresh interpreter finds."""
    environ = {**os.environ, "PYTHONPATH": HERE}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import json, sys, os\n" + program],
        env=environ,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_exported_names_are_those_that_are_defined():
    defined = {
        name
        for name, value in vars(distribute).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "").startswith("distribute")
    }

    assert set(distribute.__all__) == defined | LAZY
    assert sorted(distribute.__all__) == list(distribute.__all__)


@pytest.mark.parametrize("name", distribute.__all__)
def test_an_exported_name_can_be_imported_and_says_what_it_is(name: str):
    value = getattr(distribute, name)

    assert value.__doc__
    assert value.__name__ == name


def test_star_import_gives_the_exported_names():
    found = fresh(
        "scope = {}\n"
        "exec('from distribute import *', scope)\n"
        "print(json.dumps(sorted(set(scope) - {'__builtins__'})))"
    )

    assert found == list(distribute.__all__)


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'distribute' has no attribute 'lunch'"):
        distribute.lunch  # noqa: B018


def test_the_package_has_a_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", distribute.__version__)


def test_an_import_brings_neither_torch_nor_numpy():
    found = fresh(
        "import distribute\n"
        "heavy = {'torch', 'numpy', 'multiprocessing', 'tqdm'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )

    assert found == []


def test_an_import_starts_nothing_and_changes_nothing():
    found = fresh("""
import signal, threading
def facts():
    handlers = {n: str(signal.getsignal(n)) for n in signal.valid_signals()}
    descriptors = sorted(os.listdir("/proc/self/fd"))
    with open(f"/proc/self/task/{os.getpid()}/children") as stream:
        children = stream.read()
    hooks = [str(sys.excepthook), str(sys.unraisablehook), os.getcwd(), sys.path, sys.argv]
    return [dict(os.environ), handlers, descriptors, children, threading.active_count(), hooks]
before = facts()
import distribute
print(json.dumps(before == facts()))
""")

    assert found is True


def test_the_lazy_names_bring_torch_but_no_group_and_no_context_of_a_device():
    found = fresh("""
from distribute import Context, current, is_worker
import torch, torch.distributed as dist
woken = [dist.is_initialized(), torch.cuda.is_initialized(), is_worker()]
print(json.dumps([Context.__name__, *woken]))
""")

    assert found == ["Context", False, False, False]


def test_the_package_is_typed():
    assert (Path(HERE) / "distribute" / "py.typed").exists()
