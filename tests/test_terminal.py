"""On a terminal, a job of several processes is used like any other program.

Each test types into a shell with job control, on a pseudo-terminal of its own, and looks at what
comes back and at the states of the processes.
"""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import pytest

from tests.scripts import METHODS, ROOT, SLOW_METHODS, run_python, tagged, write

# Programs of their own, at seconds each: run by `make slow`.
pytestmark = pytest.mark.slow

# What rank 0 is in when something is typed.
STATES = [
    *((method, place) for method in ("reexec", "fork") for place in ("python", "collective")),
    *(pytest.param(method, "python", marks=pytest.mark.slow) for method in ("forkserver", "spawn")),
]
CTRL_C = "\x03"
CTRL_Z = "\x1a"

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="needs a shell with job control")

# Makes the terminal on its standard input the controlling one, and becomes a program for which no
# signal is ignored that the test run itself may ignore.
_ON_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for name in ("INT", "QUIT", "HUP", "PIPE", "TERM", "TSTP", "TTIN", "TTOU", "CONT"):
    signal.signal(getattr(signal, "SIG" + name), signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """An interactive shell on a terminal; what it starts is gone when the block is left.

    The prompt shows the status of the last command, as in `<0> `; `$PY` is this Python.
    """

    def __init__(self, directory: Path) -> None:
        assert BASH is not None
        self.directory = directory
        self.text = ""
        self._seen = 0
        self._tag = str(uuid.uuid4())
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
        path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
        environ |= {
            "CASE_TAG": self._tag,
            "PYTHONPATH": path,
            "PY": sys.executable,
            "PS1": "<$?> ",
            "TERM": "dumb",
            "HISTFILE": str(directory / "history"),
        }
        shell = [BASH, "--norc", "--noprofile", "--noediting", "-i"]
        self._ours, theirs = pty.openpty()
        try:
            self._shell = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _ON_TERMINAL, *shell],
                cwd=directory,
                env=environ,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def __enter__(self) -> Terminal:
        try:
            self.prompt()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        limit = time.monotonic() + 20
        while (left := self.processes()) and error is None and time.monotonic() < limit:
            time.sleep(0.02)
        names = [_command(pid) for pid in left]
        self._end()
        if error is None:
            assert not left, f"processes left: {names}\n{self.text}"

    def type(self, text: str) -> None:
        """Types some characters; a line ends with a newline."""
        os.write(self._ours, text.encode())

    def start(self, *arguments: str, end: str = "") -> None:
        """Starts the script with some arguments."""
        self.type(f'"$PY" s.py {" ".join(arguments)} {end}\n')

    def expect(self, pattern: str, seconds: float = 90) -> re.Match[str]:
        """Waits until a pattern appears after what was expected before."""
        limit = time.monotonic() + seconds
        while (found := re.compile(pattern).search(self.text, self._seen)) is None:
            left = limit - time.monotonic()
            assert left > 0, f"no {pattern!r} within {seconds} s\n{self._told()}"
            if select.select([self._ours], [], [], left)[0]:
                self._read(pattern)
        self._seen = found.end()
        return found

    def prompt(self) -> int:
        """Waits for the shell's prompt and returns the status of the last command."""
        return int(self.expect(r"<(\d+)> ")[1])

    def processes(self) -> list[int]:
        """Returns the processes that were started from the shell."""
        return [pid for pid in tagged(self._tag) if pid != self._shell.pid]

    def pids(self, *names: str) -> list[int]:
        """Waits until the script's processes have noted their ids (`note`), and returns these."""
        paths = [self.directory / f"pid-{name}" for name in names]
        self.until(lambda: all(one.exists() for one in paths), f"not all there: {names}")
        return [int(one.read_text()) for one in paths]

    def until(self, condition: Callable[[], bool], otherwise: str, seconds: float = 60) -> None:
        """Waits until a condition holds."""
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"{otherwise}\n{self._told()}"
            time.sleep(0.01)

    def states(self, pids: list[int], *, stopped: bool, seconds: float = 60) -> None:
        """Waits until all of some processes are stopped, or none is."""
        limit = time.monotonic() + seconds
        states = [_state(pid) for pid in pids]
        while any((one == "T") != stopped for one in states):
            wanted = "all" if stopped else "none"
            assert time.monotonic() < limit, f"{wanted} should be T: {states}\n{self._told()}"
            time.sleep(0.01)
            states = [_state(pid) for pid in pids]
        assert "gone" not in states, f"{states}\n{self._told()}"

    def _told(self) -> str:
        """Returns what has been written so far, for a message."""
        while select.select([self._ours], [], [], 0)[0]:
            try:
                self._read("")
            except AssertionError:
                break
        processes = [f"{pid} {_state(pid)} {_command(pid)}" for pid in self.processes()]
        return "\n".join(["--- written:", self.text, "--- processes:", *processes])

    def _read(self, awaited: str) -> None:
        try:
            new = os.read(self._ours, 65536)
        except OSError:
            new = b""  # nobody has the terminal open any more
        assert new, f"the terminal was closed before {awaited!r}\n{self.text}"
        self.text += new.decode(errors="replace")

    def _end(self) -> None:
        limit = time.monotonic() + 20
        while (left := tagged(self._tag)) and time.monotonic() < limit:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass  # it has ended
            time.sleep(0.02)
        self._shell.kill()
        self._shell.wait()
        os.close(self._ours)


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    return text.rpartition(")")[2].split()[0]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:300]
    except OSError:
        return "gone"


# What every script begins with.
HEAD = """
    import os, signal, sys, time
    from pathlib import Path
    from distribute import is_worker, run

    def note(name):
        path = Path(f"pid-{name}.new")
        path.write_text(str(os.getpid()))
        path.rename(f"pid-{name}")

    if __name__ == "__main__" and not is_worker():
        note("launcher")
    """

JOB = ("launcher", "rank0", "rank1")


# -- reading and writing ---------------------------------------------------------------------------


@needs_bash
@pytest.mark.parametrize("method", METHODS)
def test_rank_0_reads_what_is_typed(tmp_path: Path, method: str) -> None:
    """`input()` reads a line on rank 0, the other rank has no input; then the script reads on."""
    source = """
    def body(ctx):
        try:
            first = input("NAME? " if ctx.rank == 0 else "")
        except EOFError:
            return "nothing"
        return first + " " + input("AGAIN? ")

    if __name__ == "__main__":
        got = run(body, devices=2, start_method=sys.argv[1], returns="all")
        print("RESULT", got, "AND", input("MORE? "))
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.start(method)
        terminal.expect(r"NAME\? ")
        terminal.type("ada\n")
        terminal.expect(r"AGAIN\? ")
        terminal.type("bob\n")
        terminal.expect(r"MORE\? ")
        terminal.type("eve\n")

        terminal.expect(r"RESULT \['ada bob', 'nothing'\] AND eve")
        assert terminal.prompt() == 0


@needs_bash
@pytest.mark.parametrize("method", METHODS)
def test_rank_0_stops_at_a_breakpoint(tmp_path: Path, method: str) -> None:
    """The debugger prompts, evaluates and continues, while the other rank waits."""
    source = """
    def body(ctx):
        if ctx.rank == 0:
            breakpoint()
        ctx.barrier()
        return ctx.rank + 5

    if __name__ == "__main__":
        print("RESULT", run(body, devices=2, start_method=sys.argv[1]))
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.start(method)
        terminal.expect(r"\(Pdb\) ")
        terminal.type("p 6*7\n")
        terminal.expect(r"\b42\r\n")
        terminal.expect(r"\(Pdb\) ")
        terminal.type("c\n")

        terminal.expect("RESULT 5")
        assert terminal.prompt() == 0


