"""What users of other launchers reported about failures and ends, as they would run it here.

The numbers are those of the project's case log, as in `test_cases`. Lines of ranks are searched
for, not compared as a whole: something may stand before them.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.scripts import ROOT, Ended, run_python, tagged, write

# Programs of their own, at seconds each: run by `make slow`.
pytestmark = pytest.mark.slow

STRATEGIES = ["ddp", "ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)]
ALL_STRATEGIES = [*STRATEGIES, pytest.param("ddp_forkserver", marks=pytest.mark.slow)]
TRACEBACK = "Traceback (most recent call last)"


# -- programs that something happens to while they run -------------------------------------------


@dataclass
class Running:
    """A program that runs, and what it has written so far.

    Attributes:
        process: The program, which leads a session of its own.
        out: The file that its standard output goes to.
        err: The file that its standard error goes to.
        since: When the last thing was done to it, by the monotonic clock.
    """

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    since: float = field(default_factory=time.monotonic)

    def wait_for(self, file: Path, *patterns: str, seconds: float = 90) -> None:
        """Waits until a file has a match of each pattern."""
        limit = time.monotonic() + seconds
        while missing := [one for one in patterns if not re.search(one, file.read_text())]:
            assert time.monotonic() < limit, f"{missing} not in {seconds} s\n{self.text}"
            assert self.process.poll() is None, f"ended without {missing}\n{self.text}"
            time.sleep(0.02)
        self.since = time.monotonic()

    @property
    def text(self) -> str:
        return f"{self.out.read_text()}\n{self.err.read_text()}"


def run_with(
    act: Callable[[Running], None],
    *command: str | Path,
    directory: Path,
    within: float = 60,
    environ: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> Ended:
    """Runs `python COMMAND...`, as `run_python` does, and calls a function meanwhile.

    Args:
        act: Gets the running program; may raise.
        command: What follows the interpreter.
        directory: Where the files of its output are made.
        within: Seconds from what the function waited for or sent until nothing of it is left.
        environ: Further variables.
        stdin: Its standard input.
    """
    tag = str(uuid.uuid4())
    full = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    path = os.pathsep.join(filter(None, [str(ROOT), full.get("PYTHONPATH")]))
    full |= {"CASE_TAG": tag, "PYTHONPATH": path, **(environ or {})}
    out, err = directory / "stdout", directory / "stderr"
    with out.open("wb") as to_out, err.open("wb") as to_err, _ctrl_c_is_heard():
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=full,
            stdin=stdin,
            stdout=to_out,
            stderr=to_err,
            start_new_session=True,
        )
    running = Running(process, out, err)
    try:
        act(running)
        process.wait(max(0.0, running.since + within - time.monotonic()))
        while tagged(tag) and time.monotonic() < running.since + within:
            time.sleep(0.02)
        left = tagged(tag)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end within {within} s\n{running.text}") from None
    finally:
        for pid in tagged(tag):
            _kill(pid)
        process.wait()
    assert not left, f"processes left: {left}\n{running.text}"
    return Ended(process.returncode, out.read_text(), err.read_text())


@contextmanager
def _ctrl_c_is_heard() -> Generator[None]:
    """Has children start with SIGINT's default, which a shell's background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended by itself


def found(pattern: str, text: str) -> list[str]:
    """Returns all matches of a pattern, sorted."""
    return sorted(one.group() for one in re.finditer(pattern, text))


# -- the cause -----------------------------------------------------------------------------------


def test_c29_the_cause_is_reported_and_not_its_echo(tmp_path: Path) -> None:
    """A peer meets a closed connection first; the caller still gets the error that was behind it.

    The last traceback is the caller's: it ends with the cause and names its rank.
    """
    script = write(
        tmp_path,
        """
        import time
        import torch
        import torch.distributed as dist
        from distribute import distributed

        class SlowToLeave:
            def __enter__(self):
                return self

            def __exit__(self, *args):
                time.sleep(2)

        @distributed(devices=2, strategy="ddp_spawn")
        def train(ctx):
            with SlowToLeave():
                if ctx.rank == 1:
                    dist.destroy_process_group()
                    raise KeyError("the real cause")
                ctx.all_reduce(torch.ones(1), op="sum")

        if __name__ == "__main__":
            train()
        """,
    )

    ended = run_python(script)

    assert ended.code == 1, ended.text
    last = ended.err[ended.err.rindex(TRACEBACK) :]
    assert "KeyError: 'the real cause'" in last
    assert "raised by rank 1" in last


