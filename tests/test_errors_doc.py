"""Every message that docs/errors.md shows, produced for real.

A fenced block whose info string is a kind and an id, such as "error devices", holds messages, one
in each paragraph. The producer of that id makes them. `<words>` in a message stand for any text;
how whitespace is broken does not count.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo  # an optimizer would import it, which sets a variable
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from distribute import Context, current, distributed, memory, run, workers
from distribute.launchers import forkserver
from distribute.machine import Machine
from distribute.plan import resolve
from distribute.request import Request
from tests.scripts import BIN, ROOT, Ended, run_program, run_python, write

PAGE = (ROOT / "docs" / "errors.md").read_text()
BLOCK = re.compile(r"^```(error|note|warning|stderr|report) ([a-z-]+)\n(.*?)^```$", re.M | re.S)
FORK: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork"}
SERVER: dict[str, Any] = {"devices": 2, "strategy": "ddp_forkserver"}


# -- the page ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block of messages.

    Attributes:
        kind: `error` (type and text of an exception), `note` (of one), `warning` and `stderr`
            (somewhere in what is written), `report` (the same, with times and process ids of its
            own).
        messages: The messages.
    """

    kind: str
    messages: tuple[str, ...]

    def matches(self, message: str, text: str) -> bool:
        """Tells whether a text is what a message stands for."""
        whole = self.kind in ("error", "note")
        find = re.fullmatch if whole else re.search
        return find(self._pattern(message), " ".join(text.split())) is not None

    def _pattern(self, message: str) -> str:
        if self.kind == "report":
            message = re.sub(r"(?<=process )\d+|\d+\.\d(?= s\b)|/home/ada/|\.\.\.", "<>", message)
        parts = re.split(r"<[^<>]*>", " ".join(message.split()))
        return ".+?".join(map(re.escape, parts))


BLOCKS = {
    name: Block(kind, tuple(re.split(r"\n\s*\n", text.strip())))
    for kind, name, text in BLOCK.findall(PAGE)
}


@dataclass(frozen=True)
class Ground:
    """What a producer works with."""

    path: Path
    patch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]

    def written(self) -> str:
        """Returns what has gone to standard error."""
        return self.capture.readouterr().err


Producer = Callable[[Ground], list[str]]
PRODUCERS: dict[str, Producer] = {}


def producer(function: Producer) -> Producer:
    PRODUCERS[function.__name__.rstrip("_").replace("_", "-")] = function
    return function


def test_every_message_has_a_producer_and_every_producer_a_message() -> None:
    assert len(BLOCKS) == len(BLOCK.findall(PAGE)), "an id is there twice"
    assert sorted(BLOCKS) == sorted(PRODUCERS)
    # A block of messages whose info string is misspelled would go unnoticed otherwise.
    others = set(re.findall(r"^```(.+)$", PAGE, re.M))
    assert others - {f"{one.kind} {name}" for name, one in BLOCKS.items()} == {"python hang"}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BLOCKS))
