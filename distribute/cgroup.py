"""What Linux's control groups say about processes that ran out of memory."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int | None:
    """Returns how many processes of this process's control group were killed for memory so far.

    None where it cannot be read. The counts: `memory.events` of version 2, `memory.oom_control` of
    version 1, both of which also count kills for the whole machine's lack of memory.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            files = [_ROOT / path.lstrip("/") / "memory.events", _ROOT / "memory.events"]
        elif "memory" in controllers.split(","):
            memory = _ROOT / "memory"
            files = [
                memory / path.lstrip("/") / "memory.oom_control",
                memory / "memory.oom_control",
            ]
        else:
            continue
        # In a container the path may be the host's, where only the root can be seen.
        for file in files:
            count = _count(file)
            if count is not None:
                return count
    return None


class OutOfMemory:
    """Tells whether lack of memory may have ended a process since this object was made."""

    def __init__(self) -> None:
        self._before = oom_kills()

    def hint(self) -> str:
        """Says so about a process that SIGKILL has ended."""
        hint = "possibly out of memory"
        now = oom_kills()
        if now is None or self._before is None:
            return hint
        if now > self._before:
            return f"out of memory: its cgroup counts {now - self._before} such kill(s) more"
        return f"{hint}, although its cgroup counts no such kill during the call"


def _count(file: Path) -> int | None:
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass  # not here, or another form
    return None
