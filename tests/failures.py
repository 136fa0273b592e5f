"""How calls fail, as a script: `python failures.py METHOD FOLDER [CELL ...]`.

A cell is a cause, such as SIGKILL, and what the other rank is doing meanwhile: it waits in a
collective, or it sleeps. Each is one call, and a line: whether all that is promised about it holds,
and the seconds from the cause to the exception. The last line counts them.

Run by test_failures.py and benchmarks/failure.py, and by nothing of pytest: re-exec needs a script
of its own. It serves the first call of a script only, so it takes one cell.

    --list      print the cells of the method and end
    --calls N   instead of cells: that many failing calls in a row, of ranks that train
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import itertools
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import distribute
from distribute import (
    Context,
    DeadlineExceeded,
    Options,
    RankOutcome,
    RequestError,
    WorkerDied,
    WorkerError,
    run,
)
from distribute.launchers import forkserver

# How long a rank that does not answer is waited for: by a collective, and by the whole call, which
# includes the start of the ranks.
TIMEOUT = 4.0
DEADLINES = {"reexec": 30.0, "fork": 8.0, "forkserver": 8.0, "spawn": 60.0}
# A rank that is about to wait in C++ is in there after this.
MOMENT = 0.1
EARLY_CODE = 5


@dataclass(frozen=True)
class Cell:
    """A failure.

    Attributes:
        cause: What the failing rank does.
        state: What the others do meanwhile: `collective` or `sleep`.
        by: The rank that fails.
    """

    cause: str
    state: str
    by: int = 1

    @property
    def name(self) -> str:
        return f"{self.cause}/{self.state}" + ("/rank0" if self.by == 0 else "")

    @property
    def failing(self) -> tuple[int, ...]:
        return (1, 2) if self.cause == "raise-at-once" else (self.by,)

    @property
    def world_size(self) -> int:
        return 3 if self.cause == "raise-at-once" else 2

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(one for one in range(self.world_size) if one not in self.failing)


# -- what the ranks tell --------------------------------------------------------------------------


def note(folder: str, what: str, rank: int) -> None:
    """Tells the other processes that a rank has come somewhere, and when."""
    Path(folder, f"{what}-{rank}").write_text(repr(time.monotonic()))


def wait_for(folder: str, what: str, ranks: tuple[int, ...]) -> None:
    """Waits until ranks have come somewhere."""
    limit = time.monotonic() + 60
    while not all(os.path.exists(os.path.join(folder, f"{what}-{one}")) for one in ranks):
        if time.monotonic() > limit:
            raise AssertionError(f"ranks {ranks} did not come to {what!r}")
        time.sleep(0.002)


def noted(folder: Path, what: str) -> list[float]:
    """Returns when ranks came somewhere."""
    return sorted(float(one.read_text()) for one in folder.glob(f"{what}-*"))


# -- causes ---------------------------------------------------------------------------------------


class BadSample(Exception):
    pass


class Unsendable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raises() -> NoReturn:
    raise BadSample("bad sample 17")


def raises_unsendable() -> NoReturn:
    raise Unsendable("it holds a lock")


def is_interrupted() -> NoReturn:
    raise KeyboardInterrupt


def crashes() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


ACTS: dict[str, Callable[[], Any]] = {
    "raise": raises,
    "raise-at-once": raises,
    "SystemExit(0)": lambda: sys.exit(0),
    "SystemExit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(7)": lambda: os._exit(7),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": crashes,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "KeyboardInterrupt": is_interrupted,
    "unsendable-value": threading.Lock,
    "unsendable-error": raises_unsendable,
    "early-death": lambda: os._exit(EARLY_CODE),
    "ImportError": lambda: importlib.import_module("a_module_that_is_missing"),
}
STATES = ("collective", "sleep")
# What re-exec and spawn, which take seconds, show in every run of the tests.
CHOSEN = ("raise", "SIGKILL", "os._exit(0)", "ImportError", "early-death")
# Of rank 0 under re-exec, which is the caller: the script's own end is no failure of a call.
OF_CALLER = ("raise", "SystemExit(0)", "SystemExit(3)", "KeyboardInterrupt", "unsendable-error")


def cells(method: str) -> list[Cell]:
    """Returns all cells of a start method."""
    found = [Cell(cause, state) for cause, state in itertools.product(ACTS, STATES)]
    if method in ("fork", "reexec"):
        of_rank_0 = (
            OF_CALLER if method == "reexec" else [one for one in ACTS if "at-once" not in one]
        )
        found += [Cell(cause, state, 0) for cause, state in itertools.product(of_rank_0, STATES)]
    return found


def body(ctx: Context, argument: object, cell: Cell, folder: str) -> Any:
    """Is the function: some ranks fail, once the others are in their state."""
    ctx.barrier()  # the connections are there
    if ctx.rank not in cell.failing:
        note(folder, "there", ctx.rank)
        return waiting(ctx) if cell.state == "collective" else sleeping(cell, folder)
    wait_for(folder, "there", cell.others)
    if cell.state == "collective":
        ctx.all_reduce(torch.ones(1))  # the others have come to it, and are in the next one soon
    time.sleep(MOMENT)
    note(folder, "ready", ctx.rank)
    wait_for(folder, "ready", cell.failing)
    note(folder, "cause", ctx.rank)
    return ACTS[cell.cause]()


def waiting(ctx: Context) -> NoReturn:
    while True:
        ctx.all_reduce(torch.ones(1))


def sleeping(cell: Cell, folder: str) -> str:
    time.sleep(0.5 if cell.cause == "SystemExit(0)" else 600)
    note(folder, "left", 1 - cell.by)
    return "slept"


# -- causes before the function -------------------------------------------------------------------


def fail_early(cell: Cell, folder: str, rank: int) -> None:
    """Has a rank fail on its way to the function, once the others are in their state.

    These sleep right here, or go on and wait for it where all ranks meet.
    """
    if rank not in cell.failing:
        note(folder, "there", rank)
        time.sleep(600 if cell.state == "sleep" else 0)
        return
    wait_for(folder, "there", cell.others)
    time.sleep(MOMENT)
    note(folder, "cause", rank)
    ACTS[cell.cause]()


def unpacked(cell: Cell, folder: str) -> None:
    fail_early(cell, folder, int(os.environ["RANK"]))


@dataclass(frozen=True)
class Argument:
    """An argument that the failing rank fails to unpack."""

    cell: Cell
    folder: str

    def __reduce__(self) -> tuple[Callable[[Cell, str], None], tuple[Cell, str]]:
        return unpacked, (self.cell, self.folder)


class Forks:
    """Has forks of this process fail, as the rank that they are about to be."""

    def __init__(self) -> None:
        self._planned: tuple[Cell, str] | None = None
        self._count = 0
        os.register_at_fork(before=self._before, after_in_child=self._after)

    def _before(self) -> None:
        self._count += 1

    def _after(self) -> None:
        if self._planned is not None:
            fail_early(*self._planned, self._count - 1)

    @contextmanager
    def failing(self, cell: Cell, folder: str) -> Generator[None]:
        self._planned, self._count = (cell, folder), 0
        try:
            yield
        finally:
            self._planned = None


@contextmanager
def failing_to_join(cell: Cell, folder: str) -> Generator[None]:
    """Has a rank fail right before it joins the others."""
    join = dist.init_process_group

    def patched(*args: Any, **options: Any) -> None:
        fail_early(cell, folder, int(os.environ["RANK"]))
        join(*args, **options)

    dist.init_process_group = patched
    try:
        yield
    finally:
        dist.init_process_group = join


def is_early(method: str, cell: Cell) -> bool:
    """Tells whether the failing rank does not come to the function."""
    # A fork has the arguments and the imports already.
    return cell.cause == "early-death" or (cell.cause == "ImportError" and method != "fork")


@contextmanager
def prepared(method: str, cell: Cell, folder: str, forks: Forks) -> Generator[Argument | None]:
    """Prepares a failure before the function; yields the argument of the call."""
    if not is_early(method, cell):
        yield None
    elif method == "fork":
        failing = forks.failing if cell.state == "sleep" else failing_to_join
        with failing(cell, folder):
            yield None
    elif method != "reexec":
        yield Argument(cell, folder)
    elif cell.state == "collective":
        # Only the others unpack arguments; the caller is seen to join.
        with failing_to_join(cell, folder):
            yield Argument(cell, folder)
    else:
        note(folder, "there", 0)  # the others fail above the call
        yield None


# -- what is promised -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Promise:
    """What the caller gets for a cause, and what is told of the rank that failed."""

    error: type[BaseException]
    kind: str
    exit_code: int | None = None
    signal: int | None = None


PROMISED = {
    "raise": Promise(BadSample, "raised"),
    "raise-at-once": Promise(BadSample, "raised"),
    "SystemExit(0)": Promise(RuntimeError, "returned"),
    "SystemExit(3)": Promise(WorkerDied, "exited", exit_code=3),
    "os._exit(0)": Promise(WorkerDied, "exited", exit_code=0),
    "os._exit(7)": Promise(WorkerDied, "exited", exit_code=7),
    "SIGKILL": Promise(WorkerDied, "killed", signal=signal.SIGKILL),
    "SIGSEGV": Promise(WorkerDied, "killed", signal=signal.SIGSEGV),
    "KeyboardInterrupt": Promise(KeyboardInterrupt, "raised"),
    "unsendable-value": Promise(RequestError, "raised"),
    "unsendable-error": Promise(WorkerError, "raised"),
    "early-death": Promise(WorkerDied, "exited", exit_code=EARLY_CODE),
    "ImportError": Promise(ModuleNotFoundError, "raised"),
}


def promised(method: str, cell: Cell) -> Promise:
    """Returns what is promised for a cell."""
    if cell.cause == "SIGSTOP":
        hang = RuntimeError if cell.state == "collective" else DeadlineExceeded
        return Promise(hang, "killed", signal=signal.SIGTERM)
    if cell.cause == "early-death" and cell.state == "sleep" and method in ("fork", "reexec"):
        return Promise(WorkerDied, "never started", exit_code=EARLY_CODE)
    if cell.cause == "unsendable-error" and method == "reexec" and cell.by == 0:
        return Promise(Unsendable, "raised")  # it is in the caller's process already
    return PROMISED[cell.cause]


def check(method: str, cell: Cell, error: BaseException) -> None:
    """Checks the exception of a call that has failed."""
    promise = promised(method, cell)
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert type(error) is promise.error, told
    outcomes = cast("tuple[RankOutcome, ...]", vars(error)["outcomes"])
    assert [one.rank for one in outcomes] == list(range(cell.world_size)), outcomes
    if cell.cause == "raise-at-once":
        check_first_of_two(outcomes, told)
    else:
        failed = outcomes[cell.by]
        assert re.search(rf"\brank(\(s\))? {cell.by}\b", told), told
        found = failed.kind, failed.exit_code, failed.signal
        assert found == (promise.kind, promise.exit_code, promise.signal), failed
        assert not failed.consequence or cell.cause == "SIGSTOP", failed
    for rank in cell.others:
        check_other(method, cell, outcomes[rank])
    if cell.cause == "SIGSEGV":
        assert "in crashes" in outcomes[cell.by].stack, outcomes
        assert "in crashes" in str(error), error
    if cell.cause == "SIGSTOP" or promise.kind == "returned":
        check_whereabouts(cell, told)


def check_first_of_two(outcomes: tuple[RankOutcome, ...], told: str) -> None:
    """Checks that one of two ranks that raised is the news, and the other one is told of."""
    found = re.search(r"raised by rank ([12]) ", told)
    assert found is not None, told
    first = int(found[1])
    second = outcomes[3 - first]
    assert (outcomes[first].kind, outcomes[first].consequence) == ("raised", False), outcomes
    # The end of the call may have come before its exception.
    assert second.kind == "raised" or second.consequence, outcomes
    if second.kind == "raised":
        assert f"rank {second.rank} raised as well: __main__.BadSample: bad sample" in told, told


def check_other(method: str, cell: Cell, other: RankOutcome) -> None:
    """Checks what is told of a rank that is not the cause."""
    hang = cell.cause == "SIGSTOP" and cell.state == "collective"
    assert other.consequence is not hang, other
    if cell.state == "collective":
        # What it waits in may have raised before its end came.
        alone = hang or cell.cause == "SystemExit(0)"
        assert other.kind in (("raised",) if alone else ("raised", "killed")), other
        early = is_early(method, cell)
        assert other.collective.startswith("" if early else "all_reduce at failures.py:"), other
        return
    unready = method == "fork" and cell.cause == "early-death"
    assert other.kind == ("never started" if unready else "killed"), other
    caller = method == "reexec" and other.rank == 0
    assert other.signal == (None if caller else signal.SIGTERM), other


def check_whereabouts(cell: Cell, told: str) -> None:
    """Checks that an error about a hang says where every rank was."""
    if cell.state == "collective":
        other = rf"rank {1 - cell.by} raised RuntimeError in all_reduce at failures\.py:\d+"
    else:
        other = rf"rank {1 - cell.by} is at failures\.py:\d+, in sleeping"
    assert re.search(other, told), told
    if cell.cause == "SIGSTOP":
        assert re.search(rf"rank {cell.by} .*its process is stopped", told), told
        return
    assert f"rank(s) {cell.by} had returned, while this rank waited for them" in told, told
    assert re.search(rf"rank {cell.by} returned\b", told), told


def due(method: str, cell: Cell, folder: Path, began: float) -> float:
    """Returns the moment from which the news could be there."""
    if cell.cause == "SIGSTOP":
        if cell.state == "collective":
            return noted(folder, "there")[0] + TIMEOUT
        return began + DEADLINES[method]
    if cell.cause == "SystemExit(0)" and cell.state == "sleep":
        return noted(folder, "left")[0]
    return noted(folder, "cause")[0]


# -- what is left ---------------------------------------------------------------------------------


@dataclass
class Left:
    """What a call could leave behind. The fork server may stay."""

    processes: set[str]
    descriptors: set[str]
    files: set[str]
    threads: int

    @classmethod
    def now(cls) -> Left:
        server = forkserver.process_id()
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        files = {one for one in os.listdir(tempfile.gettempdir()) if one.startswith("dist")}
        return cls(
            {f"process {one}" for one in children if int(one) != server},
            _descriptors(),
            files,
            len(os.listdir("/proc/self/task")),
        )

    def beyond(self, before: Left) -> list[str]:
        """Returns what was not there before."""
        found = [
            *(self.processes - before.processes),
            *(self.descriptors - before.descriptors),
            *(self.files - before.files),
        ]
        if self.threads > before.threads:
            found.append(f"{self.threads} threads after {before.threads}")
        return sorted(found)


def _descriptors() -> set[str]:
    found: set[str] = set()
    for number in {int(one) for one in os.listdir("/proc/self/fd")} - forkserver.descriptors():
        try:
            found.add(f"descriptor {number}: {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            pass  # that of the listing
    return found


def check_nothing_left(before: Left) -> None:
    """Checks that nothing is left; what has just ended may take a moment to go."""
    limit = time.monotonic() + 5
    while (found := Left.now().beyond(before)) and time.monotonic() < limit:
        gc.collect()
        time.sleep(0.02)
    assert not found, found


def make_what_stays() -> None:
    """Makes what a process has once and for all."""
    # libuv, under torch's store, makes a pipe with its first server and keeps it.
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.ones(1 << 20).add_(1).sum()


# -- running cells --------------------------------------------------------------------------------


def take(method: str, cell: Cell, folder: Path, forks: Forks) -> float:
    """Makes the call of a cell; returns the seconds from the cause to the exception."""
    folder.mkdir(exist_ok=True)
    options: Options = {"devices": cell.world_size, "start_method": method}
    if cell.cause == "SIGSTOP" and cell.state == "collective":
        options["timeout"] = TIMEOUT
    elif cell.cause == "SIGSTOP":
        options["deadline"] = DEADLINES[method]
    caught: BaseException | None = None
    values: list[object] = []
    before = Left.now()
    began = time.monotonic()
    try:
        with prepared(method, cell, str(folder), forks) as argument:
            values = run(body, argument, cell, str(folder), returns="all", **options)
    except BaseException as error:
        caught = error
    ended = time.monotonic()
    if cell.cause == "SystemExit(0)" and cell.state == "sleep":
        if caught is not None:
            raise caught
        assert values == [None if rank == cell.by else "slept" for rank in range(2)], values
    else:
        assert caught is not None, values
        try:
            check(method, cell, caught)
        except AssertionError:
            traceback.print_exception(caught)
            raise
    seconds = ended - due(method, cell, folder, began)
    if method == "reexec" and caught is None:
        return seconds  # the workers are idle, and there for the next call
    if method == "reexec" and (cell.by == 0 or cell.cause == "SIGSTOP"):
        caught = None  # rank 0's own: it holds the frames of this process, and they the group
    # Otherwise the exception is still held.
    check_nothing_left(before)
    return seconds


def take_all(method: str, chosen: list[Cell], folder: Path) -> bool:
    """Takes cells in turn, then makes a call that succeeds; prints a line for each."""
    forks = Forks()
    good = 0
    if method != "reexec":
        run(int, devices=2, start_method=method)  # starts the fork server, and imports
    for number, cell in enumerate(chosen):
        try:
            seconds = take(method, cell, folder / str(number), forks)
        except BaseException:
            print(f"FAILED {method} {cell.name} -\n{traceback.format_exc()}", flush=True)
        else:
            good += 1
            print(f"ok {method} {cell.name} {seconds:.3f}", flush=True)
    if method != "reexec":
        assert run(total, devices=2, start_method=method) == 3
    elif chosen[0].cause == "raise":
        # Re-exec serves the first call only; forks take over, which import more of torch first.
        assert run(total, devices=2) == 3
    print(f"{method}: {good} of {len(chosen)}", flush=True)
    return good == len(chosen)


def total(ctx: Context) -> int:
    return ctx.all_reduce(ctx.rank + 1)


# -- many failures in a row -----------------------------------------------------------------------


def fails_with_a_group(group: object) -> NoReturn:
    held = [group]
    raise BadSample(f"it holds {len(held)} group")


WAYS: tuple[tuple[str, type[BaseException]], ...] = (
    ("raise", BadSample),
    ("SIGKILL", WorkerDied),
    ("os._exit(7)", WorkerDied),
    ("unsendable-value", RequestError),
    ("SystemExit(3)", WorkerDied),
)


def training(ctx: Context, weights: torch.Tensor, way: str, failing: int, state: int) -> object:
    """Trains until a rank fails; all frames hold a model, its optimizer and a second group."""
    model = ctx.model(torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    group = dist.new_group([0, 1])
    for _ in range(2):
        model(weights[:8]).sum().backward()
        optimizer.step()
        dist.all_reduce(torch.ones(8), group=group)
    if ctx.rank == failing:
        return fails_with_a_group(group) if way == "raise" else ACTS[way]()
    while state == 0:
        dist.all_reduce(torch.ones(8), group=group)
    while state == 1:
        model(weights[:8]).sum().backward()
        optimizer.step()
    time.sleep(600)
    return None


def take_many(method: str, calls: int) -> None:
    """Makes failing calls in a row, and checks that this process does not grow."""
    weights = torch.ones(4096, 64)  # large enough for a memory file
    rounds = itertools.product((0, 1, 2), (0, 1), WAYS)
    before: Left | None = None
    for number, (state, failing, (way, kind)) in zip(
        range(calls), itertools.cycle(rounds), strict=False
    ):
        try:
            # All values, as one that is not asked for is not sent, and cannot fail at that.
            run(
                *(training, weights, way, failing, state),
                devices=2,
                returns="all",
                start_method=method,
            )
        except BaseException as error:
            if type(error) is not kind:
                raise
        else:
            raise AssertionError(f"call {number} did not fail")
        # The first ones make what stays.
        if number == min(5, calls // 2):
            before = Left.now()
        elif before is not None and number % 50 == 0:
            check_nothing_left(before)
    assert before is not None
    check_nothing_left(before)
    assert run(total, devices=2, start_method=method) == 3
    print(f"{method}: {calls} failing calls, and a good one", flush=True)


def main() -> bool:
    parser = argparse.ArgumentParser(description="Makes calls fail.")
    parser.add_argument("method", choices=("reexec", "fork", "forkserver", "spawn"))
    parser.add_argument("folder", type=Path, help="for the marks that ranks leave; empty")
    parser.add_argument("cells", nargs="*", help="default: all of the method")
    parser.add_argument("--list", action="store_true", help="print the cells and end")
    parser.add_argument("--calls", type=int, help="make that many failing calls in a row instead")
    args = parser.parse_args()
    folder: Path = args.folder
    known = {one.name: one for one in cells(args.method)}
    if args.list:
        print("\n".join(known))
        return True
    make_what_stays()
    if args.calls is not None:
        take_many(args.method, args.calls)
        return True
    chosen = [known[one] for one in args.cells or known]
    if args.method == "reexec" and distribute.is_worker():
        fail_above_the_call(chosen[0], folder / "0")
    return take_all(args.method, chosen, folder)


def fail_above_the_call(cell: Cell, folder: Path) -> None:
    """Has a re-executed worker fail before it comes to the call, if that is the cell."""
    if is_early("reexec", cell) and cell.state == "sleep":
        fail_early(cell, str(folder), int(os.environ["RANK"]))


if __name__ == "__main__":
    sys.exit(not main())