def test_the_library_says_what_the_page_shows(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    block = BLOCKS[name]

    texts = PRODUCERS[name](Ground(tmp_path, monkeypatch, capfd))

    for message in block.messages:
        assert any(block.matches(message, one) for one in texts), f"{message}\n\n{texts}"
    if block.kind == "error":
        for one in texts:
            assert any(block.matches(message, one) for message in block.messages), one


def test_a_placeholder_stands_for_something_and_the_rest_for_itself() -> None:
    block = Block("error", ("ValueError: <n> of\n2; (why?)",))
    (message,) = block.messages

    assert block.matches(message, "ValueError: 1  of 2; (why?)")
    assert not block.matches(message, "ValueError:  of 2; (why?)")
    assert not block.matches(message, "ValueError: 1 of 3; (why?)")
    assert not block.matches(message, "ValueError: 1 of 2; (why?) more")


# -- helpers -----------------------------------------------------------------------------------


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def told(call: Callable[[], object]) -> str:
    """Type and text of what a call raises."""
    return shown(caught(call))


def shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def notes(call: Callable[[], object]) -> list[str]:
    return list(caught(call).__notes__)


def refused(machine: Machine, environ: dict[str, str] | None = None, /, **options: Any) -> str:
    """What the plan of a request raises, on a machine with these facts."""
    return told(lambda: resolve(Request.of(options), environ or {}, machine))


def alone(body: Callable[[Context], object]) -> str:
    """What a function raises in a world of one."""
    return told(lambda: run(body, devices=1))


def on_two(body: Callable[[Context], object]) -> str:
    """What a function raises on two ranks."""
    return told(lambda: run(body, **FORK))


def last(ended: Ended, name: str) -> str:
    """The error at the end of a script's traceback."""
    found = [
        line for line in ended.err.splitlines() if line.startswith(f"distribute.errors.{name}")
    ]
    assert found, ended.text
    return found[-1].removeprefix("distribute.errors.")


# What a fork does first. Hooks of `os.register_at_fork` stay for good.
_in_fork: list[Callable[[], object]] = []
os.register_at_fork(after_in_child=lambda: [one() for one in _in_fork])


@pytest.fixture(autouse=True)
def forks_are_free() -> Iterator[None]:
    yield
    _in_fork.clear()


# -- what reaches the caller -------------------------------------------------------------------


def fail(ctx: Context, how: str) -> None:
    ctx.barrier()
    if how == "raise":
        raise ValueError("bad data")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit" or ctx.rank == 1:
        os._exit(3)
    ctx.barrier()


@producer
def raised(ground: Ground) -> list[str]:
    return notes(lambda: run(fail, "raise", **FORK))


@producer
def as_well(ground: Ground) -> list[str]:
    # The news waits for all ranks, and not only for those that fail within hundredths of a second.
    ground.patch.setattr("distribute.supervise._ORDER_SECONDS", 30)
    return [
        one
        for how in ("echo", "raise", "kill", "exit")
        for one in getattr(caught(partial(run, fail, how, **FORK)), "__notes__", [])
    ]


@producer
def hang(ground: Ground) -> list[str]:
    found = re.search(r"^```python hang\n(.*?)^```$", PAGE, re.M | re.S)
    assert found is not None
    script = write(ground.path, found[1], "train.py")
    return [run_python(script, cwd=ground.path).err]


def test_outcomes_are_there_where_the_page_says_so() -> None:
    fields = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.partition("| field |")[2], re.M)
    names = re.findall(r"\w+", " ".join(fields[:10]))
    error = caught(lambda: run(fail, "raise", **FORK))

    outcomes = error.outcomes  # type: ignore[attr-defined]
    assert [one.rank for one in outcomes] == [0, 1]
    assert sorted(names) == sorted(vars(outcomes[0]))
    alone = caught(lambda: run(lambda ctx: [][0], devices=1))
    assert [one.kind for one in alone.outcomes] == ["raised"]  # type: ignore[attr-defined]
    assert not hasattr(alone, "__notes__")


@pytest.mark.parametrize("code", [None, 0])
def test_a_good_exit_is_a_value(code: int | None) -> None:
    assert run(lambda ctx: sys.exit(code), returns="all", **FORK) == [None, None]
    assert run(lambda ctx: sys.exit(code), devices=1) is None


# -- refused before anything starts ------------------------------------------------------------

CPU = Machine(cores=8, script=("/usr/bin/python", "train.py"))
GPUS = Machine(accelerators={"cuda": 4}, backends=frozenset({"gloo", "nccl"}))
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


@producer
def option(ground: Ground) -> list[str]:
    return [
        told(lambda: distributed(device=2)),  # type: ignore[call-overload]
        told(lambda: run(print, qqq=2)),  # type: ignore[call-overload]
    ]


@producer
def arguments(ground: Ground) -> list[str]:
    def train(ctx: Context, lr: float) -> None: ...

    return [told(lambda: run(train)), told(lambda: run(train, 1, 2))]


@producer
def not_callable(ground: Ground) -> list[str]:
    return [
        told(lambda: run(None)),  # type: ignore[call-overload]
        told(lambda: distributed(devices=2)(3)),  # type: ignore[call-overload]
    ]


@producer
def function_kind(ground: Ground) -> list[str]:
    async def train(ctx: Context) -> None:
        ctx.barrier()

    def steps(ctx: Context) -> Iterator[int]:
        yield ctx.rank

    return [told(partial(run, one, **FORK)) for one in (train, steps)]


@producer
def word(ground: Ground) -> list[str]:
    return [
        refused(CPU, None, **{name: value})
        for name in ("strategy", "start_method", "accelerator", "returns")
        for value in ("spawm" if name == "start_method" else "dpp", "zzz", 3)
    ]


@producer
def output(ground: Ground) -> list[str]:
    (ground.path / "rank-1.log").mkdir()
    held = Machine(group=(0, 2, "gloo"))
    return [
        *(refused(CPU, output=value) for value in ("mian", "logs", 3)),
        told(lambda: run(print, output="/dev/null/logs", **FORK)),
        told(lambda: run(print, output=ground.path, **FORK)),
        *(refused(CPU, TORCHRUN, output=value) for value in ("main", "./logs")),
        refused(held, output="none"),
    ]


@producer
def output_file(ground: Ground) -> list[str]:
    (ground.path / "rank-1.log").symlink_to("/dev/full")
    run(lambda ctx: print(ctx.rank), output=ground.path, **FORK)
    return [ground.written()]


@producer
def devices(ground: Ground) -> list[str]:
    return [refused(CPU, devices=one) for one in (0, [], [-1], [1, 1], "2", True, 2.0)]