LEAVES_EARLY = """
    import sys
    from distribute import distributed

    @distributed(devices=2, strategy=sys.argv[1])
    def train(ctx):
        if ctx.rank == 1:
            sys.exit(int(sys.argv[2]))
        ctx.barrier()

    if __name__ == "__main__":
        train()
        print("DONE")
    """


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("code", [3, 0])
def test_c31_a_rank_that_exits_alone_is_a_failure(tmp_path: Path, strategy: str, code: int) -> None:
    """A rank leaves with `sys.exit` while another waits for it: no hang, no success.

    The rank is named, and its exit code unless that is 0.
    """
    ended = run_python(write(tmp_path, LEAVES_EARLY), strategy, str(code))

    assert ended.code != 0, ended.text
    assert "DONE" not in ended.out
    last = ended.err[ended.err.rindex(TRACEBACK) :]
    if code:
        assert re.search(r"WorkerDied: rank 1\b.*\b3\b", last)
    else:
        assert re.search(r"rank(\(s\))? 1\b.*returned", last)


# -- signals -------------------------------------------------------------------------------------

LOOPS = """
    import signal, sys, time
    from distribute import distributed

    @distributed(devices=2, strategy=sys.argv[1], grace=600)
    def train(ctx):
        stubborn = ctx.rank == 1 and "stubborn" in sys.argv
        if stubborn:
            signal.signal(signal.SIGTERM, lambda *_: print("ASKED", flush=True))
        print(f"UP {ctx.rank}\\n", end="", flush=True)
        while True:
            if not stubborn:
                ctx.barrier()
            time.sleep(0.05)

    if __name__ == "__main__":
        train()
        print("DONE")
    """


def interrupt_group(running: Running) -> None:
    os.killpg(running.process.pid, signal.SIGINT)


def interrupt_launcher(running: Running) -> None:
    os.kill(running.process.pid, signal.SIGINT)


def interrupt_twice(running: Running) -> None:
    """Comes while the call ends: later it would be Python's own affair."""
    os.killpg(running.process.pid, signal.SIGINT)
    running.wait_for(running.out, "ASKED")
    os.killpg(running.process.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("strategy", "interrupt"),
    [
        ("ddp", interrupt_group),
        ("ddp", interrupt_launcher),
        ("ddp", interrupt_twice),
        ("ddp_fork", interrupt_group),
        ("ddp_fork", interrupt_launcher),
        ("ddp_fork", interrupt_twice),
        pytest.param("ddp_spawn", interrupt_launcher, marks=pytest.mark.slow),
        pytest.param("ddp_forkserver", interrupt_launcher, marks=pytest.mark.slow),
    ],
)
def test_c33_ctrl_c_ends_everything(
    tmp_path: Path, strategy: str, interrupt: Callable[[Running], None]
) -> None:
    """Ctrl-C ends the launcher and every rank soon, quietly, even when it is pressed twice.

    Standard input is a terminal, as it is for whoever presses it.
    """
    terminal, stdin = pty.openpty()
    twice = ["stubborn"] if interrupt is interrupt_twice else []

    def act(running: Running) -> None:
        running.wait_for(running.out, r"UP 0\b", r"UP 1\b")
        interrupt(running)

    try:
        ended = run_with(
            act, write(tmp_path, LOOPS), strategy, *twice, directory=tmp_path, stdin=stdin
        )
    finally:
        os.close(terminal)
        os.close(stdin)

    assert ended.code != 0, ended.text
    assert "DONE" not in ended.out
    assert ended.err.count(TRACEBACK) <= 1, ended.err
    assert "Exception ignored" not in ended.err
    assert "raised as well" not in ended.err


