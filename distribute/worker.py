"""A worker: one process from its first step to its last, the same for every start method.

    launcher                         worker
       |  (process is started)          |   settle: directory, search path, threads, device
       |  <---------- Ready ----------- |   prove (after a fork): threads work
       |  ----------- Call -----------> |   unpack the task, join the call's process group
       |  <---------- Joining --------- |
       |  <---------- Joined ---------- |
       |  ------------ Go ------------> |   once all ranks have joined: run the function
       |  <---------- Outcome --------- |   leave the process group, unless it is kept
       |  ------- Call or Close ------> |   again, or end

The rank in the calling process (re-exec, attached, inline) takes the same steps without the
process: `run_call` is what all of them share.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from distribute import (
    ambient,
    devices,
    lifeline,
    memory,
    outcome,
    record,
    rendezvous,
    scratch,
    variables,
)
from distribute.channel import Channel
from distribute.context import Context, entered
from distribute.display import PLAIN
from distribute.environment import WORKER_MARKER
from distribute.handlers import Deferred
from distribute.interrupt import WorldEnded, from_handler
from distribute.link import Link, WatchedLink
from distribute.messages import (
    Call,
    Close,
    Forget,
    Go,
    Hold,
    Joined,
    Joining,
    Leave,
    Ready,
    Stop,
)
from distribute.outcome import Outcome
from distribute.place import Place, marked
from distribute.record import Record
from distribute.reference import main_classes
from distribute.rendezvous import Rendezvous
from distribute.snapshot import untouched
from distribute.state import Held
from distribute.task import Task
from distribute.world import World

T = TypeVar("T")


class Seat:
    """A rank's standing facts and its connection to the store, kept from call to call."""

    def __init__(self, place: Place, listening: int | None) -> None:
        self.place = place
        self.device = devices.device(place.accelerator, place.device_index)
        self._listening = listening
        self._rendezvous: Rendezvous | None = None
        # The call whose process group is still held, or None.
        self._group: int | None = None
        self._freed = False

    def join(self, call: Call, *, local: bool) -> Context:
        """Joins the process group of a call, if the world has more than one rank.

        Args:
            call: The call.
            local: Whether this is the calling process.
        """
        plan, rank = call.plan, self.place.rank
        if self._group is not None and self._group != call.group:
            self.leave()
        if plan.world_size > 1 and self._group is None:
            if self._rendezvous is None:
                # The server's from now on, whatever comes of it.
                listening, self._listening = self._listening, None
                self._rendezvous = Rendezvous(
                    rendezvous.LOOPBACK,
                    call.port,
                    server=rank == 0,
                    listening=listening,
                    timeout=plan.rendezvous_timeout,
                )
                if self._freed:
                    raise WorldEnded
            self._rendezvous.join(
                f"call-{call.group}",
                backend=plan.backend,
                rank=rank,
                world_size=plan.world_size,
                timeout=plan.timeout,
                device=self.device,
            )
            self._group = call.group
        world = World(
            rank=rank,
            local_rank=rank,
            node_rank=0,
            world_size=plan.world_size,
            local_world_size=plan.world_size,
            num_nodes=1,
            device=self.device,
            backend=plan.backend,
            seed=call.seed,
            grouped=plan.world_size > 1,
            restart_count=call.restarts,
            check=plan.check_collectives,
        )
        return Context(world, PLAIN if plan.detached and not local else call.display)

    @property
    def holds_group(self) -> bool:
        """Whether the process group of the last call is there, as it was made."""
        return self._group is not None and rendezvous.only_group()

    def leave(self) -> None:
        """Lets go of the process group of a call that was good; those who wait in it are freed."""
        self._group = None
        rendezvous.leave(failed=False)

    def free(self) -> None:
        """Frees whoever waits in the store; called by the supervisor's thread."""
        self._freed = True  # first: who is connecting right now looks at it afterwards
        rendezvous.hold_groups()
        if self._rendezvous is not None:
            self._rendezvous.drop_server()

    def close(self) -> None:
        """Lets go of the connection to the store; the world has ended."""
        self.free()
        self._rendezvous = None
        if self._listening is not None:
            os.close(self._listening)
            self._listening = None


