"""What users of other launchers reported about arguments and values, as they would run it here.

The numbers are those of the project's case log; each docstring says what went wrong elsewhere.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.scripts import SLOW_METHODS, run_python, write

# As whole programs; inside one program test_state.py has them.
OTHER_METHODS = [pytest.param("fork", marks=pytest.mark.slow), *SLOW_METHODS]
OTHERS = [pytest.param(one, 2, marks=pytest.mark.slow) for one in ("fork", "forkserver", "spawn")]


@pytest.mark.slow
def test_c10_every_rank_trains_the_trial_that_the_launcher_drew(tmp_path: Path) -> None:
    """Each process draws hyper-parameters of its own, and ranks train different networks."""
    script = write(
        tmp_path,
        """
        import random
        import torch
        from distribute import distributed

        @distributed(devices=2, strategy="ddp")
        def objective(ctx, width):
            net = ctx.model(torch.nn.Linear(width, 1))
            net(torch.ones(4, width)).sum().backward()
            print(f"TRIAL {width} on {ctx.rank} of {ctx.world_size}\\n", end="", flush=True)
            return width

        if __name__ == "__main__":
            print("METHOD", objective.plan().method)
            drawn = [random.SystemRandom().randint(1, 10_000) for _ in range(3)]
            print("DRAWN", drawn)
            print("RETURNED", [objective(width) for width in drawn])
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("METHOD") == ["METHOD reexec"]
    drawn = ast.literal_eval(ended.lines("DRAWN")[0].removeprefix("DRAWN"))
    assert ended.lines("RETURNED") == [f"RETURNED {drawn}"]
    assert ended.lines("TRIAL") == sorted(
        f"TRIAL {width} on {rank} of 2" for width in drawn for rank in (0, 1)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "devices"), [("auto", 1), ("auto", 2), *OTHERS])
def test_c25_the_callers_model_is_the_trained_one(
    tmp_path: Path, method: str, devices: int
) -> None:
    """Training happened in copies: the caller's model is untrained, and nothing says so."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import distributed

        @distributed(devices={devices}, start_method="{method}")
        def train(ctx, net):
            model = ctx.model(net)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            return ctx.world_size, {{key: one.clone() for key, one in model.state_dict().items()}}

        if __name__ == "__main__":
            net = torch.nn.Linear(2, 1)
            before = net.weight.detach().clone()
            print("METHOD", train.plan().method)
            world, trained = train(net)
            print("WORLD", world)
            print("RETURNED", torch.allclose(trained["weight"], before - 1.0))
            print("CALLER", torch.equal(net.weight, trained["weight"]))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    chosen = {1: "inline", 2: "reexec"}[devices] if method == "auto" else method
    assert ended.lines("METHOD") == [f"METHOD {chosen}"]
    assert ended.lines("WORLD") == [f"WORLD {devices}"]
    assert ended.lines("RETURNED") == ["RETURNED True"]
    assert ended.lines("CALLER") == ["CALLER True"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reexec", *OTHER_METHODS])
def test_c43_equal_weights_and_different_noise_on_all_ranks(tmp_path: Path, method: str) -> None:
    """One seed everywhere gives the same noise on all ranks; none gives different weights."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import distributed, run

        def train(ctx, seed):
            if seed is not None:
                torch.manual_seed(seed + 1000 * ctx.rank)  # by hand, as people do
            net = ctx.model(torch.nn.Linear(3, 1))
            return net.weight.tolist(), torch.rand(2).tolist()

        if __name__ == "__main__":
            options = {{"devices": 2, "start_method": "{method}", "returns": "all"}}
            by_hand = run(train, 7, **options)
            options["start_method"] = "auto" if "{method}" == "reexec" else "{method}"
            without = run(train, None, **options)
            seeded = [run(train, None, seed=7, **options) for _ in range(2)]
            for found in (by_hand, without, *seeded):
                (weights, noise), (others, other_noise) = found
                print("WEIGHTS", weights == others, "NOISE", noise == other_noise)
            print("AGAIN", seeded[0] == seeded[1], "ANEW", without[0] == seeded[0])
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("WEIGHTS") == ["WEIGHTS True NOISE False"] * 4
    assert ended.lines("AGAIN") == ["AGAIN True ANEW False"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn", "ddp_forkserver"])
def test_c18_names_that_exist_under_the_guard_only(tmp_path: Path, strategy: str) -> None:
    """A worker that imports the script anew has neither the class nor the function."""
    script = write(
        tmp_path,
        f"""
        from distribute import distributed

        if __name__ == "__main__":
            class Settings:
                lr = 5

            def body(ctx, settings):
                return settings.lr * ctx.world_size, ctx.all_gather(ctx.rank)

            train = distributed(devices=2, strategy="{strategy}")(body)
            print("GOT", train(Settings()))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT (10, [0, 1])"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn", "ddp_fork"])
def test_c19_the_decorator_among_others(tmp_path: Path, strategy: str) -> None:
    """pickle finds another object under the function's name, and refuses to send it."""
    script = write(
        tmp_path,
        f"""
        import functools, inspect
        from distribute import distributed

        def logged(fn):
            @functools.wraps(fn)
            def inner(*args, **kwargs):
                return fn(*args, **kwargs)
            return inner

        @logged
        @distributed(devices=2, strategy="{strategy}")
        @logged
        def train(ctx, x):
            "what it does"
            return x + ctx.world_size

        if __name__ == "__main__":
            print("GOT", train(5), train.__name__, train.__doc__)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT 7 train what it does"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn", "ddp_forkserver"])
def test_c21_what_cannot_be_sent_is_named_early(tmp_path: Path, strategy: str) -> None:
    """ "cannot pickle '_thread.lock' object" says nothing about which of many arguments it is.

    A script that is run again has an argument of its own in each rank; a warning names it.
    """
    script = write(
        tmp_path,
        f"""
        import threading
        from distribute import distributed

        @distributed(devices=2, strategy="{strategy}")
        def train(ctx, cfg, log=None):
            print("BODY\\n", end="")
            return ctx.world_size, ctx.all_gather(ctx.rank)

        if __name__ == "__main__":
            for bad in (open(__file__), threading.Lock(), (i for i in range(3))):
                try:
                    print("VALUE", train({{"lr": 1}}, log={{"deep": [bad]}}))
                except ValueError as error:
                    print("ERROR", "argument `log['deep'][0]`" in str(error))
            print("STILL", train({{"lr": 1}}))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("STILL") == ["STILL (2, [0, 1])"]
    if strategy == "auto":
        # Only the first call of the script meets ranks that have an argument of their own.
        assert ended.lines("VALUE") == ["VALUE (2, [0, 1])"]
        assert ended.lines("ERROR") == ["ERROR True"] * 2
        assert "UserWarning: argument `log['deep'][0]`: an open file" in ended.err
        assert len(ended.lines("BODY")) == 4
    else:
        assert ended.lines("ERROR") == ["ERROR True"] * 3
        assert len(ended.lines("BODY")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn", "ddp_fork", "ddp_forkserver"])
def test_c22_configuration_keeps_its_identity(tmp_path: Path, strategy: str) -> None:
    """Objects of the script come back as instances of a twin of their class."""
    script = write(
        tmp_path,
        f"""
        import dataclasses, enum, pathlib
        from distribute import distributed

        class Mode(enum.Enum):
            A = 1

        @dataclasses.dataclass(frozen=True)
        class Options:
            lr: float
            out: pathlib.Path
            mode: Mode = Mode.A

        @distributed(devices=2, strategy="{strategy}", returns="all")
        def train(ctx, options, *, extra=()):
            kept = isinstance(options, Options), options.mode is Mode.A
            return ctx.world_size, ctx.rank, *kept, options.lr, options

        if __name__ == "__main__":
            mine = Options(0.1, pathlib.Path("x"))
            for found in train(mine, extra=[1]):
                print("GOT", found[:5], found[5] == mine, type(found[5]) is Options)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == [f"GOT (2, {rank}, True, True, 0.1) True True" for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn", "ddp_fork", "ddp_forkserver"])
def test_c23_a_search_path_that_was_changed_at_run_time(tmp_path: Path, strategy: str) -> None:
    """Ranks do not find the user's own module."""
    write(tmp_path, "class Config:\n    lr = 7\n", "lib/mymod.py")
    script = write(
        tmp_path,
        f"""
        import sys
        from distribute import distributed

        @distributed(devices=2, strategy="{strategy}")
        def train(ctx, cfg):
            import mymod
            return ctx.all_gather((isinstance(cfg, mymod.Config), cfg.lr))

        if __name__ == "__main__":
            sys.path.insert(0, {str(tmp_path / "lib")!r})
            import mymod
            print("GOT", train(mymod.Config()))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("GOT") == ["GOT [(True, 7), (True, 7)]"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn", "ddp_fork", "ddp_forkserver"])
def test_c24_a_large_data_set_is_there_once(tmp_path: Path, strategy: str) -> None:
    """Memory grew with the number of processes; the measure counts shared pages for their part."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import distributed

        def pss():
            with open("/proc/self/smaps_rollup") as rollup:
                return [int(one.split()[1]) / 1024 for one in rollup if one.startswith("Pss:")][0]

        @distributed(devices=4, strategy="{strategy}", returns="all")
        def train(ctx, data):
            data.sum()
            ctx.barrier()
            own = pss()
            ctx.barrier()
            return ctx.world_size, ctx.all_reduce(own)

        if __name__ == "__main__":
            small, large = train(torch.ones(1)), train(torch.ones(50_000_000))
            print("RANKS", [one[0] for one in large])
            print("EXTRA", round(large[0][1] - small[0][1]))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("RANKS") == ["RANKS [4, 4, 4, 4]"]
    assert int(ended.lines("EXTRA")[0].split()[1]) <= 400


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp_spawn", "ddp_fork", "ddp_forkserver"])
def test_c26_a_large_result_arrives(tmp_path: Path, strategy: str) -> None:
    """The launcher waited for the end of a rank that waited for its reader."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import distributed

        @distributed(devices=2, strategy="{strategy}")
        def train(ctx):
            return {{
                "world": ctx.all_gather(ctx.rank),
                "embedding": torch.full((64, 1_000_000), float(ctx.rank + 1)),
                "view": torch.arange(10.0)[3:5],
            }}

        if __name__ == "__main__":
            out = train()
            embedding = out["embedding"]
            print("WORLD", out["world"])
            print("GOT", tuple(embedding.shape), embedding.double().mean().item(), out["view"])
            print("WRITABLE", embedding.add_(1)[0, 0].item())
        """,
    )
    before = set(os.listdir("/dev/shm"))

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("WORLD") == ["WORLD [0, 1]"]
    assert ended.lines("GOT") == ["GOT (64, 1000000) 1.0 tensor([3., 4.])"]
    assert ended.lines("WRITABLE") == ["WRITABLE 2.0"]
    assert set(os.listdir("/dev/shm")) <= before
