"""What users of other launchers reported, as they would run it here.

The numbers are those of the project's case log; each docstring says what went wrong elsewhere.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.scripts import BIN, run_program, run_python, tagged, write

# Programs of their own, at seconds each: run by `make slow`.
pytestmark = pytest.mark.slow

STRATEGIES = ["ddp", "ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)]


def test_c01_spawn_needs_no_main_guard(tmp_path: Path) -> None:
    """Children that import the script again reach the launch line again and multiply."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=2, strategy="ddp_spawn")
        def train(ctx):
            print(f"BODY {ctx.rank}\\n", end="", flush=True)
            return ctx.world_size

        print("AFTER", train())
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("BODY") == ["BODY 0", "BODY 1"]
    assert ended.lines("AFTER") == ["AFTER 2"]


PACKAGE_MODULE = """
    import sys
    from distribute import distributed
    from .opts import LR

    @distributed(devices=2, strategy="ddp")
    def train(ctx, lr):
        print(f"R{ctx.rank} lr={lr} pkg={__package__} argv={sys.argv[1:]}\\n", end="", flush=True)

    if __name__ == "__main__":
        train(LR)
    """


@pytest.mark.parametrize("module", ["pkg.train", "pkg"])
@pytest.mark.parametrize("found", ["cwd", "PYTHONPATH"])
def test_c02_modules_run_with_their_package(tmp_path: Path, module: str, found: str) -> None:
    """Running the file instead of the module loses the package of relative imports."""
    write(tmp_path, "", "pkg/__init__.py")
    write(tmp_path, "LR = 0.5", "pkg/opts.py")
    write(tmp_path, PACKAGE_MODULE, "pkg/train.py" if module == "pkg.train" else "pkg/__main__.py")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = tmp_path if found == "cwd" else elsewhere
    environ = {} if found == "cwd" else {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent.parent}"}

    ended = run_python("-m", module, "--epochs", "3", cwd=where, environ=environ)

    assert ended.code == 0, ended.text
    assert ended.lines("R") == [
        "R0 lr=0.5 pkg=pkg argv=['--epochs', '3']",
        "R1 lr=0.5 pkg=pkg argv=['--epochs', '3']",
    ]


def test_c03_arguments_survive_byte_for_byte(tmp_path: Path) -> None:
    """Launchers inject flags of their own, which a strict parser refuses."""
    script = write(
        tmp_path,
        """
        import argparse, json, sys
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def train(ctx, args):
            print(f"R{ctx.rank} " + json.dumps([sys.argv[1:], vars(args)]) + "\\n", end="")

        if __name__ == "__main__":
            p = argparse.ArgumentParser()
            p.add_argument("--name")
            p.add_argument("--expr")
            p.add_argument("rest", nargs="*")
            train(p.parse_args())
        """,
    )
    given = ["--name", "two words", "--expr", 'a="b" c=$X', "", "ünï", "--", "--not-a-flag"]

    ended = run_python(script, *given)

    assert ended.code == 0, ended.text
    zero, one = ended.lines("R")
    assert zero[:2] == "R0"
    assert one[:2] == "R1"
    assert json.loads(zero[2:]) == json.loads(one[2:])
    assert json.loads(zero[2:])[0] == given


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c07_code_after_the_call_runs_once(tmp_path: Path, strategy: str) -> None:
    """Re-executed processes go on with the script; fast ranks leave while others still connect."""
    script = write(
        tmp_path,
        """
        import os, sys
        from distribute import distributed

        @distributed(devices=3, strategy=sys.argv[1])
        def train(ctx):
            return ctx.rank

        if __name__ == "__main__":
            train()
            with open("after.log", "a") as f:
                f.write(f"{os.getpid()}\\n")
            print("AFTER")
        """,
    )
    times = 1 if strategy == "ddp_spawn" else 3
    for number in range(times):
        ended = run_python(script, strategy, cwd=tmp_path)

        assert ended.code == 0, ended.text
        assert ended.lines("AFTER") == ["AFTER"]
        assert len((tmp_path / "after.log").read_text().splitlines()) == number + 1


def test_c07_bodies_without_collectives_end_well_a_hundred_times(tmp_path: Path) -> None:
    """A rank that is done must not leave before all ranks have connected."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=3, strategy="ddp", returns="all")
        def train(ctx):
            return ctx.rank

        if __name__ == "__main__":
            print("GOT", sum(train() == [0, 1, 2] for _ in range(100)))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT 100"]


def test_c08_several_launches_with_different_worlds(tmp_path: Path) -> None:
    """The second launch finds its address in use, or hangs."""
    script = write(
        tmp_path,
        """
        import torch
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def fit(ctx, n):
            return float(ctx.all_reduce(torch.tensor([float(n)]), op="sum"))

        @distributed(devices=3, strategy="ddp")
        def check(ctx):
            return ctx.world_size

        if __name__ == "__main__":
            print("GOT", [fit(i) for i in range(3)], check())
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT [0.0, 2.0, 4.0] 3"]