@producer
def devices_present(ground: Ground) -> list[str]:
    mac = Machine(accelerators={"mps": 2}, can_fork=False)
    return [
        refused(GPUS, devices=5),
        refused(GPUS, devices=[0, 9]),
        refused(mac, devices=2, accelerator="mps"),
    ]


@producer
def accelerator(ground: Ground) -> list[str]:
    return [refused(CPU, accelerator="gpu"), refused(GPUS, accelerator="xpu")]


@producer
def backend(ground: Ground) -> list[str]:
    return [refused(CPU, backend="nccl"), told(lambda: run(print, devices=2, backend="glu"))]


@producer
def number(ground: Ground) -> list[str]:
    return [refused(CPU, num_nodes=0), refused(CPU, max_restarts=1.5)]


@producer
def duration(ground: Ground) -> list[str]:
    names = ("timeout", "rendezvous_timeout", "deadline", "grace")
    values = (-1, "30", float("inf"))
    rest = [refused(CPU, grace=None), refused(CPU, rendezvous_timeout=None)]
    return rest + [refused(CPU, None, **{name: value}) for name in names for value in values]


@producer
def seed(ground: Ground) -> list[str]:
    return [refused(CPU, seed=one) for one in (-1, 2**63, "7")]


@producer
def flag(ground: Ground) -> list[str]:
    return [refused(CPU, write_back=one) for one in (None, 0, "no")]


@producer
def contradiction(ground: Ground) -> list[str]:
    return [refused(CPU, strategy="ddp_spawn", start_method="fork")]


# Calls that are refused in all the ways of one program.
REFUSED = """
import multiprocessing, os, sys, unittest
from distribute import run

def call():
    try:
        run(print, devices=2, start_method="reexec")
    except ValueError as error:
        print(f"TOLD {type(error).__name__}: {error}", flush=True)

class Test(unittest.TestCase):
    def test(self):
        call()

call()
unittest.main(argv=["test"], exit=False)
child = multiprocessing.get_context("fork").Process(target=call)
child.start()
child.join()
if os.fork() == 0:
    call()
    os._exit(0)
os.wait()
sys.frozen = True
call()
"""


@producer
def reexec(ground: Ground) -> list[str]:
    asked: dict[str, Any] = {"devices": 2, "start_method": "reexec"}
    texts = [
        refused(Machine(main_thread=False), **asked),
        refused(Machine(interactive="an interactive prompt"), **asked),
        refused(Machine(script=("python", "s.py"), earlier_calls=True), **asked),
        refused(CPU, max_restarts=2, **asked),
        told(lambda: run(print, **asked)),  # pytest
    ]
    write(ground.path, REFUSED)
    for ended in (run_python("-c", REFUSED), run_python("-m", "runpy", "s", cwd=ground.path)):
        texts += [line.removeprefix("TOLD ") for line in ended.lines("TOLD")]
    return texts


@producer
def frozen(ground: Ground) -> list[str]:
    return [
        refused(Machine(frozen=True), devices=2, start_method="spawn"),
        refused(Machine(frozen=True, live_accelerator=True), devices=2),
        frozen_beside_a_thread(ground),
    ]


def frozen_beside_a_thread(ground: Ground) -> str:
    def loop() -> None:
        while not stop.is_set():
            sum(range(1000))

    stop = threading.Event()
    thread = threading.Thread(target=loop)
    ground.patch.setattr(sys, "frozen", True, raising=False)
    thread.start()
    try:
        return told(lambda: run(size, devices=2, accelerator="cpu"))
    finally:
        stop.set()
        thread.join()
        ground.patch.delattr(sys, "frozen")


def size(ctx: Context) -> int:
    return ctx.world_size


@producer
def fork(ground: Ground) -> list[str]:
    return [
        refused(Machine(accelerators={"cuda": 2}, live_accelerator="CUDA"), strategy="ddp_fork"),
        refused(Machine(can_fork=False), strategy="ddp_fork", devices=2),
    ]


@producer
def process(ground: Ground) -> list[str]:
    return [
        refused(Machine(open_files=20), devices=2),
        refused(Machine(working_directory=False), devices=2),
    ]


@producer
def nodes(ground: Ground) -> list[str]:
    return [refused(CPU, num_nodes=2)]


@producer
def launcher(ground: Ground) -> list[str]:
    return [
        refused(CPU, TORCHRUN, devices=4),
        refused(CPU, TORCHRUN, num_nodes=3),
        refused(Machine(group=(0, 2, "gloo")), devices=3),
        refused(CPU, TORCHRUN, max_restarts=2),
        refused(Machine(group=(0, 2, "gloo")), max_restarts=2),
        refused(Machine(main_thread=False), TORCHRUN, deadline=60),
    ]


@producer
def variables(ground: Ground) -> list[str]:
    return [refused(CPU, TORCHRUN | {"RANK": "one"}), refused(CPU, TORCHRUN | {"WORLD_SIZE": "0"})]


