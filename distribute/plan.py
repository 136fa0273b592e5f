"""From what the user asked to what will happen: every choice and every refusal, in one place.

`resolve` is pure: it reads the request, a mapping of environment variables and a record of facts
about the machine and the process, and returns a plan or raises `RequestError`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal, cast

from distribute.environment import External, external_world, partial_world
from distribute.errors import RequestError
from distribute.machine import Machine
from distribute.request import (
    START_METHODS,
    STRATEGIES,
    Request,
    StartMethod,
    flag,
    indices,
    number,
    one_of,
    output,
    seconds,
    seed,
)

# torch's device types that a rank can compute on, with the names people also use.
_ACCELERATORS = ("cpu", "cuda", "mps", "xpu", "mtia", "hpu")


Method = Literal["inline", "attached", "reexec", "fork", "forkserver", "spawn"]


@dataclass(frozen=True)
class Plan:
    """What will happen at a call.

    Attributes:
        method: Who makes the processes.
        reason: Why that one, as half a sentence.
        accelerator: torch's device type.
        devices: Index of each local rank's device.
        backend: torch's process-group backend.
        world_size: Number of ranks on all nodes.
        num_nodes: Number of nodes.
        timeout: Seconds a collective may take; None for torch's default.
        rendezvous_timeout: Seconds until all ranks have joined.
        deadline: Seconds that the whole call may take, or None.
        grace: Seconds between SIGTERM and SIGKILL.
        max_restarts: How often the world may be started again.
        returns: `"main"` or `"all"`.
        seed: Seed of the random-number generators, or None.
        output: `"all"`, `"main"` or `"none"`, or the directory of the ranks' files.
        write_back: Whether the state of the objects that the function is given comes back.
        check_collectives: Whether ranks agree on each collective before it.
        command: What re-executed workers run.
        cores: CPU cores to share out.
        external: The world of an external launcher.
        remark: What the user is told when the call begins, as another choice is the usual one.
    """

    method: Method
    reason: str
    accelerator: str
    devices: tuple[int, ...]
    backend: str
    world_size: int
    num_nodes: int = 1
    timeout: float | None = None
    rendezvous_timeout: float = 120.0
    deadline: float | None = None
    grace: float = 5.0
    max_restarts: int = 0
    returns: Literal["main", "all"] = "main"
    seed: int | None = None
    output: str | PurePath = "all"
    write_back: bool = True
    check_collectives: bool = True
    command: tuple[str, ...] = ()
    cores: int = 1
    external: External | None = None
    remark: str = ""

    def __str__(self) -> str:
        lines = [
            f"start method  {self.method}: {self.reason}",
            f"world         {self.world_size} ranks on {self.num_nodes} node(s), {self._group()}",
            f"devices       {self._devices()}",
        ]
        if self.method == "reexec":
            lines.append(f"command       {shlex.join(self.command)}")
        if self.method not in ("inline", "attached"):
            lines.append("environment   " + self._environment())
        if self.output != "all":
            lines.append("output        " + self._output())
        if not self.write_back:
            lines.append("state         of what the function is given stays as it is in the caller")
        if not self.check_collectives:
            lines.append("collectives   are not checked for being the same on all ranks")
        return "\n".join(lines)

    def _group(self) -> str:
        return f"backend {self.backend}" if self.world_size > 1 else "no process group"

    def _devices(self) -> str:
        if self.external is not None:
            return f"one of {self.accelerator} for each process"
        indexed = self.accelerator not in ("cpu", "mps")
        return ", ".join(
            f"rank {rank} on {self.accelerator}{f':{index}' if indexed else ''}"
            for rank, index in enumerate(self.devices)
        )

    @property
    def detached(self) -> bool:
        """Whether the output of rank 0 is not to come to the launcher's own streams."""
        return self.output not in ("all", "main")

    @property
    def forwarded(self) -> range:
        """The ranks whose output is forwarded: they are in processes of their own."""
        if self.method in ("inline", "attached"):
            return range(0)
        return range(self.method == "reexec", self.world_size)

    def _output(self) -> str:
        if isinstance(self.output, PurePath):
            told = f"in {self.output}/rank-N.log, N the rank"
        else:
            told = "of rank 0" if self.output == "main" else "of no rank"
        if self.detached and 0 not in self.forwarded:
            told += "; rank 0 is the caller and prints as ever"
        return told

    def _environment(self) -> str:
        threads = max(1, self.cores // len(self.devices))
        return (
            f"RANK=0..{self.world_size - 1} LOCAL_RANK=RANK WORLD_SIZE={self.world_size} "
            f"LOCAL_WORLD_SIZE={self.world_size} GROUP_RANK=0 NODE_RANK=0 MASTER_ADDR=127.0.0.1 "
            f"MASTER_PORT=(free port) OMP_NUM_THREADS={threads} (unless set)"
        )


def resolve(
    request: Request, environ: Mapping[str, str], machine: Machine, *, keep: bool = False
) -> Plan:
    """Decides what a call does.

    Args:
        request: What the user said.
        environ: Environment variables.
        machine: Facts about the machine and this process.
        keep: Whether the workers are to stay for further calls.

    Raises:
        RequestError: It cannot be done; nothing was started.
    """
    wanted = _wanted_start_method(request)
    returns = one_of("returns", request.returns, ("main", "all"))
    external = external_world(environ)
    num_nodes = number("num_nodes", request.num_nodes, 1)
    accelerator, devices = _devices(request, machine, external)
    backend = _backend(request, machine, accelerator)
    rest: dict[str, Any] = {
        "accelerator": accelerator,
        "timeout": seconds("timeout", request.timeout),
        "rendezvous_timeout": seconds("rendezvous_timeout", request.rendezvous_timeout),
        "deadline": seconds("deadline", request.deadline),
        "grace": seconds("grace", request.grace, least=0.0),
        "max_restarts": number("max_restarts", request.max_restarts, 0),
        "returns": returns,
        "seed": seed(request.seed),
        "output": output(request.output, exists=machine.output_exists),
        "write_back": flag("write_back", request.write_back),
        "check_collectives": flag("check_collectives", request.check_collectives),
        "cores": machine.cores,
    }
    if keep:
        _check_kept(rest)
    if machine.group is not None:
        rank, size, held = machine.group
        reason = f"this process already holds a process group ({held}, rank {rank} of {size})"
        nodes = num_nodes if external is None else external.num_nodes
        _check_attached(rest, external, machine)
        _check_output(rest["output"], size, "this process is a rank of a group that it holds")
        asked = None if request.devices == "auto" else len(devices) * nodes
        if asked not in (None, size):
            raise RequestError(
                f"devices={request.devices!r}, num_nodes={num_nodes}",
                f"the process group that this process holds has {size} ranks",
                'pass devices="auto" or destroy that group first',
            )
        return Plan(
            "attached", reason, devices=devices, backend=held, world_size=size,
            num_nodes=nodes, external=external, **rest,
        )  # fmt: skip
    if external is not None:
        _check_external(request, external)
        _check_attached(rest, external, machine)
        _check_output(rest["output"], external.world_size, f"{external.by} started this rank")
        return Plan(
            "attached", f"{external.by} started this process", devices=devices, backend=backend,
            world_size=external.world_size, num_nodes=external.num_nodes, external=external, **rest,
        )  # fmt: skip
    if num_nodes > 1:
        raise RequestError(
            f"num_nodes={num_nodes}",
            "this process was not started by a launcher that knows the other nodes",
            "start the script on every node with torchrun, "
            f"`torchrun --nnodes {num_nodes} --nproc-per-node {len(devices)} ...`",
        )
    if keep:
        method, reason = _method_kept(wanted, machine)
    else:
        idle = machine.kept == devices and machine.kept_accelerator == accelerator
        method, reason = _method(wanted, len(devices), idle, machine, rest)
    if method != "inline":
        _check_process(method, len(devices), machine)
    ignored = partial_world(environ)
    if ignored:
        reason = f"{reason} ({ignored})"
    # In a notebook a fork is the usual one: ranks of the fork server see less of what cells made.
    unusual = machine.interactive and wanted is None and method == "forkserver"
    return Plan(
        method, reason, devices=devices, backend=backend, world_size=len(devices),
        command=machine.script if method == "reexec" else (),
        remark=f"the fork server makes the ranks: {reason}" if unusual else "", **rest,
    )  # fmt: skip


def _wanted_start_method(request: Request) -> StartMethod | None:
    strategy = one_of("strategy", request.strategy, tuple(STRATEGIES))
    implied = STRATEGIES[strategy]
    given = one_of("start_method", request.start_method, ("auto", *START_METHODS))
    if given == "auto":
        return implied
    if implied not in (None, given):
        raise RequestError(
            f"strategy={strategy!r} with start_method={given!r}",
            f"that strategy means start_method={implied!r}",
            "leave one of them out",
        )
    return cast("StartMethod", given)


def _method(
    wanted: StartMethod | None,
    world_size: int,
    kept: bool,
    machine: Machine,
    limits: Mapping[str, Any],
) -> tuple[Method, str]:
    restarts: int = limits["max_restarts"]
    # Freeing rank 0 takes signals, which only the main thread gets.
    kept = kept and machine.main_thread
    if wanted is not None:
        return _asked_for(wanted, _OBSTACLES[wanted](machine, kept, restarts))
    # Without the main thread nobody could end the function at its deadline.
    if world_size == 1 and not restarts and (limits["deadline"] is None or machine.main_thread):
        return "inline", "one process needs no other"
    obstacle = _no_reexec(machine, kept, restarts)
    if not obstacle and not machine.interactive:
        return "reexec", (
            "the workers of the first call are idle at theirs"
            if kept
            else "the first call of a script that can be run again"
        )
    return _beside(machine, *obstacle[:1])


def _method_kept(wanted: StartMethod | None, machine: Machine) -> tuple[Method, str]:
    # One process too: what the calls leave in it is not to be in the caller.
    if wanted == "reexec":
        return _asked_for(wanted, _KEPT)
    if wanted is not None:
        return _asked_for(wanted, _OBSTACLES[wanted](machine, False, 0))
    return _beside(machine, "the workers are kept for further calls")


_KEPT = (
    "kept workers are processes beside the caller, and rank 0 of a re-executed script is the "
    "caller itself",
    'leave the start method to "auto"',
)


def _asked_for(wanted: StartMethod, obstacle: tuple[str, ...]) -> tuple[Method, str]:
    if obstacle:
        raise RequestError(f"start method {wanted!r}", *obstacle)
    return wanted, "it was asked for"


def _beside(machine: Machine, why: str = "") -> tuple[Method, str]:
    """Chooses for ranks that are all processes beside the caller."""
    if machine.frozen:
        obstacle = _no_fork(machine, False, 0)
        if obstacle:
            raise RequestError(
                "several processes of a frozen program",
                f"it has no interpreter to start, and {obstacle[0]}",
                "make the call before the first use of the accelerator, or run the script itself",
            )
        return "fork", why
    if machine.interactive:
        # A kernel always has threads of its own, which wait for messages: a fork proves itself.
        why_not = _unsafe_fork(replace(machine, other_threads=False))
        if why_not:
            return "forkserver", f"{machine.interactive}, where {why_not}"
        return "fork", f"{machine.interactive}: the workers see what the cells made"
    unsafe = _unsafe_fork(machine)
    if unsafe:
        return "forkserver", f"{why}, and {unsafe}"
    return "fork", why


def _unsafe_fork(machine: Machine) -> str:
    if not machine.can_fork:
        return "torch does not survive a fork on this platform"
    if machine.live_accelerator:
        return f"this process holds a {machine.live_accelerator} context, which no fork survives"
    if not machine.main_thread or machine.other_threads:
        return "other threads are running, whose locks a fork would copy"
    return ""


def _no_reexec(machine: Machine, kept: bool, restarts: int) -> tuple[str, ...]:
    if restarts:
        return (
            f"max_restarts={restarts} starts all ranks again, and a rank 0 that is the calling "
            "process cannot be",
            'use start_method="forkserver", or leave it to "auto"',
        )
    if kept:
        return ()
    if not machine.main_thread:
        fact = "the call comes from a thread other than the main one"
    elif machine.interactive:
        fact = f"{machine.interactive} cannot be run again"
    elif not machine.script:
        fact = machine.no_script
    elif machine.earlier_calls:
        fact = (
            "this process has made a distributed call before, whose workers are not those of this "
            "one"
        )
    else:
        return ()
    return fact, 'leave the start method to "auto"'


def _no_fork(machine: Machine, kept: bool, restarts: int) -> tuple[str, ...]:
    if not machine.can_fork:
        return "this platform has no fork that torch survives", 'use "spawn"'
    if machine.live_accelerator:
        return (
            f"this process already holds a {machine.live_accelerator} context, which no fork "
            "survives",
            'use "forkserver", or leave it to "auto"',
        )
    return ()


def _no_interpreter(machine: Machine, kept: bool, restarts: int) -> tuple[str, ...]:
    if machine.frozen:
        return (
            "a frozen program would start itself in place of an interpreter",
            'use "fork", or leave it to "auto"',
        )
    return ()


_OBSTACLES: dict[StartMethod, Callable[[Machine, bool, int], tuple[str, ...]]] = {
    "reexec": _no_reexec,
    "fork": _no_fork,
    "forkserver": _no_interpreter,
    "spawn": _no_interpreter,
}


def _devices(
    request: Request, machine: Machine, external: External | None
) -> tuple[str, tuple[int, ...]]:
    asked = request.devices
    wanted = indices(asked)
    accelerator = _accelerator(request, machine, wanted)
    present = machine.accelerators.get(accelerator, 0)
    if accelerator == "cpu":
        if isinstance(asked, str):
            return accelerator, (0,)
        assert wanted is not None
        return accelerator, tuple(range(len(wanted)))
    if isinstance(asked, str):
        return accelerator, tuple(range(present))
    assert wanted is not None
    # A launcher that shows each process its own device only has already done the choosing.
    isolated = external is not None and present == 1
    if not isolated and max(wanted) >= present:
        raise RequestError(
            f"devices={asked!r}",
            f"this machine has {present} {accelerator} device(s)",
            f"ask for at most {present}, or pass accelerator='cpu'",
        )
    if accelerator == "mps" and len(wanted) > 1:
        raise RequestError(
            f"devices={asked!r} on mps",
            "there is one device, and no process-group backend for it",
            "pass devices=1, or accelerator='cpu'",
        )
    return accelerator, wanted


def _accelerator(request: Request, machine: Machine, wanted: tuple[int, ...] | None) -> str:
    present = machine.accelerators
    asked = request.accelerator
    if asked == "auto":
        best = next(iter(present), "cpu")
        # mps has one device: a larger world is possible on the CPU only.
        return "cpu" if best == "mps" and wanted is not None and len(wanted) > 1 else best
    if asked == "gpu":
        asked = next(iter(present), "cuda")
    one_of("accelerator", asked, ("auto", "gpu", *_ACCELERATORS))
    if asked != "cpu" and not present.get(asked):
        have = ", ".join(present) or "no accelerator"
        raise RequestError(
            f"accelerator={request.accelerator!r}",
            f"torch finds {have} on this machine",
            'pass accelerator="cpu", or leave it to "auto"',
        )
    return asked


def _backend(request: Request, machine: Machine, accelerator: str) -> str:
    asked = request.backend
    if asked == "auto":
        defaults = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "hpu": "hccl", "mps": "gloo"}
        return defaults.get(accelerator, "gloo")
    for part in str(asked).lower().split(","):
        name = part.rpartition(":")[2].strip()
        if name not in machine.backends:
            raise RequestError(
                f"backend={asked!r}",
                f"this torch has {', '.join(sorted(machine.backends))}",
                'pass one of them, or leave it to "auto"',
            )
    return str(asked).lower()