@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork"])
def test_ctrl_c_ends_a_call_in_an_event_loop(tmp_path: Path, strategy: str) -> None:
    """Whose handler would only cancel what comes after the call."""
    script = write(
        tmp_path,
        """
        import asyncio, signal, sys, time
        from distribute import run

        def body(ctx):
            print(f"UP {ctx.rank} of {ctx.world_size}\\n", end="", flush=True)
            time.sleep(600)

        async def main():
            await asyncio.sleep(0)
            before = signal.getsignal(signal.SIGINT)
            try:
                run(body, devices=2, strategy=sys.argv[1])
            except KeyboardInterrupt:
                print("ENDED", signal.getsignal(signal.SIGINT) is before)

        asyncio.run(main())
        """,
    )

    def act(running: Running) -> None:
        running.wait_for(running.out, r"UP 0 of 2\b", r"UP 1 of 2\b")
        interrupt_launcher(running)

    ended = run_with(act, script, strategy, directory=tmp_path)

    assert ended.code == 0, ended.text
    assert ended.lines("ENDED") == ["ENDED True"]


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_c34_sigterm_to_the_launcher_ends_everything(tmp_path: Path, strategy: str) -> None:
    """A scheduler ends the launcher alone: the ranks go with it, though they sleep."""
    script = write(
        tmp_path,
        """
        import sys, time
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            print(f"UP {ctx.rank}\\n", end="", flush=True)
            time.sleep(600)

        if __name__ == "__main__":
            train()
        """,
    )

    def act(running: Running) -> None:
        running.wait_for(running.out, r"UP 0\b", r"UP 1\b")
        os.kill(running.process.pid, signal.SIGTERM)

    ended = run_with(act, script, strategy, directory=tmp_path)

    assert ended.code != 0, ended.text


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c34_a_users_sigterm_handler_stays_installed(tmp_path: Path, strategy: str) -> None:
    """After a normal call the handler is the one from before, and it works."""
    script = write(
        tmp_path,
        """
        import os, signal, sys
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            ctx.barrier()

        def mine(number, frame):
            print("HEARD", number)

        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, mine)
            train()
            print("SAME", signal.getsignal(signal.SIGTERM) is mine)
            os.kill(os.getpid(), signal.SIGTERM)
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 0, ended.text
    assert found("SAME .*|HEARD .*", ended.out) == ["HEARD 15", "SAME True"]


@pytest.mark.parametrize(
    ("strategy", "stubborn"),
    [
        ("ddp_fork", 0),
        ("ddp", 0),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [("ddp_spawn", 0), ("ddp", 1)]),
    ],
)
def test_c35_a_rank_that_ignores_signals_is_ended(
    tmp_path: Path, strategy: str, stubborn: int
) -> None:
    """A rank deaf to SIGTERM and SIGINT delays the news of another's failure by the grace only."""
    script = write(
        tmp_path,
        """
        import signal, sys, time
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            if ctx.rank == int(sys.argv[2]):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                while True:
                    time.sleep(1)
            time.sleep(1)
            raise RuntimeError(f"rank {ctx.rank} gives up")

        if __name__ == "__main__":
            train()
        """,
    )

    ended = run_python(script, strategy, str(stubborn))

    assert ended.code == 1, ended.text
    assert f"RuntimeError: rank {1 - stubborn} gives up" in ended.err


# -- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c37_an_error_in_a_loader_worker_of_one_rank_ends_all(
    tmp_path: Path, strategy: str
) -> None:
    """One bad sample, loaded by a worker process of one rank: no freeze, the error with its rank.

    The loaders' own processes are gone as well.
    """
    script = write(
        tmp_path,
        """
        import sys
        import torch
        from distribute import distributed

        class Samples(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if index == 5:
                    raise IndexError("augmentation bug at 5")
                return torch.tensor([float(index)])

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            for batch in ctx.dataloader(Samples(), batch_size=1, num_workers=1):
                ctx.all_reduce(batch, op="sum")

        if __name__ == "__main__":
            train()
        """,
    )

    ended = run_python(script, strategy)

    assert ended.code == 1, ended.text
    last = ended.err[ended.err.rindex(TRACEBACK) :]
    assert "IndexError: augmentation bug at 5" in last
    assert re.search(r"raised by rank [01]\b", last)


# -- variables of a launcher that is not there ---------------------------------------------------

SHOWS_RANKS = """
    import sys
    import torch
    from distribute import distributed

    @distributed(devices=2, strategy=sys.argv[1], rendezvous_timeout=float(sys.argv[2]))
    def train(ctx):
        print(f"R{ctx.rank}/{ctx.world_size}\\n", end="", flush=True)

    if __name__ == "__main__":
        print("CALL\\n", end="", flush=True)
        train()
    """