@needs_bash
@pytest.mark.parametrize("way", ["raise", "os._exit"])
@pytest.mark.parametrize("method", [one for one in METHODS if one != "reexec"])
def test_what_rank_0_forks_ends_with_it(tmp_path: Path, method: str, way: str) -> None:
    """Although it has no process group of its own: the workers of its loader would live on."""
    source = """
    import torch
    from torch.utils.data import DataLoader

    def body(ctx, way):
        assert ctx.world_size == 2
        # How often a loader's worker looks whether it has been left alone.
        torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 600.0
        kept = iter(DataLoader(torch.ones(64, 8), num_workers=2))
        next(kept)
        with open(f"workers{ctx.rank}", "w") as file:
            print(*(one.pid for one in kept._workers), file=file)
        ctx.barrier()
        if ctx.rank == 1:
            if way == "raise":
                raise KeyError("sample 17")
            os._exit(7)
        time.sleep(600)

    def runs(pid):
        try:  # what has ended has no command line, reaped or not
            return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
        except OSError:
            return False

    if __name__ == "__main__":
        try:
            run(body, sys.argv[2], devices=2, start_method=sys.argv[1])
        except BaseException as error:
            name = type(error).__name__
        pids = [int(one) for rank in "01" for one in open(f"workers{rank}").read().split()]
        limit = time.monotonic() + 60
        while (left := [one for one in pids if runs(one)]) and time.monotonic() < limit:
            time.sleep(0.01)
        print("RESULT", name, len(pids), left)
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.start(method, way)

        name = "KeyError" if way == "raise" else "WorkerDied"
        terminal.expect(rf"RESULT {name} 4 \[\]")
        assert terminal.prompt() == 0
        assert "Traceback" not in terminal.text


@needs_bash
@pytest.mark.parametrize("method", METHODS)
def test_rank_0_writes_to_the_terminal(tmp_path: Path, method: str) -> None:
    """Colours and progress bars of rank 0 are as without this library."""
    source = """
    def body(ctx):
        if ctx.rank == 0:
            print("OUT", sys.stdout.isatty(), "ERR", sys.stderr.isatty())

    if __name__ == "__main__":
        run(body, devices=2, start_method=sys.argv[1])
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.start(method)

        terminal.expect("OUT True ERR True")
        assert terminal.prompt() == 0


# -- keys that send signals ------------------------------------------------------------------------


