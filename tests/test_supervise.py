"""The first failure ends the rest, and nobody waits for ever."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distribute import Context, JoinTimeout, RequestError, WorkerDied, WorkerError, run
from tests.overdue import LONG, Overdue
from tests.scripts import run_python, write

FORK: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}


class _Reported(Exception):
    """Says when it is reported, and takes until another one is."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self.folder, self.rank = folder, rank

    def __reduce__(self) -> tuple[Any, ...]:
        (self.folder / str(self.rank)).touch()
        until(self.folder / "0")
        return _Reported, (self.folder, self.rank)


def until(path: Path) -> None:
    """Waits until a file is there."""
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit, path
        time.sleep(0.002)


def test_the_first_of_two_failures_is_the_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the machine's clock, and neither by rank nor by whose report is there first."""
    monkeypatch.setattr("distribute.supervise._ORDER_SECONDS", 60.0)

    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            until(tmp_path / "1")
        raise _Reported(tmp_path, ctx.rank)

    with pytest.raises(_Reported) as caught:
        run(body, **FORK)

    assert caught.value.rank == 1
    kinds = [one.kind for one in caught.value.outcomes]  # type: ignore[attr-defined]
    assert kinds == ["raised", "raised"]


def test_a_closed_connection_is_not_the_news() -> None:
    """The rank that died is, although its peer noticed first and said so at once."""

    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            os.close(os.pidfd_open(os.getpid()))
            os._exit(5)
        ctx.barrier()

    for _ in range(5):
        with pytest.raises(WorkerDied, match="rank 1 ended with exit code 5"):
            run(body, **FORK)


def test_a_rank_that_returns_frees_the_one_that_waits_for_it() -> None:
    """The waiting rank's error names the place; the call does not hang."""

    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.barrier()

    with pytest.raises(RuntimeError) as caught:
        run(body, **FORK)

    assert "raised by rank 1" in caught.value.__notes__[0]
    assert caught.value.__notes__[1] == "rank(s) 0 had returned, while this rank waited for them"


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    """The cause stays the cause."""

    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / "pid").write_text(str(os.getpid()))
            ctx.barrier()
            time.sleep(600)
        ctx.barrier()
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        run(body, grace=0.3, **FORK)

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize("end", ["returns", "raises", "dies"])
def test_what_a_rank_started_ends_with_it(tmp_path: Path, end: str) -> None:
    """Loader workers and other children are in its process group."""

    def body(ctx: Context) -> None:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / f"pid{ctx.rank}").write_text(str(child.pid))
        ctx.barrier()
        if ctx.rank == 1 and end == "raises":
            raise ValueError
        if ctx.rank == 1 and end == "dies":
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        run(body, **FORK)
    except (ValueError, WorkerDied):
        assert end != "returns"
    else:
        assert end == "returns"

    for rank in (0, 1):
        pid = int((tmp_path / f"pid{rank}").read_text())
        limit = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        assert not Path(f"/proc/{pid}").exists()


class _Slow:
    """Takes long to arrive, on rank 1 only."""

    def __init__(self, overdue: Overdue) -> None:
        self.overdue = overdue

    def __reduce__(self) -> tuple[Any, ...]:
        return _slow, (self.overdue,)


def _slow(overdue: Overdue) -> None:
    if os.environ.get("RANK") == "1":
        time.sleep(overdue.there(600))


def test_ranks_that_do_not_join_in_time_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout of its own, apart from that of collectives."""
    one = Overdue(tmp_path, ranks=1)
    one.limit(monkeypatch.setattr, joining=1)
    with pytest.raises(JoinTimeout, match=r"rank\(s\) 1 of 2 did not join within 600 s"):
        run(
            lambda ctx, slow: None,
            _Slow(one),
            devices=2,
            strategy="ddp_forkserver",
            rendezvous_timeout=LONG,
        )


_hang_children: list[bool] = []


def _hang() -> None:
    if _hang_children:
        time.sleep(600)


os.register_at_fork(after_in_child=_hang)


def test_forks_that_do_not_work_are_replaced(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and the call succeeds."""
    monkeypatch.setattr("distribute.launchers.fork._READY_SECONDS", 2.0)
    _hang_children.append(True)
    try:
        values = run(lambda ctx: ctx.all_gather(ctx.rank), **FORK)
    finally:
        _hang_children.clear()

    assert values == [0, 1]
    assert capfd.readouterr().err.count("the fork server takes over") == 1


