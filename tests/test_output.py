"""The ranks' output: whole lines, live, and never at the price of a rank's progress."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from distribute.output import Forwarder, Tap
from tests.scripts import ROOT, run_python


class Screen(io.StringIO):
    """A consumer in this process, which may stall."""

    def __init__(self) -> None:
        super().__init__()
        self.going = threading.Event()
        self.going.set()
        self.changed = threading.Condition()
        self.longest = 0

    def write(self, text: str) -> int:
        assert self.going.wait(30)
        with self.changed:
            self.longest = max(self.longest, len(text))
            self.changed.notify_all()
            return super().write(text)

    def wait(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.getvalue(), 10), self.getvalue()


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
def opened(ranks: int) -> Generator[tuple[list[Tap], list[tuple[int, int]]]]:
    taps: list[Tap] = []
    ends: list[tuple[int, int]] = []
    for rank in range(ranks):
        tap, (out, err) = Tap.open(rank)
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
def forwarding(ranks: int, *, same: bool = False) -> Generator[World]:
    out = Screen()
    err = out if same else Screen()
    with opened(ranks) as (taps, ends):
        world = World(out, err, taps, ends, Forwarder(taps))
        with redirect_stdout(out), redirect_stderr(err):
            world.forwarder.start()
        try:
            yield world
        finally:
            out.going.set()
            err.going.set()
            world.forwarder.finish(10)


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
        assert child.wait(30) == 0
    world.forwarder.finish()

    lines = world.out.getvalue().splitlines()
    for rank in (1, 2):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] line {n} of a rank" for n in range(60)]
    assert len(lines) == 120


def test_rank_0_is_plain_and_every_line_of_the_others_is_marked(world: World):
    world.write(0, "zero\n\nagain\n")
    world.write(1, "one\n\nagain\n")
    world.write(2, "two\n", stream=2)
    world.forwarder.finish()

    text = world.out.getvalue()
    assert "zero\n\nagain\n" in text
    assert "[1] one\n[1] \n[1] again\n" in text
    assert len(text.splitlines()) == 6
    assert world.err.getvalue() == "[2] two\n"


def test_an_unfinished_last_line_comes_with_the_end(world: World):
    world.write(0, "plain")
    world.write(1, "one\nmarked")
    world.forwarder.finish()

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
    world.forwarder.finish()

    assert world.out.getvalue() == shown


def test_an_erased_bar_does_not_run_into_the_line_after_it(world: World):
    for part in ("\r 10%", "\r    ", "x", "\n"):
        world.write(1, part)
        world.forwarder.catch_up()
    world.forwarder.finish()

    assert world.out.getvalue() == "[1]     x\n"


def test_a_line_without_end_is_passed_on_in_pieces():
    size = 12 << 20
    source = f"import os; [os.write(1, b'x' * 65536) for _ in range({size >> 16})]"
    with forwarding(2) as world:
        children = [world.child(rank, source) for rank in (0, 1)]
        for child in children:
            assert child.wait(30) == 0
        world.forwarder.finish(10)

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
    world.forwarder.finish()

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
        world.forwarder.finish()

    assert world.out.getvalue() == "\r 10%\n[1] one\n[1] two\n\r 20%\n"


def test_an_unfinished_line_in_another_place_is_left_alone(world: World):
    world.write(0, "\r 10%", stream=2)
    world.err.wait(" 10%")
    world.write(1, "one\n")
    world.out.wait("one\n")
    world.forwarder.finish()

    assert world.err.getvalue() == "\r 10%"
    assert world.out.getvalue() == "[1] one\n"


def test_a_live_piece_never_ends_within_a_character(world: World):
    world.write(0, b"caf\xc3")
    world.out.wait("caf")
    world.write(0, b"\xa9 \xf0\x9f\x98")
    world.out.wait(" ")
    world.write(0, b"\x80\n")
    world.forwarder.finish()

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
    forwarder.finish()
    for tap, _ in taps:
        tap.close()

    assert used < 0.1


# -- where to ----------------------------------------------------------------------------------


def test_bytes_that_are_no_text_are_shown_in_a_text_stream(world: World):
    world.write(1, b"caf\xe9\n")
    world.forwarder.finish()

    assert world.out.getvalue() == "[1] caf\\xe9\n"


def test_a_captured_stream_gets_the_text(capsys: pytest.CaptureFixture[str]):
    with opened(2) as (taps, ends):
        forwarder = Forwarder(taps)
        forwarder.start()
        os.write(ends[0][0], b"zero\n")
        os.write(ends[1][1], b"one\n")
        forwarder.finish()

    assert capsys.readouterr() == ("zero\n", "[1] one\n")


def test_a_captured_descriptor_gets_the_text(capfd: pytest.CaptureFixture[str]):
    with opened(2) as (taps, ends):
        forwarder = Forwarder(taps)
        forwarder.start()
        os.write(ends[0][0], b"zero\n")
        os.write(ends[1][1], b"one\n")
        forwarder.finish()

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
        forwarder.finish()

    assert tee.getvalue() == "zero\n"


def test_a_stream_that_raises_is_left_alone_and_the_other_goes_on():
    with forwarding(2) as world:
        world.out.close()
        for number in range(3):
            world.write(1, f"out {number}\n")
            world.write(1, f"err {number}\n", stream=2)
        world.forwarder.finish()

    assert world.err.getvalue() == "[1] err 0\n[1] err 1\n[1] err 2\n"
    assert "out 2" in world.taps[1].tail()


def test_without_streams_the_tail_is_kept(monkeypatch: pytest.MonkeyPatch):
    with opened(1) as (taps, ends):
        forwarder = Forwarder(taps)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", None)
            forwarder.start()
        os.write(ends[0][0], b"zero\n")
        forwarder.finish()

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
        forwarder.finish()
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
        forwarder.finish()
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
        forwarder.finish()
        """)
    source = "import os, time\nready, wait = os.pipe()\nos.dup2(ready, 0)\n" + source
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, timeout=60)

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
        out, err = process.communicate(timeout=60)

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
        out, err = process.communicate(timeout=60)

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
            forwarder.finish()
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
    _, err = process.communicate(timeout=60)

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
        out, err = process.communicate(timeout=60)

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
    world.forwarder.finish()

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
    world.forwarder.finish(10)
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
            forwarder.finish()
            assert output_threads() == []
            forwarder.finish()
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
    forwarder.finish()
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