def _check_process(method: Method, world_size: int, machine: Machine) -> None:
    if not machine.working_directory:
        raise RequestError(
            "a call from a working directory that is not there any more",
            "the ranks start where the caller is",
            "go to one that exists, with os.chdir",
        )
    idle = method == "reexec" and machine.kept is not None
    # Measured: what the launcher has open at most; a rank has fewer.
    takes = 9 * world_size + 21 if method == "reexec" else 6 * world_size + 11
    if not idle and machine.open_files is not None and machine.open_files < takes:
        raise RequestError(
            f"a world of {world_size} ranks",
            f"it takes up to {takes} open files, and this process may open {machine.open_files} "
            "more",
            f"allow more, `ulimit -n {max(1024, 4 * takes)}`",
        )


def _check_kept(limits: Mapping[str, Any]) -> None:
    restarts = limits["max_restarts"]
    if restarts:
        raise RequestError(
            f"max_restarts={restarts} for kept workers",
            "a call that fails ends them, and the next call starts them again",
            "leave it out, or use distribute.run, which makes the same call again",
        )


def _check_attached(limits: Mapping[str, Any], external: External | None, machine: Machine) -> None:
    restarts = limits["max_restarts"]
    if restarts and external is None:
        raise RequestError(
            f"max_restarts={restarts}",
            "this process is a rank of a group that it holds, which nobody can start again",
            "leave it out here",
        )
    if external is not None and restarts > external.max_restarts:
        raise RequestError(
            f"max_restarts={restarts}",
            f"{external.by} started this rank, and starts it again {external.max_restarts} times",
            f"pass `--max-restarts {restarts}` to torchrun, or leave it out here",
        )
    if limits["deadline"] is not None and not machine.main_thread:
        raise RequestError(
            f"deadline={limits['deadline']:g} in a thread",
            "this process is a rank itself, and only its main thread can be made to leave",
            "call from the main thread, or leave it out",
        )


def _check_output(asked: str | PurePath, world_size: int, fact: str) -> None:
    # In a world of one everything works: there is no other rank whose output could be in the way.
    if asked != "all" and world_size > 1:
        raise RequestError(
            f"output={str(asked)!r}",
            f"{fact}, and it prints where its process does",
            "leave it out here, and print with ctx.print or redirect it where the processes are "
            "started",
        )


def _check_external(request: Request, external: External) -> None:
    wanted = indices(request.devices)
    if wanted is not None and len(wanted) != external.local_world_size:
        raise RequestError(
            f"devices={request.devices!r}",
            f"{external.by} started {external.local_world_size} processes on this node",
            f'pass devices={external.local_world_size}, or "auto" to take what is there',
        )
    if request.num_nodes not in (1, external.num_nodes):
        raise RequestError(
            f"num_nodes={request.num_nodes}",
            f"{external.by} started {external.num_nodes} node(s)",
            "leave num_nodes out to take what is there",
        )
