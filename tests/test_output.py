"""The ranks' output: whole lines, live, and never at the price of a rank's progress."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import pytest

from distribute import Context, RequestError, WorkerDied, consumer, distributed, run
from distribute.output import Forwarder, Tap
from tests.scripts import ROOT, on_terminal, run_python, write


class Screen(io.StringIO):
    """A consumer in this process, which may stall."""

    def __init__(self) -> None:
        super().__init__()
        self.going = threading.Event()
        self.going.set()
        self.changed = threading.Condition()
        self.longest = 0

    def write(self, text: str) -> int:
        assert self.going.wait(60)
        with self.changed:
            self.longest = max(self.longest, len(text))
            self.changed.notify_all()
            return super().write(text)

    def wait(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.getvalue(), 60), self.getvalue()


@dataclass
class World:
    """Ranks whose pipes this process writes into, or its children."""

    out: Screen
    err: Screen
    taps: list[Tap]
    ends: list[tuple[int, int]]
    forwarder: Forwarder

    def write(self, rank: int, data: str | bytes, *, stream: int = 1) -> None:
        os.write(self.ends[rank][stream - 1], data.encode() if isinstance(data, str) else data)

    def child(self, rank: int, source: str) -> subprocess.Popen[bytes]:
        out, err = self.ends[rank]
        return subprocess.Popen([sys.executable, "-Sc", source], stdout=out, stderr=err)


@contextmanager
def opened(
    ranks: int, *, together: bool = False
) -> Generator[tuple[list[Tap], list[tuple[int, int]]]]:
    taps: list[Tap] = []
    ends: list[tuple[int, int]] = []
    for rank in range(ranks):
        tap, (out, err) = Tap.open(rank, together=together)
        assert out is not None
        assert err is not None
        taps.append(tap)
        ends.append((out, err))
    try:
        yield taps, ends
    finally:
        for tap, (out, err) in zip(taps, ends, strict=True):
            tap.close()
            os.close(out)
            os.close(err)


@contextmanager
def forwarding(
    ranks: int, *, same: bool = False, together: bool = False, output: str | PurePath = "all"
) -> Generator[World]:
    out = Screen()
    err = out if same else Screen()
    with opened(ranks, together=together) as (taps, ends):
        world = World(out, err, taps, ends, Forwarder(taps, output))
        with redirect_stdout(out), redirect_stderr(err):
            world.forwarder.start()
        try:
            yield world
        finally:
            out.going.set()
            err.going.set()
            world.forwarder.finish(30)


@pytest.fixture
def world() -> Iterator[World]:
    with forwarding(3) as one:
        yield one


def output_threads() -> list[str]:
    names = [one.name for one in threading.enumerate()]
    return [name for name in names if name.startswith("distribute-output")]


# -- lines -------------------------------------------------------------------------------------


def test_lines_stay_whole_when_ranks_print_one_character_at_a_time(world: World):
    source = """
import os
for number in range(60):
    for character in f"line {number} of a rank" + chr(10):
        os.write(1, character.encode())
