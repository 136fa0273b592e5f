"""What users of other launchers reported about data, as they would run it here.

The numbers are those of the project's case log; each docstring says what went wrong elsewhere.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.scripts import Ended, run_python, write

# Programs of their own, at seconds each: run by `make slow`. Inside one program test_data.py,
# test_uneven.py and test_evaluation.py have the same properties.
pytestmark = pytest.mark.slow

METHODS = ["reexec", "fork", "forkserver", "spawn"]
# Where the start method makes no difference, as people ran it.
TWO_METHODS = ["reexec", "spawn"]


def numbers(ended: Ended, start: str) -> list[list[int]]:
    """The lists at the ends of lines that begin with a word."""
    return [ast.literal_eval(line[line.index("[") :]) for line in ended.lines(start)]


@pytest.mark.parametrize("method", METHODS)
def test_c38_a_collective_on_rank_0_only_is_explained(tmp_path: Path, method: str) -> None:
    """A barrier, or validation through the wrapped model, on rank 0 only hangs in silence."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import distributed

        @distributed(devices=2, start_method="{method}", timeout=600)
        def train(ctx):
            assert ctx.world_size == 2
            if ctx.rank == 0:
                ctx.barrier()
            return "left"

        @distributed(devices=2, start_method="{method.replace("reexec", "auto")}", timeout=600)
        def validate(ctx):
            model = ctx.model(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
            model(torch.ones(4, 2)).sum().backward()
            if ctx.rank == 0:
                with torch.no_grad():
                    ctx.unwrap(model).eval()(torch.ones(4, 2))  # no other rank is needed
                    model(torch.ones(4, 2))
            model.train()
            model(torch.ones(4, 2)).sum().backward()
            return "validated", ctx.world_size

        if __name__ == "__main__":
            print("VALUE", validate())
            train()
        """,
    )

    ended = run_python(script)

    assert ended.code == 1, ended.text
    assert ended.lines("VALUE") == ["VALUE ('validated', 2)"]
    assert re.search(r"rank 0\b.*\bbarrier\b", ended.err)
    assert re.search(r"rank 1 (has )?returned", ended.err)


@pytest.mark.parametrize("method", TWO_METHODS)
def test_c39_every_rank_takes_equally_many_steps(tmp_path: Path, method: str) -> None:
    """With a length that is no multiple of ranks x batch size, one rank waits in its gradients."""
    script = write(
        tmp_path,
        f"""
        import sys
        import torch
        from distribute import run

        def train(ctx, total):
            net = ctx.model(torch.nn.Linear(1, 1))
            data = torch.arange(float(total)).view(-1, 1)
            loader = ctx.dataloader(data, batch_size=2, shuffle=True)
            steps = 0
            for batch in loader:
                net(batch).sum().backward()
                steps += 1
            return ctx.world_size, steps, len(loader)

        def by_hand(ctx):
            net = ctx.model(torch.nn.Linear(1, 1))
            for _ in range(3 + ctx.rank):
                net(torch.ones(2, 1)).sum().backward()

        if __name__ == "__main__":
            options = {{"devices": 2, "start_method": "{method}", "returns": "all", "timeout": 600}}
            for total in (7, 5, 1):
                print("STEPS", total, run(train, total, **options))
                options["start_method"] = "{method.replace("reexec", "auto")}"
            try:
                run(by_hand, **options)
            except Exception as error:
                print("ERROR", str(error).splitlines()[0], error.__notes__)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("STEPS") == [
        f"STEPS {total} {[(2, steps, steps)] * 2}" for total, steps in ((1, 1), (5, 2), (7, 2))
    ]
    assert len(ended.lines("ERROR")) == 1, ended.text


@pytest.mark.parametrize("method", TWO_METHODS)
def test_c40_shuffling_is_another_one_in_every_epoch(tmp_path: Path, method: str) -> None:
    """Without `set_epoch` every epoch has the order of the first."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import distributed

        @distributed(devices=2, start_method="{method}", seed=3)
        def train(ctx):
            loader = ctx.dataloader(torch.arange(16), batch_size=4, shuffle=True)
            for epoch in range(3):
                order = torch.cat(list(loader)).tolist()
                where = f"E{{epoch}} R{{ctx.rank}}of{{ctx.world_size}}"
                print(f"{{where}} {{order}}\\n", end="", flush=True)

        if __name__ == "__main__":
            train()
        """,
    )

    first, second = run_python(script), run_python(script)

    assert (first.code, second.code) == (0, 0), first.text + second.text
    lines = first.lines("E")
    assert lines == second.lines("E")
    assert [line.split(" [")[0] for line in lines] == [
        f"E{epoch} R{rank}of2" for epoch in range(3) for rank in range(2)
    ]
    orders = numbers(first, "E")
    for epoch in range(3):
        assert sorted(orders[2 * epoch] + orders[2 * epoch + 1]) == list(range(16))
    for rank in range(2):
        assert len({tuple(order) for order in orders[rank::2]}) == 3