@producer
def nested(ground: Ground) -> list[str]:
    return [on_two(lambda ctx: run(lambda: None, devices=3))]


@producer
def kept(ground: Ground) -> list[str]:
    return [
        told(lambda: workers(start_method="reexec")),
        told(lambda: workers(max_restarts=2)),
        told(lambda: workers(returns="all")),  # type: ignore[call-arg]
    ]


@producer
def kept_nested(ground: Ground) -> list[str]:
    return [alone(lambda ctx: workers(devices=2))]


@producer
def kept_use(ground: Ground) -> list[str]:
    over = ground.path / "over"

    def wait() -> None:
        while not over.exists():
            time.sleep(0.01)

    with workers(devices=2, start_method="forkserver") as mine:
        texts = [told(lambda: mine.run(lambda: mine.world_size))]
        caller = threading.Thread(target=mine.run, args=(wait,))
        caller.start()
        while "not started" in repr(mine):
            time.sleep(0.01)
        texts += [told(lambda: mine.run(time.sleep, 0)), told(mine.close)]
        over.touch()
        caller.join()
    return [*texts, told(lambda: mine.run(time.sleep, 0))]


@producer
def current_(ground: Ground) -> list[str]:
    def in_a_thread(ctx: Context) -> None:
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(told(current)))
        thread.start()
        thread.join()
        raise LookupError(texts[0])

    return [told(current), alone(in_a_thread).removeprefix("LookupError: ")]


# -- ranks that do not meet --------------------------------------------------------------------


@producer
def mismatch(ground: Ground) -> list[str]:
    script = write(
        ground.path,
        """
        import distribute

        train = distribute.distributed(devices=2)(lambda ctx: 1)
        evaluate = distribute.distributed(devices=2)(lambda ctx: 2)
        if distribute.is_worker():
            evaluate()
        train()
        """,
    )
    return [last(run_python(script), "CallMismatch")]


@producer
def mismatch_launcher(ground: Ground) -> list[str]:
    script = write(
        ground.path,
        """
        import os
        from distribute import CallMismatch, distributed

        train = distributed(lambda ctx: 1)
        evaluate = distributed(lambda ctx: 2)
        try:
            if os.environ["RANK"] == "0":
                train()
            else:
                evaluate()
        except CallMismatch as error:
            print(f"CallMismatch: {error}\\n", end="")
        """,
    )
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script)]
    ended = run_program(torchrun, cwd=ground.path)
    return ended.lines("CallMismatch") or [ended.text]


EARLY = """
import sys, distribute

if distribute.is_worker():
    {}
distribute.run(lambda ctx: 1, devices=2)
"""


@producer
def early(ground: Ground) -> list[str]:
    script = write(ground.path, EARLY.format("sys.exit(0)"))
    return [last(run_python(script), "WorkerDied")]


@producer
def early_raise(ground: Ground) -> list[str]:
    script = write(ground.path, EARLY.format("raise FileExistsError('runs')"))
    ended = run_python(script)
    assert "FileExistsError: runs" in ended.err
    return ended.err.splitlines()


class Slow:
    """An argument for which rank 1 waits."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _sleep_on_rank_1, ()


def _sleep_on_rank_1() -> None:
    if os.environ.get("RANK") == "1":
        time.sleep(600)


def _late() -> str:
    run(lambda ctx: None, **SERVER)  # its server may take longer to start
    return told(lambda: run(lambda ctx, slow: None, Slow(), rendezvous_timeout=1, **SERVER))


@producer
def join(ground: Ground) -> list[str]:
    return [_late()]


LONELY = """
import distribute
import distribute.meeting

distribute.meeting._NOTICE_SECONDS = 0.1
try:
    distribute.run(lambda ctx: 1, rendezvous_timeout=2)
except distribute.JoinTimeout as error:
    print(f"JoinTimeout: {error}")
"""


@cache
def _lonely(rank: int) -> Ended:
    """One of two ranks, as a launcher starts it, without the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    local = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
    return run_python("-c", LONELY, environ=TORCHRUN | local)


@producer
def join_launcher(ground: Ground) -> list[str]:
    return [_lonely(rank).out for rank in (0, 1)]


# -- a rank died -------------------------------------------------------------------------------


def _die(ctx: Context, signal_or_code: int) -> None:
    if ctx.rank == 1:
        if signal_or_code < 0:
            os.kill(os.getpid(), -signal_or_code)
        os._exit(signal_or_code)
    ctx.barrier()


@producer
def died(ground: Ground) -> list[str]:
    return [told(partial(run, _die, how, **FORK)) for how in (7, -signal.SIGTERM)]


@producer
def died_stack(ground: Ground) -> list[str]:
    def body(ctx: Context) -> None:
        print("epoch 3")
        _die(ctx, -signal.SIGSEGV)

    return [on_two(body)]


