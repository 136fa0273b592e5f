"""What a call runs: the user's function with its arguments, and where the context goes."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from distribute import stateful
from distribute.culprit import Culprit, find
from distribute.errors import RequestError
from distribute.payload import Again, Payload, pack, refusal
from distribute.sent import Sent
from distribute.variables import Changed


@dataclass
class Task:
    """A function and its arguments.

    Attributes:
        function: What to call; a bound method where the user's function is one. None in a task
            for a re-executed worker, which has come to the call with its own function.
        args: Positional arguments.
        kwargs: Keyword arguments.
        context_at: Position of the context among the positional arguments, or None.
        parts: Objects inside the arguments, or the function, whose state comes back, and what they
            are made of. Where the task is sent, these are at the same places the receiver's own,
            or None for what is not in it.
        variables: What code of the caller has set in modules that the receiver has, too.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    context_at: int | None = None
    parts: Sequence[Any] = ()
    variables: Changed = field(default_factory=dict[str, Mapping[str, Any]])

    def __getstate__(self) -> dict[str, Any]:
        """Sends the parts after the arguments, whose pickle decides what of them there is."""
        state = {**self.__dict__}
        state["parts"] = tuple(map(Again, state.pop("parts")))
        return state

    def run(self, context: object) -> Any:
        """Calls the function."""
        assert self.function is not None
        return self.function(*self.given(context), **self.kwargs)

    def given(self, context: object) -> tuple[Any, ...]:
        """Returns the positional arguments with the context in its place."""
        if self.context_at is None:
            return self.args
        return (*self.args[: self.context_at], context, *self.args[self.context_at :])

    def stateful(self) -> list[Any]:
        """Returns the modules, optimizers, schedulers and gradient scalers that it is given."""
        return stateful.found(self.function, self.args, self.kwargs)

    def completed_by(self, own: Task) -> Task:
        """Fills in what could not be sent from the task that a worker came to the call with."""
        args: tuple[Any, ...] = tuple(
            own.args[index] if isinstance(one, Own) else one for index, one in enumerate(self.args)
        )
        kwargs = {
            name: own.kwargs[name] if isinstance(one, Own) else one
            for name, one in self.kwargs.items()
        }
        return Task(self.function or own.function, args, kwargs, own.context_at)


class Own:
    """Stands for an argument that could not be sent: the receiver has one of its own."""


def context_position(function: Callable[..., Any]) -> int | None:
    """Returns which positional argument is to be the context, or None.

    It is the first one (after `self` or `cls`, where these are not bound yet) if it is annotated
    with `Context` (as a string too), or is called `ctx` and has no annotation.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    position = 1 if parameters and parameters[0].name in ("self", "cls") else 0
    if position >= len(parameters):
        return None
    one = parameters[position]
    if one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
        return None
    if one.annotation is inspect.Parameter.empty:
        return position if one.name == "ctx" else None
    return position if _is_context(one.annotation, function) else None


def _is_context(annotation: object, function: Callable[..., Any]) -> bool:
    module = sys.modules.get("distribute.context")
    context = getattr(module, "Context", None)
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        # Not evaluated: what is imported under TYPE_CHECKING does not exist at run time.
        root, *path = annotation.strip("'\" ").split(".")
        inside = _inside(function)
        found = getattr(inside, "__globals__", {}).get(root)
        if found is None:
            ours = _imported_from(inside, root) in (None, "distribute", "distribute.context")
            return ours and [root, *path][-1] == "Context"
        for name in path:
            found = getattr(found, name, None)
        return found is context
    return context is not None and annotation is context


def _inside(function: Any) -> Any:
    """Returns the plain function in a partial, a bound method, a wrapper or a callable object."""
    while True:
        if isinstance(function, functools.partial):
            function = cast("Any", function.func)
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif hasattr(function, "__globals__"):
            return function
        else:
            return function.__class__.__call__


def _imported_from(function: Any, name: str) -> str | None:
    """Returns the module that a module's source imports a name from, or None if it does not."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    try:
        tree = ast.parse(inspect.getsource(module)) if module is not None else None
    except (OSError, TypeError, SyntaxError):
        tree = None
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            for one in node.names:
                if name == (one.asname or one.name.partition(".")[0]):
                    return node.module if isinstance(node, ast.ImportFrom) else one.name
    return None


def check_function(function: Callable[..., Any]) -> None:
    """Refuses a function that only makes an object, which would run after the call has ended.

    Raises:
        RequestError: It is an async function or a generator function.
    """
    # Not through `__wrapped__`: a wrapper may run what it wraps.
    called = (function, type(function).__call__)
    name = getattr(function, "__qualname__", repr(function))
    if any(map(inspect.iscoroutinefunction, called)):
        raise RequestError(
            f"{name}, an async function",
            "a call of it makes a coroutine, of which no rank would run anything",
            "pass a function that runs it, such as def main(ctx): return asyncio.run(train(ctx))",
        )
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in called):
        raise RequestError(
            f"{name}, a generator function",
            "a call of it makes a generator, of which no rank would run anything",
            "return a list, or show what comes meanwhile with ctx.print",
        )