def run_call(
    seat: Seat,
    call: Call,
    take: Callable[[], Task],
    link: Link,
    *,
    local: bool,
    guarded: Callable[[Callable[[], Any]], Any] | None = None,
) -> Outcome:
    """Takes one rank through one call, up to and including its report.

    Args:
        seat: The rank.
        call: The call.
        take: Returns the task.
        link: The control channel.
        local: Whether this is the calling process, which keeps the value itself.
        guarded: Runs a function such that the supervisor can free it, or None.
    """
    rank = seat.place.rank
    record.fresh()
    held: Held | None = None
    # The calling process is the user's, with all its handlers.
    handlers = Deferred(active=not local)
    try:
        task = take()
        if rank == 0 and task.parts:
            held = Held(task.parts)
        link.send(Joining(rank))
        context = seat.join(call, local=local)
        link.send(Joined(rank))
        while not isinstance(message := link.receive(), Go):
            if isinstance(message, Stop):
                raise WorldEnded
        call.settings.apply()
        set_streams(call)
        write_back = not local or call.plan.write_back
        function = partial(run_user, context, task, guarded, write_back=write_back)
        value = handlers.after(partial(_without_children, function))
        wanted = rank == 0 or call.plan.returns == "all"
        result = outcome.returned(rank, value if wanted else None, local=local, held=held)
        result.holds_group = call.keep and seat.holds_group
        if rank == 0 and call.plan.seed is None and not local:
            result.streams = ambient.Streams.capture()
    except WorldEnded:
        result = Outcome(rank, "freed")
    except SystemExit as error:
        # In the calling process a signal handler of the user ends the program and not the rank.
        if local and from_handler(error):
            result = outcome.raised(rank, error, local=local)
        else:
            result = outcome.system_exit(rank, error, local=local, held=held)
    except BaseException as error:
        result = outcome.raised(rank, handlers.cause(error), local=local)
    try:
        if not local:
            # The calling process prints on, and its unfinished line is not to be in the way.
            flush()
        link.send(replace(result, local=None) if local else result)
        result.drop()
        handlers.end()
        return result
    finally:
        # The exception's traceback holds this frame: together they would be garbage that keeps
        # models and sockets until the next collection.
        del result


def run_user(
    context: Context,
    task: Task,
    guarded: Callable[[Callable[[], Any]], Any] | None = None,
    *,
    write_back: bool = True,
) -> Any:
    """Calls the user's function with its context.

    Args:
        context: The context.
        task: The function with its arguments.
        guarded: See `run_call`.
        write_back: Whether what it does to the objects that it is given is to stay.
    """

    def body() -> Any:
        return task.run(context) if guarded is None else guarded(lambda: task.run(context))

    with entered(context):
        if context.device.type != "cpu":
            context._attend(task.stateful())
        return body() if write_back else untouched(task.stateful(), body)


def _without_children(function: Callable[[], T]) -> T:
    """Calls a function; what it forks ends where it leaves the function, as a program ends.

    A fork has none of the threads and none of the channels that a rank needs to go on.
    """
    process = os.getpid()
    try:
        value = function()
    except BaseException as error:
        if os.getpid() != process:
            _end(error)
        raise
    if os.getpid() != process:
        _end(SystemExit())
    return value


def _end(error: BaseException) -> NoReturn:
    code: object = 1
    if isinstance(error, SystemExit):
        code = error.code or 0
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    flush()
    os._exit(code & 0xFF)


def set_streams(call: Call) -> None:
    """Starts the random-number generators of a rank: all ranks alike."""
    if call.plan.seed is None:
        call.streams.restore()
    else:
        ambient.seed_all(call.plan.seed)


