"""How this program was started, so that it can be started again; recorded at import.

Programs change their `sys.argv`, environment and working directory later on; what the interpreter
itself was given is in `sys.orig_argv`. A debugger, profiler or coverage tool that runs the script
is in it too, and is left out: children run the script itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distribute import cells, hosting

# Tools that run a script which their own command line ends with. Not viztracer, which wraps every
# Python that a program starts: the function is sent to forks, which it follows.
_TOOLS = ("cProfile", "coverage", "debugpy", "kernprof", "pdb", "profile", "pydevd", "trace")


@dataclass(frozen=True)
class Start:
    """How the interpreter was started.

    Attributes:
        executable: Its path.
        arguments: Its arguments, interpreter flags included.
        cwd: Its working directory.
        argv: `sys.argv`, which a tool around the script makes that of the script.
        environ: Its environment variables.
        pid: Its process.
    """

    executable: str
    arguments: tuple[str, ...]
    cwd: str
    argv: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class _Program:
    """What an interpreter is told to run.

    Attributes:
        kind: A file (or directory, or zip file), a module, or text.
        name: The file's path or the module's name.
        flags: The interpreter's own arguments, which stand before.
        rest: The program's arguments, which stand behind.
    """

    kind: Literal["file", "module", "text"]
    name: str
    flags: tuple[str, ...]
    rest: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name, for messages and for looking it up."""
        if self.kind == "module":
            return self.name.partition(".")[0]
        return os.path.splitext(os.path.basename(self.name.rstrip(os.sep)))[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The interpreter's arguments that run it."""
        option = ("-m",) if self.kind == "module" else ()
        return (*self.flags, *option, self.name, *self.rest)


def _parsed(arguments: tuple[str, ...]) -> _Program:
    at = 0
    while at < len(arguments):
        one = arguments[at]
        if one == "-" or not one.startswith("-"):
            kind: Literal["file", "text"] = "text" if one == "-" else "file"
            return _Program(kind, one, arguments[:at], arguments[at + 1 :])
        at += 1
        if one.startswith("--"):
            at += one == "--check-hash-based-pycs"
            continue
        for number, letter in enumerate(one[1:], 1):
            if letter == "c":
                return _Program("text", "-c", arguments[:at], ())
            if letter in "mWX":
                # Its value is the rest of this argument, or else the next one.
                value = one[number + 1 :]
                if letter == "m":
                    before = arguments[: at - 1] + ((one[:number],) if number > 1 else ())
                    names = (value, *arguments[at:]) if value else arguments[at:]
                    return _Program("module", names[0], before, names[1:])
                at += not value
                break
    return _Program("text", "-", arguments, ())


def _started_in() -> str:
    """Returns the directory that the interpreter was started in."""
    # A script may change it before it imports this library. But `__main__.__file__` is absolute,
    # and tells what a relative path began with. For a module the search path has the directory,
    # and before Python's library.
    here = os.getcwd()
    program = _parsed(tuple(sys.orig_argv[1:]))
    main = os.path.normpath(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    unchanged = program.kind == "module" and (sys.flags.safe_path or here in sys.path)
    if program.kind == "text" or unchanged or not os.path.isabs(main):
        return here
    library = os.path.dirname(os.__file__)
    early = sys.path[: sys.path.index(library)] if library in sys.path else []
    if program.kind == "module":
        end, whole = program.name.replace(".", os.sep), os.path.splitext(main)[0]
    else:
        end, whole = os.path.normpath(program.name), main
    for one in (whole, os.path.dirname(main)):  # the second: a package, a directory, a zip file
        if not os.path.isabs(end) and one.endswith(os.sep + end):
            found = one[: -len(end) - 1] or os.sep
            return found if program.kind == "file" or found in early else here
    return here


START = Start(
    sys.executable, tuple(sys.orig_argv[1:]), _started_in(), tuple(sys.argv), dict(os.environ)
)


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

    The command is to run in `START.cwd`. It depends on who calls: see `hosting`.
    """
    program = _parsed(START.arguments)
    why_not = _no_process() or _no_program(program)
    if why_not:
        return (), why_not
    # A script for IPython (with magics, say) runs in IPython only, which replaces `__main__`.
    if cells.shell() is None:
        script = hosting.script()
        if not _is(program, script):
            inside = _inside(program, script) if program.label in _TOOLS else None
            if inside is not None:
                return (START.executable, *inside.arguments), ""
            return (), _hosted_by(program.label)
        if hosting.runs_foreign_code():
            return (), _hosted_by(program.label)
    return (START.executable, *START.arguments), ""


def environment(now: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the program is run again with.

    What the program has set since its start is there (an identifier of the run, say), and what it
    has taken away is there again: it takes it away there, too.

    Args:
        now: The variables that the new process is to have in any case.
    """
    # With that one it would end at a prompt.
    before = {name: value for name, value in START.environ.items() if name != "PYTHONINSPECT"}
    return before | dict(now)


def frozen() -> bool:
    """Tells whether `sys.executable` is this program itself, as PyInstaller makes it."""
    return bool(getattr(sys, "frozen", False))


def absolute(file: str) -> str:
    """Returns the one path of a source file, however the program was started; a cell's name as is.

    A profiler, say, compiles the script under the name that it was given on the command line.
    """
    path = os.path.realpath(os.path.join(START.cwd, file))
    return path if os.path.isfile(path) else file


def _hosted_by(name: str) -> str:
    return f"the program is {name}, which hosts the code that makes the call"


def _no_process() -> str:
    if frozen():
        return "a frozen program has no script to run again"
    runner = hosting.runner()
    if runner:
        return runner
    parent = sys.modules.get("multiprocessing.process")
    if parent is not None and parent.parent_process() is not None:
        return "this is a child process of multiprocessing"
    if os.getpid() != START.pid:
        return "this process is a fork of the one that was started"
    return ""


def _no_program(program: _Program) -> str:
    path = os.path.join(START.cwd, program.name)
    # What the interpreter has read from a pipe, as of `python <(...)`, cannot be read again.
    found = {
        "module": bool(_main_file()),
        "file": os.path.isdir(path) or (os.path.isfile(path) and not path.startswith("/dev/")),
        "text": False,
    }
    return "" if found[program.kind] else "there is no script on disk"


def _inside(tool: _Program, script: Mapping[str, Any]) -> _Program | None:
    """Returns the program that a tool runs as this script, or None if that is not sure."""
    # Tools leave the script its part of their command line in `sys.argv`, under a name of its own.
    rest = START.argv[1:]
    at = len(tool.rest) - len(rest) - 1
    if at < 0 or tool.rest[at + 1 :] != rest:
        return None
    module = at > 0 and tool.rest[at - 1] in ("-m", "--module")
    found = _Program("module" if module else "file", tool.rest[at], tool.flags, rest)
    return found if _is(found, script) and not _no_program(found) else None


def _is(program: _Program, namespace: Mapping[str, Any]) -> bool:
    """Tells whether a namespace of `__main__` is a program's."""
    spec = namespace.get("__spec__")
    if program.kind == "module":
        return spec is not None and spec.name in (program.name, f"{program.name}.__main__")
    path = os.path.join(START.cwd, program.name)
    file = os.path.join(START.cwd, namespace.get("__file__") or "")
    files = [file]
    if os.path.basename(file) == "__main__.py":
        files.append(os.path.dirname(file))  # a directory, or a zip file
    return any(os.path.exists(one) and os.path.samefile(one, path) for one in files)


def _main_file() -> str:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return path if path and os.path.exists(os.path.join(START.cwd, path)) else ""
