"""Whatever ends the launcher, its workers and what they started end too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.scripts import METHODS, ROOT, run_python, tagged, write

SCRIPT = """
    import os, subprocess, sys, threading, time
    from distribute import run

    def body(ctx):
        subprocess.Popen(["sleep", "600"])
        ctx.barrier()
        open(f"there{ctx.rank}", "w").close()
        while True:
            if sys.argv[2] == "collective":
                ctx.barrier()
            else:
                time.sleep(600)

    def call():
        run(body, devices=2, start_method=sys.argv[1])

    if __name__ == "__main__":
        if sys.argv[3] == "thread":
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        else:
            call()
    """


def end_launcher(tmp_path: Path, number: int, *arguments: str) -> tuple[int, list[int]]:
    """Starts a world, ends its launcher with a signal, returns its code and what is left."""
    tag = str(uuid.uuid4())
    script = write(tmp_path, SCRIPT)
    environ = {**os.environ, "CASE_TAG": tag, "PYTHONPATH": str(ROOT)}
    environ.pop("PYTEST_CURRENT_TEST", None)
    launcher = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 60
        while not all((tmp_path / f"there{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < limit
            assert launcher.poll() is None
            time.sleep(0.02)
        # The launcher, rank 1, a `sleep` of each rank at least.
        assert len(tagged(tag)) >= 4
        os.kill(launcher.pid, number)
        code = launcher.wait(timeout=60)
        # The `sleep` of a rank that is the launcher itself is not ours to end: no process group
        # but the user's own holds it.
        spared = {"sleep"} if arguments[0] == "reexec" else set()
        limit = time.monotonic() + 30
        while (left := _beyond(tag, spared)) and time.monotonic() < limit:
            time.sleep(0.02)
        return code, left
    finally:
        for pid in tagged(tag):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended meanwhile
        launcher.wait()


def _beyond(tag: str, spared: set[str]) -> list[int]:
    left: list[int] = []
    for pid in tagged(tag):
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
        except OSError:
            continue
        if name not in spared:
            left.append(pid)
    return left


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_nothing_outlives_the_launcher(tmp_path: Path, method: str, number: int) -> None:
    """The launcher ends by the signal, and no process of its world is left."""
    code, left = end_launcher(tmp_path, number, method, "collective", "main")

    assert code == -number
    assert left == []


def test_nothing_outlives_a_launcher_that_called_from_a_thread(tmp_path: Path) -> None:
    """The kernel's watch is tied to the forking thread; the control channel is not."""
    code, left = end_launcher(tmp_path, signal.SIGKILL, "fork", "sleep", "thread")

    assert code == -signal.SIGKILL
    assert left == []


LOADING = """
    import os, signal, sys, time
    import torch
    from torch.utils.data import DataLoader
    from distribute import WorkerDied, run

    def body(ctx, way):
        assert ctx.world_size == 2
        kind = "fork" if ctx.rank else "forkserver"
        loader = DataLoader(torch.ones(64, 8), num_workers=2, multiprocessing_context=kind)
        kept = iter(loader)
        next(kept)
        ctx.barrier()
        if way == "good":
            return sum(len(one) for one in kept)
        if way == "exit" and ctx.rank == 1:
            os._exit(7)
        if way == "raise" and ctx.rank == 1:
            raise KeyError("sample 17")
        time.sleep(600)

    if __name__ == "__main__":
        try:
            print(run(body, sys.argv[2], devices=2, start_method=sys.argv[1]))
        except (WorkerDied, KeyError) as error:
            print(type(error).__name__)
    """


@pytest.mark.slow
@pytest.mark.parametrize("way", ["good", "raise", "exit"])
@pytest.mark.parametrize("method", METHODS)
def test_loader_workers_leave_no_temporary_file(tmp_path: Path, method: str, way: str) -> None:
    """They have sockets in a temporary directory, which nobody removes who is killed.

    And rank 0's, which are no forks, have semaphores with names.
    """
    place = tmp_path / "t"
    place.mkdir()
    script = write(tmp_path, LOADING)

    before = semaphores()
    ended = run_python(script, method, way, cwd=tmp_path, environ={"TMPDIR": str(place)})

    assert ended.code == 0, ended.text
    assert ended.out.split() == [{"good": "63", "raise": "KeyError", "exit": "WorkerDied"}[way]]
    assert [one for one in os.listdir(place) if not one.startswith("torchinductor")] == []
    assert semaphores() <= before


def semaphores() -> set[str]:
    return {one for one in os.listdir("/dev/shm") if one.startswith("sem.")}
