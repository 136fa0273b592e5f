"""Forks of a process that has used its threads, over and over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_python, write

SCRIPT = """
    import torch
    from distribute import run

    def work():
        return (torch.randn(800, 800) @ torch.randn(800, 800)).shape[0]

    def body(ctx):
        work()
        loss = torch.ones(1 << 16, requires_grad=True).mul(2).sum()
        loss.backward()
        return torch.get_num_threads(), ctx.all_reduce(ctx.rank + 1)

    if __name__ == "__main__":
        assert torch.get_num_threads() == 2
        for _ in range(50):
            work()
            found = run(body, devices=2, strategy="ddp_fork", returns="all")
            assert found == [(2, 3), (2, 3)], found
            assert work() == 800
            assert torch.get_num_threads() == 2
        print("DONE")
    """


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_fifty_forks_after_work_on_two_threads(tmp_path: Path) -> None:
    """Each rank works on two threads, and so does the caller afterwards; no call hangs."""
    script = write(tmp_path, SCRIPT)

    ended = run_python(script, environ={"OMP_NUM_THREADS": "2"}, timeout=280)

    assert ended.code == 0, ended.text
    assert "DONE" in ended.out