def serve(
    link: WatchedLink,
    seat: Seat,
    *,
    ready: Ready,
    first: Task | None = None,
) -> NoReturn:
    """Works for the launcher until it closes the channel.

    Args:
        link: The control channel.
        seat: The rank.
        ready: What to report first.
        first: The task of a call that carries none, or the part of it that is already here.
    """
    held: dict[int, list[int]] = {}
    link.send(ready)
    while not isinstance(message := _next(link), Close):
        if isinstance(message, Leave):
            seat.leave()
            continue
        if isinstance(message, Hold):
            held[message.number] = message.payload.files
            continue
        if isinstance(message, Forget):
            memory.close(held.pop(message.number))
            continue
        assert isinstance(message, Call)
        result = run_call(seat, message, _taker(message, first, held), link, local=False)
        if not result.failed and not result.holds_group:
            seat.leave()
        del result
    flush()
    os._exit(0)


def _next(link: WatchedLink) -> Any:
    """Waits for a message; after a moment without one, others may wait for this rank in a group."""
    message = link.receive_within(rendezvous.MOMENT) if rendezvous.left() else None
    if message is None:
        rendezvous.free_others()
        message = link.receive()
    return message


def _taker(call: Call, first: Task | None, held: Mapping[int, list[int]]) -> Callable[[], Task]:
    def take() -> Task:
        if call.payload is None:
            assert first is not None
            return first
        try:
            sent: Task = call.payload.load(held=held)
        finally:
            call.payload.close()
        variables.put(sent.variables)
        return sent if first is None or sent.function is not None else sent.completed_by(first)

    return take


def show(own: Record) -> None:
    """Has this process tell what it is doing, and where it crashes.

    In place of what the user may have chosen for crashes: the error of the call shows the stack.
    """
    own.open()
    own.show_stacks()
    record.use(own)


def settle(place: Place) -> None:
    """Makes this process a worker in its place, whatever it was before."""
    os.environ.clear()
    os.environ.update(place.environ)
    os.environ[WORKER_MARKER] = marked(os.getpid(), place.port)
    os.chdir(place.cwd)
    os.umask(place.umask)
    sys.path[:] = place.sys_path
    sys.argv[:] = place.argv
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    scratch.offer(place.scratch)
    settle_threads(place)
    settle_streams()


def share_group() -> None:
    """Settles this process in the launcher's process group, where it may read from the terminal."""
    # Ctrl-C on the terminal reaches this process too; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline.end_forks()


def settle_threads(place: Place) -> None:
    """Limits torch to this rank's part of the cores, unless the user has chosen a number."""
    if place.threads is not None:
        import torch

        torch.set_num_threads(place.threads)


def settle_streams() -> None:
    """Has standard output and error go to this process's descriptors, line by line.

    A fork inherits the caller's objects, which may stand for a notebook's cell or a test's capture:
    the launcher is there to write to those.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        try:
            real = stream is getattr(sys, f"__{name}__") and stream.fileno() == number
        except (AttributeError, ValueError, OSError):
            real = False  # None, closed, or no file at all
        if real:
            stream.reconfigure(line_buffering=True)
        else:
            errors = "strict" if number == 1 else "backslashreplace"
            fresh = os.fdopen(number, "w", buffering=1, errors=errors, closefd=False)
            setattr(sys, name, fresh)


def prove() -> None:
    """Runs what hangs in a badly forked child: a parallel operation and a matrix product."""
    import torch

    torch.ones(1 << 16).add_(1).sum()
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))


def main(descriptor: int, life: int, record: int) -> NoReturn:
    """Is the program of a worker that starts as a fresh interpreter."""
    channel = Channel.inherited(descriptor, life, record)
    show(channel.record)
    place: Place = channel.receive()
    listening: int | None = channel.receive()
    settle(place)
    group = os.getpgrp() == os.getpid()
    if not group:
        share_group()
    link = WatchedLink(channel, group=group)
    serve(link, Seat(place, listening), ready=Ready(place.rank))


def main_names() -> frozenset[str]:
    """Returns the qualified names of the classes that this process's `__main__` defines."""
    return frozenset(main_classes())


def flush() -> None:
    """Writes out what the standard streams hold back."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):
            pass  # closed, or never there
