"""Counting the processes that were killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from distribute import cgroup


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path)
    return tmp_path


def own_path(version: int) -> str | None:
    """Where this process is in the hierarchy of a version, if there is one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if (version == 2 and number == "0") or (
            version == 1 and "memory" in controllers.split(",")
        ):
            return path
    return None


def test_this_machine_tells_a_number_or_nothing() -> None:
    count = cgroup.oom_kills()
    assert count is None or count >= 0


def test_nothing_is_known_where_there_are_no_files(root: Path) -> None:
    assert cgroup.oom_kills() is None
    assert cgroup.OutOfMemory().hint() == "possibly out of memory"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("at_root", [False, True], ids=["own", "root"])
def test_the_count_is_read_in_both_versions(root: Path, version: int, at_root: bool) -> None:
    """In a container the path may be one of the host, which is not there."""
    path = own_path(version)
    if path is None:
        pytest.skip("no such hierarchy on this machine")
    directory = root if version == 2 else root / "memory"
    name = "memory.events" if version == 2 else "memory.oom_control"
    file = directory / ("" if at_root else path.lstrip("/")) / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("low 0\noom 5\noom_kill 3\n")

    assert cgroup.oom_kills() == 3
    memory = cgroup.OutOfMemory()
    assert memory.hint().endswith("its cgroup counts no such kill during the call")
    file.write_text("low 0\noom 5\noom_kill 5\n")
    assert memory.hint() == "out of memory: its cgroup counts 2 such kill(s) more"
    file.write_text("nonsense")
    assert cgroup.oom_kills() is None
