"""Public reports about output, prompts and threads, as programs of their own: C12, C66, C68-C70."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT, run_program, run_python, write

# Programs of their own, at seconds each: run by `make slow`.
pytestmark = pytest.mark.slow

STRATEGIES = ["ddp", "ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)]


def test_c12_the_prompt_after_a_script_can_call_again(tmp_path: Path) -> None:
    """`python -i`: the script's function, and one that is typed at the prompt."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=2)
        def train(ctx):
            return ctx.world_size

        if __name__ == "__main__":
            print("FIRST", train())
        """,
    )
    typed = (
        'print("SECOND", train())\n'
        "@distributed(devices=2)\n"
        "def typed(ctx):\n"
        "    return ctx.all_gather(ctx.rank)\n"
        "\n"
        'print("THIRD", typed())\n'
    )

    ended = run_python("-i", script, stdin=typed, timeout=90)

    assert ended.code == 0, ended.text
    assert re.findall("(?:FIRST|SECOND|THIRD) .*", ended.out) == [
        "FIRST 2",
        "SECOND 2",
        "THIRD [0, 1]",
    ], ended.text


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("wanted", ["", "3"], ids=["unset", "set"])
def test_c66_threads_are_shared_out(tmp_path: Path, strategy: str, wanted: str) -> None:
    """A rank gets its part of the cores, or the number that the user has set."""
    script = write(
        tmp_path,
        """
        import os, sys, torch
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            wanted = os.environ.get("OMP_NUM_THREADS")
            print(f"THREADS {torch.get_num_threads()} {wanted}\\n", end="")

        if __name__ == "__main__":
            before = torch.get_num_threads()
            train()
            print("SAME", torch.get_num_threads() == before)
        """,
    )

    environ = {**os.environ, "OMP_NUM_THREADS": wanted}
    if not wanted:
        del environ["OMP_NUM_THREADS"]
    command = ["env", *([] if wanted else ["-u", "OMP_NUM_THREADS"]), sys.executable]
    ended = run_program([*command, str(script), strategy], environ=environ)

    assert ended.code == 0, ended.text
    number = int(wanted) if wanted else max(1, len(os.sched_getaffinity(0)) // 2)
    # torch itself takes no more threads than there are cores, its own process's or not.
    seen = min(number, os.cpu_count() or 1)
    assert ended.lines("THREADS") == [f"THREADS {seen} {number}"] * 2
    assert ended.lines("SAME") == ["SAME True"]


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "ddp_fork", "ddp_forkserver", pytest.param("ddp_spawn", marks=pytest.mark.slow)],
)
def test_c68_logging_is_left_alone_and_works_in_the_ranks(tmp_path: Path, strategy: str) -> None:
    """A message comes once, in the format of the caller's program; nothing is reconfigured."""
    script = write(
        tmp_path,
        """
        import logging, sys
        from distribute import distributed

        logging.basicConfig(level=logging.INFO, format="%(name)s|%(message)s")

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            if ctx.rank == 1:
                logging.getLogger("mine").info("HELLO")

        def state():
            root = logging.getLogger()
            return list(root.handlers), root.level

        if __name__ == "__main__":
            before = state()
            train()
            logging.getLogger("mine").info("LAST")
            print("UNCHANGED", state() == before)
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 0, ended.text
    assert ended.lines("UNCHANGED") == ["UNCHANGED True"]
    assert ended.err.splitlines() == ["[1] mine|HELLO", "mine|LAST"]


LOUD = """
    import sys
    from distribute import distributed

    @distributed(devices=2, strategy=sys.argv[1])
    def train(ctx):
        for i in range(20_000):
            sys.stdout.write(f"R{ctx.rank} {i} " + "x" * 500 + "\\n")
            if i % 100 == 0:
                sys.stderr.write(f"E{ctx.rank} {i}\\n")
        sys.stdout.write(f"LAST {ctx.rank}")

    if __name__ == "__main__":
        train()
    """


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c69_much_output_is_neither_lost_nor_in_the_way(tmp_path: Path, strategy: str) -> None:
    """20 MB, every line whole and in order, also the last one, which has no end."""
    script = write(tmp_path, LOUD)

    ended = run_python(script, strategy, timeout=110)

    assert ended.code == 0, ended.text[-2000:]
    assert ended.out.count("x") == 2 * 20_000 * 500
    assert all(f"LAST {rank}" in ended.out for rank in (0, 1))
    if strategy == "ddp":
        return  # the caller is rank 0 and fills its own buffer, which it cuts anywhere
    for rank, mark in ((0, ""), (1, r"\[1\] ")):
        found = re.findall(rf"^{mark}R{rank} (\d+) x{{500}}$", ended.out, re.MULTILINE)
        assert found == [str(i) for i in range(20_000)]
        assert len(re.findall(rf"^{mark}E{rank} \d+$", ended.err, re.MULTILINE)) == 200
        assert len(re.findall(f"LAST {rank}", ended.out)) == 1


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_c69_a_reader_that_leaves_does_not_hold_the_program(tmp_path: Path, strategy: str) -> None:
    """As `| head -1` does."""
    script = write(tmp_path, LOUD)
    command = f'"{sys.executable}" "{script}" {strategy} 2>/dev/null | head -1'

    found = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )

    assert re.fullmatch(r"(\[1\] )?R[01] 0 x{500}\n", found.stdout)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c70_bars_of_several_ranks_do_not_mix(tmp_path: Path, strategy: str) -> None:
    """Rank 0's rewrites its line; of the others' the last state stands in a line of its own."""
    script = write(
        tmp_path,
        """
        import sys
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            for i in range(50):
                sys.stderr.write(f"\\rstep {i} of rank {ctx.rank}")
                sys.stderr.flush()
            sys.stderr.write("\\n")
            print(f"END {ctx.rank}\\n", end="", flush=True)
            for i in ctx.progress(range(5), desc="bar"):
                pass

        if __name__ == "__main__":
            train()
        """,
    )

    # As bytes: in text a carriage return would be read as the end of a line.
    ended = subprocess.run(
        [sys.executable, script, strategy],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=100,
        check=True,
    )

    assert sorted(re.findall(rb"END (\d)\n", ended.stdout)) == [b"0", b"1"]
    # The other rank's line may stand between any two states.
    states = re.findall(rb"\rstep (\d+) of rank 0", ended.stderr)
    assert states == [b"%d" % number for number in range(50)]
    assert re.findall(rb"step \d+ of rank 1\b.", ended.stderr, re.DOTALL) == [
        b"step 49 of rank 1\n"
    ]
    assert b"[1] step 49 of rank 1\n" in ended.stderr
    assert not re.search(rb"\[1\] .*bar", ended.stderr)
    assert b"bar" in ended.stderr
