"""Reading the environment: are we a worker, or one of an external launcher's processes?

Names of variables that are written are in `place`. Nothing here looks at `os.environ` by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# "<descriptor of the control channel, or ->:<process id>". The id tells a worker from a program
# that a rank started, which inherits the variable and is no rank.
WORKER_MARKER = "DISTRIBUTE_WORKER"

_WORLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class External:
    """A world that somebody else started and this process is a rank of.

    Attributes:
        by: Who started it, for messages.
        rank, local_rank, node_rank, world_size, local_world_size, num_nodes: As in `World`.
        master_addr: Where the rendezvous store listens.
        master_port: Its port.
        hosted: Whether the launcher hosts that store; otherwise rank 0 does.
    """

    by: str
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    master_addr: str
    master_port: int
    hosted: bool


def is_worker(environ: Mapping[str, str], pid: int) -> bool:
    """Tells whether this very process is a worker."""
    return environ.get(WORKER_MARKER, "").partition(":")[2] == str(pid)


def worker_descriptor(environ: Mapping[str, str], pid: int) -> int | None:
    """Returns the control channel's descriptor that this re-executed worker was started with."""
    descriptor = environ.get(WORKER_MARKER, "").partition(":")[0]
    return int(descriptor) if is_worker(environ, pid) and descriptor.isdigit() else None


def external_world(environ: Mapping[str, str]) -> External | None:
    """Returns the world that an external launcher set up for this process, if one did.

    A partial set of variables means nothing: a stray `LOCAL_RANK` of some other tool must not turn
    a program into a rank. Neither do variables that a program inherited from a worker of ours.
    """
    if WORKER_MARKER in environ or any(name not in environ for name in _WORLD):
        return None
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "the environment (RANK, WORLD_SIZE)"
    world_size = int(environ["WORLD_SIZE"])
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    return External(
        by=by,
        rank=int(environ["RANK"]),
        local_rank=int(environ["LOCAL_RANK"]),
        node_rank=int(environ.get("GROUP_RANK", environ.get("NODE_RANK", "0"))),
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=max(1, world_size // local_world_size),
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )
