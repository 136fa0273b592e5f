"""At a prompt a call forks, whatever the prompt; a script that IPython runs is a script."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.scripts import BIN, run_program, run_python, write
from tests.test_terminal import CTRL_C, Terminal, needs_bash

# Programs of their own, at seconds each: run by `make slow`.
pytestmark = pytest.mark.slow

# What is typed: the answer comes from two ranks, and the plan's first line says how.
TYPED = """\
import time
from distribute import distributed, run
K = 3
def body(ctx): return f"SUM {ctx.all_reduce(K)} OF {ctx.world_size}"

print(run(body, devices=2))
print(str(distributed(devices=2)(body).plan()).splitlines()[0])
def body(ctx): return f"THEN {ctx.all_reduce(K + 1)} OF {ctx.world_size}"

print(run(body, devices=2))
"""
SCRIPT = """
    import sys
    from distribute import distributed, is_worker, run
    class Box:
        pass
    K = 3
    def body(ctx, box):
        assert isinstance(box, Box)
        return f"SUM {ctx.all_reduce(K)} OF {ctx.world_size}"
    if not is_worker():
        print("PLAN", str(distributed(devices=2)(body).plan()).splitlines()[0], flush=True)
    print(run(body, Box(), devices=2), sys.argv[1:])
    """


def test_a_prompt_that_reads_from_a_pipe(tmp_path: Path) -> None:
    ended = run_python("-i", "-q", cwd=tmp_path, stdin=TYPED)

    assert ended.out.splitlines() == [
        "SUM 6 OF 2",
        "start method  fork: an interactive prompt: the workers see what the cells made",
        "THEN 8 OF 2",
    ]


@needs_bash
@pytest.mark.parametrize(
    ("command", "prompt", "leave", "kind"),
    [
        ("-q", r">>> ", "exit()\n", "an interactive prompt"),
        ("-m IPython --no-banner", r"In \[\d+\]: ", "exit\n", "an IPython prompt"),
    ],
    ids=["python", "ipython"],
)
def test_a_prompt_on_a_terminal(
    tmp_path: Path, command: str, prompt: str, leave: str, kind: str
) -> None:
    """Definitions change between calls; Ctrl-C ends a call and leaves the prompt."""
    pytest.importorskip("IPython")
    with Terminal(tmp_path) as terminal:
        terminal.type(f'IPYTHONDIR=. "$PY" {command}\n')
        terminal.expect(prompt)
        for line in TYPED.splitlines(keepends=True):
            terminal.type(line)
        terminal.expect("SUM 6 OF 2")
        terminal.expect(f"start method  fork: {kind}")
        terminal.expect("THEN 8 OF 2")

        terminal.type("run(lambda ctx: print(f'HERE {ctx.rank}') or time.sleep(60), devices=2)\n")
        terminal.expect(r"HERE \d\b[^{]*HERE \d\b")
        terminal.type(CTRL_C)
        terminal.expect("KeyboardInterrupt")
        terminal.expect(prompt)
        terminal.type("'AFTER %d' % run(lambda ctx: ctx.all_reduce(5), devices=2)\n")
        terminal.expect("'AFTER 10'")
        terminal.type(leave)
        assert terminal.prompt() == 0


@needs_bash
def test_the_run_magic_forks(tmp_path: Path) -> None:
    """`%run s.py` is no first call of a script: running the program again would make a prompt."""
    pytest.importorskip("IPython")
    write(tmp_path, SCRIPT)
    with Terminal(tmp_path) as terminal:
        terminal.type('IPYTHONDIR=. "$PY" -m IPython --no-banner --simple-prompt\n')
        terminal.expect(r"In \[1\]: ")
        terminal.type("%run s.py --lr 1\n")
        terminal.expect("PLAN start method  fork: an IPython prompt")
        terminal.expect(re.escape("SUM 6 OF 2 ['--lr', '1']"))
        terminal.expect(r"In \[2\]: ")
        terminal.type("exit\n")
        assert terminal.prompt() == 0


@pytest.mark.parametrize(
    ("command", "name"),
    [([str(BIN / "ipython")], "s.py"), ([sys.executable, "-m", "IPython"], "s.ipy")],
)
def test_a_script_that_ipython_runs_is_a_script(
    tmp_path: Path, command: list[str], name: str
) -> None:
    pytest.importorskip("IPython")
    script = write(tmp_path, SCRIPT, name)

    ended = run_program(
        [*command, "--colors=NoColor", str(script), "--", "--lr", "1"],
        cwd=tmp_path,
        environ={"IPYTHONDIR": str(tmp_path)},
    )

    assert ended.code == 0, ended.text
    assert ended.lines("PLAN") == [
        "PLAN start method  reexec: the first call of a script that can be run again"
    ]
    assert ended.lines("SUM") == ["SUM 6 OF 2 ['--lr', '1']"]


def test_a_prompt_in_the_middle_of_a_script(tmp_path: Path) -> None:
    """`IPython.embed()`: the script above it is not what makes the call."""
    pytest.importorskip("IPython")
    source = """
    import IPython
    here = 5
    IPython.embed(banner1="", colors="nocolor")
    """
    typed = """\
from distribute import distributed, run
print("PLAN", str(distributed(devices=2)(len).plan()).splitlines()[0])
print("SUM", run(lambda ctx: ctx.all_reduce(1), devices=2))
exit
"""
    ended = run_python(
        write(tmp_path, source), cwd=tmp_path, stdin=typed, environ={"IPYTHONDIR": str(tmp_path)}
    )

    assert "PLAN start method  fork: an IPython prompt" in ended.out
    assert "SUM 2" in ended.out