def test_c09_a_later_launch_depends_on_an_earlier_result(tmp_path: Path) -> None:
    """Workers that replay the script cannot know a result, and take another branch."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def train(ctx, lr, steps):
            print(f"R{ctx.rank} lr={lr} steps={steps}\\n", end="", flush=True)
            return abs(lr - 0.1)

        if __name__ == "__main__":
            scores = {lr: train(lr, 1) for lr in (1.0, 0.1, 0.01)}
            best = min(scores, key=scores.get)
            if scores[best] < 0.05:
                train(best, 99)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("R") == sorted(
        f"R{rank} lr={lr} steps={steps}"
        for rank in (0, 1)
        for lr, steps in ((1.0, 1), (0.1, 1), (0.01, 1), (0.1, 99))
    )


@pytest.mark.parametrize("strategy", ["ddp", "auto"])
@pytest.mark.parametrize("module", [False, True])
def test_c11_a_test_calls_a_decorated_function(tmp_path: Path, strategy: str, module: bool) -> None:
    """Re-exec inside pytest starts the whole suite again."""
    script = write(
        tmp_path,
        f"""
        from distribute import distributed

        @distributed(devices=2, strategy={strategy!r})
        def train(ctx, x):
            return x * ctx.world_size

        def test_train(tmp_path):
            (tmp_path / "once").touch(exist_ok=False)
            assert train(21) == 42
        """,
        "test_train.py",
    )
    pytest_ = [sys.executable, "-m", "pytest"] if module else [str(BIN / "pytest")]

    ended = run_program([*pytest_, "-v", "-p", "no:cacheprovider", str(script)], cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert ended.out.count("1 passed") == 1
    assert ended.out.count("test session starts") == 1


def test_c17_closures_and_lambdas_travel_to_spawned_ranks(tmp_path: Path) -> None:
    """Local functions and lambdas cannot be pickled by reference."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        def main():
            scale = 3

            @distributed(devices=2, strategy="ddp_spawn")
            def train(ctx, f):
                return f(ctx.world_size) * scale

            print("GOT", train(lambda w: w + 1))

        if __name__ == "__main__":
            main()
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT 9"]


def test_c20_decorated_methods(tmp_path: Path) -> None:
    """The context lands in the place of `self`, or `self` cannot be pickled."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        class Job:
            def __init__(self, base):
                self.base = base

            @distributed(devices=2, strategy="ddp_spawn")
            def fit(self, ctx, n):
                return self.base + n * ctx.world_size

            @staticmethod
            @distributed(devices=2, strategy="ddp_spawn")
            def sfit(ctx, n):
                return n + ctx.world_size

        if __name__ == "__main__":
            print("GOT", Job(100).fit(2), Job.sfit(1), Job(1).sfit(1))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT 104 3 3"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c27_the_same_type_comes_back_for_one_and_for_many(tmp_path: Path, strategy: str) -> None:
    """With several devices the value is lost in a child process."""
    script = write(
        tmp_path,
        """
        import sys
        from distribute import run

        def body(ctx):
            return {"acc": 1.0, "world": ctx.world_size}

        if __name__ == "__main__":
            s = sys.argv[1]
            one, two = run(body, devices=1, strategy=s), run(body, devices=2, strategy=s)
            print("GOT", one, two)
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT {'acc': 1.0, 'world': 1} {'acc': 1.0, 'world': 2}"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c28_one_rank_raises_while_others_wait(tmp_path: Path, strategy: str) -> None:
    """The job never ends, and holds the devices."""
    script = write(
        tmp_path,
        """
        import sys, time
        from distribute import distributed

        @distributed(devices=3, strategy=sys.argv[1])
        def train(ctx):
            if ctx.rank == 1:
                raise ValueError("bad sample 17")
            for _ in range(10**6):
                ctx.barrier()

        if __name__ == "__main__":
            train()
        """,
    )
    ended = run_python(script, strategy, cwd=tmp_path)

    assert ended.code == 1, ended.text
    assert "ValueError: bad sample 17" in ended.err
    assert "raised by rank 1" in ended.err
    assert 'raise ValueError("bad sample 17")' in ended.err
    assert (
        ended.err.count("ValueError: bad sample 17") == 2
    )  # the rank's traceback and the caller's