@pytest.mark.parametrize("method", TWO_METHODS)
def test_c41_evaluation_reads_every_sample_once(tmp_path: Path, method: str) -> None:
    """The sampler repeats samples, so that a metric depends on the number of devices."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import run

        def evaluate(ctx, total):
            loader = ctx.dataloader(torch.arange(total), batch_size=2, shuffle=False)
            read = [one for batch in loader for one in batch.tolist()]
            return ctx.world_size, read

        if __name__ == "__main__":
            options = {{"devices": 2, "start_method": "{method}", "returns": "all"}}
            for total in (5, 8, 1):
                ranks = run(evaluate, total, **options)
                options["start_method"] = "{method.replace("reexec", "auto")}"
                print("WORLD", [size for size, _ in ranks])
                print(f"READ {{total}}", [one for _, read in ranks for one in read])
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("WORLD") == ["WORLD [2, 2]"] * 3
    assert [sorted(read) for read in numbers(ended, "READ")] == [
        list(range(total)) for total in (1, 5, 8)
    ]


@pytest.mark.parametrize("method", METHODS)
def test_c42_augmentation_differs_between_ranks_workers_and_epochs(
    tmp_path: Path, method: str
) -> None:
    """All loader workers of all ranks draw the same numbers from numpy, in every epoch."""
    script = write(
        tmp_path,
        f"""
        import random
        import numpy as np
        import torch
        from distribute import distributed

        class Noise(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return torch.tensor([np.random.randint(1 << 30), random.randrange(1 << 30)])

        @distributed(devices=2, start_method="{method}", seed=11)
        def train(ctx):
            loader = ctx.dataloader(Noise(), batch_size=1, num_workers=2)
            for epoch in range(2):
                for batch in loader:
                    print(f"R{{ctx.rank}} {{batch[0].tolist()}}\\n", end="", flush=True)

        if __name__ == "__main__":
            train()
        """,
    )

    first, second = run_python(script), run_python(script)

    assert (first.code, second.code) == (0, 0), first.text + second.text
    assert first.lines("R") == second.lines("R")
    assert Counter(line[:2] for line in first.lines("R")) == {"R0": 8, "R1": 8}
    for column in range(2):
        assert len({draws[column] for draws in numbers(first, "R")}) == 16


@pytest.mark.parametrize("method", TWO_METHODS)
def test_c44_a_stream_is_not_read_whole_by_every_rank(tmp_path: Path, method: str) -> None:
    """No sampler applies to streaming data: every rank trains on the same items."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import run

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(range(12))

        def train(ctx, workers):
            loader = ctx.dataloader(Stream(), batch_size=2, num_workers=workers)
            return [batch.tolist() for batch in loader]

        def shuffled(ctx):
            ctx.dataloader(Stream(), shuffle=True)

        if __name__ == "__main__":
            options = {{"devices": 2, "start_method": "{method}", "returns": "all"}}
            for workers in (0, 2):
                print(f"W{{workers}}", run(train, workers, **options))
                options["start_method"] = "{method.replace("reexec", "auto")}"
            try:
                run(shuffled, **options)
            except ValueError as error:
                print("REFUSED", error)
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    for left, right in numbers(ended, "W"):
        assert len(left) == len(right) >= 3
        assert sorted(one for batch in left + right for one in batch) == list(range(12))
    assert len(ended.lines("W")) == 2
    assert "shuffle=True with an IterableDataset" in ended.lines("REFUSED")[0]


@pytest.mark.parametrize("method", TWO_METHODS)
def test_c45_the_batch_size_is_what_the_documentation_says(tmp_path: Path, method: str) -> None:
    """Nobody can tell whether it is each process's or all of them together's."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import distributed

        @distributed(devices=2, start_method="{method}", returns="all")
        def train(ctx):
            found = []
            for option in ("batch_size", "global_batch_size"):
                loader = ctx.dataloader(torch.arange(32), **{{option: 8}})
                found.append((len(loader), [len(batch) for batch in loader]))
            return found, ctx.dataloader.__doc__

        if __name__ == "__main__":
            (left, text), (right, _) = train()
            print("EACH", left[0], left[0] == right[0])
            print("TOGETHER", left[1], left[1] == right[1])
            print("SAYS", " ".join(text.split()))
        """,
    )

    ended = run_python(script)

    assert ended.code == 0, ended.text
    assert ended.lines("EACH") == ["EACH (2, [8, 8]) True"]
    assert ended.lines("TOGETHER") == ["TOGETHER (4, [4, 4, 4, 4]) True"]
    assert "`batch_size` (of each rank) or `global_batch_size`" in ended.lines("SAYS")[0]


@pytest.mark.parametrize("method", METHODS)
def test_c64_ranks_may_have_loader_workers(tmp_path: Path, method: str) -> None:
    """Ranks are daemons, which may not have children; or loader workers are left behind."""
    script = write(
        tmp_path,
        f"""
        import multiprocessing as mp
        import torch
        from distribute import distributed

        @distributed(devices=2, start_method="{method}", returns="all")
        def train(ctx):
            loader = ctx.dataloader(
                torch.arange(8), batch_size=2, num_workers=2, persistent_workers=True
            )
            read = sum(batch.numel() for _ in range(2) for batch in loader)
            return read, len(mp.active_children()), mp.current_process().daemon

        if __name__ == "__main__":
            print("RANKS", train())
        """,
    )

    ended = run_python(script)  # which sees to it that no process is left

    assert ended.code == 0, ended.text
    assert ended.lines("RANKS") == [f"RANKS {[(8, 2, False)] * 2}"]