"""
    children = [world.child(rank, source) for rank in (1, 2)]
    for child in children:
        assert child.wait(100) == 0
    world.forwarder.finish(30)

    lines = world.out.getvalue().splitlines()
    for rank in (1, 2):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] line {n} of a rank" for n in range(60)]
    assert len(lines) == 120


def test_rank_0_is_plain_and_every_line_of_the_others_is_marked(world: World):
    world.write(0, "zero\n\nagain\n")
    world.write(1, "one\n\nagain\n")
    world.write(2, "two\n", stream=2)
    world.forwarder.finish(30)

    text = world.out.getvalue()
    assert "zero\n\nagain\n" in text
    assert "[1] one\n[1] \n[1] again\n" in text
    assert len(text.splitlines()) == 6
    assert world.err.getvalue() == "[2] two\n"


def test_an_unfinished_last_line_comes_with_the_end(world: World):
    world.write(0, "plain")
    world.write(1, "one\nmarked")
    world.forwarder.finish(30)

    assert world.out.getvalue() in (
        "[1] one\n[1] marked\nplain",
        "plain\n[1] one\n[1] marked\n",  # it had been passed on
    )


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b" 10%\r 20%\r 30%\n", "[1]  30%\n"),
        (b"\r 10%\r 20%\r\n", "[1]  20%\n"),
        (b"a line\r\nanother\r\n", "[1] a line\n[1] another\n"),
        (b"\r 10%\r 20%", "[1]  20%\n"),
        (b"\r\n", "[1] \n"),
        (b"\r bar\r    \rtext\n", "[1] text\n"),
    ],
)
def test_of_a_rewritten_line_of_another_rank_the_last_state_is_shown(
    world: World, written: bytes, shown: str
):
    for byte in written:
        world.write(1, bytes([byte]))
        world.forwarder.catch_up()  # each by itself
    world.forwarder.finish(30)

    assert world.out.getvalue() == shown


def test_an_erased_bar_does_not_run_into_the_line_after_it(world: World):
    for part in ("\r 10%", "\r    ", "x", "\n"):
        world.write(1, part)
        world.forwarder.catch_up()
    world.forwarder.finish(30)

    assert world.out.getvalue() == "[1]     x\n"


def test_a_line_without_end_is_passed_on_in_pieces():
    size = 12 << 20
    source = f"import os; [os.write(1, b'x' * 65536) for _ in range({size >> 16})]"
    with forwarding(2) as world:
        children = [world.child(rank, source) for rank in (0, 1)]
        for child in children:
            assert child.wait(100) == 0
        world.forwarder.finish(30)

    text = world.out.getvalue()
    lines = text.splitlines()
    assert world.out.longest < 2 << 20
    assert text.count("x") == 2 * size
    assert "".join(line for line in lines if line.startswith("[1] ")).count("x") == size
    assert max(len(line) for line in lines if line.startswith("[1] ")) < 2 << 20


# -- live --------------------------------------------------------------------------------------


def test_lines_appear_while_the_call_runs(world: World):
    world.write(1, "first\n")
    world.out.wait("[1] first\n")


def test_a_progress_bar_of_rank_0_moves(world: World):
    world.write(0, "\r 10%", stream=2)
    world.err.wait("\r 10%")
    world.write(0, "\r 20%", stream=2)
    world.err.wait("\r 10%\r 20%")
    world.write(0, "\n", stream=2)
    world.forwarder.finish(30)

    assert world.err.getvalue() == "\r 10%\r 20%\n"


def test_a_line_of_another_rank_does_not_run_into_an_unfinished_one_of_rank_0():
    with forwarding(2, same=True) as world:
        world.write(0, "\r 10%", stream=2)
        world.out.wait(" 10%")
        world.write(1, "one\n")
        world.out.wait("one\n")
        world.write(1, "two\n")
        world.out.wait("two\n")
        world.write(0, "\r 20%\n", stream=2)
        world.forwarder.finish(30)

    assert world.out.getvalue() == "\r 10%\n[1] one\n[1] two\n\r 20%\n"


def test_an_unfinished_line_in_another_place_is_left_alone(world: World):
    world.write(0, "\r 10%", stream=2)
    world.err.wait(" 10%")
    world.write(1, "one\n")
    world.out.wait("one\n")
    world.forwarder.finish(30)

    assert world.err.getvalue() == "\r 10%"
    assert world.out.getvalue() == "[1] one\n"


def test_a_live_piece_never_ends_within_a_character(world: World):
    world.write(0, b"caf\xc3")
    world.out.wait("caf")
    world.write(0, b"\xa9 \xf0\x9f\x98")
    world.out.wait(" ")
    world.write(0, b"\x80\n")
    world.forwarder.finish(30)

    assert world.out.getvalue() == "café \U0001f600\n"


def test_idle_threads_sleep(world: World):
    world.write(0, b"half a character \xc3")
    world.out.wait("half")
    child = world.child(1, "print('gone')")
    child.wait()
    world.out.wait("gone")
    before = time.process_time()
    time.sleep(0.4)

    assert time.process_time() - before < 0.1


def test_a_rank_that_closed_its_output_costs_nothing():
    taps = [Tap.open(rank) for rank in (0, 1)]
    forwarder = Forwarder([tap for tap, _ in taps])
    for _, ends in taps:
        for one in ends:
            assert one is not None
            os.close(one)
    forwarder.start()
    before = time.process_time()
    time.sleep(0.4)
    used = time.process_time() - before
    forwarder.finish(30)
    for tap, _ in taps:
        tap.close()

    assert used < 0.1


# -- where to ----------------------------------------------------------------------------------


def test_bytes_that_are_no_text_are_shown_in_a_text_stream(world: World):
    world.write(1, b"caf\xe9\n")
    world.forwarder.finish(30)

    assert world.out.getvalue() == "[1] caf\\xe9\n"


def test_a_captured_stream_gets_the_text(capsys: pytest.CaptureFixture[str]):
    with opened(2) as (taps, ends):
        forwarder = Forwarder(taps)
        forwarder.start()
        os.write(ends[0][0], b"zero\n")
        os.write(ends[1][1], b"one\n")
        forwarder.finish(30)

    assert capsys.readouterr() == ("zero\n", "[1] one\n")


def test_a_captured_descriptor_gets_the_text(capfd: pytest.CaptureFixture[str]):
    with opened(2) as (taps, ends):
        forwarder = Forwarder(taps)
        forwarder.start()
        os.write(ends[0][0], b"zero\n")
        os.write(ends[1][1], b"one\n")
        forwarder.finish(30)

    assert capfd.readouterr() == ("zero\n", "[1] one\n")


def test_an_object_that_wraps_the_real_stream_is_asked():
    class Tee(Screen):
        def fileno(self) -> int:
            return 1

    tee = Tee()
    with opened(1) as (taps, ends):
        forwarder = Forwarder(taps)
        with redirect_stdout(tee):
            forwarder.start()
        os.write(ends[0][0], b"zero\n")
        forwarder.finish(30)

    assert tee.getvalue() == "zero\n"


def test_a_stream_that_raises_is_left_alone_and_the_other_goes_on():
    with forwarding(2) as world:
        world.out.close()
        for number in range(3):
            world.write(1, f"out {number}\n")
            world.write(1, f"err {number}\n", stream=2)
        world.forwarder.finish(30)

    assert world.err.getvalue() == "[1] err 0\n[1] err 1\n[1] err 2\n"
    assert "out 2" in world.taps[1].tail()


def test_without_streams_the_tail_is_kept(monkeypatch: pytest.MonkeyPatch):
    with opened(1) as (taps, ends):
        forwarder = Forwarder(taps)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", None)
            forwarder.start()
        os.write(ends[0][0], b"zero\n")
        forwarder.finish(30)

    assert taps[0].tail() == ["zero"]


# -- the launcher's real streams ---------------------------------------------------------------

# A launcher whose ranks run some code each; `RANK` is theirs.
LAUNCHER = """
import glob, os, subprocess, sys
from distribute.output import Forwarder, Tap