def check_arguments(task: Task) -> None:
    """Raises the `TypeError` that the call would raise, before anything is started."""
    assert task.function is not None
    try:
        signature = inspect.signature(task.function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*task.given(None), **task.kwargs)
    except TypeError as error:
        name = getattr(task.function, "__qualname__", repr(task.function))
        raise TypeError(f"{name}(): {error}") from None


def packed(task: Task, main_names: frozenset[str] | None, sent: Sent | None = None) -> Payload:
    """Packs a task with its function.

    Args:
        task: The task.
        main_names: See `payload.pack`.
        sent: See `payload.pack`.

    Raises:
        RequestError: A part of it cannot be sent.
    """
    try:
        return pack(task, main_names=main_names, sent=sent)
    except Exception as error:
        problem = error
    try:
        # Not while the first error is handled, which would become part of what the search finds.
        found = _culprit(task, main_names)
        if found is None:
            raise problem
    finally:
        del problem
    raise refused(found) from found.cause


def packed_for_script(task: Task, main_names: frozenset[str]) -> Payload:
    """Packs a task with its function for ranks that have run the script up to its first call.

    A variable of the script that cannot be sent is replaced by the rank's own, with a warning.

    Raises:
        RequestError: Something else cannot be sent.
    """
    try:
        return packed(task, main_names)
    except RequestError:
        # Arguments are the caller's, and of this moment.
        if refusal((task.args, task.kwargs), main_names=main_names) is not None:
            raise
        script = vars(sys.modules["__main__"])
        own = {
            id(one): name
            for name, one in script.items()
            # Functions and classes are sent with what of them can be.
            if not isinstance(one, type | types.FunctionType)
            and not name.startswith("__")
            and refusal(one, main_names=main_names) is not None
        }
        used: list[str] = []
        try:
            payload = pack(task, main_names=main_names, own=own, used=used)
        except Exception:
            payload = None
        if payload is None:
            raise
    for name in dict.fromkeys(used):
        warnings.warn(
            f"variable `{name}` ({type(script[name]).__name__}) cannot be sent to another process; "
            "the other ranks use the one that they made themselves when the script ran there",
            stacklevel=2,
        )
    return payload


def refused(found: Culprit) -> RequestError:
    """Returns the error that names what cannot be sent."""
    return RequestError(
        found.where,
        found.reason,
        'it is for processes that inherit it: use start_method="fork"'
        if found.inherited
        else 'make it inside the function, or use start_method="fork", whose ranks have a copy of '
        "everything",
    )


def _culprit(task: Task, main_names: frozenset[str] | None) -> Culprit | None:
    for kind, name, value in _named(task):
        found = find(kind, name, value, partial(refusal, main_names=main_names))
        if found is not None:
            return found
    return None


def _named(task: Task) -> Iterator[tuple[str, str, Any]]:
    """Yields the parts of a task with what the user calls them."""
    try:
        assert task.function is not None
        names = list(inspect.signature(task.function).parameters)
    except (TypeError, ValueError):
        names = []
    if task.context_at is not None:
        del names[task.context_at : task.context_at + 1]
    for index, one in enumerate(task.args):
        yield "argument", names[index] if index < len(names) else str(index + 1), one
    for name, one in task.kwargs.items():
        yield "argument", name, one
    if task.function is not None:
        yield "function", getattr(task.function, "__qualname__", ""), task.function


def check_inherited(task: Task) -> None:
    """Refuses arguments that only processes can share that inherit them; before any is started.

    Raises:
        RequestError: There is one, such as a queue of `multiprocessing`.
    """
    # Pickling them for a look takes time, and without these modules there is no such object.
    if not {"multiprocessing.queues", "multiprocessing.synchronize"} & sys.modules.keys():
        return
    if refusal(replace(task, function=None)) is None:
        return
    for kind, name, value in _named(task):
        if kind == "argument":
            found = find(kind, name, value, refusal)
            if found is not None and found.inherited:
                raise refused(found) from found.cause


def pack_arguments(task: Task, main_names: frozenset[str]) -> Payload:
    """Packs a task without its function, for workers that have come to the call themselves.

    An argument that cannot be sent is replaced by the worker's own, with a warning.
    """
    try:
        return pack(Task(None, task.args, task.kwargs), main_names=main_names)
    except Exception:
        named = [one for one in _named(task) if one[0] == "argument"]
        values = [_sendable(name, value, main_names) for _, name, value in named]
        args, rest = tuple(values[: len(task.args)]), values[len(task.args) :]
        kwargs = dict(zip(task.kwargs, rest, strict=True))
        return pack(Task(None, args, kwargs), main_names=main_names)


def _sendable(name: str, value: object, main_names: frozenset[str]) -> object:
    found = find("argument", name, value, partial(refusal, main_names=main_names))
    if found is None:
        return value
    warnings.warn(
        f"{found.where}: {found.reason}; the other ranks use the argument that they made "
        "themselves when the script ran there",
        stacklevel=2,
    )
    return Own()
