"""A set of workers as the launcher holds it: calls go in, outcomes come out."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from distribute import ending, rendezvous
from distribute.ambient import Settings, Streams
from distribute.channel import Channel
from distribute.ending import Worker
from distribute.failure import Failure
from distribute.interrupt import Signals
from distribute.messages import Call
from distribute.outcome import Outcome
from distribute.output import Forwarder, Tap
from distribute.payload import Payload
from distribute.place import Place, places
from distribute.plan import Plan
from distribute.process import Process, is_terminal, leads_group
from distribute.supervise import Supervisor


@dataclass(frozen=True)
class Berth:
    """Where a worker is to be made, and what its process gets with it.

    Attributes:
        place: Its place.
        ours: The launcher's end of its control channel.
        theirs: Its own end.
        listening: The listening socket of the rendezvous, if it is rank 0.
        stdout: Descriptor of its standard output, or None for the launcher's.
        stderr: Descriptor of its standard error, or None for the launcher's.
        group: Whether it leads a process group of its own; otherwise it is in the launcher's.
    """

    place: Place
    ours: Channel
    theirs: Channel
    listening: socket.socket | None
    stdout: int | None
    stderr: int | None
    group: bool


Make = Callable[[Berth], Process]


@dataclass
class Workers:
    """The workers of one world, all in other processes.

    Attributes:
        members: One for each rank, in order.
        port: Port of the rendezvous store.
        calls: How many calls they have been given.
    """

    members: list[Worker]
    port: int
    calls: int = field(default=0)

    def call(
        self,
        plan: Plan,
        payload: Payload | None,
        *,
        began: float,
        ready_timeout: float | None = None,
        restarts: int = 0,
    ) -> list[Outcome]:
        """Has every rank run a task.

        Args:
            plan: The plan.
            payload: The task, or None when the workers have it already.
            began: When the whole call began, by the monotonic clock.
            ready_timeout: See `Supervisor`.
            restarts: How often the world was started again.

        Raises:
            Failure: The call did not succeed, and the processes have been ended.
        """
        with Signals() as signals, self.forwarded() as forwarder:
            return Supervisor(
                self.members,
                lambda: self.next_call(plan, payload, restarts),
                plan,
                began=began,
                ready_timeout=ready_timeout,
                signals=signals,
                catch_up=forwarder.catch_up,
            ).run()

    @contextmanager
    def forwarded(self) -> Generator[Forwarder]:
        """Forwards the ranks' output meanwhile."""
        forwarder = Forwarder([one.tap for one in self.members if one.tap is not None])
        forwarder.start()
        try:
            yield forwarder
        finally:
            forwarder.finish()

    def next_call(self, plan: Plan, payload: Payload | None, restarts: int = 0) -> Call:
        """Makes the message of the next call, with the surroundings of this moment."""
        streams = Streams.capture()
        number, self.calls = self.calls, self.calls + 1
        return Call(
            number=number,
            plan=plan,
            port=self.port,
            seed=streams.seed() if plan.seed is None else plan.seed,
            streams=streams,
            settings=Settings.capture(),
            restarts=restarts,
            payload=payload,
        )

    def close(self, grace: float) -> None:
        """Lets the workers leave; they are gone afterwards."""
        ending.close(self.members, grace)


def assemble(plan: Plan, make: Make) -> Workers:
    """Makes the workers of all ranks of a world on this machine."""
    with rendezvous.listen() as listening:
        port: int = listening.getsockname()[1]
        return Workers(make_all(planned_places(plan, port), make, listening), port)


def planned_places(plan: Plan, port: int) -> list[Place]:
    """Returns the places of a plan's ranks, in order."""
    return places(
        accelerator=plan.accelerator,
        devices=plan.devices,
        cores=plan.cores,
        port=port,
        environ=os.environ,
    )


def make_all(wanted: Iterable[Place], make: Make, listening: socket.socket | None) -> list[Worker]:
    """Makes a worker for each place; all or none."""
    members: list[Worker] = []
    try:
        for place in wanted:
            worker = _make(place, make, listening if place.rank == 0 else None)
            members.append(worker)
    except BaseException:
        ending.end(members, 0.0)
        raise
    return members


def _make(place: Place, make: Make, listening: socket.socket | None) -> Worker:
    rank = place.rank
    ours, theirs = Channel.pair()
    # On a terminal rank 0 keeps it: progress bars and prompts are to be the real ones.
    tap, (stdout, stderr) = Tap.open(
        rank, stdout=rank != 0 or not is_terminal(1), stderr=rank != 0 or not is_terminal(2)
    )
    try:
        process = make(Berth(place, ours, theirs, listening, stdout, stderr, leads_group(rank)))
    except BaseException:
        ours.close()
        tap.close()
        raise
    finally:
        theirs.close()
        for one in (stdout, stderr):
            if one is not None:
                os.close(one)
    return Worker(rank, ours, process, tap=tap)


def run_once(
    plan: Plan, payload: Payload | None, make: Make, *, ready_timeout: float | None = None
) -> list[Outcome]:
    """Makes workers, has them run one task, and lets them go; again as the plan allows it.

    Raises:
        Failure: The call did not succeed.
    """
    began = time.monotonic()
    try:
        for restarts in range(plan.max_restarts + 1):
            try:
                return _run_world(plan, payload, make, began, ready_timeout, restarts)
            except Failure as failure:
                if restarts == plan.max_restarts or not failure.restartable:
                    raise
                sys.stderr.write(
                    f"distribute: {failure.headline}; the world is started again, restart "
                    f"{restarts + 1} of {plan.max_restarts}\n"
                )
        raise AssertionError
    finally:
        if payload is not None:
            payload.close()


def _run_world(
    plan: Plan,
    payload: Payload | None,
    make: Make,
    began: float,
    ready_timeout: float | None,
    restarts: int,
) -> list[Outcome]:
    workers = assemble(plan, make)
    try:
        return workers.call(
            plan, payload, began=began, ready_timeout=ready_timeout, restarts=restarts
        )
    finally:
        workers.close(plan.grace)