def test_c30_a_failure_can_be_caught_and_the_next_launch_works(tmp_path: Path) -> None:
    """A generic error, or the end of the process, leaves the script nothing to decide by."""
    script = write(
        tmp_path,
        """
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def train(ctx, batch):
            if batch > 64 and ctx.rank == 1:
                raise MemoryError(f"batch {batch}")
            ctx.barrier()
            return batch

        if __name__ == "__main__":
            batch = 256
            while True:
                try:
                    print("OK", train(batch))
                    break
                except Exception as e:
                    print("RETRY", batch, isinstance(e, MemoryError))
                    batch //= 2
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.out.splitlines() == ["RETRY 256 True", "RETRY 128 True", "OK 64"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c32_a_killed_rank_is_explained(tmp_path: Path, strategy: str) -> None:
    """'exitcode: -9' says nothing, and the others hang."""
    script = write(
        tmp_path,
        """
        import os, signal, sys
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            if ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            ctx.barrier()

        if __name__ == "__main__":
            train()
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 1, ended.text
    assert "WorkerDied: rank 1 was killed by SIGKILL (possibly out of memory" in ended.err


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_c36_a_worker_dies_before_it_joins(tmp_path: Path, strategy: str) -> None:
    """Rank 0 waits half an hour for a rank whose import failed."""
    script = write(
        tmp_path,
        f"""
        from distribute import distributed
        import helper

        @distributed(devices=2, strategy={strategy!r})
        def train(ctx):
            return helper.__name__

        if __name__ == "__main__":
            train()
        """,
    )
    write(
        tmp_path,
        """
        import os
        try:
            open("first", "x").close()
        except FileExistsError:
            raise ImportError("only workers lack this library")
        """,
        "helper.py",
    )

    ended = run_python(script, cwd=tmp_path)

    assert ended.code == 1, ended.text
    assert "only workers lack this library" in ended.err
    assert "raised by rank" in ended.err


def test_c55_one_device_every_helper_works(tmp_path: Path) -> None:
    """Helpers fail because no process group exists."""
    script = write(
        tmp_path,
        """
        import torch
        from distribute import run

        def body(ctx):
            ctx.barrier()
            net = ctx.model(torch.nn.Linear(2, 1))
            with ctx.no_sync(net):
                net(torch.ones(1, 2)).sum().backward()
            g = ctx.all_gather(torch.tensor([3]))
            n = sum(len(b) for b in ctx.dataloader(torch.arange(7), batch_size=2, shuffle=True))
            return (ctx.rank, ctx.world_size, str(ctx.device),
                    float(ctx.all_reduce(torch.tensor([2.0]), op="mean")), len(g),
                    int(ctx.broadcast(torch.tensor([4]), src=0)), n)

        if __name__ == "__main__":
            print("GOT", run(body, devices=1))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT (0, 1, 'cpu', 2.0, 1, 4, 7)"]


def test_c56_a_busy_master_port_of_an_earlier_run_does_not_matter(tmp_path: Path) -> None:
    """'Address already in use'."""
    script = write(
        tmp_path,
        """
        import os, socket
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def train(ctx):
            return ctx.world_size

        if __name__ == "__main__":
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                s.listen()
                os.environ["MASTER_ADDR"] = "127.0.0.1"
                os.environ["MASTER_PORT"] = str(s.getsockname()[1])
                print("GOT", train())
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT 2"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c61_the_environment_is_unchanged(tmp_path: Path, strategy: str) -> None:
    """WORLD_SIZE and the like are left set, which misleads the next launch."""
    script = write(
        tmp_path,
        """
        import os, signal, sys
        import torch
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx, fail=False):
            ctx.model(torch.nn.Linear(1, 1))
            if fail:
                raise ValueError("x")
            return os.environ.get("MYVAR"), os.environ["OMP_NUM_THREADS"], torch.get_num_threads()

        if __name__ == "__main__":
            os.environ["MYVAR"] = "keep"
            os.environ["OMP_NUM_THREADS"] = "2"
            before, sig = dict(os.environ), signal.getsignal(signal.SIGINT)
            r = train()
            try:
                train(True)
            except ValueError:
                print("SAME", dict(os.environ) == before, signal.getsignal(signal.SIGINT) is sig, r)
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 0, ended.text
    assert ended.lines("SAME") == ["SAME True True ('keep', '2', 2)"]


C62 = """
    import os
    from distribute import distributed

    @distributed(devices=2)
    def train(ctx, x):
        print(f"R{ctx.rank}/{ctx.world_size} main={os.getpid() == MAIN} {x}\\n", end="", flush=True)
        return ctx.rank

    if __name__ == "__main__":
        MAIN = os.getpid()
        train(os.environ["RANK"])
        print(f"VALUE {train(1)}\\n", end="")
    """


def torchrun(processes: int, script: Path, *args: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(processes),
        str(script), *args,
    ]  # fmt: skip


def test_c62_started_by_torchrun(tmp_path: Path) -> None:
    """The library launches again inside each process, or ignores the world that is there."""
    script = write(tmp_path, C62)

    ended = run_program(torchrun(2, script))

    assert ended.code == 0, ended.text
    assert ended.lines("R") == [
        "R0/2 main=True 0",
        "R0/2 main=True 1",
        "R1/2 main=True 0",
        "R1/2 main=True 1",
    ]
    assert ended.lines("VALUE") == ["VALUE 0", "VALUE 0"]


def test_c62_devices_must_fit_what_torchrun_started(tmp_path: Path) -> None:
    """The mismatch is an error that names both numbers."""
    ended = run_program(torchrun(3, write(tmp_path, C62)))

    assert ended.code != 0
    assert "devices=2: torchrun started 3 processes on this node" in ended.err


def test_the_tag_finds_a_process() -> None:
    """The check that nothing is left could fail."""
    assert tagged("no process has this tag") == []
