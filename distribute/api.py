"""The doors: `@distributed(...)` around a function, `run(fn, ...)` once, `workers(...)` to keep."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Unpack,
    overload,
)

from distribute import engine
from distribute.decorated import Distributed, checked, inside
from distribute.errors import RequestError
from distribute.kept import Workers
from distribute.request import Options, Request

if TYPE_CHECKING:
    from typing import Protocol

    from distribute.context import Context

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

if TYPE_CHECKING:

    class Decorator(Protocol):
        """What `distributed(...)` returns."""

        @overload
        def __call__(self, fn: Callable[Concatenate[Context, P], R], /) -> Distributed[P, R]: ...
        @overload
        def __call__(
            self, fn: Callable[Concatenate[S, Context, P], R], /
        ) -> Distributed[Concatenate[S, P], R]: ...
        @overload
        def __call__(self, fn: Callable[P, R], /) -> Distributed[P, R]: ...

    class DecoratorOfAll(Protocol):
        """What `distributed(..., returns="all")` returns."""

        @overload
        def __call__(
            self, fn: Callable[Concatenate[Context, P], R], /
        ) -> Distributed[P, list[R]]: ...
        @overload
        def __call__(
            self, fn: Callable[Concatenate[S, Context, P], R], /
        ) -> Distributed[Concatenate[S, P], list[R]]: ...
        @overload
        def __call__(self, fn: Callable[P, R], /) -> Distributed[P, list[R]]: ...


@overload
def distributed(fn: Callable[Concatenate[Context, P], R], /) -> Distributed[P, R]: ...
@overload
def distributed(
    fn: Callable[Concatenate[S, Context, P], R], /
) -> Distributed[Concatenate[S, P], R]: ...
@overload
def distributed(fn: Callable[P, R], /) -> Distributed[P, R]: ...
@overload
def distributed(*, returns: Literal["main"] = "main", **options: Unpack[Options]) -> Decorator: ...
@overload
def distributed(*, returns: Literal["all"], **options: Unpack[Options]) -> DecoratorOfAll: ...
def distributed(fn: Any = None, /, **options: Any) -> Any:
    """Makes a function run on every device when it is called.

    The function gets a `Context` as its first argument (after `self` or `cls`) if that parameter
    is annotated with it, or is called `ctx` without an annotation; `distribute.current()` returns
    it everywhere inside. The other arguments are those of the call.

    Args:
        fn: The function, when the decorator is used without options.
        **options: See `distribute.Options`; and `returns`: `"main"` (default) for rank 0's value,
            `"all"` for the list of every rank's value in rank order.

    Returns:
        The function, to be called without the context; or a decorator.

    Raises:
        RequestError: `fn` is not callable.
        TypeError: There is no such option.
    """
    request = Request.of(options)

    def decorate(function: Any) -> Distributed[..., Any]:
        return Distributed(checked(function, "distributed"), request)

    return decorate if fn is None else decorate(fn)


@overload
def run(
    fn: Callable[..., R],
    /,
    *args: Any,
    returns: Literal["main"] = "main",
    **options: Unpack[Options],
) -> R: ...
@overload
def run(
    fn: Callable[..., R], /, *args: Any, returns: Literal["all"], **options: Unpack[Options]
) -> list[R]: ...
def run(fn: Any, /, *args: Any, **options: Any) -> Any:
    """Runs a function on every device, once.

    Args:
        fn: The function; it gets a context as with `distributed`. Give keyword arguments for it
            through `functools.partial`.
        *args: Its positional arguments, without the context.
        **options: As for `distributed`.

    Returns:
        Rank 0's value; with `returns="all"` the list of every rank's value in rank order.

    Raises:
        RequestError: It cannot be carried out; nothing was started.
        TypeError: There is no such option, or the arguments do not fit the function.
        WorkerDied: A rank's process ended without a value or an exception.
        Exception: Whatever the function raised on the rank that failed first.
    """
    __tracebackhide__ = True
    request = Request.of(options)
    function = inside(fn, "run")
    return engine.call(request, function, args, {}, engine.calling_site(function))


def workers(**options: Unpack[Options]) -> Workers:
    """Makes workers that stay for one call after the other.

    The second call finds its processes there, so it costs milliseconds, and what the first one left
    in imported modules is still there. To be used in a `with` block, or kept in a variable and
    closed. See docs/workers.md.

    Args:
        **options: As for `run`; without `max_restarts`, and never by re-exec. Each call has the
            whole `deadline`, and with a `seed` starts from it.

    Returns:
        The workers; their processes start with the first `run`.

    Raises:
        RequestError: It cannot be carried out.
        TypeError: There is no such option.
    """
    request = Request.of(options)
    if "returns" in options:
        raise RequestError(
            f"returns={request.returns!r} for kept workers",
            "it is the affair of each call",
            "pass it to run",
        )
    return Workers(request)


def is_worker() -> bool:
    """Tells whether this process was started by this library to be a rank.

    For code above the first distributed call of a script, which re-executed workers run as well:
    `if not distribute.is_worker(): wandb.init(...)`.
    """
    return engine.in_worker(os.environ)
