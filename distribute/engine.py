"""One call from the request to the value: both doors lead here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, Any

from distribute import command, stateful
from distribute.environment import is_worker
from distribute.errors import RequestError
from distribute.messages import Site
from distribute.plan import Plan, resolve
from distribute.request import Request
from distribute.task import Task, check_arguments, check_function, context_position

if TYPE_CHECKING:
    from distribute.context import Context
    from distribute.outcome import Outcome

# Whether this process has made a distributed call that was no rank's own; re-exec serves only
# the first one of a script.
_called = False


def call(
    request: Request,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    site: Site,
) -> Any:
    """Runs a function as requested and returns its value or raises its exception."""
    __tracebackhide__ = True
    from distribute import context

    task = checked_task(function, args, kwargs)
    here = context.running()
    if here is not None:
        return _in_place(request, task, here)
    arrive(task, site)
    return carry_out(plan(request), partial(launch, task=task, site=site))


def checked_task(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Task:
    """Returns what a call runs; refuses what cannot be called, or not with these arguments."""
    check_function(function)
    task = Task(function, args, kwargs, context_position(function))
    check_arguments(task)
    return task


def arrive(task: Task, site: Site) -> None:
    """Joins the launcher, if this is a re-executed worker at its first call; returns otherwise."""
    from distribute.launchers import reexec

    if reexec.arriving():
        reexec.join(task, site)


def plan(request: Request, *, keep: bool = False) -> Plan:
    """Returns what a call with this request would do now.

    Args:
        request: The request.
        keep: Whether the workers are to stay for further calls.
    """
    from distribute import machine
    from distribute.launchers import reexec

    idle = reexec.kept()
    facts = machine.read(
        earlier_calls=_called,
        kept=None if idle is None else idle[0],
        kept_accelerator="" if idle is None else idle[1],
        output=request.output,
    )
    return resolve(request, os.environ, facts, keep=keep)


def in_worker(environ: Mapping[str, str]) -> bool:
    """Tells whether this process is a worker of ours."""
    return is_worker(environ, os.getpid())


def calling_site(function: Callable[..., Any]) -> Site:
    """Returns the function and the line that calls it: the nearest frame outside this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("distribute."):
        frame = frame.f_back
    name = getattr(function, "__qualname__", repr(function))
    if frame is None:
        return Site(name, "?", 0)
    return Site(name, command.absolute(frame.f_code.co_filename), frame.f_lineno)


def _in_place(request: Request, task: Task, context: Context) -> Any:
    devices = request.devices
    asked = len(devices) if isinstance(devices, list | tuple) else devices
    if isinstance(asked, int) and asked not in (1, context.local_world_size):
        raise RequestError(
            f"devices={devices!r} inside a running distributed call",
            f"that call has {context.local_world_size} ranks on this node, and a call inside it "
            "runs in the same world",
            'pass devices="auto" to the inner one, or call it after the outer one has returned',
        )
    value = task.run(context)
    return context.all_gather_object(value) if request.returns == "all" else value


def carry_out(chosen: Plan, launch: Callable[[Plan], list[Outcome]]) -> Any:
    """Carries a plan out, and returns the value of the call or raises its exception.

    Args:
        chosen: The plan.
        launch: Takes the ranks through the call; made again with another plan where their
            processes did not start working.
    """
    __tracebackhide__ = True
    from distribute import consumer, hosting, interrupt, notice
    from distribute.failure import NotReady

    if isinstance(chosen.output, PurePath) and chosen.forwarded:
        consumer.make_files(chosen.output, chosen.forwarded)
    global _called
    _called = True
    if chosen.remark:
        notice.tell(f"distribute: {chosen.remark}\n")
    with hosting.script_as_main(), interrupt.audible():
        done = _attempt(chosen, launch)
        if isinstance(done, NotReady) and command.frozen():
            done = RequestError(
                "several processes of a frozen program",
                f"it has no interpreter to start, and {done}",
                "make the call while no other thread computes, or run the script itself",
            )
        elif isinstance(done, NotReady):
            notice.tell(f"distribute: {done}; the fork server takes over\n")
            done = _attempt(replace(chosen, method="forkserver"), launch)
        if not isinstance(done, BaseException):
            return _value(chosen, done)
    try:
        raise done
    finally:
        del done  # its traceback holds this frame


def _attempt(
    chosen: Plan, launch: Callable[[Plan], list[Outcome]]
) -> list[Outcome] | BaseException:
    from distribute.failure import Failure

    # What was raised is raised again outside these blocks: they would become part of its chain, and
    # contextlib assigns to it, which a frozen dataclass refuses.
    with _standard_descriptors():
        try:
            return launch(chosen)
        except Failure as failure:
            return failure.news()
        except RequestError as error:
            return error.with_traceback(None)  # the way to it is ours alone
        except BaseException as error:
            _forget_failure(error)
            return error


def _forget_failure(error: BaseException) -> None:
    """Drops our own exception from the chain of one that came while the failed call was ended.

    As a second Ctrl-C does; the first one is no news then.
    """
    from distribute.failure import Failure

    link = error
    while (context := link.__context__) is not None:
        if isinstance(context, Failure):
            news = context.news()
            link.__context__ = None if isinstance(news, KeyboardInterrupt) else news
            return
        link = context


@contextmanager
def _standard_descriptors() -> Generator[None]:
    """Keeps the numbers of the standard streams from being taken by our own pipes and sockets."""
    taken: list[int] = []
    try:
        while (one := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(one, True)  # so that the ranks have them, too
            taken.append(one)
        os.close(one)
        yield
    finally:
        for one in taken:
            os.close(one)


def launch(chosen: Plan, task: Task, site: Site) -> list[Outcome]:
    """Has the ranks of a plan run a task, once.

    Raises:
        Failure: The call did not succeed.
    """
    from distribute.launchers import attached, fork, forkserver, inline, reexec, spawn

    match chosen.method:
        case "inline":
            return inline.run(chosen, task)
        case "attached":
            return attached.run(chosen, task, site)
        case "reexec":
            return reexec.run(chosen, task, site)
        case "fork":
            return with_state(chosen, task, partial(fork.run, chosen))
        case "forkserver":
            return with_state(chosen, task, partial(forkserver.run, chosen))
        case "spawn":
            return with_state(chosen, task, partial(spawn.run, chosen))


def with_state(chosen: Plan, task: Task, launch: Callable[[Task], list[Outcome]]) -> list[Outcome]:
    """Has ranks in other processes run a task, such that the state of its objects comes back.

    Args:
        chosen: The plan.
        task: The task.
        launch: Takes the ranks through the call.

    Raises:
        Failure: The call did not succeed.
    """
    parts = stateful.parts(task.stateful()) if chosen.write_back else ()
    outcomes = launch(replace(task, parts=parts))
    outcomes[0].parts = parts
    return outcomes


def _value(chosen: Plan, outcomes: list[Outcome]) -> Any:
    if chosen.method == "attached":
        return outcomes[0].value()
    streams = outcomes[0].streams
    if streams is not None:
        streams.restore()
    try:
        if chosen.returns == "all":
            return [one.value() for one in outcomes]
        return outcomes[0].value()
    finally:
        for one in outcomes:
            one.drop()