@producer
def died_memory(ground: Ground) -> list[str]:
    texts: list[str] = []
    # Before and after the call, what the control group counts; None where it tells nothing.
    for counts in ([0, 1], [None, None], [1, 1]):
        ground.patch.setattr("distribute.cgroup.oom_kills", iter(counts).__next__)
        texts.append(told(lambda: run(_die, -signal.SIGKILL, **FORK)))
    return texts


@producer
def died_exit(ground: Ground) -> list[str]:
    return [on_two(lambda ctx: sys.exit(3)), on_two(lambda ctx: sys.exit("no data"))]


class Deadly:
    """An argument that ends the process in which it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


@producer
def died_early(ground: Ground) -> list[str]:
    joining = told(lambda: run(lambda ctx, one: None, Deadly(), **SERVER))
    _in_fork.append(lambda: os._exit(5))
    return [joining, on_two(lambda ctx: None)]


# -- something takes too long ------------------------------------------------------------------


@producer
def deadline(ground: Ground) -> list[str]:
    options: list[dict[str, Any]] = [FORK, {"devices": 1}]
    return [told(partial(run, _sleep, deadline=0.5, **one)) for one in options]


def _sleep(ctx: Context) -> None:
    time.sleep(600)


@producer
def deadline_here(ground: Ground) -> list[str]:
    return notes(lambda: run(_sleep, deadline=0.3, devices=1))


@producer
def collective(ground: Ground) -> list[str]:
    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            ctx.barrier()
        time.sleep(600)

    return [told(lambda: run(body, timeout=2, **FORK))]


@producer
def returned(ground: Ground) -> list[str]:
    def body(ctx: Context) -> None:
        ctx.barrier()
        if ctx.rank == 0:
            ctx.barrier()

    return notes(lambda: run(body, **FORK))


# -- what cannot travel ------------------------------------------------------------------------


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def _raise(error: Exception) -> None:
    raise error


@producer
def worker_error(ground: Ground) -> list[str]:
    return [
        on_two(lambda ctx: _raise(Locked())),
        on_two(lambda ctx: _raise(TwoArguments(404, "gone"))),
    ]


@producer
def pickle(ground: Ground) -> list[str]:
    lock = threading.Lock()
    value = caught(lambda: run(lambda ctx: {"lock": lock}, **FORK))
    assert value.__notes__[0].startswith("raised by rank")
    found = [value]
    for held in (lock, multiprocessing.Lock()):
        found.append(caught(lambda held=held: run(lambda ctx, x: None, held, **SERVER)))
        assert not hasattr(found[-1], "__notes__")
    found.append(caught(lambda: run(lambda ctx: lock, **SERVER)))
    return [*map(shown, found)]


@producer
def argument(ground: Ground) -> list[str]:
    script = write(
        ground.path,
        """
        import threading
        from distribute import run

        run(lambda ctx, lr, lock: None, 0.1, threading.Lock(), devices=2)
        """,
    )
    ended = run_python(script)
    assert ended.code == 0, ended.text
    return [ended.err]


def lock(net: Any) -> None:
    net.lock = nn.Identity()
    net.lock.key = threading.Lock()


class Unreadable(StepLR):
    """Has no state to give, or takes none."""

    def __init__(self, optimizer: torch.optim.Optimizer, verb: str) -> None:
        super().__init__(optimizer, 1)
        self.verb = verb

    def state_dict(self) -> dict[str, Any]:
        if self.verb == "read":
            raise LookupError("nothing to read")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise LookupError("nothing to load")


def shard(net: nn.Module) -> None:
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))


@producer
def state(ground: Ground) -> list[str]:
    def warned(function: Callable[[Any], object], given: object) -> str:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(lambda ctx, one: function(one) and None, given, **FORK)
        return "\n".join(f"UserWarning: {one.message}" for one in caught)

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    return [
        warned(lock, nn.Linear(1, 1)),
        warned(id, Unreadable(optimizer, "read")),
        warned(id, Unreadable(optimizer, "load")),
        warned(shard, nn.Linear(2, 2)),
    ]


@producer
def unsendable(ground: Ground) -> list[str]:
    return [
        on_two(lambda ctx: ctx.all_gather_object(threading.Lock())),
        on_two(lambda ctx: ctx.broadcast(threading.Lock(), src=1)),
        on_two(lambda ctx: ctx.on_main(threading.Lock)),
    ]


@producer
def memory_(ground: Ground) -> list[str]:
    descriptor = memory.new()
    try:
        return [told(lambda: memory.mapped([descriptor], 1 << 60))]
    finally:
        os.close(descriptor)


# -- model -------------------------------------------------------------------------------------


@producer
def model(ground: Ground) -> list[str]:
    def wrapped(ctx: Context) -> None:
        ctx.model(DistributedDataParallel(nn.Linear(1, 1)))

    def with_other_options(ctx: Context) -> None:
        ctx.model(ctx.model(nn.Linear(1, 1)), static_graph=True)

    return [
        alone(lambda ctx: ctx.model(nn.Linear(1, 1), bucket_cap=1)),
        alone(lambda ctx: ctx.model(nn.Linear(1, 1), unheard=1)),
        alone(lambda ctx: ctx.model(nn.Linear(1, 1), device_ids=[0])),
        alone(lambda ctx: ctx.model(nn.Linear(1, 1), sync_batchnorm=True)),
        alone(lambda ctx: ctx.model(lambda: 3)),  # type: ignore[type-var]
        alone(lambda ctx: ctx.model([nn.Linear(1, 1)])),  # type: ignore[call-overload]
        alone(lambda ctx: ctx.model(Encoder(), forward="los")),
        alone(lambda ctx: ctx.model(Encoder(), forward="x")),
        alone(lambda ctx: ctx.model(on_meta())),
        on_two(wrapped),
        on_two(with_other_options),
    ]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1)
        self.spare = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).sum()


def on_meta() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(1, device="meta"))
    return module


@producer
def training(ground: Ground) -> list[str]:
    x = torch.ones(1, 1)

    def beside(ctx: Context) -> None:
        model = ctx.model(Encoder())
        model.part(x).sum().backward()

    def twice(ctx: Context) -> None:
        model = ctx.model(Encoder())
        outputs = model(torch.ones(2, 1))
        outputs[0].sum().backward(retain_graph=True)
        outputs[1].sum().backward()

    def unused(ctx: Context) -> None:
        model = ctx.model(Encoder())
        for _ in range(2):
            model(x).sum().backward()

    def changed(ctx: Context, name: str) -> None:
        module = Encoder()
        module.spare.weight.requires_grad_(False)
        model = ctx.model(module)
        if name == "spare.weight":
            module.spare.weight.requires_grad_(True)
        elif name == "extra":
            model.extra = nn.Parameter(x)
        else:
            module.part.bias.requires_grad_(False)
        model(x)

    def earlier(ctx: Context) -> None:
        model = ctx.model(Encoder())
        dist.destroy_process_group()  # as between two calls
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model(x)

    return [
        on_two(beside),
        on_two(twice),
        on_two(unused),
        on_two(earlier),
        *(on_two(partial(changed, name=name)) for name in ("spare.weight", "extra", "part.bias")),
    ]


@producer
def accumulate(ground: Ground) -> list[str]:
    def static(ctx: Context) -> None:
        ctx.accumulate(ctx.model(nn.Linear(1, 1), static_graph=True), [1], 2)

    return [alone(lambda ctx: ctx.accumulate(nn.ReLU(), [1], 0)), on_two(static)]


class Hiding(nn.Linear):
    reducer = "mean"


@producer
def hidden(ground: Ground) -> list[str]:
    # A fork inherits pytest's filters, by which a warning is raised.
    return [on_two(lambda ctx: ctx.model(Hiding(1, 1)))]


# -- data --------------------------------------------------------------------------------------


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Divided(DistributedSampler[int]):
    """Of one's own: it may do anything."""


