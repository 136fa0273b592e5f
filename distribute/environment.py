"""Reading the environment: are we a worker, or one of an external launcher's processes?

Names of variables that are written are in `place`. Nothing here looks at `os.environ` by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distribute.errors import RequestError

# "<descriptors, or ->:<port of its world>:<process id>". The id tells a worker from a program that
# a rank started, which inherits the variable and is no rank; the port tells the variables of that
# rank from those of a launcher in between.
WORKER_MARKER = "DISTRIBUTE_WORKER"

# Set by the user, it shows what re-executed workers print before their call.
_SHOWS_ALL = "DISTRIBUTE_SHOW_ALL"

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
        restarts: How often the launcher has started the world again.
        max_restarts: How often it will.
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
    restarts: int = 0
    max_restarts: int = 0


def is_worker(environ: Mapping[str, str], pid: int) -> bool:
    """Tells whether this very process is a worker."""
    return _marker(environ)[2] == str(pid)


def worker_descriptors(environ: Mapping[str, str], pid: int) -> tuple[int, int, int, int] | None:
    """Returns the descriptors that this re-executed worker was started with.

    The first three are the control channel's, the last is its standard output in the call.
    """
    parts = _marker(environ)[0].split(",")
    if is_worker(environ, pid) and len(parts) == 4 and all(one.isdigit() for one in parts):
        return int(parts[0]), int(parts[1]), int(parts[2]), int(parts[3])
    return None


def shows_all(environ: Mapping[str, str]) -> bool:
    """Tells whether to show what re-executed workers print before their call."""
    return environ.get(_SHOWS_ALL, "") not in ("", "0")


def _marker(environ: Mapping[str, str]) -> list[str]:
    parts = environ.get(WORKER_MARKER, "").split(":")
    return parts if len(parts) == 3 else ["", "", ""]


def partial_world(environ: Mapping[str, str]) -> str:
    """Says which variables of a launcher are set without the others, or nothing.

    The address alone is no sign of a launcher.
    """
    set_ones = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK") if name in environ
    ]
    missing = [name for name in _WORLD if name not in environ]
    if not set_ones or not missing:
        return ""
    verb = "is" if len(set_ones) == 1 else "are"
    return (
        f"{', '.join(set_ones)} {verb} set without {', '.join(missing)}, and {verb} no launcher's"
    )


def external_world(environ: Mapping[str, str]) -> External | None:
    """Returns the world that an external launcher set up for this process, if one did.

    A partial set of variables means nothing: a stray `LOCAL_RANK` of some other tool must not turn
    a program into a rank. Neither do variables that a program inherited from a worker of ours.

    Raises:
        RequestError: A variable of a full set makes no sense.
    """
    if any(name not in environ for name in _WORLD):
        return None
    if _marker(environ)[1] == environ["MASTER_PORT"]:
        return None
    by = (
        "torchrun"
        if "TORCHELASTIC_RUN_ID" in environ
        else "another launcher (RANK and WORLD_SIZE are set)"
    )
    world_size = _number(environ, "WORLD_SIZE", least=1)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size, least=1)
    return External(
        by=by,
        rank=_number(environ, "RANK"),
        local_rank=_number(environ, "LOCAL_RANK"),
        node_rank=_number(environ, "GROUP_RANK", _number(environ, "NODE_RANK", 0)),
        world_size=world_size,
        local_world_size=local_world_size,
        num_nodes=max(1, world_size // local_world_size),
        master_addr=environ["MASTER_ADDR"],
        master_port=_number(environ, "MASTER_PORT"),
        hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_number(environ, "TORCHELASTIC_RESTART_COUNT"),
        max_restarts=_number(environ, "TORCHELASTIC_MAX_RESTARTS"),
    )


def _number(environ: Mapping[str, str], name: str, default: int = 0, *, least: int = 0) -> int:
    text = environ.get(name, str(default))
    if text.strip().isdecimal() and int(text) >= least:
        return int(text)
    raise RequestError(
        f"{name}={text!r} in the environment, beside the other variables of a launcher",
        f"it is a whole number from {least}",
        "set it as torchrun does, or unset RANK and WORLD_SIZE",
    )
