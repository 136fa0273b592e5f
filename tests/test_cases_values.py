"""What users of other launchers reported about arguments and values, as they would run it here.

The numbers are those of the project's case log; each docstring says what went wrong elsewhere.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.scripts import SLOW_METHODS, run_python, write

# As whole programs; inside one program test_state.py has them.
OTHER_METHODS = [pytest.param("fork", marks=pytest.mark.slow), *SLOW_METHODS]
OTHERS = [pytest.param(one, 2, marks=pytest.mark.slow) for one in ("fork", "forkserver", "spawn")]


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

    ended = run_python(script, timeout=150)

    assert ended.code == 0, ended.text
    assert ended.lines("METHOD") == ["METHOD reexec"]
    drawn = ast.literal_eval(ended.lines("DRAWN")[0].removeprefix("DRAWN"))
    assert ended.lines("RETURNED") == [f"RETURNED {drawn}"]
    assert ended.lines("TRIAL") == sorted(
        f"TRIAL {width} on {rank} of 2" for width in drawn for rank in (0, 1)
    )


@pytest.mark.timeout(300)
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

    ended = run_python(script, timeout=90)

    assert ended.code == 0, ended.text
    chosen = {1: "inline", 2: "reexec"}[devices] if method == "auto" else method
    assert ended.lines("METHOD") == [f"METHOD {chosen}"]
    assert ended.lines("WORLD") == [f"WORLD {devices}"]
    assert ended.lines("RETURNED") == ["RETURNED True"]
    assert ended.lines("CALLER") == ["CALLER True"]


@pytest.mark.timeout(300)
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

    ended = run_python(script, timeout=150)

    assert ended.code == 0, ended.text
    assert ended.lines("WEIGHTS") == ["WEIGHTS True NOISE False"] * 4
    assert ended.lines("AGAIN") == ["AGAIN True ANEW False"]