DATA = list(range(10))


def _loaded(data: Any = DATA, **options: Any) -> str:
    return alone(lambda ctx: ctx.dataloader(data, **options))


@producer
def data_type(ground: Ground) -> list[str]:
    return [_loaded(one for one in DATA), _loaded(NoLength())]


@producer
def data_size(ground: Ground) -> list[str]:
    return [
        _loaded(batch_size=2, global_batch_size=4),
        _loaded(batch_size=0),
        _loaded(global_batch_size=2.5),
        on_two(lambda ctx: ctx.dataloader(DATA, global_batch_size=1)),
    ]


@producer
def data_order(ground: Ground) -> list[str]:
    return [
        _loaded(shuffle=True, sampler=[3, 1]),
        _loaded(batch_sampler=[[0]], batch_size=2, drop_last=True),
        _loaded(shuffle=True, seed=1, generator=torch.Generator()),
        _loaded(Numbers(), shuffle=True),
    ]


@producer
def data_loader(ground: Ground) -> list[str]:
    return [
        _loaded(DataLoader(DATA, 2), shuffle=True),  # type: ignore[arg-type]
        alone(lambda ctx: ctx.dataloader(ctx.dataloader(DATA).loader)),
        _loaded(DataLoader(DATA, batch_size=None)),  # type: ignore[arg-type]
    ]


@producer
def data_tail(ground: Ground) -> list[str]:
    def divided(ctx: Context) -> None:
        sampler = Divided(DATA, ctx.world_size, ctx.rank)  # type: ignore[arg-type]
        ctx.dataloader(DATA, sampler=sampler, uneven="pad")

    return [
        _loaded(uneven="cut"),
        _loaded(uneven="pad", drop_last=True),
        _loaded(Numbers(), uneven="balance"),
        on_two(divided),
    ]


