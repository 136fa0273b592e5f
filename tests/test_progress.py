"""A bar on a terminal, a bar in a notebook, and a line from time to time elsewhere."""

from __future__ import annotations

import io
import re
import sys
import threading
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from distribute import Context, display, progress, run
from distribute.display import PLAIN, Display
from tests.scripts import METHODS, on_terminal, write

FORK: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}
# What a line of a bar looks like.
LINE = r"{} \d+/\d+ \[\d\d:\d\d<(\d\d:\d\d|\?), .+/.+\]"


class Clock:
    """Stands for the clock by which lines are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: self.now))


class Screen(io.StringIO):
    """A consumer that is a terminal, and no file."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def plain(*args: Any, **options: Any) -> Any:
    return progress.bar(*args, PLAIN, silent=False, **options)


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on standard error, where nothing else is."""
    out, error = capsys.readouterr()
    assert out == ""
    assert "\r" not in error
    assert "\x1b" not in error
    assert error == "" or error.endswith("\n")
    return error.splitlines()


# -- lines -------------------------------------------------------------------------------------


def test_a_line_comes_every_10_seconds_and_at_the_end(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is in it are the numbers of that moment."""
    seen: list[int] = []
    for step in plain(range(35), desc="epoch 1", mininterval=0):
        clock.now += 1
        seen += [step] * len(errors(capsys))

    (last,) = errors(capsys)
    assert re.fullmatch(LINE.format("epoch 1: 100%"), last)
    assert "35/35" in last
    assert seen == [10, 20, 30]