def launch(*sources):
    taps, children = [], []
    for rank, source in enumerate(sources):
        tap, (out, err) = Tap.open(rank)
        source = f"import os, sys\\nRANK = {rank}\\n{source}"
        command = [sys.executable, "-Sc", source]
        children.append(subprocess.Popen(command, stdout=out, stderr=err))
        os.close(out)
        os.close(err)
        taps.append(tap)
    return taps, children
"""
# 100 bytes a line with its mark.
MANY = """
COUNT = 10 << 20
for number in range(COUNT // 100):
    sys.stdout.write(f"{RANK} {number} ".ljust(95, ".") + chr(10))
"""


def launcher(source: str) -> str:
    return LAUNCHER + textwrap.dedent(source)


def check_many(lines: Sequence[str]) -> None:
    for rank in (0, 1):
        mark = f"[{rank}] " if rank else ""
        mine = [line for line in lines if line.startswith(f"{mark}{rank} ")]
        assert mine == [
            mark + f"{rank} {number} ".ljust(95, ".") for number in range((10 << 20) // 100)
        ]


def test_real_streams_get_bytes_after_what_the_launcher_has_printed():
    ended = run_python(
        "-c",
        launcher(r"""
        print("mine")
        taps, children = launch("", "os.write(1, b'caf\\xc3\\xa9\\n'); os.write(2, b'error\\n')")
        forwarder = Forwarder(taps)
        forwarder.start()
        children[1].wait()
        forwarder.finish(30)
        children[0].wait()
        print("mine again")
        """),
        environ={"PYTHONUNBUFFERED": ""},
    )

    assert (ended.code, ended.out, ended.err) == (0, "mine\n[1] café\nmine again\n", "[1] error\n")


def test_bytes_that_are_no_text_pass_through_real_streams_as_they_are():
    source = launcher(r"""
        taps, (child,) = launch("os.write(1, b'\\xff\\xe9\\n')")
        forwarder = Forwarder(taps)
        forwarder.start()
        child.wait()
        forwarder.finish(30)
        """)
    ended = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"\xff\xe9\n", b"")


@pytest.mark.parametrize(
    ("stderr", "seen"),
    [
        (subprocess.STDOUT, (b"\r 10%\n[1] one\n", None)),
        (subprocess.PIPE, (b"[1] one\n", b"\r 10%")),
    ],
)
def test_the_cursor_of_real_streams_is_known(stderr: int, seen: tuple[bytes, bytes | None]):
    source = launcher(r"""
        taps, children = launch("os.write(2, b'\\r 10%')", "sys.stdin.read(); print('one')")
        forwarder = Forwarder(taps)
        forwarder.start()
        children[0].wait()
        while not taps[0].pipes[1].last or taps[0].pipes[1].rest:
            time.sleep(0.01)  # until it has been passed on
        os.close(wait)
        children[1].wait()
        forwarder.finish(30)
        """)
    source = "import os, time\nready, wait = os.pipe()\nos.dup2(ready, 0)\n" + source
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, timeout=100)

    assert (ended.stdout, ended.stderr) == seen


@contextmanager
def stalled(source: str) -> Generator[tuple[subprocess.Popen[str], list[str]]]:
    """Runs a launcher; yields once it has said `done` on stderr, nothing of stdout being read."""
    process = subprocess.Popen(
        [sys.executable, "-c", launcher(source)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        said: list[str] = []
        while "done" not in said:
            line = process.stderr.readline()
            assert line, said
            said.append(line.rstrip("\n"))
        yield process, said
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_stalled_consumer_holds_up_nobody_and_gets_everything_in_order(blocking: bool):
    with stalled(f"""
        os.set_blocking(1, {blocking})
        MANY = {MANY!r}
        taps, children = launch(MANY, MANY)
        forwarder = Forwarder(taps)
        forwarder.start()
        for child in children:
            child.wait()  # though nobody reads
        forwarder.finish(0.05)
        open_now = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
        sys.stderr.write(f"{{any('deleted' in path for path in open_now)}}\\n")
        sys.stderr.write(f"{{taps[1].tail(1)[0][:8]}}\\ndone\\n")
        """) as (process, said):
        out, err = process.communicate(timeout=100)

    assert said == ["True", "1 104856", "done"]
    check_many(out.splitlines())
    assert (process.returncode, err) == (0, "")


def test_what_the_consumer_gets_late_comes_before_the_output_of_the_next_call():
    with stalled(f"""
        MANY = {MANY!r}
        taps, children = launch(MANY, MANY)
        first = Forwarder(taps)
        first.start()
        for child in children:
            child.wait()
        first.finish(0.05)
        print("done", file=sys.stderr)
        more, others = launch("", "print('of the next call')")
        second = Forwarder([*taps, *more])
        second.start()
        for child in others:
            child.wait()
        second.finish(0.05)
        """) as (process, _):
        out, err = process.communicate(timeout=100)

    *lines, last = out.splitlines()
    check_many(lines)
    assert last == "[1] of the next call"
    assert (process.returncode, err) == (0, "")


def test_a_consumer_that_is_gone_costs_its_stream_only():
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            launcher(f"""
            MANY = {MANY!r}
            taps, children = launch(MANY, MANY + "sys.stderr.write('an error')")
            forwarder = Forwarder(taps)
            forwarder.start()
            for child in children:
                child.wait()
            forwarder.finish(30)
            sys.stderr.write(f"{{[len(tap.tail()) for tap in taps]}}\\n")
            """),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=100)

    assert (process.returncode, err) == (0, "[1] an error\n[20, 20]\n")


def test_a_full_disk_costs_output_and_says_so():
    with stalled(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        MANY = {MANY!r}
        taps, children = launch(MANY, MANY)
        forwarder = Forwarder(taps)
        forwarder.start()
        for child in children:
            child.wait()
        forwarder.finish(0.05)
        print("done", file=sys.stderr)
        """) as (process, _):
        out, err = process.communicate(timeout=100)

    lines = out.splitlines()
    assert 9 << 20 < len(out) < 11 << 20
    assert {len(line) for line in lines} <= {95, 99}
    assert err.startswith("distribute: no room for ")
    assert process.returncode == 0