@producer
def data_sampler(ground: Ground) -> list[str]:
    return [
        _loaded(sampler=Divided(DATA, 4, 3)),  # type: ignore[arg-type]
        _loaded(sharded=True),
    ]


@producer
def data_unknown(ground: Ground) -> list[str]:
    def unordered(ctx: Context) -> None:
        loader = ctx.dataloader(DATA, num_workers=1, in_order=False)
        _ = loader.weight

    def unordered_place(ctx: Context) -> None:
        ctx.dataloader(DATA, num_workers=1, in_order=False).state_dict()

    def place_in_stream(ctx: Context) -> None:
        loader = ctx.dataloader(Numbers(), sharded=True)
        for _ in loader:
            loader.state_dict()

    return [
        alone(lambda ctx: len(ctx.dataloader(Numbers(), sharded=True))),
        alone(unordered),
        alone(unordered_place),
        alone(place_in_stream),
    ]


@producer
def data_state(ground: Ground) -> list[str]:
    def resumed(state: dict[str, Any] | None = None, **options: Any) -> Callable[[Context], None]:
        def fn(ctx: Context) -> None:
            saved = ctx.dataloader(DATA)
            next(iter(saved))
            ctx.dataloader(DATA, **options).load_state_dict(state or saved.state_dict())

        return fn

    return [
        alone(resumed({"model": 1, "optimizer": 2})),
        alone(resumed(generator=torch.Generator())),
        alone(resumed(shuffle=True)),
    ]


@producer
def data_values(ground: Ground) -> list[str]:
    def gathered(data: Any, values: list[int], **options: Any) -> Callable[[Context], None]:
        def fn(ctx: Context) -> None:
            loader = ctx.dataloader(data, **options)
            if not loader.loader.num_workers:
                list(loader)
            ctx.gather_samples(values, loader)

        return fn

    return [
        alone(gathered(DATA, [1, 2])),
        alone(gathered(DATA, DATA, batch_sampler=[[n] for n in DATA])),
        alone(gathered(DATA, DATA, num_workers=1, in_order=False)),
    ]


@producer
def data_differs(ground: Ground) -> list[str]:
    return [on_two(lambda ctx: ctx.dataloader(DATA[ctx.rank :]))]


# -- collectives -------------------------------------------------------------------------------


@producer
def checkpoint(ground: Ground) -> list[str]:
    def saved(ctx: Context) -> None:
        ctx.save({"args": argparse.Namespace(lr=0.1)}, ground.path / "run.pt")
        ctx.load(ground.path / "run.pt")

    return [alone(saved)]


@producer
def collectives(ground: Ground) -> list[str]:
    return [
        alone(lambda ctx: ctx.all_reduce(1, op="avg")),
        alone(lambda ctx: ctx.broadcast(1, src=2)),
        alone(lambda ctx: ctx.all_reduce(1, "mean", weight=-1)),
        alone(lambda ctx: ctx.all_reduce(1, weight=2)),
        alone(lambda ctx: ctx.all_reduce(1, "max", differentiable=True)),
        alone(lambda ctx: ctx.scatter([1, 2])),
        alone(lambda ctx: ctx.barrier(timeout=0)),
        alone(lambda ctx: ctx.all_reduce({"loss": "low"})),
        alone(lambda ctx: ctx.all_reduce(numpy.ones(2))),
        alone(lambda ctx: ctx.all_reduce(torch.ones(1, dtype=torch.complex64), op="max")),
        alone(lambda ctx: ctx.all_reduce(2**64)),
        alone(lambda ctx: ctx.all_reduce(torch.eye(2).to_sparse())),
    ]


@producer
def collective_mismatch(ground: Ground) -> list[str]:
    return [
        on_two(lambda ctx: ctx.all_reduce(torch.ones(1 + ctx.rank))),
        on_two(lambda ctx: ctx.all_reduce(1) if ctx.rank else ctx.barrier()),
        on_two(lambda ctx: ctx.model(nn.Linear(1, 1 + ctx.rank))),
    ]


@producer
def barrier(ground: Ground) -> list[str]:
    def late(ctx: Context) -> None:
        time.sleep(600 * ctx.rank)
        ctx.barrier(timeout=0.2, name="load")

    return [on_two(late)]


@producer
def over(ground: Ground) -> list[str]:
    def body(ctx: Context) -> str:
        dist.destroy_process_group()  # as the end of the call does
        return told(lambda: ctx.all_reduce(1))

    return [run(body, **FORK)]


@producer
def main(ground: Ground) -> list[str]:
    def first(ctx: Context) -> None:
        with ctx.main_process_first():
            if ctx.rank == 0:
                raise OSError("disk full")

    def on_main(ctx: Context) -> None:
        ctx.on_main(_raise, TwoArguments(404, "gone"))

    def told_on_rank_1(ctx: Context) -> list[str]:
        return [told(lambda: first(ctx)), told(lambda: on_main(ctx))]

    return run(told_on_rank_1, returns="all", **FORK)[1]


