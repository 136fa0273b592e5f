"""A call that hangs ends, and its error says where every rank was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import distribute
from distribute import Context, DeadlineExceeded, JoinTimeout, MainFailed, RequestError, run
from tests.overdue import LONG, Overdue
from tests.scripts import BIN, METHODS, run_program, run_python, write

FORK: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}
HERE = Path(__file__).name


def line_of(text: str) -> int:
    """The line of this file that holds a text; the first one."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


@pytest.fixture
def overdue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overdue:
    """The limits of calls come when both ranks are there."""
    folder = tmp_path / "there"
    folder.mkdir()
    both = Overdue(folder)
    both.limit(monkeypatch.setattr)
    return both


def outcomes(error: BaseException) -> tuple[distribute.RankOutcome, ...]:
    found: tuple[distribute.RankOutcome, ...] = error.outcomes  # type: ignore[attr-defined]
    return found


def test_a_deadline_ends_the_call_and_says_where_the_ranks_were(overdue: Overdue) -> None:
    """State, last collective with the line that called it, and stack of both ranks."""

    def body(ctx: Context) -> None:
        ctx.barrier()  # first
        if ctx.rank == 0:
            ctx.all_reduce(overdue.there(torch.ones(3)))  # in vain
        time.sleep(overdue.there(600))  # asleep

    with pytest.raises(DeadlineExceeded, match=r"did not end within 600 s \(deadline\)") as caught:
        run(body, deadline=LONG, **FORK)

    text = notes(caught.value)
    assert f"rank 0 is in all_reduce at {HERE}:{line_of('# in vain')}" in text
    assert f"rank 1 is at {HERE}:{line_of('# asleep')}, in body" in text
    assert f"last collective barrier at {HERE}:{line_of('# first')}" in text
    assert "    time.sleep(overdue.there(600))  # asleep" in text
    zero, one = outcomes(caught.value)
    assert (zero.rank, zero.kind, zero.consequence) == (0, "killed", True)
    assert (one.rank, one.kind, one.consequence) == (1, "killed", True)
    assert "# in vain" in zero.stack
    assert zero.collective.startswith("all_reduce at")
    assert one.collective.startswith("barrier at")


def test_a_deadline_that_is_kept_changes_nothing() -> None:
    assert run(lambda ctx: ctx.all_gather(ctx.rank), deadline=60, **FORK) == [0, 1]


def test_the_stack_names_what_torch_is_doing_for_whom(overdue: Overdue) -> None:
    """Also where it is not the context's own collective."""

    def body(ctx: Context) -> None:
        if ctx.rank == 0:
            dist.all_reduce(overdue.there(torch.ones(3)))  # torch's own
        time.sleep(overdue.there(600))

    with pytest.raises(DeadlineExceeded) as caught:
        run(body, deadline=LONG, **FORK)

    line = line_of("# torch's own")
    assert f"rank 0 is in all_reduce at {HERE}:{line}" in notes(caught.value)


def test_the_summary_names_the_users_line_and_not_that_of_what_it_calls(
    overdue: Overdue,
) -> None:
    """Such as a wait for a program, or for a loader's worker."""

    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            subprocess.run(["sleep", overdue.there("600")], check=True)  # a program
        for _ in DataLoader(overdue.there(Sleeping()), num_workers=1):  # a loader
            pass

    with pytest.raises(DeadlineExceeded) as caught:
        run(body, deadline=LONG, **FORK)

    text = notes(caught.value)
    assert f"rank 0 is at {HERE}:{line_of('# a loader')}, in body; " in text
    assert f"rank 1 is at {HERE}:{line_of('# a program')}, in body\n" in text


