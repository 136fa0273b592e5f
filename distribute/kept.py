"""Workers that a user keeps: processes that stay for one call after the other."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, overload

from distribute import engine
from distribute.decorated import inside
from distribute.errors import RequestError
from distribute.plan import Plan
from distribute.reference import main_classes
from distribute.request import Request, one_of
from distribute.sent import Sent
from distribute.task import Task, packed

if TYPE_CHECKING:
    from distribute.crew import Crew
    from distribute.outcome import Outcome

R = TypeVar("R")


class Workers:
    """Processes that run one function after the other; made by `distribute.workers`.

    They start with the first `run`, and again with the one after a call that failed. They end with
    `close`, with the `with` block, with this object, and with the process that made it.

    Used by one thread at a time.
    """

    def __init__(self, request: Request) -> None:
        _refuse_inside()
        self._request = request
        self._plan = engine.plan(request, keep=True)
        self._held = _Held()
        # Not by `__del__`, which the interpreter does not promise to call at its end.
        self._end = weakref.finalize(self, self._held.abandon)

    @overload
    def run(self, fn: Callable[..., R], /, *args: Any, returns: Literal["main"] = "main") -> R: ...
    @overload
    def run(self, fn: Callable[..., R], /, *args: Any, returns: Literal["all"]) -> list[R]: ...
    def run(self, fn: Any, /, *args: Any, returns: str = "main") -> Any:
        """Runs a function on every worker, as `distribute.run` does.

        Args:
            fn: The function; it gets a context as with `distributed`. Give keyword arguments for it
                through `functools.partial`.
            *args: Its positional arguments, without the context.
            returns: `"main"` for rank 0's value, `"all"` for the list of every rank's.

        Raises:
            RequestError: It cannot be carried out; nothing was run.
            WorkerDied: A worker ended without a value or an exception.
            Exception: Whatever the function raised on the rank that failed first. The workers
                have been ended, and the next `run` starts new ones.
        """
        __tracebackhide__ = True
        _refuse_inside()
        function = inside(fn, "run")
        task = engine.checked_task(function, args, {})
        site = engine.calling_site(function)
        engine.arrive(task, site)
        wanted = cast("Literal['main', 'all']", one_of("returns", returns, ("main", "all")))
        with self._held.used("run"):
            if not self._end.alive:
                raise RequestError(
                    "run of workers that have been closed",
                    "their processes have ended for good",
                    "make new ones with distribute.workers(...)",
                )
            chosen = self._plan = replace(self.plan(), returns=wanted)
            launch = partial(self._held.run, task=task)
            if chosen.method == "attached":
                launch = partial(engine.launch, task=task, site=site)
            # An exception's traceback holds this frame, and a prompt or notebook holds the last
            # traceback: the object would live on where its variable has been given another one.
            del self
            return engine.carry_out(chosen, launch)

    def plan(self) -> Plan:
        """Returns the plan of the running workers, or what starting them would do now."""
        return self._held.plan or engine.plan(self._request, keep=True)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._plan.world_size

    def close(self) -> None:
        """Ends the workers, for good; nothing if they have been closed."""
        with self._held.used("close"):
            try:
                self._held.end()
            finally:
                self._end.detach()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        now = self._held.plan or self._plan
        state: str = now.method
        if not self._end.alive:
            state = "closed"
        elif now.method != "attached" and self._held.plan is None:
            state = "not started"
        return f"<distribute.Workers: {now.world_size} on {now.accelerator}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("workers belong to the process that made them")


class _Held:
    """The processes of `Workers`, apart from that object, whose own end is theirs."""

    def __init__(self) -> None:
        self._crew: Crew | None = None
        self._plan: Plan | None = None
        self._owner = os.getpid()
        # The classes of `__main__` that the workers have as well, as they are copies of this
        # process. A cell that is run again makes another one.
        self._shared: dict[str, weakref.ref[type]] = {}
        self._sent = Sent()
        self._lock = threading.Lock()
        self._abandoned = False

    @property
    def plan(self) -> Plan | None:
        """The plan by which the processes were started, if this process has any."""
        return self._plan if self._crew is not None and self._owner == os.getpid() else None

    @contextmanager
    def used(self, verb: str) -> Generator[None]:
        """Refuses to be used by two at once."""
        if not self._lock.acquire(blocking=False):
            raise RequestError(
                f"{verb} of workers in a call",
                "they run one function at a time, and another call has not ended",
                "wait for it, or make further workers with distribute.workers(...)",
            )
        try:
            yield
        finally:
            self._lock.release()
            if self._abandoned:
                self.end()

    def run(self, plan: Plan, task: Task) -> list[Outcome]:
        """Has every rank run a task, and the state of its objects come back; see `_call`."""
        return engine.with_state(plan, task, partial(self._call, plan))

    def _call(self, plan: Plan, task: Task) -> list[Outcome]:
        """Has every rank run a task; starts the processes if there are none.

        Raises:
            Failure: The call did not succeed, and the processes have been ended.
        """
        began = time.monotonic()
        started = self.plan is not None
        if not started:
            self._crew = None  # that of the process which this one is a fork of
            self._sent = Sent()
            copies = plan.method == "fork"
            self._shared = (
                {name: weakref.ref(one) for name, one in main_classes().items()} if copies else {}
            )
        # Before anything is started, or harmed: it may be impossible.
        sent = self._sent
        payload = packed(task, self._still_shared(), sent)
        news = sent.news()
        try:
            self._plan, self._owner = plan, os.getpid()
            if not started:
                self._crew = _launch(plan)
                self._crew.keep = True
            assert self._crew is not None
            self._crew.tell(news)
            sent.sweep()
            return self._crew.call(plan, payload, began=began)
        except BaseException:
            self.end()
            raise
        finally:
            news.close()
            payload.close()

    def _still_shared(self) -> frozenset[str]:
        now = main_classes() if self._shared else {}
        return frozenset(name for name, one in self._shared.items() if one() is now.get(name))

    def end(self) -> None:
        """Ends the processes, if this process has any."""
        plan, crew, self._crew = self.plan, self._crew, None
        if crew is not None and plan is not None:
            crew.close(plan.grace)

    def abandon(self) -> None:
        """Ends the processes when nobody can use them any longer."""
        # Where a call is running: when it ends. It does not hold the object, and at the end of
        # the interpreter it may be that of another thread, which the ranks end with.
        self._abandoned = True
        if not self._lock.locked():
            self.end()


def _launch(plan: Plan) -> Crew:
    from distribute.launchers import fork, forkserver, spawn

    match plan.method:
        case "fork":
            return fork.launch(plan)
        case "forkserver":
            return forkserver.launch(plan)
        case "spawn":
            return spawn.launch(plan)
        case _:
            raise AssertionError(plan.method)


def _refuse_inside() -> None:
    from distribute import context

    here = context.running()
    if here is not None:
        raise RequestError(
            "kept workers inside a running distributed call",
            f"rank {here.rank} of it is a worker itself",
            "call the function as it is, or distribute.run(fn), which runs it in the same world",
        )