def test_a_time_in_which_nothing_ran_is_not_held_against_the_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when the machine stalls, or the whole job is stopped and continued."""
    monkeypatch.setattr("distribute.launchers.fork._READY_SECONDS", 2.0)
    monkeypatch.setattr("distribute.worker.prove", lambda: until(tmp_path / "over"))

    class Stalling(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            found = super().select(0)
            if not (tmp_path / "over").exists():
                time.sleep((timeout or 0) + 2.5)
                (tmp_path / "over").touch()
            return found

    stalling = SimpleNamespace(DefaultSelector=Stalling, EVENT_READ=selectors.EVENT_READ)
    monkeypatch.setattr("distribute.supervise.selectors", stalling)
    values = run(lambda ctx: (ctx.all_gather(ctx.rank), os.getppid()), **FORK)

    assert values == ([0, 1], os.getpid())
    assert capfd.readouterr().err == ""


class TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_be_rebuilt_arrives_as_text() -> None:
    """With its type's name, its text and its traceback."""

    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            raise TwoArguments(1, 2)
        ctx.barrier()

    with pytest.raises(WorkerError) as caught:
        run(body, **FORK)

    assert caught.value.rank == 1
    assert caught.value.type_name.endswith("TwoArguments")
    assert caught.value.text == "1 and 2"
    assert "raise TwoArguments(1, 2)" in caught.value.traceback


def test_an_exception_without_a_text_is_told_by_its_type_alone() -> None:
    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 1:
            raise MemoryError
        ctx.barrier()

    with pytest.raises(MemoryError) as caught:
        run(body, **FORK)

    assert caught.value.outcomes[1].error == "MemoryError"  # type: ignore[attr-defined]


def test_a_value_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    """Not a hang, and not a None."""

    def body(ctx: Context) -> object:
        import threading

        return threading.Lock()

    with pytest.raises(RequestError, match=r"cannot pickle '_thread\.lock' object"):
        run(body, **FORK)


def test_an_interrupt_of_the_caller_ends_all_ranks(tmp_path: Path) -> None:
    """One KeyboardInterrupt; the next call works."""
    import threading

    def body(ctx: Context) -> None:
        ctx.barrier()
        (tmp_path / f"there{ctx.rank}").touch()
        time.sleep(600)

    def interrupt() -> None:
        for rank in (0, 1):
            until(tmp_path / f"there{rank}")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(body, **FORK)
    finally:
        thread.join()
    assert run(lambda ctx: ctx.world_size, **FORK) == 2


@pytest.mark.parametrize("first", ["failure", "interrupt"])
def test_an_interrupt_while_a_failed_call_is_cleared_up_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """It comes after that, as one exception in a chain of the user's own ones."""
    removed: list[str] = []

    def remove(path: str) -> None:
        signal.raise_signal(signal.SIGINT)
        removed.append(path)

    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 1 and first == "failure":
            raise ValueError("the cause")
        if ctx.rank == 1:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    monkeypatch.setattr("distribute.scratch.remove", remove)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(body, **FORK)

    assert len(removed) == 2
    context = caught.value.__context__
    assert type(context) is (ValueError if first == "failure" else type(None))


def test_ranks_that_have_failed_leave_whatever_sigterm_means_to_them() -> None:
    """A handler of the user's that does not end the process does not cost the grace period."""

    def body(ctx: Context) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        ctx.barrier()
        raise ValueError(ctx.rank)

    with pytest.raises(ValueError):  # noqa: PT011
        run(body, grace=600, **FORK)


def test_sys_exit_means_the_same_in_a_world_of_one() -> None:
    """Without a code the call returns None; with one it has failed, and the caller goes on."""
    assert run(lambda ctx: sys.exit(), devices=1) is None
    with pytest.raises(WorkerDied, match=r"exit code 3 when its function called sys\.exit") as one:
        run(lambda ctx: sys.exit(3), devices=1)
    assert [found.kind for found in one.value.outcomes] == ["exited"]  # type: ignore[attr-defined]


def test_every_error_carries_the_outcomes_of_all_ranks() -> None:
    """Also in a world of one."""

    def body(ctx: Context) -> None:
        if ctx.rank == ctx.world_size - 1:
            raise KeyError("x")
        time.sleep(600)

    for devices, kinds in ((1, ["raised"]), (3, ["killed", "killed", "raised"])):
        with pytest.raises(KeyError) as caught:
            run(body, devices=devices, strategy="ddp_fork" if devices > 1 else "auto")
        found = caught.value.outcomes  # type: ignore[attr-defined]
        assert [one.rank for one in found] == list(range(devices))
        assert [one.kind for one in found] == kinds
        assert [one.consequence for one in found] == [kind == "killed" for kind in kinds]
        assert found[-1].error == "KeyError: 'x'"
        assert 'raise KeyError("x")' in found[-1].traceback


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_handler_that_ends_the_program_ends_it(tmp_path: Path, strategy: str) -> None:
    """As containers are told to stop: the call does not return as if it had come to its end."""
    script = write(
        tmp_path,
        """
        import os, signal, sys, time
        from distribute import run

        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

        def body(ctx):
            if ctx.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(600)

        if __name__ == "__main__":
            run(body, devices=2 if sys.argv[1] == "ddp" else 1, strategy=sys.argv[1], grace=1)
            print("RETURNED")
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 0
    assert "RETURNED" not in ended.out