# -- lines on stderr ---------------------------------------------------------------------------


@producer
def missing(ground: Ground) -> list[str]:
    ground.patch.setattr("distribute.arrival._NOTICE_SECONDS", 0.1)
    _late()
    return [ground.written()]


@producer
def waiting(ground: Ground) -> list[str]:
    return [_lonely(1).err]


@producer
def forked(ground: Ground) -> list[str]:
    ground.patch.setattr("distribute.launchers.fork._READY_SECONDS", 0.5)
    _in_fork.append(lambda: time.sleep(600))
    assert run(lambda ctx: ctx.all_gather(ctx.rank), **FORK) == [0, 1]
    return [ground.written()]


@producer
def server_start(ground: Ground) -> list[str]:
    forkserver.close()
    hook = write(
        ground.path, "import os; os.environ.get('END') and os._exit(7)", "sitecustomize.py"
    )
    ground.patch.setenv("PYTHONPATH", str(hook.parent))
    ground.patch.setenv("END", "1")
    ended = caught(lambda: run(len, "ab", devices=2, start_method="forkserver"))
    ground.patch.delenv("END")
    late = caught(lambda: run(len, "ab", rendezvous_timeout=0.01, **SERVER))
    ground.patch.delenv("PYTHONPATH")
    assert run(lambda ctx: ctx.all_gather(ctx.rank), **SERVER) == [0, 1]
    return [shown(ended), shown(late)]


@producer
def busy(ground: Ground) -> list[str]:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            torch.ones(64, 64).mm(torch.ones(64, 64))

    thread = threading.Thread(target=compute, name="trainer")
    thread.start()
    found: list[str] = []
    try:
        for names in (threading.enumerate, list):
            ground.patch.setattr(threading, "enumerate", names)
            assert run(lambda ctx: ctx.all_gather(ctx.rank), **FORK) == [0, 1]
            found.append(ground.written())
    finally:
        stop.set()
        thread.join()
    return found


@producer
def server(ground: Ground) -> list[str]:
    ground.patch.setattr("distribute.command.interactive", lambda: "a notebook kernel")
    ground.patch.setattr("distribute.devices.live", lambda: "CUDA")
    assert run(lambda ctx: ctx.all_gather(ctx.rank), devices=2) == [0, 1]
    return [ground.written()]


@producer
def again(ground: Ground) -> list[str]:
    def body(ctx: Context) -> int:
        if ctx.restart_count == 0:
            fail(ctx, "raise")
        return ctx.restart_count

    assert run(body, max_restarts=1, **FORK) == 1
    return [ground.written()]


@producer
def stopped(ground: Ground) -> list[str]:
    def body(ctx: Context) -> None:
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        ctx.barrier()

    assert "is stopped (SIGSTOP" in "".join(notes(lambda: run(body, deadline=5, **FORK)))
    return [ground.written()]


@producer
def long(ground: Ground) -> list[str]:
    def body(ctx: Context) -> None:
        if ctx.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctx.barrier()
        if ctx.rank == 0:
            time.sleep(600)
        raise ValueError("bad data")

    told(lambda: run(body, grace=4, **FORK))
    return [ground.written()]


STUBBORN = """
import time, distribute
import distribute.{module}

distribute.{module}.LAST_RESORT_SECONDS = 0.2

def body(ctx):
    if ctx.rank == 1:
        raise ValueError("bad data")
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

distribute.run(body, {options}, grace=0.2)
"""


@producer
def freed(ground: Ground) -> list[str]:
    ended = run_python(write(ground.path, STUBBORN.format(module="ending", options="devices=2")))
    assert ended.code == 1, ended.text
    return [ended.err]


@producer
def deadline_last(ground: Ground) -> list[str]:
    options = "devices=1, deadline=0.2"
    ended = run_python(write(ground.path, STUBBORN.format(module="deadline", options=options)))
    assert ended.code == 1, ended.text
    return [ended.err]


@producer
def room(ground: Ground) -> list[str]:
    script = write(
        ground.path,
        """
        import resource, sys, threading
        from distribute import run

        class Stalled:
            def __init__(self):
                self.free = threading.Event()

            def write(self, text):
                self.free.wait()

            def flush(self):
                pass

        def body(ctx):
            for _ in range(12):
                sys.stdout.write(("x" * 99 + "\\n") * 10486)

        # A full disk: no file may be larger than this.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        stdout, sys.stdout = sys.stdout, Stalled()
        try:
            run(body, devices=2, strategy="ddp_fork")
        finally:
            sys.stdout.free.set()
        """,
    )
    ended = run_python(script)
    assert ended.code == 0, ended.text
    return [ended.err]
