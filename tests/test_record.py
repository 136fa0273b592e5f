"""What a rank does can be read from outside, while it does it and after it has crashed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import StackSummary, walk_stack

import pytest

from distribute import record
from distribute.record import Record

FILE = Path(__file__)


def line_of(text: str) -> int:
    lines = FILE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.fixture
def pair() -> Iterator[tuple[Record, Record]]:
    ours, theirs = Record.pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def fork(own: Record, body: Callable[[], None]) -> int:
    """Makes a process that runs `body` with its record, and returns its id."""
    pid = os.fork()
    if pid == 0:
        try:
            own.open()
            own.show_stacks()
            record.use(own)
            body()
        finally:
            os._exit(0)
    return pid


def end(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def test_a_record_that_nobody_has_opened_says_nothing(pair: tuple[Record, Record]) -> None:
    """A process that has not come that far cannot be asked: the signal would end it."""
    ours, _ = pair
    assert ours.last() is None
    assert ours.completed() == 0
    assert not ours.ask(os.getpid())
    assert list(ours.stack()) == []


def test_a_collective_is_seen_while_it_runs_and_afterwards(pair: tuple[Record, Record]) -> None:
    """With its caller's line, and how many were completed."""
    ours, theirs = pair
    theirs.open()
    before = time.monotonic()
    with theirs.operation("barrier", sys._getframe()):  # here
        seen = ours.last()
        assert seen is not None
        assert (seen.name, seen.file, seen.line) == ("barrier", __file__, line_of("# here"))
        assert (seen.running, seen.failed, seen.completed) == (True, False, 0)
        assert before <= seen.since <= time.monotonic()
        assert str(seen) == f"barrier at {FILE.name}:{line_of('# here')}"
    seen = ours.last()
    assert seen is not None
    assert (seen.running, seen.failed, seen.completed) == (False, False, 1)
    assert ours.completed() == 1


def test_a_collective_that_fails_is_not_completed(pair: tuple[Record, Record]) -> None:
    ours, theirs = pair
    theirs.open()
    with pytest.raises(ValueError, match="no"), theirs.operation("gather", sys._getframe()):
        raise ValueError("no")
    seen = ours.last()
    assert seen is not None
    assert (seen.running, seen.failed, seen.completed) == (False, True, 0)


def test_a_collective_inside_another_is_no_news(pair: tuple[Record, Record]) -> None:
    """`save` is what the user called, and not the broadcast in it."""
    ours, theirs = pair
    theirs.open()
    frame = sys._getframe()
    with theirs.operation("on_main", frame), theirs.operation("broadcast", frame):
        seen = ours.last()
        assert seen is not None
        assert seen.name == "on_main"
    assert ours.completed() == 1


def test_steps_of_a_model_count(pair: tuple[Record, Record]) -> None:
    ours, theirs = pair
    theirs.open()
    record.use(theirs)
    try:
        record.step()
        record.step()
    finally:
        record.use(None)
    record.step()
    assert ours.completed() == 2


def test_a_long_name_and_an_odd_one_do_not_break_the_page(pair: tuple[Record, Record]) -> None:
    ours, theirs = pair
    theirs.open()
    with theirs.operation("ä" * 5000, sys._getframe()):
        pass
    seen = ours.last()
    assert seen is not None
    assert seen.name.startswith("ää")
    assert len(ours.stack()) == 0


def test_reading_and_writing_at_once_gives_whole_entries(pair: tuple[Record, Record]) -> None:
    """A name never comes with the number of another."""
    ours, theirs = pair
    theirs.open()
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for name in ("a" * 10, "b" * 200):
                with theirs.operation(name, None):
                    pass

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(2000):
            seen = ours.last()
            assert seen is None or seen.name in ("a" * 10, "b" * 200)
    finally:
        stop.set()
        thread.join()


def test_a_process_shows_its_stack_when_asked(pair: tuple[Record, Record]) -> None:
    """Also inside C code that holds the interpreter's lock; each time anew."""
    ours, theirs = pair

    libc = ctypes.PyDLL(None)

    def hold_the_lock() -> None:
        while True:  # a signal ends libc's sleep: there is no other call to be seen in between
            libc.sleep(600)  # deaf

    def answer() -> StackSummary:
        """Asks once, and waits for the whole answer, whose last line is the outermost call."""
        size = ours.size()
        assert list(ours.stack(size)) == []
        assert ours.ask(pid)
        until(lambda: is_whole(ours.stack(size)))
        return ours.stack(size)

    def is_whole(stack: StackSummary) -> bool:
        return len(stack) > 0 and stack[0].name == outermost

    *_, (outer, _) = walk_stack(sys._getframe())
    outermost = outer.f_code.co_name
    pid = fork(theirs, hold_the_lock)
    try:
        until(lambda: ours.ask(pid))
        until(lambda: is_whole(ours.stack()))
        while answer()[-1].lineno != line_of("# deaf"):
            pass  # it was still on its way there
        stack = answer()
        assert stack[-1].name == "hold_the_lock"
        assert stack[-1].line == "libc.sleep(600)  # deaf"
    finally:
        end(pid)


def test_a_crash_leaves_its_stack(pair: tuple[Record, Record]) -> None:
    ours, theirs = pair

    def crash() -> None:
        ctypes.string_at(0)  # a wild read

    pid = fork(theirs, crash)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    names = [(one.name, one.lineno) for one in ours.stack()]
    assert ("crash", line_of("# a wild read")) in names
    assert not ours.ask(pid)


def test_the_stack_of_a_thread_of_this_process() -> None:
    there, go = threading.Event(), threading.Event()

    def wait() -> None:
        there.set()
        go.wait()  # until told

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        there.wait()
        assert thread.ident is not None
        frames = record.stack_of_thread(thread.ident)
        assert ("wait", line_of("# until told")) in [(one.name, one.lineno) for one in frames]
    finally:
        go.set()
        thread.join()
    assert list(record.stack_of_thread(0)) == []
