"""The automatic choice, in programs that are started in other ways than `python script.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.scripts import run_program, run_python, write

PROGRAM = """
from distribute import distributed

def outer():
    scale = 10

    @distributed(devices=2, returns="all")
    def train(ctx, x):
        return x * scale + ctx.rank, ctx.world_size

    return train

train = outer()
print("METHOD", train.plan().method)
print("GOT", train(4))
"""


def test_a_command_line_program(tmp_path: Path) -> None:
    """`python -c`: there is no script to run again."""
    ended = run_python("-c", PROGRAM, cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert ended.lines("METHOD") == ["METHOD fork"]
    assert ended.lines("GOT") == ["GOT [(40, 2), (41, 2)]"]


def test_a_program_from_standard_input(tmp_path: Path) -> None:
    """`python < script.py`."""
    ended = run_python(cwd=tmp_path, stdin=PROGRAM)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT [(40, 2), (41, 2)]"]


def test_an_interactive_prompt(tmp_path: Path) -> None:
    """Functions that were typed in, called again and again."""
    typed = (
        "from distribute import run\n"
        "def f(ctx): return ctx.all_gather(ctx.rank)\n\n"
        "print('FIRST', run(f, devices=2))\n"
        "print('SECOND', run(f, devices=3))\n"
    )

    ended = run_python("-i", cwd=tmp_path, stdin=typed)

    assert ended.code == 0, ended.text
    assert "FIRST [0, 1]" in ended.out
    assert "SECOND [0, 1, 2]" in ended.out


def test_a_thread_of_a_script(tmp_path: Path) -> None:
    """Signals, which free rank 0 under re-exec, are the main thread's."""
    script = write(
        tmp_path,
        """
        import threading
        from distribute import distributed

        @distributed(devices=2, returns="all")
        def train(ctx):
            return ctx.rank, ctx.world_size

        def call():
            print("METHOD", train.plan().method)
            print("GOT", train())

        if __name__ == "__main__":
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("METHOD") == ["METHOD forkserver"]
    assert ended.lines("GOT") == ["GOT [(0, 2), (1, 2)]"]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_no_main_guard_is_needed(tmp_path: Path, method: str) -> None:
    """The function is sent; the script is not imported again."""
    script = write(
        tmp_path,
        f"""
        from distribute import run
        print("ABOVE")
        print("GOT", run(lambda ctx: ctx.all_gather(ctx.rank), devices=2, start_method="{method}"))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.out.splitlines() == ["ABOVE", "GOT [0, 1]"]


def test_a_child_process_of_multiprocessing(tmp_path: Path) -> None:
    """Also a daemonic one, which multiprocessing itself would not let have children."""
    script = write(
        tmp_path,
        """
        import multiprocessing
        from distribute import distributed

        @distributed(devices=2)
        def train(ctx):
            return ctx.all_gather(ctx.rank)

        def call():
            print("METHOD", train.plan().method, flush=True)
            print("GOT", train(), flush=True)

        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=call, daemon=True)
            child.start()
            child.join()
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("METHOD") == ["METHOD fork"]
    assert ended.lines("GOT") == ["GOT [0, 1]"]


def test_a_program_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    """It inherits the variables of the rank, and starts a world of its own nevertheless."""
    script = write(
        tmp_path,
        """
        import subprocess, sys
        from distribute import distributed

        @distributed(devices=2)
        def inner(ctx):
            return ctx.all_gather(ctx.rank + 10)

        @distributed(devices=2)
        def outer(ctx):
            if ctx.rank == 0:
                return subprocess.check_output([sys.executable, __file__, "inner"], text=True)

        if __name__ == "__main__":
            if sys.argv[1:] == ["inner"]:
                print("INNER", inner(), end="")
            else:
                print(outer())
        """,
    )

    ended = run_program([sys.executable, str(script)])

    assert ended.code == 0, ended.text
    assert ended.lines("INNER") == ["INNER [10, 11]"]