class Sleeping(Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(600)
        return index


def test_a_collective_that_times_out_shows_who_did_not_come(tmp_path: Path) -> None:
    """The rank that waited has the news, the other its stack."""
    zero = Overdue(tmp_path, ranks=1)

    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            while not zero.come():
                time.sleep(0.01)
            ctx.barrier()  # alone
        time.sleep(zero.there(600))  # elsewhere

    with pytest.raises(RuntimeError, match="Timed out") as caught:
        run(body, timeout=3, **FORK)

    text = notes(caught.value)
    assert "raised by rank 1 " in text
    assert f"rank 1 raised RuntimeError in barrier at {HERE}:{line_of('# alone')}" in text
    assert f"rank 0 is at {HERE}:{line_of('# elsewhere')}, in body" in text
    assert [one.kind for one in outcomes(caught.value)] == ["killed", "raised"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_trains_on_alone_does_not_wait_for_its_timeout(
    tmp_path: Path, method: str
) -> None:
    """The first model of a process, which is garbage in a cycle on the rank that has returned."""
    script = write(
        tmp_path,
        f"""
        import torch
        from distribute import run

        def train(ctx):
            ring = [ctx.model(torch.nn.Linear(1, 1))]
            ring.append(ring)
            for _ in range(3 + ctx.rank):
                ring[0](torch.ones(2, 1)).sum().backward()

        if __name__ == "__main__":
            try:
                run(train, devices=2, start_method="{method}", timeout=600)
            except RuntimeError as error:
                print("NOTES", *error.__notes__)
        """,
    )

    ended = run_python(script)

    (line,) = ended.lines("NOTES")
    assert "raised by rank 1 " in line
    assert "rank(s) 0 had returned, while this rank waited for them" in line


def test_a_rank_that_has_returned_is_reported_to_the_one_that_waits_for_it() -> None:
    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            ctx.all_reduce(1.0)  # for nobody

    with pytest.raises(RuntimeError) as caught:
        run(body, **FORK)

    text = notes(caught.value)
    assert "rank(s) 1 had returned, while this rank waited for them" in text
    line = line_of("# for nobody")
    assert f"rank 0 raised RuntimeError in all_reduce at {HERE}:{line}; rank 1 returned" in text
    assert [one.kind for one in outcomes(caught.value)] == ["raised", "returned"]


class _Slow:
    def __init__(self, overdue: Overdue) -> None:
        self.overdue = overdue

    def __reduce__(self) -> tuple[Any, ...]:
        return _sleep_on_rank_1, (self.overdue,)


def _sleep_on_rank_1(overdue: Overdue) -> None:
    if os.environ.get("RANK") == "1":
        time.sleep(overdue.there(600))  # while unpacking


def test_ranks_that_do_not_join_are_shown_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Overdue(tmp_path, ranks=1)
    one.limit(monkeypatch.setattr, joining=1)
    with pytest.raises(JoinTimeout, match=r"rank\(s\) 1 of 2 did not join within 600 s") as caught:
        run(
            lambda ctx, slow: None,
            _Slow(one),
            devices=2,
            strategy="ddp_forkserver",
            rendezvous_timeout=LONG,
        )

    text = notes(caught.value)
    assert "rank 0 is joining the others" in text or "rank 0 is in" in text
    assert "unpacking its arguments" in text
    assert f'{HERE}", line {line_of("# while unpacking")}' in text


def test_a_re_executed_script_that_does_not_arrive_is_shown_where_it_is(tmp_path: Path) -> None:
    """Above the call as well, where the worker has said nothing yet."""
    script = write(
        tmp_path,
        """
        import sys, time
        from pathlib import Path
        import distribute
        from tests.overdue import LONG, Overdue

        overdue = Overdue(Path(sys.argv[1]), ranks=1)
        if distribute.is_worker():
            time.sleep(overdue.there(600))  # stuck
        overdue.limit(setattr)

        @distribute.distributed(devices=2, rendezvous_timeout=LONG)
        def train(ctx):
            return 1

        train()
        """,
    )
    (tmp_path / "there").mkdir()

    ended = run_python(script, tmp_path / "there")

    assert ended.code == 1
    assert "JoinTimeout: rank(s) 1 of 2 did not join" in ended.err
    assert "rank 1 is at s.py:8, in <module>" in ended.err
    assert "on its way to `train` (" in ended.err
    assert "    time.sleep(overdue.there(600))  # stuck" in ended.err


def test_a_stopped_rank_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    """By a line after a while, and in the error of the timeout; it is ended like the others."""

    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        ctx.barrier()

    with pytest.raises(RuntimeError, match="Timed out") as caught:
        run(body, timeout=4, **FORK)

    assert "rank 1 is running, but its process is stopped (SIGSTOP" in notes(caught.value)
    pid = next(line for line in notes(caught.value).splitlines() if "rank 1 (process" in line)
    told = capfd.readouterr().err
    assert "the process of rank 1 is stopped" in told
    assert f"`kill -CONT {pid.split()[3].rstrip('):')}`" in told
    assert [one.signal for one in outcomes(caught.value)] == [None, signal.SIGTERM]


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    yield
    assert threading.active_count() == 1


@pytest.mark.usefixtures("no_thread_left")
def test_a_deadline_holds_in_the_calling_process_too() -> None:
    """A world of one has no supervisor, and the same error."""

    def body(ctx: Context) -> None:
        assert ctx.world_size == 1
        time.sleep(600)  # alone in the world

    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match=r"within 1 s") as caught:
            run(body, devices=1, deadline=1)
        assert f"line {line_of('# alone in the world')}, in body" in notes(caught.value)
    assert run(lambda ctx: ctx.rank, devices=1, deadline=60) == 0


def test_a_deadline_in_a_thread_takes_a_process_that_can_be_ended() -> None:
    """Nobody can make a thread leave its function."""
    caught: list[BaseException] = []
    # The fork server is there: its start takes seconds, of which the deadline is not to be spent.
    assert run(lambda ctx: ctx.world_size, devices=1, start_method="forkserver") == 1

    def call() -> None:
        try:
            run(lambda ctx: time.sleep(600), devices=1, deadline=3)
        except DeadlineExceeded as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)

    assert [type(one) for one in caught] == [DeadlineExceeded]