# -- ranks that die, and what they leave -------------------------------------------------------


def test_what_a_rank_wrote_before_it_was_killed_is_forwarded(world: World):
    source = """
import os
os.write(1, b"out\\nlast words")
os.write(2, b"err\\n")
os.kill(os.getpid(), 9)
"""
    assert world.child(1, source).wait() == -signal.SIGKILL
    world.forwarder.finish(30)

    assert world.out.getvalue() == "[1] out\n[1] last words\n"
    assert world.err.getvalue() == "[1] err\n"
    assert sorted(world.taps[1].tail()) == ["err", "last words", "out"]


def test_the_tail_is_caught_up_with_although_the_consumer_stalls(world: World):
    world.out.going.clear()
    source = "import os; os.write(1, b'x' * 50000 + b'\\nlast words'); os.kill(os.getpid(), 9)"
    for _ in range(20):
        assert world.child(1, source).wait() == -signal.SIGKILL
        world.forwarder.catch_up()
        assert world.taps[1].tail()[-1] == "last words"
        world.write(1, "\n")


def test_a_process_that_holds_the_pipes_is_not_waited_for(world: World):
    source = """
import os, signal
if os.fork() == 0:
    os.write(2, f"{os.getpid()}".encode())
    signal.pause()
os.write(1, b"last words")
"""
    assert world.child(1, source).wait() == 0
    while not any(line.isdigit() for line in world.taps[1].tail()):
        world.forwarder.catch_up()
    began = time.monotonic()
    world.forwarder.finish(30)
    took = time.monotonic() - began
    (holder,) = [int(line) for line in world.taps[1].tail() if line.isdigit()]
    os.kill(holder, signal.SIGKILL)

    assert took < 10
    assert world.out.getvalue() == "[1] last words\n"