@needs_bash
@pytest.mark.parametrize(("method", "place"), STATES)
def test_ctrl_c_is_one_keyboard_interrupt(tmp_path: Path, method: str, place: str) -> None:
    """The caller catches it, the ranks go quietly, and the next call works."""
    source = """
    def forever(ctx):
        note(f"rank{ctx.rank}")
        while True:
            if ctx.rank == 0 and sys.argv[2] == "collective":
                ctx.barrier()
            time.sleep(0.05)

    def short(ctx):
        ctx.barrier()
        return ctx.world_size

    if __name__ == "__main__":
        method = sys.argv[1]
        try:
            run(forever, devices=2, start_method=method)
        except KeyboardInterrupt:
            print("CAUGHT", flush=True)
        # Re-executed processes serve the first call only.
        print("NEXT", run(short, devices=2, start_method=method if method != "reexec" else "auto"))
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.start(method, place)
        ranks = terminal.pids("rank0", "rank1")
        time.sleep(0.3)  # now rank 0 is in the collective
        terminal.type(CTRL_C)

        terminal.expect("CAUGHT")
        assert _state(ranks[1]) == "gone"
        terminal.expect("NEXT 2")
        assert terminal.prompt() == 0
        assert terminal.text.count("CAUGHT") == 1
        assert "Traceback" not in terminal.text
        assert "KeyboardInterrupt" not in terminal.text


LOOPS = """
    def body(ctx):
        note(f"rank{ctx.rank}")
        while (ctx.rank == 1 or sys.argv[2] == "python") and not Path("go").exists():
            sum(range(1000))
            time.sleep(0.02)
        ctx.barrier()
        return ctx.world_size + 40

    if __name__ == "__main__":
        print("RESULT", run(body, devices=2, start_method=sys.argv[1]))
    """


@needs_bash
@pytest.mark.parametrize(("method", "place"), STATES)
def test_ctrl_z_stops_all_and_fg_continues_all(tmp_path: Path, method: str, place: str) -> None:
    """As often as one likes, wherever rank 0 is; the call then ends as ever."""
    write(tmp_path, HEAD + LOOPS)
    with Terminal(tmp_path) as terminal:
        terminal.start(method, place)
        job = terminal.pids(*JOB)
        time.sleep(0.3)  # now rank 0 is in the collective
        for _ in range(2):
            terminal.type(CTRL_Z)
            terminal.states(job, stopped=True)
            terminal.expect("Stopped")
            assert terminal.prompt() in (128 + signal.SIGTSTP, 128 + signal.SIGSTOP)
            time.sleep(0.3)
            terminal.states(job, stopped=True, seconds=0)
            terminal.type("fg\n")
            terminal.states(job, stopped=False)
            time.sleep(0.3)
            terminal.states(job, stopped=False, seconds=0)
        (tmp_path / "go").touch()

        terminal.expect("RESULT 42")
        assert terminal.prompt() == 0


@needs_bash
@pytest.mark.parametrize("method", ["reexec", "fork"])
def test_ctrl_z_does_nothing_where_nobody_could_continue(tmp_path: Path, method: str) -> None:
    """Without a shell above it, as under `ssh -t host python` or in a container.

    There the system does not let SIGTSTP stop a program, which nothing typed could continue.
    """
    write(tmp_path, HEAD + LOOPS)
    with Terminal(tmp_path) as terminal:
        terminal.type(f'exec "$PY" s.py {method} python\n')
        job = terminal.pids(*JOB)
        terminal.type(CTRL_Z)
        time.sleep(1)
        terminal.states(job, stopped=False)
        (tmp_path / "go").touch()

        terminal.expect("RESULT 42")


@needs_bash
@pytest.mark.parametrize("method", ["reexec", "fork"])
def test_a_stopped_job_goes_on_in_the_background(tmp_path: Path, method: str) -> None:
    """After Ctrl-Z and `bg` all ranks work on."""
    write(tmp_path, HEAD + LOOPS)
    with Terminal(tmp_path) as terminal:
        terminal.start(method, "python")
        job = terminal.pids(*JOB)
        terminal.type(CTRL_Z)
        terminal.states(job, stopped=True)
        terminal.prompt()
        terminal.type("bg\n")
        terminal.prompt()
        terminal.states(job, stopped=False)
        (tmp_path / "go").touch()

        terminal.expect("RESULT 42")
        terminal.type("wait %1\n")
        assert terminal.prompt() == 0


@needs_bash
@pytest.mark.parametrize("method", ["reexec", "fork"])
def test_a_background_job_stops_when_it_reads(tmp_path: Path, method: str) -> None:
    """Like any program it waits until `fg` gives it the terminal, and reads the line then."""
    source = """
    def body(ctx):
        note(f"rank{ctx.rank}")
        got = input("NAME? ") if ctx.rank == 0 else ""
        ctx.barrier()
        return got

    if __name__ == "__main__":
        print("RESULT", run(body, devices=2, start_method=sys.argv[1]))
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.start(method, end="&")
        terminal.prompt()
        # The launcher may stop before rank 1 has begun.
        readers = terminal.pids("launcher", "rank0")
        terminal.states(readers, stopped=True)
        # The shell is told a moment after the kernel has stopped them.
        state = "Running"
        while state == "Running":
            terminal.type("jobs -l\n")
            state = terminal.expect(r"Running|Stopped \(tty input\)")[0]
            terminal.prompt()
        terminal.type("fg\n")
        terminal.states(readers, stopped=False)
        terminal.type("ada\n")

        terminal.expect("RESULT ada")
        assert terminal.prompt() == 0


