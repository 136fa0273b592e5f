"""What a launcher and its workers say to each other; see `worker` for the order."""

from __future__ import annotations

from dataclasses import dataclass, field

from distribute.ambient import Settings, Streams
from distribute.display import Display
from distribute.payload import Payload
from distribute.plan import Plan


@dataclass(frozen=True)
class Site:
    """Which call of a script this is: the function and the line that calls it."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"`{self.function}` ({self.file}:{self.line})"


@dataclass(frozen=True)
class Ready:
    """From a worker: I am in place and may be given a call.

    Attributes:
        rank: The worker's rank.
        site: The call at which a re-executed script has arrived.
        main_names: Qualified names of the classes in its `__main__` module.
    """

    rank: int
    site: Site | None = None
    main_names: frozenset[str] = frozenset()


@dataclass
class Call:
    """To a worker: run this.

    Attributes:
        number: Count of the calls of this world, from 0.
        plan: The plan.
        port: Port of the rendezvous store.
        seed: Seed of the data order.
        streams: Random-number states to start from.
        settings: torch's settings to run under.
        display: What the launcher's output is shown on.
        group: Number of the call whose process group this one uses: its own, or an earlier one's
            that all ranks still hold.
        keep: Whether the ranks hold on to the group for a later call.
        restarts: How often the world was started again before this call.
        payload: The task; None when the worker has it already.
    """

    number: int
    plan: Plan
    port: int
    seed: int
    streams: Streams
    settings: Settings
    display: Display
    group: int
    keep: bool = False
    restarts: int = 0
    payload: Payload | None = field(default=None)


@dataclass
class Hold:
    """To a worker: keep this buffer, calls will refer to it by its number.

    Attributes:
        number: The number.
        payload: The buffer, in memory files.
    """

    number: int
    payload: Payload


@dataclass(frozen=True)
class Forget:
    """To a worker: no call will refer to this buffer again.

    Attributes:
        number: Its number.
    """

    number: int


@dataclass(frozen=True)
class Joining:
    """From a worker: I have my task and go to meet the others."""

    rank: int


@dataclass(frozen=True)
class Joined:
    """From a worker: I have joined the process group of the call."""

    rank: int


@dataclass(frozen=True)
class Go:
    """To a worker: all ranks have joined; run the function."""


@dataclass(frozen=True)
class Leave:
    """To a worker that has returned: let go of the process group, others may wait for you in it."""


@dataclass(frozen=True)
class Stop:
    """To the rank in the calling process: do not start, or do not wait any longer."""


@dataclass(frozen=True)
class Close:
    """To a worker: leave."""