def test_a_process_that_goes_on_writing_is_not_waited_for(world: World):
    child = world.child(1, "while True: print('more', flush=True)")
    world.out.wait("more")
    world.forwarder.catch_up()
    world.forwarder.finish(30)
    child.kill()
    child.wait()

    assert output_threads() == []
    assert set(world.out.getvalue().splitlines()) == {"[1] more"}


# -- the tail ----------------------------------------------------------------------------------


def test_the_tail_has_both_streams_and_an_unfinished_line(world: World):
    for stream, text in ((1, "one\n"), (2, "two\n"), (1, "three\r\n"), (2, "\r 1%\r 2%"), (1, "4")):
        world.write(1, text, stream=stream)
        world.forwarder.catch_up()

    assert world.taps[1].tail() == ["one", "two", "three", "4", " 2%"]
    assert world.taps[1].tail(2) == ["4", " 2%"]
    assert world.taps[0].tail() == []


def test_the_tail_is_bounded(world: World):
    for number in range(100):
        world.write(0, f"{number} ".ljust(30_000, "é") + "\n")
        world.forwarder.catch_up()
    world.write(0, "\r".join("é" * 5000 for _ in range(3)))
    world.forwarder.catch_up()

    tail = world.taps[0].tail(1000)
    assert [line.split()[0] for line in tail[:-1]] == [str(number) for number in range(50, 100)]
    assert {len(line) for line in tail} == {2000}


def test_the_tail_is_there_when_the_tap_is_closed():
    with forwarding(1) as world:
        world.write(0, "last words")
    world.taps[0].close()

    assert world.taps[0].tail() == ["last words"]


# -- nothing is left ---------------------------------------------------------------------------


def test_taps_serve_one_call_after_the_other_and_nothing_is_left():
    with opened(2) as (taps, ends):
        before = set(os.listdir("/proc/self/fd"))
        for number in range(3):
            os.write(ends[1][0], f"before call {number}\n".encode())  # while nobody listened
            screen = Screen()
            with redirect_stdout(screen):
                forwarder = Forwarder(taps)
                forwarder.start()
            assert len(output_threads()) == 2
            os.write(ends[1][0], f"call {number}".encode())
            forwarder.finish(30)
            assert output_threads() == []
            forwarder.finish(30)
            forwarder.catch_up()
            assert screen.getvalue() == f"[1] before call {number}\n[1] call {number}\n"
        assert set(os.listdir("/proc/self/fd")) == before