# What a real launcher sets for rank 1 of 2; nobody listens on that port.
OF_RANK_1 = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
ADDRESS = r"127\.0\.0\.1(:| MASTER_PORT=)1\b"
RANK_0_IS_MISSING = r"\brank(s|\(s\))? 0\b|\bmissing 0\b"


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("ddp", ["LOCAL_RANK"]),
        ("ddp", ["NODE_RANK"]),
        ("ddp", ["RANK"]),
        pytest.param("ddp_spawn", ["LOCAL_RANK", "NODE_RANK", "RANK"], marks=pytest.mark.slow),
        ("ddp_fork", ["LOCAL_RANK", "NODE_RANK", "RANK"]),
    ],
)
def test_c58_stray_variables_do_not_make_a_rank(
    tmp_path: Path, strategy: str, names: list[str]
) -> None:
    """What an image sets in every shell proves no launcher: both ranks are started, none waits."""
    script = write(tmp_path, SHOWS_RANKS)

    ended = run_python(script, strategy, "60", environ=dict.fromkeys(names, "0"))

    assert ended.code == 0, ended.text
    assert found(r"R\d/\d", ended.out) == ["R0/2", "R1/2"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c58_a_launcher_that_is_not_there_is_not_waited_for_for_ever(
    tmp_path: Path, strategy: str
) -> None:
    """A complete set of variables with nobody at the address: an error after the timeout.

    It is the documented one, and says which rank is missing at which address.
    """
    script = write(tmp_path, SHOWS_RANKS)

    ended = run_python(script, strategy, "3", environ=OF_RANK_1)

    assert ended.code == 1, ended.text
    assert found(r"R\d/\d", ended.out) == []
    last = ended.err[ended.err.rindex(TRACEBACK) :]
    line = last[last.index("JoinTimeout: ") :] if "JoinTimeout: " in last else ""
    assert re.search(RANK_0_IS_MISSING, line), last
    assert re.search(ADDRESS, line), last


def test_c58_a_host_of_ranks_that_do_not_come_is_not_left_waiting(tmp_path: Path) -> None:
    """The same for rank 0, which is at the address itself: rank 1 is the one that is missing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environ = OF_RANK_1 | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": port}

    ended = run_python(write(tmp_path, SHOWS_RANKS), "ddp", "3", environ=environ)

    assert ended.code == 1, ended.text
    assert found(r"R\d/\d", ended.out) == []
    assert re.search(r"JoinTimeout: .*(\brank(s|\(s\))? 1\b|\bmissing 1\b)", ended.err), ended.err


def test_c58_waiting_for_a_launcher_is_explained_meanwhile(tmp_path: Path) -> None:
    """A line on stderr tells who is missing, at which address, and who says so.

    By default the wait lasts two minutes, in which nothing else would tell of it.
    """

    def act(running: Running) -> None:
        running.wait_for(running.out, "CALL")
        running.wait_for(running.err, r"distribute: .*\n")

        os.kill(running.process.pid, signal.SIGKILL)

    ended = run_with(
        act, write(tmp_path, SHOWS_RANKS), "ddp", "120", directory=tmp_path, environ=OF_RANK_1
    )

    assert ended.code == -signal.SIGKILL, ended.text
    line = found(r"distribute: .*", ended.err)[0]
    assert re.search(RANK_0_IS_MISSING, line)
    assert re.search(ADDRESS, line)
    assert re.search(r"\bMASTER_(ADDR|PORT)\b", line)
    assert re.search(r"\bRANK\b", line)


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_c71_a_clean_end_says_and_leaves_nothing(tmp_path: Path, strategy: str) -> None:
    """Under Python's strictest checks nothing complains, and no file is left anywhere."""
    script = write(
        tmp_path,
        """
        import sys
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            ctx.barrier()
            return 1

        if __name__ == "__main__":
            print("GOT", train())
        """,
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shared = set(os.listdir("/dev/shm"))
    environ = {"TMPDIR": str(temporary)}

    ended = run_python(
        "-X", "dev", "-W", "error::ResourceWarning", script, strategy, environ=environ
    )

    assert ended.code == 0, ended.text
    assert found("GOT .*", ended.out) == ["GOT 1"]
    complaint = "ResourceWarning|leaked semaphore|destroy_process_group|Exception ignored|Traceback"
    assert found(complaint, ended.err) == [], ended.err
    assert os.listdir(temporary) == []
    assert _new(shared) == []


def _new(before: Sequence[str] | set[str]) -> list[str]:
    """Returns new entries of /dev/shm that stay: others use it too."""
    limit = time.monotonic() + 5
    while (new := sorted({*os.listdir("/dev/shm")} - {*before})) and time.monotonic() < limit:
        time.sleep(0.05)
    return new


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_c72_standard_input_is_rank_0s(tmp_path: Path, strategy: str) -> None:
    """`input()` in the function reads in rank 0 what one process would; the others get its end."""
    script = write(
        tmp_path,
        """
        import sys
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            try:
                got = input()
            except EOFError:
                got = "EOF"
            print(f"R{ctx.rank} got={got}\\n", end="", flush=True)

        if __name__ == "__main__":
            train()
        """,
    )

    ended = run_python(script, strategy, stdin="hello\n")

    assert ended.code == 0, ended.text
    assert found(r"R\d got=\w*", ended.out) == ["R0 got=hello", "R1 got=EOF"]


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_c72_no_rank_swallows_the_callers_input(tmp_path: Path, strategy: str) -> None:
    """What the function doesn't read is there for the script after the call."""
    script = write(
        tmp_path,
        """
        import sys
        from distribute import distributed

        @distributed(devices=2, strategy=sys.argv[1])
        def train(ctx):
            ctx.barrier()

        if __name__ == "__main__":
            train()
            print("LAUNCHER", input())
        """,
    )

    ended = run_python(script, strategy, stdin="hello\n")

    assert ended.code == 0, ended.text
    assert found("LAUNCHER .*", ended.out) == ["LAUNCHER hello"]