def test_the_end_is_not_told_twice(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in plain(range(10), mininterval=0):
        clock.now += 1

    (line,) = errors(capsys)
    assert re.fullmatch(LINE.format("100%"), line)


def test_nothing_comes_before_there_is_progress(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop that is over at once has one line."""
    bar = plain(range(3))

    assert errors(capsys) == []
    assert list(bar) == [0, 1, 2]
    assert len(errors(capsys)) == 1


def test_members_of_tqdm_do_not_write_more_often(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """`set_postfix` refreshes the bar each time, and `tqdm.write` removes it and puts it back."""
    with plain(None, total=50) as bar:
        for step in range(50):
            clock.now += 0.5
            bar.update()
            bar.set_postfix(loss=step)
            bar.set_description(f"step {step}")
            if step % 10 == 0:
                tqdm.write("something", file=sys.stderr)

    lines = [line for line in errors(capsys) if line != "something"]
    assert [line.split("%")[0] for line in lines] == ["step 18: 40", "step 38: 80", "step 49: 100"]
    assert re.fullmatch(LINE.format("step 49: 100%"), lines[-1])
    assert lines[-1].endswith(", loss=49]")


@pytest.mark.parametrize(
    ("arguments", "options", "line"),
    [
        ([iter(range(3))], {}, r"3it \[00:00, .+it/s\]"),
        ([iter(range(3))], {"desc": "x"}, r"x: 3it \[00:00, .+it/s\]"),
        ([range(3)], {"unit": "batch"}, r"100% 3/3 \[00:00<00:00, .+batch/s\]"),
        ([range(3)], {"total": 2}, r"3it \[00:00, .+it/s\]"),
        ([[]], {}, r"0it \[00:00, .+\]"),
        ([range(3)], {"bar_format": "{n} of {total}"}, "3 of 3"),
        ([range(3)], {"ncols": 4}, LINE.format("100%")),
        ([range(3)], {"leave": False}, None),
        ([range(3)], {"disable": True}, None),
    ],
)
def test_the_last_line(
    capsys: pytest.CaptureFixture[str],
    arguments: list[Any],
    options: dict[str, Any],
    line: str | None,
) -> None:
    for _ in plain(*arguments, **options):
        pass

    found = errors(capsys)
    assert len(found) == (line is not None)
    assert line is None or re.fullmatch(line, found[0])


def test_a_loop_that_is_left_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    """By an exception or `break`, as tqdm's bar does."""
    for step in plain(range(10)):
        if step == 3:
            break

    (line,) = errors(capsys)
    assert re.fullmatch(LINE.format("30%"), line)


def test_a_bar_inside_another_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in plain(range(2), desc="outer"):
        for _ in plain(range(3), desc="inner"):
            pass

    assert [line.split(":")[0] for line in errors(capsys)] == ["inner", "inner", "outer"]


def test_a_file_of_ones_own_gets_the_bar_of_tqdm() -> None:
    file = io.StringIO()

    assert list(plain(range(3), file=file)) == [0, 1, 2]
    assert "\r100%|" in file.getvalue()


def test_a_bar_leaves_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """The next call may fork, and would not beside a thread of the caller's."""
    run(lambda ctx: list(ctx.progress(range(3))), devices=1)

    assert [one.name for one in threading.enumerate() if "TMonitor" in repr(one)] == []


# -- what it is shown on -----------------------------------------------------------------------


def test_a_notebook_gets_a_bar_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard error has a red background there."""
    assert list(progress.bar(range(3), Display("notebook"), silent=False)) == [0, 1, 2]

    out, error = capsys.readouterr()
    assert "\r100%|" in out
    assert error == ""


def test_a_bar_has_the_width_of_a_terminal_that_it_does_not_see(
    capsys: pytest.CaptureFixture[str],
) -> None:
    list(progress.bar(range(3), Display("terminal", 40), silent=False))

    error = capsys.readouterr().err
    assert {len(part) for part in error.rstrip("\n").split("\r")[1:]} == {39}


@pytest.mark.parametrize(
    ("kernel", "stream", "found"),
    [
        (object(), Screen(), Display("notebook")),
        (None, Screen(), Display("terminal")),
        (None, io.StringIO(), PLAIN),
        (None, None, PLAIN),
    ],
)
def test_what_a_process_is_shown_on(
    monkeypatch: pytest.MonkeyPatch, kernel: object, stream: Any, found: Display
) -> None:
    monkeypatch.setattr("distribute.cells.kernel", lambda: kernel)
    with redirect_stderr(stream):
        assert display.here() == found


def test_a_closed_stream_shows_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    with redirect_stderr(stream):
        assert display.here() == PLAIN


# -- ranks -------------------------------------------------------------------------------------


def show(ctx: Context) -> tuple[str, list[int]]:
    bar: Any = ctx.progress(range(3), desc=f"r{ctx.rank}")
    bar.set_postfix(rank=ctx.rank)
    return type(bar).__name__, list(bar)


@pytest.mark.parametrize(
    "options",
    [
        FORK,
        {"devices": 1},
        {"devices": 2, "strategy": "ddp_forkserver"},
        pytest.param({"devices": 2, "strategy": "ddp_spawn"}, marks=pytest.mark.slow),
    ],
)
def test_rank_0_writes_lines_and_all_ranks_have_the_same_object(
    capfd: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    values = run(show, returns="all", **options)

    assert values == [("Bar", [0, 1, 2])] * options["devices"]
    out, error = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(LINE.format("r0: 100%") + "\n", error)
    assert ", rank=0]" in error


def in_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(session=SimpleNamespace())
    monkeypatch.setattr("distribute.cells.kernel", lambda: kernel)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_rank_of_a_notebook_has_a_bar(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], devices: int
) -> None:
    """Though it sees neither the notebook nor a terminal."""
    in_kernel(monkeypatch)

    run(show, devices=devices)

    out, error = capfd.readouterr()
    assert error == ""
    assert "\rr0: 100%|" in out
    assert "r1" not in out


def test_a_rank_whose_output_is_shown_on_a_terminal_has_a_bar() -> None:
    screen = Screen()
    with redirect_stderr(screen):
        run(show, **FORK)

    assert "\rr0: 100%|" in screen.getvalue()
    assert "r1" not in screen.getvalue()


def test_a_rank_whose_output_goes_to_a_file_writes_lines(tmp_path: Path) -> None:
    """Whatever its launcher has."""
    screen = Screen()
    with redirect_stderr(screen):
        run(show, output=tmp_path, **FORK)

    assert screen.getvalue() == ""
    assert re.fullmatch(LINE.format("r0: 100%") + "\n", (tmp_path / "rank-0.log").read_text())
    assert (tmp_path / "rank-1.log").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, "inline"])
def test_a_terminal_gets_the_bar_of_tqdm(tmp_path: Path, method: str) -> None:
    """On rank 0, in the terminal's width, of which tqdm leaves one column free."""
    script = write(
        tmp_path,
        """
        import sys
        from distribute import distributed

        @distributed(devices=1 + (sys.argv[1] != "inline"))
        def train(ctx):
            for _ in ctx.progress(range(3), desc=f"r{ctx.rank}"):
                pass

        if __name__ == "__main__":
            train()
        """,
    )
    if method not in ("reexec", "inline"):
        script.write_text(
            script.read_text().replace("devices=", f"strategy='ddp_{method}', devices=")
        )

    text = on_terminal(script, method, columns=60)

    bars = [part for part in text.rstrip("\r\n").split("\r") if part]
    assert bars[-1].startswith("r0: 100%|"), text
    assert {len(one) for one in bars} == {59}