def test_a_stream_that_is_not_forwarded_has_no_pipe():
    tap, (out, err) = Tap.open(0, stdout=False)
    forwarder = Forwarder([tap])
    assert out is None
    assert err is not None
    screen = Screen()
    with redirect_stderr(screen):
        forwarder.start()
    os.write(err, b"error\n")
    os.close(err)
    forwarder.finish(30)
    tap.close()

    assert screen.getvalue() == "error\n"
    assert tap.tail() == ["error"]


def test_a_forked_process_does_not_keep_the_pipes_of_others(world: World):
    own = [pipe.descriptor for tap in world.taps for pipe in tap.pipes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if pid == 0:
        open_here = [one for one in own if os.path.lexists(f"/proc/self/fd/{one}")]
        os._exit(len(open_here))

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    world.write(1, "still heard\n")
    world.out.wait("[1] still heard\n")


# -- standard output and error in one place ----------------------------------------------------


def test_two_streams_of_one_place_share_a_pipe_and_keep_their_order():
    with forwarding(2, together=True) as world:
        for number in range(50):
            world.write(1, f"out {number}\n")
            world.write(1, f"err {number}\n", stream=2)
        world.forwarder.finish(30)

    expected = [f"{stream} {number}" for number in range(50) for stream in ("out", "err")]
    assert world.out.getvalue().splitlines() == [f"[1] {line}" for line in expected]
    assert world.err.getvalue() == ""
    assert world.taps[1].tail(4) == expected[-4:]


def test_no_descriptor_is_left_where_a_pipe_cannot_be_shared(monkeypatch: pytest.MonkeyPatch):
    def refuse(descriptor: int) -> int:
        raise OSError("none left")

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", refuse)
        with pytest.raises(OSError, match="none left"):
            Tap.open(1, together=True)

    assert set(os.listdir("/proc/self/fd")) == before


def test_captured_streams_are_not_in_one_place():
    screen = Screen()
    with redirect_stdout(screen), redirect_stderr(screen):
        assert not consumer.together()  # each might be another one in the next call


# Ranks that write to both streams in turns.
IN_TURNS = """
    import sys
    from distribute import distributed

    @distributed(devices=2)
    def train(ctx):
        for number in range(100):
            print(f"{ctx.rank} out {number}")
            print(f"{ctx.rank} err {number}", file=sys.stderr)

    if __name__ == "__main__":
        train()
    """


@pytest.mark.parametrize("method", ["reexec", "fork"])
def test_the_order_is_kept_on_the_way_into_one_file(tmp_path: Path, method: str):
    """As with `python train.py > log 2>&1`."""
    script = write(tmp_path, IN_TURNS)
    if method == "fork":
        script.write_text(script.read_text().replace("(devices", "(strategy='ddp_fork', devices"))
    with open(tmp_path / "log", "wb") as log:
        subprocess.run(
            [sys.executable, script],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            check=True,
            timeout=100,
        )

    lines = (tmp_path / "log").read_text().splitlines()
    for rank, mark in ((0, ""), (1, "[1] ")):
        mine = [line for line in lines if line.startswith(f"{mark}{rank} ")]
        assert mine == [
            f"{mark}{rank} {stream} {number}" for number in range(100) for stream in ("out", "err")
        ]
    assert len(lines) == 400


# -- the option --------------------------------------------------------------------------------

FORK: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}
METHODS = [
    "fork",
    "forkserver",
    pytest.param("spawn", marks=pytest.mark.slow),
]


def speak(ctx: Context, text: str = "") -> None:
    print(f"{text}out {ctx.rank}")
    print(f"{text}err {ctx.rank}", file=sys.stderr)
    ctx.barrier()


def speak_and_die(ctx: Context) -> None:
    speak(ctx)
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.barrier()


