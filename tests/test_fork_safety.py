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


BESIDE = """
    import threading
    import torch
    from distribute import run

    def work():
        return (torch.randn(300, 300) @ torch.randn(300, 300)).sum()

    def keep_working():
        while not stop.is_set():
            work()
            loops[0] += 1

    def body(ctx):
        work()
        loss = torch.ones(1 << 16, requires_grad=True).mul(2).sum()
        loss.backward()
        return ctx.world_size, torch.get_num_threads(), ctx.all_reduce(ctx.rank + 1)

    if __name__ == "__main__":
        stop, loops = threading.Event(), [0]
        thread = threading.Thread(target=keep_working, name="trainer")
        thread.start()
        for _ in range(50):
            before = loops[0]
            found = run(body, devices=2, strategy="ddp_fork", returns="all")
            assert found == [(2, 2, 3), (2, 2, 3)], found
            while loops[0] == before:
                pass
        stop.set()
        thread.join()
        found = run(body, devices=2, strategy="ddp_fork", returns="all")
        assert found == [(2, 2, 3), (2, 2, 3)], found
        print("DONE")
    """


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_fifty_forks_beside_a_thread_at_work(tmp_path: Path) -> None:
    """Each call gives its value: the fork server takes over, with a line that names the thread."""
    script = write(tmp_path, BESIDE)

    ended = run_python(script, environ={"OMP_NUM_THREADS": "2"}, timeout=280)

    assert ended.code == 0, ended.text
    assert "DONE" in ended.out
    lines = ended.err.splitlines()
    assert (
        lines
        == [
            "distribute: the thread 'trainer' of this process was at work, and a fork copies what "
            "it had locked; the fork server takes over"
        ]
        * 50
    )
