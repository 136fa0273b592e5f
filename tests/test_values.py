"""Arguments in, values out: any object, any size, under every start method."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from distribute import Context, run
from tests.scripts import run_python

VALUES = Path(__file__).parent / "values.py"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reexec", "fork", "forkserver", "spawn"])
def test_what_travels(method: str, tmp_path: Path) -> None:
    """3,000 small tensors under a limit of 256 descriptors, 300 MB at once, classes, kinds."""
    ended = run_python("-W", "ignore", VALUES, method, cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert ended.out.splitlines()[-4:] == ["ok bytes", "ok array", "ok tensor", "ok all"]
    assert ended.out.count("ok small") == (2 if method == "reexec" else 1)


def pss(pid: int | str) -> float:
    """The proportional memory of a process in megabytes: what is shared counts for its part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def used(ctx: Context, data: torch.Tensor, launcher: int) -> list[float]:
    total = float(data[:: 1 << 8].sum())  # touches every page
    assert ctx.all_gather(total) == [len(data) / (1 << 8)] * ctx.world_size
    ctx.barrier()
    found = pss("self"), pss(launcher)
    ctx.barrier()  # until then all have what they share
    everybody: list[float] = ctx.all_gather(found[0])
    return [*everybody, found[1]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_ranks_share_one_copy_of_a_large_argument(method: str) -> None:
    """A gigabyte for four ranks that read it takes a gigabyte more, and none if they are forks."""
    options: dict[str, Any] = {"devices": 4, "start_method": method}
    megabytes = 1024
    data = torch.ones(megabytes << 18)
    before = sum(run(used, torch.ones(1 << 8), os.getpid(), **options))

    after = run(used, data, os.getpid(), **options)

    assert len(after) == 5
    more = sum(after) - before
    assert more <= 1.15 * megabytes
    if method == "fork":
        assert more <= 0.15 * megabytes
