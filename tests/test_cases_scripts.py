"""Cases of the log about how a program is started, and about several of them at once.

Others of the kind are in test_cases.py and test_cases_failure.py.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.scripts import Ended, run_program, run_python, write

slow = pytest.mark.slow


@slow
def test_c04_the_launcher_changed_directory(tmp_path: Path) -> None:
    """A relative path no longer leads to the script, or ranks run elsewhere than rank 0."""
    write(
        tmp_path,
        """
        import os
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def train(ctx):
            print(f"R{ctx.rank} cwd={os.getcwd()}\\n", end="", flush=True)

        if __name__ == "__main__":
            os.makedirs("runs/a", exist_ok=True)
            os.chdir("runs/a")
            train()
            print("LAUNCHER", os.getcwd())
        """,
        "sub/s.py",
    )

    ended = run_python("sub/s.py", cwd=tmp_path)

    here = tmp_path / "runs" / "a"
    assert ended.code == 0, ended.text
    assert ended.lines("R") == [f"R0 cwd={here}", f"R1 cwd={here}"]
    assert ended.lines("LAUNCHER") == [f"LAUNCHER {here}"]
    assert not (here / "runs").exists()


@slow
@pytest.mark.parametrize("guard", [True, False], ids=["is_worker", "plain"])
def test_c05_ranks_agree_on_a_directory_with_a_time_stamp(tmp_path: Path, guard: bool) -> None:
    """Each process computes its own, and later steps look in the wrong one.

    What stands above the call runs in every process, as the first page says: `is_worker` tells.
    """
    script = write(
        tmp_path,
        f"""
        import os, time
        from distribute import distributed, is_worker

        @distributed(devices=2, strategy="ddp")
        def train(ctx, run_dir):
            print(f"R{{ctx.rank}} {{run_dir}}\\n", end="", flush=True)
            ctx.barrier()
            assert os.path.isdir(run_dir)

        if __name__ == "__main__":
            run_dir = os.path.join(os.environ["OUT"], f"run-{{time.time_ns()}}")
            if not ({guard} and is_worker()):
                os.makedirs(run_dir)
            train(run_dir)
            print("LAUNCHER", run_dir)
        """,
    )

    ended = run_python(script, environ={"OUT": str(tmp_path)})

    assert ended.code == 0, ended.text
    (run_dir,) = (line.split()[1] for line in ended.lines("LAUNCHER"))
    assert ended.lines("R") == [f"R0 {run_dir}", f"R1 {run_dir}"]
    assert len(list(tmp_path.glob("run-*"))) == (1 if guard else 2)


@slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_spawn", "ddp_forkserver"])
def test_c06_the_launcher_s_interpreter_and_flags(tmp_path: Path, strategy: str) -> None:
    """`python` is absent, or is another one."""
    script = write(
        tmp_path,
        f"""
        import sys
        from distribute import distributed

        @distributed(devices=2, strategy={strategy!r})
        def train(ctx):
            f = sys.flags
            print(f"R{{ctx.rank}} {{sys.executable}} O={{f.optimize}} utf8={{f.utf8_mode}} "
                  f"dbg={{__debug__}}\\n", end="", flush=True)

        if __name__ == "__main__":
            train()
        """,
    )

    ended = run_python("-O", "-X", "utf8", script, environ={"PATH": "/nonexistent"})

    assert ended.code == 0, ended.text
    rest = f"{sys.executable} O=1 utf8=1 dbg=False"
    assert ended.lines("R") == [f"R0 {rest}", f"R1 {rest}"]


@pytest.mark.parametrize(
    "how", ["program", pytest.param("called", marks=slow), pytest.param("python -m", marks=slow)]
)
def test_c13_an_entry_point_of_a_package(tmp_path: Path, how: str) -> None:
    """`__main__` is a stub that knows nothing of the function.

    The same where another script calls its `main`, with command-line arguments of its own.
    """
    write(tmp_path, "", "toolpkg/__init__.py")
    write(
        tmp_path,
        """
        import argparse
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def fit(ctx, epochs):
            print(f"R{ctx.rank} epochs={epochs} name={__name__}\\n", end="", flush=True)

        def main(argv=None):
            p = argparse.ArgumentParser(prog="mytool")
            sub = p.add_subparsers(dest="cmd")
            f = sub.add_parser("fit")
            f.add_argument("--epochs", type=int, default=1)
            return fit(p.parse_args(argv).epochs)
        """,
        "toolpkg/cli.py",
    )
    stub = write(
        tmp_path,
        f"""
        #!/bin/sh
        '''exec' "{sys.executable}" "$0" "$@"
        ' '''
        import sys
        from toolpkg.cli import main
        if __name__ == "__main__":
            sys.exit(main())
        """,
        "bin/mytool",
    )
    stub.chmod(0o755)
    write(
        tmp_path,
        "from toolpkg.cli import main\nmain(['fit', '--epochs', '5'])",
        "toolpkg/caller.py",
    )
    command = {
        "program": [str(stub), "fit", "--epochs", "5"],
        "called": [sys.executable, str(tmp_path / "toolpkg" / "caller.py"), "other"],
        "python -m": [sys.executable, "-m", "toolpkg.caller", "--unrelated"],
    }[how]

    root = Path(__file__).parent.parent
    ended = run_program(command, cwd=tmp_path, environ={"PYTHONPATH": f"{root}:{tmp_path}"})

    assert ended.code == 0, ended.text
    assert ended.lines("R") == ["R0 epochs=5 name=toolpkg.cli", "R1 epochs=5 name=toolpkg.cli"]


@slow
def test_c57_several_jobs_at_once(tmp_path: Path) -> None:
    """The second takes the first one's port and dies, or joins its group."""
    script = write(
        tmp_path,
        """
        import sys, time
        import torch
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def train(ctx, me):
            for _ in range(20):
                t = ctx.all_reduce(torch.tensor([float(me)]), op="sum")
                assert float(t) == 2 * me, float(t)
                time.sleep(0.02)
            return me

        if __name__ == "__main__":
            print("GOT", train(int(sys.argv[1])))
        """,
    )

    def job(number: int) -> Ended:
        return run_python(script, str(number))

    with ThreadPoolExecutor(4) as pool:
        for ended, number in zip(pool.map(job, range(1, 5)), range(1, 5), strict=True):
            assert ended.code == 0, ended.text
            assert ended.lines("GOT") == [f"GOT {number}"]


