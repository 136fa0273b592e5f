"""Processes as the launcher sees them: how they start, how they end, what goes with them."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from distribute.process import ChildProcess, interpreter, leads_group, reap, send_signal, start

HERE = str(Path(__file__).parent.parent)
IDLE = "import time; time.sleep(600)"


def fork(child: Callable[[], Any]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(99)
    return pid


def ended(process: ChildProcess, seconds: float = 60.0) -> int:
    """The exit code of a process that ends by itself."""
    assert select.select([process], [], [], seconds)[0], "it did not end"
    code = process.poll()
    assert code is not None
    process.close()
    return code


def gone(pid: int, seconds: float = 60.0) -> bool:
    """Tells whether a process that is not ours ends in time."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


# -- children ----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("code", [0, 3, 255])
def test_an_exit_code(code: int, group: bool):
    assert ended(ChildProcess(fork(lambda: os._exit(code)), group=group)) == code


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_is_a_negative_exit_code(number: int):
    def child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(600)

    assert ended(ChildProcess(fork(child), group=True)) == -number


def test_a_running_process_has_no_exit_code():
    process = ChildProcess(fork(lambda: time.sleep(600)), group=True)

    assert process.poll() is None
    assert not select.select([process], [], [], 0)[0]
    send_signal(process, signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL


def test_an_exit_code_can_be_asked_for_again():
    process = ChildProcess(fork(lambda: os._exit(4)), group=True)

    assert ended(process) == 4
    assert process.poll() == 4
    assert process.fileno() == -1


@pytest.mark.parametrize("how", ["exit", "signal"])
def test_what_a_process_started_ends_with_it(how: str):
    told, tell = os.pipe()

    def child() -> None:
        os.setpgid(0, 0)
        grandchild = fork(lambda: time.sleep(600))
        os.write(tell, str(grandchild).encode())
        if how == "exit":
            os._exit(0)
        time.sleep(600)

    process = ChildProcess(fork(child), group=True)
    grandchild = int(os.read(told, 16))
    assert psutil.pid_exists(grandchild)
    if how == "signal":
        os.kill(process.pid, signal.SIGKILL)

    ended(process)

    assert gone(grandchild)
    os.close(told)
    os.close(tell)


def test_what_a_process_without_a_group_started_is_left_alone():
    told, tell = os.pipe()

    def child() -> None:
        os.write(tell, str(fork(lambda: time.sleep(600))).encode())
        os._exit(0)

    process = ChildProcess(fork(child), group=False)
    grandchild = int(os.read(told, 16))

    assert ended(process) == 0
    assert not gone(grandchild, 0.1)

    os.kill(grandchild, signal.SIGKILL)
    assert gone(grandchild)
    os.close(told)
    os.close(tell)


def test_a_signal_reaches_all_that_a_process_started():
    told, tell = os.pipe()

    def child() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.write(tell, str(fork(lambda: time.sleep(600))).encode())
        time.sleep(600)

    process = ChildProcess(fork(child), group=True)
    grandchild = int(os.read(told, 16))

    send_signal(process, signal.SIGTERM)

    assert gone(grandchild)
    assert ended(process) == -signal.SIGTERM
    os.close(told)
    os.close(tell)


def test_a_signal_to_a_process_that_has_ended_reaches_nobody():
    process = ChildProcess(fork(lambda: os._exit(0)), group=True)
    assert select.select([process], [], [], 60)[0]

    send_signal(process, signal.SIGKILL)

    assert process.poll() == 0
    process.close()


def test_reaping_may_wait():
    told, tell = os.pipe()
    pid = fork(lambda: (os.read(told, 1), os._exit(7)))

    assert reap(pid, group=False) is None
    os.write(tell, b"x")

    assert reap(pid, group=False, block=True) == 7
    os.close(told)
    os.close(tell)


# -- programs ----------------------------------------------------------------------------------

REPORT = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "group": os.getpgrp(), "cwd": os.getcwd(), "environ": dict(os.environ),
    "argv": sys.argv[1:], "stdin": sys.stdin.read(),
    "descriptors": sorted(int(one) for one in os.listdir("/proc/self/fd")),
}))
"""


def report(**options: Any) -> tuple[ChildProcess, dict[str, Any]]:
    """What a started program finds around itself."""
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    given: dict[str, Any] = {
        "environ": {"LC_ALL": "C.UTF-8"},
        "cwd": "/",
        "life": theirs.fileno(),
        "descriptors": [],
        "stdin": subprocess.DEVNULL,
        "group": True,
    }
    arguments = options.pop("arguments", [])
    process = start(
        [sys.executable, "-S", "-c", REPORT, *arguments], stdout=writer, **{**given, **options}
    )
    os.close(writer)
    with open(reader) as stream:
        found = json.load(stream)
    assert ended(process) == 0
    ours.close()
    theirs.close()
    return process, found


def test_a_program_keeps_the_id_that_it_was_started_under():
    process, found = report()

    assert found["pid"] == process.pid


def test_a_program_leads_a_group_if_it_is_to():
    process, found = report(group=True)
    assert found["group"] == process.pid

    _, found = report(group=False)
    assert found["group"] == os.getpgrp()


def test_a_program_has_the_environment_and_directory_that_it_is_given(tmp_path: Path):
    environ = {"LC_ALL": "C.UTF-8", "ODD": 'two words\n"$X" ünï', "EMPTY": ""}

    _, found = report(environ=environ, cwd=str(tmp_path))

    assert found["environ"] == environ
    assert os.path.samefile(found["cwd"], tmp_path)


def test_a_program_gets_its_arguments_as_they_are():
    arguments = ["two words", 'a="b" c=$X', "", "ünï", "--", "-c", "\\", "line\nbreak"]

    _, found = report(arguments=arguments)

    assert found["argv"] == arguments


def test_the_marker_is_completed_by_the_process_id():
    process, found = report(marker=("MARK", "7"))

    assert found["environ"]["MARK"] == f"7:{process.pid}"


def test_a_program_inherits_the_descriptors_that_it_is_given_and_no_others():
    inherited, other = os.memfd_create("inherited"), os.memfd_create("other")
    os.set_inheritable(other, True)

    _, found = report(descriptors=[inherited])

    assert inherited in found["descriptors"]
    assert other not in found["descriptors"]
    os.close(inherited)
    os.close(other)


def test_a_program_reads_the_standard_input_that_it_is_given():
    reader, writer = os.pipe()
    os.write(writer, b"hello")
    os.close(writer)

    _, found = report(stdin=reader)

    assert found["stdin"] == "hello"
    os.close(reader)


def test_a_program_ends_when_its_parent_is_killed(tmp_path: Path):
    """Even one that never looks at anything, such as a script in its imports."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import socket, sys, time\n"
        "from distribute.process import start\n"
        "ours, theirs = socket.socketpair()\n"
        f"child = start([sys.executable, '-S', '-c', '''print(1, flush=True); {IDLE}'''],\n"
        "    environ={}, cwd='/', life=theirs.fileno(), descriptors=[], stdin=None, group=True)\n"
        "theirs.close()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environ = {**os.environ, "PYTHONPATH": HERE}
    with subprocess.Popen([sys.executable, parent], env=environ, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        lines = {first.stdout.readline() for _ in range(2)}  # the child's, too: it is watched now
        assert b"1\n" in lines
        child = int(max(lines, key=len))
        assert psutil.pid_exists(child)

        first.kill()

        assert gone(child)


def test_a_program_outlives_the_thread_that_started_it():
    """The kernel would end it with that thread, which need not be the end of the launcher."""
    made: list[ChildProcess] = []
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()

    def make() -> None:
        made.append(
            start(
                [sys.executable, "-S", "-c", f"print(1, flush=True); {IDLE}"],
                environ={},
                cwd="/",
                life=theirs.fileno(),
                descriptors=[],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                group=True,
            )
        )
        os.read(reader, 1)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()

    assert not select.select([made[0]], [], [], 0.2)[0]

    theirs.close()
    ours.close()  # the end of the lifeline is the end of the program
    assert ended(made[0]) == -signal.SIGKILL
    os.close(reader)
    os.close(writer)


def test_the_end_of_the_lifeline_ends_what_a_program_started():
    """The kernel does it, so a program that is busy, or holds Python's lock, is no exception."""
    reader, writer = os.pipe()
    ours, theirs = socket.socketpair()
    process = start(
        [
            sys.executable,
            "-S",
            "-c",
            "import subprocess\n"
            "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
            "while True: pass",
        ],
        environ={"PATH": os.environ["PATH"]},
        cwd="/",
        life=theirs.fileno(),
        descriptors=[],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        group=True,
    )
    theirs.close()
    grandchild = int(os.read(reader, 16))

    ours.close()

    assert ended(process) == -signal.SIGKILL
    assert gone(grandchild)
    os.close(reader)
    os.close(writer)


def test_a_program_that_does_not_exist_is_an_exit_code():
    ours, theirs = socket.socketpair()
    process = start(
        ["/nowhere/program"],
        environ={},
        cwd="/",
        life=theirs.fileno(),
        descriptors=[],
        stdin=subprocess.DEVNULL,
        group=True,
    )

    assert ended(process) != 0
    ours.close()
    theirs.close()


# -- an interpreter like this one --------------------------------------------------------------


def test_an_interpreter_has_the_flags_and_the_search_path_of_this_one(tmp_path: Path):
    (tmp_path / "it's.d").mkdir()
    (tmp_path / "it's.d" / "program.py").write_text(
        "import json, sys\n"
        "def main(descriptor, life):\n"
        "    flags = sys.flags\n"
        "    print(json.dumps([descriptor, life, sys.path, flags.optimize, flags.utf8_mode]))\n"
    )
    wanted = [str(tmp_path / "it's.d"), *(one for one in sys.path if "lib" in one)]
    make = (
        "import json, sys; from distribute.process import interpreter; "
        f"print(json.dumps(interpreter('program', (7, 8), {wanted!r})))"
    )
    flags = ["-O", "-X", "utf8"]

    made = subprocess.check_output([sys.executable, *flags, "-c", make], cwd=HERE)
    found = json.loads(subprocess.check_output(json.loads(made), cwd="/"))

    assert found == [7, 8, wanted, 1, 1]


def test_the_command_of_an_interpreter_names_this_one():
    made = interpreter("distribute.worker", (7, 8), ["/somewhere"])

    assert made[0] == sys.executable
    assert "distribute.worker" in made[-1]


# -- terminals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("terminal", "leads"), [(True, "[False, True]"), (False, "[True, True]")])
def test_only_rank_0_on_a_terminal_stays_in_the_launchers_group(terminal: bool, leads: str):
    program = "from distribute.process import leads_group as leads; print([leads(0), leads(1)])"
    master, slave = pty.openpty()

    found = subprocess.check_output(
        [sys.executable, "-c", program], cwd=HERE, stdin=slave if terminal else subprocess.DEVNULL
    )

    os.close(master)
    os.close(slave)
    assert found.decode().strip() == leads


def test_the_other_ranks_lead_a_group_everywhere():
    assert leads_group(1)
    assert leads_group(7)
