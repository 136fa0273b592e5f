"""A set of workers as the launcher holds it: calls go in, outcomes come out."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from distribute import ending, rendezvous
from distribute.ambient import Settings, Streams
from distribute.channel import Channel
from distribute.ending import Worker
from distribute.messages import Call
from distribute.outcome import Outcome
from distribute.payload import Payload
from distribute.place import Place, places
from distribute.plan import Plan
from distribute.process import Process
from distribute.supervise import Supervisor

# Makes the process of one place. It gets the launcher's and the worker's end of the control
# channel, and the listening socket of the rendezvous if the worker is rank 0.
Make = Callable[[Place, Channel, Channel, socket.socket | None], Process]


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
        self, plan: Plan, payload: Payload | None, *, ready_timeout: float | None = None
    ) -> list[Outcome]:
        """Has every rank run a task.

        Args:
            plan: The plan.
            payload: The task, or None when the workers have it already.
            ready_timeout: See `Supervisor`.

        Raises:
            Failure: The call did not succeed, and the processes have been ended.
        """
        return Supervisor(
            self.members,
            lambda: self.next_call(plan, payload),
            grace=plan.grace,
            rendezvous_timeout=plan.rendezvous_timeout,
            ready_timeout=ready_timeout,
        ).run()

    def next_call(self, plan: Plan, payload: Payload | None) -> Call:
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
            ours, theirs = Channel.pair()
            try:
                process = make(place, ours, theirs, listening if place.rank == 0 else None)
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
            members.append(Worker(place.rank, ours, process))
    except BaseException:
        ending.end(members, 0.0)
        raise
    return members


def run_once(
    plan: Plan, payload: Payload | None, make: Make, *, ready_timeout: float | None = None
) -> list[Outcome]:
    """Makes workers, has them run one task, and lets them go.

    Raises:
        Failure: The call did not succeed.
    """
    try:
        workers = assemble(plan, make)
        try:
            return workers.call(plan, payload, ready_timeout=ready_timeout)
        finally:
            workers.close(plan.grace)
    finally:
        if payload is not None:
            payload.close()