@slow
@pytest.mark.parametrize(
    ("job", "step"), [("bash", "0"), ("interactive", "0"), ("bash", None)], ids=str
)
def test_c59_a_shell_on_a_cluster(tmp_path: Path, job: str, step: str | None) -> None:
    """Its variables speak of one task, which is the shell: both ranks are started here."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=2)
        def train(ctx):
            print(f"R{ctx.rank}/{ctx.world_size}\\n", end="", flush=True)

        if __name__ == "__main__":
            train()
        """,
    )
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": job,
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "localhost",
    }
    if step is not None:
        environ["SLURM_STEP_ID"] = step

    ended = run_python(script, environ=environ)

    assert ended.code == 0, ended.text
    assert ended.lines("R") == ["R0/2", "R1/2"]


C63 = """
    import sys
    from distribute import run

    def inner(ctx):
        ctx.barrier()
        return ctx.world_size

    def outer(ctx):
        if ctx.rank == 0 or {both}:
            return ("inner", run(inner, devices={devices}{strategy}))

    if __name__ == "__main__":
        print("GOT", run(outer, devices=2, strategy={outside!r}))
    """


@pytest.mark.parametrize(
    "outside", ["ddp_fork", *(pytest.param(one, marks=slow) for one in ("ddp", "ddp_spawn"))]
)
def test_c63_a_launch_inside_a_launched_function(tmp_path: Path, outside: str) -> None:
    """It runs in the world that is there, instead of hanging in one of the same address."""
    source = C63.format(both=True, devices=2, strategy="", outside=outside)

    ended = run_python(write(tmp_path, source))

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT ('inner', 2)"]


@slow
def test_c63_another_world_inside_is_refused(tmp_path: Path) -> None:
    source = C63.format(both=True, devices=3, strategy="", outside="ddp_fork")

    ended = run_python(write(tmp_path, source))

    assert ended.code == 1, ended.text
    assert "devices=3 inside a running distributed call: that call has 2 ranks" in ended.err


@slow
@pytest.mark.parametrize("outside", ["ddp_fork", "ddp_spawn"])
def test_c63_a_launch_inside_that_one_rank_makes(tmp_path: Path, outside: str) -> None:
    """Rank 0 waits for a rank that has returned: an error that names both."""
    source = C63.format(both=False, devices=2, strategy=", strategy='ddp_spawn'", outside=outside)

    ended = run_python(write(tmp_path, source))

    assert ended.code == 1, ended.text
    assert "rank(s) 1 had returned, while this rank waited for them" in ended.err, ended.text
    assert "rank 0 raised RuntimeError in barrier at s.py:5; rank 1 returned" in ended.err
