"""Public reports of notebook users, with real kernels and prompts: C14-C16."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebook import Notebook
from tests.scripts import run_python, write

# Each starts a kernel or a prompt: run by `make slow`.
pytestmark = pytest.mark.slow

DEFINED = """
    import torch
    from distribute import distributed, run
    class Net(torch.nn.Linear):
        pass
    K = 3
    """
TRAINED = """
    @distributed(devices=2)
    def train(ctx):
        net = ctx.model(Net(K, 1))
        print(f"IN-WORKER {ctx.rank}\\n", end="", flush=True)
        return ctx.world_size, sum(p.numel() for p in net.parameters())
    print("CELL", train(), run(lambda ctx: ctx.rank + 10, devices=2))
    """


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with Notebook(tmp_path_factory.mktemp("notebook")) as one:
        yield one


def test_c14_what_cells_define_is_there(notebook: Notebook) -> None:
    assert notebook.run(DEFINED).error is None

    cell = notebook.run(TRAINED)

    assert cell.error is None, cell.error
    assert cell.lines == ["CELL (2, 4) 10", "IN-WORKER 0", "[1] IN-WORKER 1"]


@pytest.mark.parametrize("way", ["file", "magic"])
def test_c14_under_ipython(tmp_path: Path, way: str) -> None:
    """`ipython cells.ipy`, and `%run s.py` at a prompt."""
    source = write(tmp_path, DEFINED, "s.ipy").read_text() + write(tmp_path, TRAINED).read_text()
    environ = {"IPYTHONDIR": str(tmp_path)}
    if way == "file":
        script = write(tmp_path, source, "cells.ipy")
        ended = run_python("-m", "IPython", script, cwd=tmp_path, environ=environ)
    else:
        write(tmp_path, source)
        ended = run_python(
            "-m", "IPython", "--simple-prompt", cwd=tmp_path, environ=environ, stdin="%run s.py\n"
        )

    assert ended.code == 0, ended.text
    assert ended.out.count("CELL (2, 4) 10") == 1, ended.text
    assert ended.out.count("IN-WORKER 0") == 1
    assert ended.out.count("[1] IN-WORKER 1") == 1


def test_c15_edit_the_function_and_run_the_cell_again(notebook: Notebook) -> None:
    """The last definition counts, also after one that failed and for another world."""
    first = notebook.run("""
        from distribute import distributed
        import torch.distributed as dist

        @distributed(devices=2)
        def train(ctx):
            return "v1"
        a = train()
        """)
    second = notebook.run("""
        @distributed(devices=2)
        def train(ctx):
            if ctx.rank == 1:
                raise ValueError("v2 broke")
        try:
            b = train()
        except Exception as e:
            b = "v2 broke" in str(e)
        """)
    third = notebook.run("""
        @distributed(devices=3, returns="all")
        def train(ctx):
            return ctx.world_size
        print("CELLS", a, b, train(), dist.is_initialized())
        """)

    assert [cell.error for cell in (first, second, third)] == [None] * 3
    assert third.lines == ["CELLS v1 True [3, 3, 3] False"]


TOUCHED = """
    import sys
    import torch
    from distribute import distributed
    torch.cuda.is_initialized = lambda: True

    @distributed(devices=2, strategy=sys.argv[1])
    def train(ctx):
        print("BODY\\n", end="", flush=True)
        return ctx.all_gather(ctx.rank)

    if __name__ == "__main__":
        print("VALUE", train())
    """


def test_c16_a_fork_after_cuda_is_refused_before_it_starts(tmp_path: Path) -> None:
    """The message names CUDA and another way."""
    ended = run_python(write(tmp_path, TOUCHED), "ddp_fork")

    assert ended.code == 1
    assert "BODY" not in ended.out
    assert ended.err.splitlines()[-1] == (
        "distribute.errors.RequestError: start method 'fork': this process already holds a CUDA "
        'context, which no fork survives; use "forkserver", or leave it to "auto"'
    )


@pytest.mark.parametrize("strategy", ["auto", "ddp_forkserver"])
def test_c16_other_ways_work_after_cuda(tmp_path: Path, strategy: str) -> None:
    ended = run_python(write(tmp_path, TOUCHED), strategy)

    assert ended.code == 0, ended.text
    assert ended.lines("BODY") == ["BODY", "BODY"]
    assert ended.lines("VALUE") == ["VALUE [0, 1]"]
