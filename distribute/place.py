"""The place of a worker: which rank it is and what surrounds it. Writes the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from distribute import cells, scratch
from distribute.environment import WORKER_MARKER

# Those that a child must not inherit: they belong to the launcher's own start.
_DROPPED = ("PYTHONINSPECT", WORKER_MARKER)


@dataclass(frozen=True)
class Place:
    """Everything about a worker that is known before it starts.

    Attributes:
        rank: Its rank; with one node also its local rank.
        world_size: Number of processes on all nodes.
        accelerator: torch's device type.
        device_index: Index of its device, or None where the type has no indices (cpu, mps).
        threads: Threads for each rank when the user has not chosen a number, else None.
        environ: Its whole environment.
        cwd: Its working directory.
        umask: Its file-creation mask.
        sys_path: Its module search path.
        argv: Its `sys.argv`.
        launcher: Process id of the launcher.
        port: Port of the rendezvous store.
        reads: Whether its standard input is the launcher's; otherwise it is empty.
        scratch: See the module of that name.
    """

    rank: int
    world_size: int
    accelerator: str
    device_index: int | None
    threads: int | None
    environ: dict[str, str]
    cwd: str
    umask: int
    sys_path: list[str]
    argv: list[str]
    launcher: int
    port: int
    reads: bool = False
    scratch: str = ""


# What a rank's environment has and the launcher's need not have.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", WORKER_MARKER,
)  # fmt: skip


def marked(pid: int, port: int) -> str:
    """Returns the marker of a worker that was not started with a descriptor."""
    return f"-:{port}:{pid}"


def places(
    *,
    accelerator: str,
    devices: tuple[int, ...],
    cores: int,
    port: int,
    environ: Mapping[str, str],
) -> list[Place]:
    """Returns the places of all ranks of a one-node world, in rank order."""
    world_size = len(devices)
    threads = None if "OMP_NUM_THREADS" in environ else max(1, cores // world_size)
    umask = os.umask(0)
    os.umask(umask)
    return [
        Place(
            rank=rank,
            world_size=world_size,
            accelerator=accelerator,
            device_index=None if accelerator in ("cpu", "mps") else index,
            threads=threads,
            environ=worker_environ(environ, rank, world_size, port, threads),
            cwd=os.getcwd(),
            umask=umask,
            sys_path=list(sys.path),
            argv=list(sys.argv),
            launcher=os.getpid(),
            port=port,
            # A notebook has no standard input; what its kernel has need never end.
            reads=rank == 0 and cells.kernel() is None,
            scratch=scratch.chosen(),
        )
        for rank, index in enumerate(devices)
    ]


def worker_environ(
    environ: Mapping[str, str], rank: int, world_size: int, port: int, threads: int | None
) -> dict[str, str]:
    """Returns the environment of a worker: the launcher's with the full set that torchrun sets."""
    full = {name: value for name, value in environ.items() if name not in _DROPPED}
    full |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # No process has this id: a program that a rank starts must not take itself for a rank.
    full[WORKER_MARKER] = marked(0, port)
    if threads is not None:
        full["OMP_NUM_THREADS"] = str(threads)
    # On one machine nothing has to leave it, whatever its host name resolves to.
    full.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return full
