"""How a program was started, as real interpreters report it about themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distribute import command

PROBE = """
import json, os, sys
from distribute import command
found, why = command.command()
print(json.dumps({
    "command": found,
    "why": why,
    "interactive": command.interactive(),
    "cwd": command.START.cwd,
    "argv": sys.argv,
    "optimize": sys.flags.optimize,
    "utf8": sys.flags.utf8_mode,
    "unbuffered": sys.stdout.line_buffering or sys.stdout.write_through,
    "warnings": sys.warnoptions,
    "main": __name__,
}))
"""
ODD = ["two words", 'a="b" c=$X', "", "ünï", "--", "--not-a-flag", "-c", "-m", "it's"]
HERE = str(Path(__file__).parent.parent)


def start(
    *arguments: str, cwd: Path, stdin: str = "", flags: tuple[str, ...] = (), **variables: str
) -> Any:
    """What the probe says about an interpreter that was started like this."""
    return output([sys.executable, *flags, *arguments], cwd=cwd, stdin=stdin, **variables)


def output(whole: list[str], *, cwd: Path, stdin: str = "", **variables: str) -> Any:
    environ = {**os.environ, "PYTHONPATH": HERE, **variables}
    if "PYTEST_CURRENT_TEST" not in variables:
        environ.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        whole,
        cwd=cwd,
        env=environ,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my script.py"
    path.write_text(PROBE)
    return path


def test_a_script_with_flags_and_odd_arguments_can_be_run_again(script: Path, tmp_path: Path):
    flags = ("-O", "-X", "utf8", "-W", "ignore", "-u")

    first = start(str(script), *ODD, flags=flags, cwd=tmp_path)

    assert first["command"] == [sys.executable, *flags, str(script), *ODD]
    assert first["why"] == ""
    assert first["argv"] == [str(script), *ODD]
    assert (first["optimize"], first["utf8"], first["warnings"]) == (1, 1, ["ignore"])
    assert output(first["command"], cwd=Path(first["cwd"])) == first


def test_a_module_can_be_run_again(tmp_path: Path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "mod.py").write_text(PROBE)

    first = start("-m", "pkg.mod", *ODD, flags=("-Xutf8",), cwd=tmp_path)

    assert first["command"] == [sys.executable, "-Xutf8", "-m", "pkg.mod", *ODD]
    assert output(first["command"], cwd=Path(first["cwd"])) == first


@pytest.mark.parametrize("how", [("-mpkg.mod",), ("-um", "pkg.mod"), ("pkg",), ("-m", "pkg")])
def test_a_package_can_be_run_again(how: tuple[str, ...], tmp_path: Path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("mod", "__main__"):
        (package / f"{name}.py").write_text(PROBE)

    first = start(*how, "x", cwd=tmp_path)

    assert first["command"] == [sys.executable, *how, "x"]
    assert output(first["command"], cwd=Path(first["cwd"])) == first


def test_a_program_may_change_its_directory_and_arguments(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text(
        "import distribute, os, sys\nos.chdir('elsewhere')\nsys.argv[1:] = ['eaten']\n" + PROBE
    )

    found = start("train.py", "--lr", "1", cwd=tmp_path)

    assert found["argv"] == ["train.py", "eaten"]
    assert found["command"] == [sys.executable, "train.py", "--lr", "1"]
    assert os.path.samefile(found["cwd"], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [(("-c", PROBE), ""), (("-uc", PROBE), ""), (("-",), PROBE), (("-", "x"), PROBE), ((), PROBE)],
    ids=["-c", "-uc", "-", "- x", "stdin"],
)
def test_a_program_that_is_no_file_cannot_be_run_again(
    arguments: tuple[str, ...], stdin: str, tmp_path: Path
):
    found = start(*arguments, stdin=stdin, cwd=tmp_path)

    assert found["command"] == []
    assert found["why"] == "there is no script on disk"
    assert found["interactive"] == ""


def test_a_script_that_ends_at_a_prompt_is_interactive(script: Path, tmp_path: Path):
    assert start("-i", str(script), cwd=tmp_path)["interactive"] == "an interactive prompt"
    assert start(str(script), cwd=tmp_path)["interactive"] == ""


def test_a_prompt_is_interactive(tmp_path: Path):
    found = start("-i", "-q", stdin=f"exec({PROBE!r})\n", cwd=tmp_path)

    assert found["interactive"] == "an interactive prompt"
    assert found["command"] == []


def test_the_debugger_is_not_started_again(script: Path, tmp_path: Path):
    found = start("-m", "pdb", "-c", "continue", str(script), "a", stdin="q\n", cwd=tmp_path)

    assert found["command"] == [sys.executable, str(script), "a"]


@pytest.mark.parametrize("name", ["trace.py", "profile", "kernprof.py"])
def test_a_script_with_the_name_of_a_tool_is_a_script(name: str, tmp_path: Path):
    (tmp_path / name).write_text(PROBE)

    found = start(name, "a", cwd=tmp_path)

    assert found["command"] == [sys.executable, name, "a"]


@pytest.mark.parametrize(
    ("arguments", "kind", "name", "flags", "rest"),
    [
        ("-um pkg x", "module", "pkg", ("-u",), ("x",)),
        ("-uOmpkg -m", "module", "pkg", ("-uO",), ("-m",)),
        ("-Xm -W c s.py -c", "file", "s.py", ("-Xm", "-W", "c"), ("-c",)),
        ("-OX utf8 --check-hash-based-pycs always s.py", "file", "s.py", 4, ()),
        ("-Wm -uc pass", "text", "-c", 2, ()),
        ("-u -", "text", "-", ("-u",), ()),
        ("-u", "text", "-", ("-u",), ()),
    ],
)
def test_the_interpreter_s_arguments_are_read_as_it_does(
    arguments: str, kind: str, name: str, flags: tuple[str, ...] | int, rest: tuple[str, ...]
):
    given = tuple(arguments.split())

    found = command._parsed(given)

    assert (found.kind, found.name, found.rest) == (kind, name, rest)
    assert found.flags == (given[:flags] if isinstance(flags, int) else flags)


def test_the_profiler_is_not_started_again(script: Path, tmp_path: Path):
    """Several of them would write one file of results."""
    found = start("-m", "cProfile", "-o", "out.prof", str(script), cwd=tmp_path)

    assert found["command"] == [sys.executable, str(script)]


def test_a_tool_that_takes_the_directory_from_the_search_path(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "s.py").write_text(PROBE)

    found = start("-m", "trace", "--count", "-C", "counts", "sub/s.py", "a", cwd=tmp_path)

    assert found["command"] == [sys.executable, "sub/s.py", "a"]
    assert os.path.samefile(found["cwd"], tmp_path)


@pytest.mark.parametrize("flags", [(), ("-W", "ignore"), ("-X", "utf8", "-u"), ("-Wignore",)])
def test_a_test_runner_is_not_started_again(flags: tuple[str, ...], tmp_path: Path):
    (tmp_path / "test_it.py").write_text(
        "import unittest\n"
        "class Test(unittest.TestCase):\n"
        "    def test(self):\n"
        f"        exec({PROBE!r}, {{'__name__': 'probe'}})\n"
    )

    found = start("-m", "unittest", "test_it", flags=flags, cwd=tmp_path)

    assert found["command"] == []
    assert "unittest" in found["why"]


def test_a_test_of_pytest_is_not_started_again():
    found, why = command.command()

    assert found == ()
    assert "pytest" in why


def test_a_child_of_multiprocessing_is_not_started_again(tmp_path: Path):
    (tmp_path / "train.py").write_text(
        "import multiprocessing, sys\n"
        f"def probe(): exec({PROBE!r}); sys.stdout.flush()\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('fork').Process(target=probe)\n"
        "    child.start(); child.join()\n"
    )

    found = start("train.py", cwd=tmp_path)

    assert found["command"] == []
    assert "multiprocessing" in found["why"]


def test_a_script_that_is_gone_cannot_be_run_again(tmp_path: Path):
    (tmp_path / "train.py").write_text("import os\nos.unlink(__file__)\n" + PROBE)

    found = start("train.py", cwd=tmp_path)

    assert found["command"] == []
    assert found["why"] == "there is no script on disk"


@pytest.mark.parametrize("changed", [False, True])
def test_a_module_that_is_found_elsewhere_was_not_started_there(tmp_path: Path, changed: bool):
    """Of an editable install, say: its place on the search path says nothing of the start."""
    (tmp_path / "src").mkdir()
    (tmp_path / "here").mkdir()
    change = "import os; os.chdir(os.path.dirname(__file__))\n" * changed
    (tmp_path / "src" / "mod.py").write_text(change + PROBE)
    path = os.pathsep.join([HERE, str(tmp_path / "src")])

    found = start("-m", "mod", cwd=tmp_path / "here", PYTHONPATH=path)

    assert found["command"] == [sys.executable, "-m", "mod"]
    assert os.path.samefile(found["cwd"], tmp_path / ("src" if changed else "here"))