@needs_bash
@pytest.mark.parametrize("method", ["fork", "reexec"])
def test_an_ignored_hangup_stays_ignored(tmp_path: Path, method: str) -> None:
    """As under `nohup`: in the launcher and in every rank, and the call ends with its value."""
    source = """
    def body(ctx):
        note(f"rank{ctx.rank}")
        while not Path("go").exists():
            time.sleep(0.02)
        return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    if __name__ == "__main__":
        print("RESULT", run(body, devices=2, start_method=sys.argv[1], returns="all"))
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.type(f"(trap '' HUP; exec \"$PY\" s.py {method})\n")
        for pid in terminal.pids(*JOB):
            os.kill(pid, signal.SIGHUP)
        time.sleep(0.3)
        (tmp_path / "go").touch()

        terminal.expect(r"RESULT \[True, True\]")
        assert terminal.prompt() == 0


# -- what a call leaves as it was ------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("whose", ["default", "user"])
def test_handlers_are_as_before_after_a_call(tmp_path: Path, method: str, whose: str) -> None:
    """Signal handlers and the wakeup descriptor: after a call that returned, and one that failed.

    The user's still work, and have heard of the user's signals only.
    """
    source = """
    NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT]
    heard = []

    def handler(number, frame):
        heard.append(number)

    def state():
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        return descriptor, [signal.getsignal(one) for one in NUMBERS]

    def good(ctx):
        ctx.barrier()
        return ctx.world_size

    def bad(ctx):
        if ctx.rank == 1:
            raise ValueError("told")
        ctx.barrier()

    if __name__ == "__main__":
        if sys.argv[2] == "user":
            ours, theirs = os.pipe()
            os.set_blocking(theirs, False)
            signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
            for one in NUMBERS:
                signal.signal(one, handler)
        before = state()
        print("VALUE", run(good, devices=2, start_method=sys.argv[1]))
        print("AFTER GOOD", state() == before, state())
        try:
            run(bad, devices=2, start_method=sys.argv[1])
        except ValueError as error:
            print("RAISED", error)
        print("AFTER BAD", state() == before, state())
        if sys.argv[2] == "user":
            for one in NUMBERS:
                os.kill(os.getpid(), one)
            print("HEARD", sorted(set(heard)) == sorted(NUMBERS))
            os.set_blocking(ours, False)
            print("WOKEN", set(os.read(ours, 4096)) == set(NUMBERS))
    """
    ended = run_python(write(tmp_path, HEAD + source), method, whose, cwd=tmp_path)

    assert ended.code == 0, ended.text
    assert "VALUE 2" in ended.out
    assert "AFTER GOOD True" in ended.out, ended.out
    assert "RAISED told" in ended.out
    assert "AFTER BAD True" in ended.out, ended.out
    if whose == "user":
        assert "HEARD True" in ended.out, ended.out
        assert "WOKEN True" in ended.out, ended.out


# -- the end of the launcher -----------------------------------------------------------------------

SLOW_START = """
    import os, time
    from pathlib import Path

    def slow():
        if Path("pid-launcher").exists():
            Path("there").touch()
            time.sleep(600)
        Path("pid-launcher.new").write_text(str(os.getpid()))
        Path("pid-launcher.new").rename("pid-launcher")

    if PLACE == "above":
        slow()
    from distribute import run
    if PLACE == "below":
        slow()

    def body(ctx):
        pass

    if __name__ == "__main__":
        run(body, devices=3, start_method="reexec")
    """

# Each is the shell's redirection of the job's standard input.
INPUTS = pytest.mark.parametrize("redirected", ["", "</dev/null"], ids=["terminal", "null"])


@needs_bash
@INPUTS
@pytest.mark.parametrize("place", ["above", "below"])
def test_killed_while_the_ranks_run_the_script_again(
    tmp_path: Path, place: str, redirected: str
) -> None:
    """They end with the launcher, whether they have imported this library yet or not."""
    write(tmp_path, SLOW_START.replace("PLACE", repr(place)))
    with Terminal(tmp_path) as terminal:
        terminal.start(end=redirected)
        (launcher,) = terminal.pids("launcher")
        terminal.until((tmp_path / "there").exists, "no rank")
        os.kill(launcher, signal.SIGKILL)

        assert terminal.prompt() == 128 + signal.SIGKILL
        terminal.until(lambda: not terminal.processes(), "processes left")


@needs_bash
@INPUTS
@pytest.mark.parametrize("moment", ["begun", "importing"])
@pytest.mark.parametrize("method", SLOW_METHODS)
def test_killed_while_the_ranks_start(
    tmp_path: Path, method: str, moment: str, redirected: str
) -> None:
    """Fresh interpreters end with it, at their first step and while they import torch."""
    source = """
    def body(ctx):
        pass

    if __name__ == "__main__":
        run(body, devices=2, start_method=sys.argv[1])
    """
    write(tmp_path, HEAD + source)
    with Terminal(tmp_path) as terminal:
        terminal.start(method, end=redirected)
        (launcher,) = terminal.pids("launcher")

        def there() -> bool:
            others = [pid for pid in terminal.processes() if pid != launcher]
            return any(moment == "begun" or _imports_torch(pid) for pid in others)

        terminal.until(there, "no rank")
        os.kill(launcher, signal.SIGKILL)

        assert terminal.prompt() == 128 + signal.SIGKILL
        terminal.until(lambda: not terminal.processes(), "processes left")


def _imports_torch(pid: int) -> bool:
    try:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