def test_a_deadline_holds_under_torchrun(tmp_path: Path) -> None:
    """Each rank leaves its own function."""
    script = write(
        tmp_path,
        """
        import os, time
        from pathlib import Path
        from distribute import DeadlineExceeded, distributed

        @distributed(deadline=3)
        def train(ctx):
            ctx.barrier()
            time.sleep(600)

        import torch.distributed  # takes longer in the one than in the other
        Path("there" + os.environ["RANK"]).touch()
        while not all(Path("there" + rank).exists() for rank in "01"):
            time.sleep(0.01)
        try:
            train()
        except DeadlineExceeded as error:
            last = error.__notes__[0].splitlines()[-1].strip()
            print(f"LATE {last}\\n", end="", flush=True)
        """,
    )

    ended = run_program(
        [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script)], cwd=tmp_path
    )

    assert ended.code == 0, ended.text
    assert ended.lines("LATE") == ["LATE time.sleep(600)"] * 2


@pytest.mark.parametrize("deadline", [0, -1, "soon", True, float("inf")])
def test_a_deadline_is_a_positive_duration(deadline: Any) -> None:
    with pytest.raises(RequestError, match="deadline"):
        run(lambda ctx: None, deadline=deadline, **FORK)


# -- one rank at a time ------------------------------------------------------------------------


def test_waiting_for_the_main_rank_is_not_bounded_by_the_timeout() -> None:
    """It may download for hours."""

    def body(ctx: Context) -> tuple[int, bool]:
        def work() -> int:
            time.sleep(2.5)
            return 42

        before = time.monotonic()
        with ctx.main_process_first():
            if ctx.is_main_process:
                time.sleep(2.5)
        return ctx.on_main(work), time.monotonic() - before > 4.5

    assert run(body, timeout=2, returns="all", **FORK) == [(42, True)] * 2


def test_an_exception_on_the_main_rank_reaches_all_ranks_at_once() -> None:
    """It is one failure, rank 0's, with the line that raised it; each rank may catch it."""

    def fail() -> None:
        raise KeyError("no such file")  # the line

    def body(ctx: Context) -> None:
        with pytest.raises(KeyError, match="no such file"):
            ctx.on_main(fail)
        ctx.barrier()
        ctx.on_main(fail)

    for _ in range(3):
        with pytest.raises(KeyError, match="no such file") as caught:
            run(body, **FORK)
        assert "raised by rank 0 " in caught.value.__notes__[0]
        assert len(caught.value.__notes__) == 1
        assert "# the line" in str(caught.value.__cause__)


class TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_exception_that_cannot_travel_still_reaches_all_ranks() -> None:
    """As itself on rank 0, and by its text elsewhere."""

    def fail() -> None:
        raise TwoArguments(1, 2)

    def body(ctx: Context) -> str:
        try:
            ctx.on_main(fail)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    assert run(body, returns="all", **FORK) == [
        "TwoArguments: 1 and 2",
        "MainFailed: rank 0 failed in on_main: TwoArguments: 1 and 2",
    ]


def test_main_process_first_tells_the_others_of_its_exception() -> None:
    def body(ctx: Context) -> str:
        try:
            with ctx.main_process_first():
                if ctx.is_main_process:
                    raise OSError("disk full")
        except MainFailed as error:
            ctx.barrier()
            return str(error)
        except OSError:
            ctx.barrier()
            return "own"
        return "nothing"

    assert run(body, returns="all", **FORK) == [
        "own",
        "rank 0 failed in main_process_first: OSError: disk full",
    ]

    def uncaught(ctx: Context) -> None:
        with ctx.main_process_first():
            if ctx.is_main_process:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full") as caught:
        run(uncaught, **FORK)
    assert len(caught.value.__notes__) == 1


# -- the end of ranks that do not want to ------------------------------------------------------


def test_the_cause_is_told_before_a_rank_that_ignores_sigterm_has_ended(tmp_path: Path) -> None:
    """The grace period delays the clean-up and the exception, and not the news."""
    script = write(
        tmp_path,
        """
        import signal, time
        from distribute import run

        def body(ctx):
            if ctx.rank == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctx.barrier()
            if ctx.rank == 1:
                raise ValueError("the cause")
            time.sleep(600)

        if __name__ == "__main__":
            run(body, devices=2, strategy="ddp_fork", grace=100)
        """,
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    try:
        told = process.stderr.readline() + process.stderr.readline()
        # The call is still waiting for the rank.
        assert process.poll() is None
        # The other one may take a while, too.
        wanted = r"rank\(s\) 0(, 1)? take long to end; SIGKILL comes 100 s \(grace\) after SIGTERM"
        assert re.search(wanted, told), told
        assert "ValueError: the cause" in told
        # The second interruption does not wait for the grace period.
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(60) == 1
        assert "ValueError: the cause" in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_second_ctrl_c_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    """Under re-exec another thread waits for the ranks, and hears it."""
    script = write(
        tmp_path,
        """
        import signal, sys, time
        from distribute import distributed

        @distributed(devices=2, grace=100)
        def train(ctx):
            if ctx.rank == 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ctx.barrier()
            ctx.print("UP")
            time.sleep(600)

        try:
            train()
        except KeyboardInterrupt as error:
            print("CAUGHT", [one.kind for one in error.outcomes])
        """,
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "UP\n"
        process.send_signal(signal.SIGINT)
        assert "take long to end; SIGKILL comes 100 s (grace)" in process.stderr.readline()
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "CAUGHT ['raised', 'killed']\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_a_deadline_in_the_calling_process_is_the_news_whatever_the_function_does() -> None:
    """It may swallow its end, or make another exception of it."""

    def swallows(ctx: Context) -> int:
        try:
            time.sleep(600)
        except BaseException:
            pass
        return ctx.world_size

    def wraps(ctx: Context) -> None:
        try:
            time.sleep(600)
        except BaseException as error:
            raise RuntimeError("wrapped") from error

    for body in (swallows, wraps):
        with pytest.raises(DeadlineExceeded):
            run(body, devices=1, deadline=0.3, grace=0.1)


def test_waiting_for_the_main_rank_leaves_one_key_in_the_store() -> None:
    """However often it is done, and each turn has its own value."""

    def body(ctx: Context) -> tuple[list[int], int]:
        store = dist.distributed_c10d._get_default_store()
        before = store.num_keys()
        found = [ctx.on_main(lambda one=one: one * 10) for one in range(50)]
        ctx.barrier()
        return found, store.num_keys() - before

    expected = [one * 10 for one in range(50)]
    (found, keys), (other, _) = run(body, returns="all", **FORK)
    assert found == other == expected
    assert keys <= 2