def read(directory: Path) -> dict[str, str]:
    return {path.name: path.read_bytes().decode() for path in sorted(directory.iterdir())}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("output", "out", "err"),
    [
        ("all", "out 0\n[1] out 1\n", "err 0\n[1] err 1\n"),
        ("main", "out 0\n", "err 0\n"),
        ("none", "", ""),
    ],
)
def test_the_ranks_that_are_shown(
    capfd: pytest.CaptureFixture[str], method: str, output: str, out: str, err: str
):
    run(speak, devices=2, start_method=method, output=output)

    found = capfd.readouterr()
    assert sorted(found.out.splitlines()) == sorted(out.splitlines())
    assert sorted(found.err.splitlines()) == sorted(err.splitlines())


@pytest.mark.parametrize("method", METHODS)
def test_a_directory_gets_a_file_of_each_rank(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], method: str
):
    """Both streams in order, and nothing where the launcher prints."""
    directory = tmp_path / "new" / "logs"

    run(speak, devices=2, start_method=method, output=directory)

    assert read(directory) == {
        "rank-0.log": "out 0\nerr 0\n",
        "rank-1.log": "out 1\nerr 1\n",
    }
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("devices", [1, 2])
def test_one_rank_beside_the_caller_has_a_file_too(tmp_path: Path, devices: int):
    run(speak, devices=devices, strategy="ddp_fork", output=str(tmp_path))

    assert sorted(read(tmp_path)) == ["rank-0.log", "rank-1.log"][:devices]


def test_a_file_has_every_byte():
    """Carriage returns, an unfinished line and what is no text."""
    data = b"\r 10%\r 20%\na\r\n\xff\xe9 last"
    with tempfile.TemporaryDirectory() as directory:
        with forwarding(2, output=PurePath(directory)) as world:
            for rank in (0, 1):
                for byte in data:
                    world.write(rank, bytes([byte]))
            world.forwarder.finish(30)
            assert world.out.getvalue() == ""
        files = [path.read_bytes() for path in sorted(Path(directory).iterdir())]

    assert files == [data, data]
    assert world.taps[1].tail() == [" 20%", "a", "\\xff\\xe9 last"]


def test_a_further_call_adds_to_the_files(tmp_path: Path):
    """A run that is started again does not lose what the first one has said."""
    run(speak, "1 ", output=tmp_path, **FORK)
    run(speak, "2 ", output=tmp_path, **FORK)

    assert read(tmp_path)["rank-1.log"] == "1 out 1\n1 err 1\n2 out 1\n2 err 1\n"


def test_restarted_ranks_go_on_in_their_files(tmp_path: Path):
    def body(ctx: Context) -> None:
        print(f"start {ctx.restart_count}")
        ctx.barrier()
        if ctx.restart_count == 0 and ctx.rank == 1:
            raise ValueError

    run(body, output=tmp_path, max_restarts=1, **FORK)

    assert read(tmp_path)["rank-1.log"] == "start 0\nstart 1\n"


@pytest.mark.parametrize("output", ["main", "none", "directory"])
def test_the_last_lines_of_a_dead_rank_are_known_in_any_case(tmp_path: Path, output: str):
    where = tmp_path if output == "directory" else output
    with pytest.raises(WorkerDied) as caught:
        run(speak_and_die, output=where, **FORK)

    assert sorted(caught.value.output) == ["err 1", "out 1"]


def test_nothing_starts_where_the_files_cannot_be_made(tmp_path: Path):
    def body(ctx: Context) -> None:
        (tmp_path / "started").touch()

    (tmp_path / "file").touch()
    (tmp_path / "logs" / "rank-1.log").mkdir(parents=True)

    with pytest.raises(RequestError) as caught:
        run(body, output=tmp_path / "file" / "logs", **FORK)
    assert caught.value.given == f"output='{tmp_path}/file/logs'"
    assert caught.value.fact == f"{tmp_path}/file/logs cannot be made (Not a directory)"
    assert caught.value.advice
    with pytest.raises(RequestError, match=r"rank-1\.log cannot be written \(Is a directory\)"):
        run(body, output=tmp_path / "logs", **FORK)
    with pytest.raises(RequestError, match="cannot be made"):
        run(body, output="a/\0", **FORK)
    assert not (tmp_path / "started").exists()


