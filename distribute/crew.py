"""A set of workers as the launcher holds it: calls go in, outcomes come out."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from distribute import consumer, display, ending, interrupt, notice, rendezvous
from distribute.ambient import Settings, Streams
from distribute.channel import Channel
from distribute.ending import Worker
from distribute.failure import Failure
from distribute.interrupt import Signals
from distribute.messages import Call, Forget, Hold
from distribute.outcome import Outcome
from distribute.output import Forwarder, Tap
from distribute.payload import Payload
from distribute.place import Place, places
from distribute.plan import Plan
from distribute.process import Process, is_terminal, leads_group
from distribute.sent import News
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
        muted: Descriptor of its standard output up to the call, or None if that is shown, too.
        group: Whether it leads a process group of its own; otherwise it is in the launcher's.
    """

    place: Place
    ours: Channel
    theirs: Channel
    listening: socket.socket | None
    stdout: int | None
    stderr: int | None
    muted: int | None
    group: bool


Make = Callable[[Berth], Process]


@dataclass
class Crew:
    """The workers of one world, all in other processes.

    Attributes:
        members: One for each rank, in order.
        port: Port of the rendezvous store.
        ready_timeout: See `Supervisor`.
        calls: How many calls they have been given.
        keep: Whether they are for more than one call, and hold on to their process group.
        group: Number of the call whose process group they hold, or None.
    """

    members: list[Worker]
    port: int
    ready_timeout: float | None = None
    calls: int = field(default=0)
    keep: bool = False
    group: int | None = field(default=None)

    def call(
        self,
        plan: Plan,
        payload: Payload | None,
        *,
        began: float,
        restarts: int = 0,
    ) -> list[Outcome]:
        """Has every rank run a task.

        Args:
            plan: The plan.
            payload: The task, or None when the workers have it already.
            began: When the whole call began, by the monotonic clock.
            restarts: How often the world was started again.

        Raises:
            Failure: The call did not succeed, and the processes have been ended.
        """
        with Signals() as signals, self.forwarded(plan) as forwarder:
            outcomes = Supervisor(
                self.members,
                lambda: self.next_call(plan, payload, restarts),
                plan,
                began=began,
                ready_timeout=self.ready_timeout,
                signals=signals,
                catch_up=forwarder.catch_up,
            ).run()
        if not all(one.holds_group for one in outcomes):
            self.group = None
        return outcomes

    def tell(self, news: News) -> None:
        """Tells the workers which buffers to keep from now on, and which no longer."""
        holds = [Hold(number, Payload([size], None, files)) for number, size, files in news.files]
        for worker in self.members:
            try:
                for one in (*map(Forget, news.forgotten), *holds):
                    worker.channel.send(one)
            except OSError:
                pass  # it has ended; the next call says so

    @contextmanager
    def forwarded(self, plan: Plan) -> Generator[Forwarder]:
        """Forwards the ranks' output meanwhile, as the plan says where to."""
        taps = [one.tap for one in self.members if one.tap is not None]
        forwarder = Forwarder(taps, plan.output)
        forwarder.start()
        try:
            yield forwarder
        finally:
            forwarder.finish()

    def next_call(self, plan: Plan, payload: Payload | None, restarts: int = 0) -> Call:
        """Makes the message of the next call, with the surroundings of this moment."""
        streams = Streams.capture()
        number, self.calls = self.calls, self.calls + 1
        if self.group is None or not self.keep:
            self.group = number
        return Call(
            number=number,
            plan=plan,
            port=self.port,
            seed=streams.seed() if plan.seed is None else plan.seed,
            streams=streams,
            settings=Settings.capture(),
            display=display.here(),
            group=self.group,
            keep=self.keep,
            restarts=restarts,
            payload=payload,
        )

    def close(self, grace: float) -> None:
        """Lets the workers leave; they are gone afterwards."""
        ending.close(self.members, grace)


def assemble(plan: Plan, make: Make, *, ready_timeout: float | None = None) -> Crew:
    """Makes the workers of all ranks of a world on this machine.

    Args:
        plan: The plan.
        make: Makes one.
        ready_timeout: See `Supervisor`.
    """
    with rendezvous.listen() as listening:
        port: int = listening.getsockname()[1]
        wanted = planned_places(plan, port)
        members = make_all(wanted, make, listening, detached=plan.detached)
        return Crew(members, port, ready_timeout)


def planned_places(plan: Plan, port: int) -> list[Place]:
    """Returns the places of a plan's ranks, in order."""
    return places(
        accelerator=plan.accelerator,
        devices=plan.devices,
        cores=plan.cores,
        port=port,
        environ=os.environ,
    )


def make_all(
    wanted: Iterable[Place],
    make: Make,
    listening: socket.socket | None,
    *,
    detached: bool = False,
    muted: bool = False,
) -> list[Worker]:
    """Makes a worker for each place; all or none.

    Args:
        wanted: The places.
        make: Makes the process of one.
        listening: The listening socket of the rendezvous, for rank 0.
        detached: Whether not even rank 0 writes to the launcher's terminal.
        muted: Whether their standard output is not shown before the call.
    """
    members: list[Worker] = []
    try:
        for place in wanted:
            with interrupt.held():
                ours = listening if place.rank == 0 else None
                members.append(_make(place, make, ours, detached, muted))
    except BaseException:
        ending.end(members, 0.0)
        raise
    return members


def _make(
    place: Place, make: Make, listening: socket.socket | None, detached: bool, muted: bool
) -> Worker:
    rank = place.rank
    ours, theirs = Channel.pair()
    # On a terminal rank 0 keeps it: progress bars and prompts are to be the real ones.
    keeps = rank == 0 and not detached
    tap, (stdout, stderr) = Tap.open(
        rank,
        stdout=not (keeps and is_terminal(1)),
        stderr=not (keeps and is_terminal(2)),
        together=detached or consumer.together(),
    )
    above: int | None = None
    try:
        above = tap.muted() if muted else None
        group = leads_group(rank)
        process = make(Berth(place, ours, theirs, listening, stdout, stderr, above, group))
    except BaseException:
        ours.close()
        tap.close()
        raise
    finally:
        theirs.close()
        for one in (stdout, stderr, above):
            if one is not None:
                os.close(one)
    return Worker(rank, ours, process, tap=tap, scratch=place.scratch)


def run_once(plan: Plan, payload: Payload | None, launch: Callable[[], Crew]) -> list[Outcome]:
    """Makes workers, has them run one task, and lets them go; again as the plan allows it.

    Args:
        plan: The plan.
        payload: The task, or None when the workers will have it already.
        launch: Makes the workers.

    Raises:
        Failure: The call did not succeed.
    """
    began = time.monotonic()
    try:
        for restarts in range(plan.max_restarts + 1):
            try:
                return _run_world(plan, payload, launch, began, restarts)
            except Failure as failure:
                if restarts == plan.max_restarts or not failure.restartable:
                    raise
                notice.tell(
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
    launch: Callable[[], Crew],
    began: float,
    restarts: int,
) -> list[Outcome]:
    crew = launch()
    try:
        return crew.call(plan, payload, began=began, restarts=restarts)
    finally:
        crew.close(plan.grace)