def test_a_plan_makes_no_files(tmp_path: Path):
    plan = distributed(output=tmp_path / "logs", **FORK)(speak).plan()

    assert plan.output == tmp_path / "logs"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_costs_output_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "rank-1.log").symlink_to("/dev/full")

    run(speak, output=tmp_path, **FORK)

    assert (tmp_path / "rank-0.log").read_text() == "out 0\nerr 0\n"
    assert capfd.readouterr().err == (
        f"distribute: {tmp_path}/rank-1.log cannot be written (No space left on device); what its "
        "rank prints from now on is lost\n"
    )


# Rank 0 is the calling process; its workers stay from call to call.
CALLER = """
    import os, sys
    from distribute import distributed

    def speak(ctx):
        print(f"out {ctx.rank}", flush=True)
        print(f"err {ctx.rank}", file=sys.stderr, flush=True)
        ctx.barrier()

    calls = {
        output: distributed(devices=2, output=output)(speak)
        for output in ("logs/", "none", "main", "all")
    }
    print("above", flush=True)
    if __name__ == "__main__":
        for output, call in calls.items():
            call()
            print(f"below {output}", flush=True)
    """


def test_a_rank_0_that_is_the_caller_prints_as_ever(tmp_path: Path):
    ended = run_python(write(tmp_path, CALLER), cwd=tmp_path)

    assert ended.code == 0, ended.text
    calls = ended.out.replace("[1] out 1\nout 0\n", "out 0\n[1] out 1\n").split("below ")
    assert calls == [
        "above\nout 0\n",
        "logs/\nout 0\n",
        "none\nout 0\n",
        "main\nout 0\n[1] out 1\n",
        "all\n",
    ]
    assert sorted(ended.err.splitlines()) == ["[1] err 1", *["err 0"] * 4]
    assert {name: sorted(text.splitlines()) for name, text in read(tmp_path / "logs").items()} == {
        "rank-1.log": ["err 1", "out 1"]
    }


def test_lines_stay_whole_beside_a_rank_0_that_is_the_caller(tmp_path: Path):
    """It holds back what it prints into a pipe, up to some number of bytes; and its last line."""
    script = write(
        tmp_path,
        """
        import sys, time
        from distribute import distributed

        @distributed(devices=2)
        def train(ctx):
            ctx.barrier()
            for number in range(4000):
                print(ctx.rank, number, "x" * 300)
            print("last", end="")
            if ctx.rank == 1:
                time.sleep(0.3)
                print(" of rank 1")

        if __name__ == "__main__":
            before = sys.stdout.line_buffering, sys.stderr.line_buffering
            train()
            print(before == (sys.stdout.line_buffering, sys.stderr.line_buffering))
        """,
    )

    ended = run_python(script, environ={"PYTHONUNBUFFERED": ""})

    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    for rank, mark in ((0, ""), (1, "[1] ")):
        mine = [line for line in lines if line.startswith(f"{mark}{rank} ")]
        assert mine == [f"{mark}{rank} {number} " + "x" * 300 for number in range(4000)]
    assert lines[-2:] == ["[1] last of rank 1", "lastTrue"]
    assert len(lines) == 8002


def test_what_is_longer_than_a_pipe_takes_whole_is_cut_at_lines():
    lines = [b"x" * size + b"\n" for size in (10, 4000, 100, 5000, 4095, 1)]
    data = b"".join(lines) + b"rest" * 2000

    pieces = list(consumer._pieces(data))

    assert b"".join(pieces) == data
    assert pieces == [lines[0] + lines[1], lines[2], *lines[3:], b"rest" * 2000]


@pytest.mark.parametrize("output", ["main", "none", "logs/"])
def test_a_world_of_one_prints_as_ever(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    output: str,
):
    """The function runs in the calling process."""
    monkeypatch.chdir(tmp_path)

    run(speak, devices=1, output=output)

    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("output", ["main", "none", "logs/"])
def test_rank_0_of_a_terminal_is_shown_there_only_if_it_is_to_be(tmp_path: Path, output: str):
    source = IN_TURNS.replace("(devices", f"(strategy='ddp_fork', output={output!r}, devices")

    text = on_terminal(write(tmp_path, source), cwd=tmp_path)

    expected = [f"0 {stream} {number}" for number in range(100) for stream in ("out", "err")]
    assert text.splitlines() == (expected if output == "main" else [])
    if output == "logs/":
        assert (tmp_path / "logs" / "rank-0.log").read_text().splitlines() == expected
