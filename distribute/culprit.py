"""Which part of an object cannot be sent, as a path that the user can follow."""

from __future__ import annotations

import copyreg
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

# Deeper than any structure that a person has written.
_MOST_STEPS = 60

# What people put into arguments, and what it is called.
_NAMES = {
    "_thread.lock": "a thread lock",
    "_thread.RLock": "a thread lock",
    "_io.TextIOWrapper": "an open file",
    "_io.BufferedReader": "an open file",
    "_io.BufferedWriter": "an open file",
    "_io.FileIO": "an open file",
    "builtins.generator": "a generator",
    "socket.socket": "a socket",
    "sqlite3.Connection": "a database connection",
    "_sqlite3.Connection": "a database connection",
}

# What calls the code that an object has for pickle.
_PICKLERS = frozenset({"distribute", "cloudpickle", "pickle", "copyreg"})

# The end of a path, and what is there.
_Child = tuple[str, Any]


@dataclass(frozen=True)
class Culprit:
    """A part that cannot be sent.

    Attributes:
        where: The way to it, such as "argument `config.logger.lock`".
        value: The part.
        error: Why it cannot be sent.
    """

    where: str
    value: object
    error: Exception

    @property
    def reason(self) -> str:
        """Why, in words."""
        return f"{self.what} cannot be sent to another process ({_told(self.error)})"

    @property
    def what(self) -> str:
        """What it is, in words, with its type."""
        kind = type(self.value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        plain = name.removeprefix("builtins.")
        known = _NAMES.get(name)
        return f"{known} ({plain})" if known else f"an object of type {plain}"

    @property
    def cause(self) -> Exception | None:
        """The error from the code on that objects have for pickle; None if there is none in it."""
        trace = self.error.__traceback__
        while trace is not None and _package(trace.tb_frame.f_globals) in _PICKLERS:
            trace = trace.tb_next
        return None if trace is None else self.error.with_traceback(trace)

    @property
    def inherited(self) -> bool:
        """Whether its point is to be shared with processes that inherit it."""
        return type(self.value).__module__.startswith("multiprocessing.")


def _package(namespace: dict[str, Any]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def find(
    kind: str, name: str, value: object, trial: Callable[[object], Exception | None]
) -> Culprit | None:
    """Follows the parts of an object to the innermost one that cannot be sent.

    Args:
        kind: What the object is in the call, such as "argument".
        name: Its name there, or empty.
        value: The object.
        trial: Returns why an object cannot be sent, or None if it can.
    """
    error = trial(value)
    if error is None:
        return None
    labels: list[str] = []
    seen = {id(value)}
    for _ in range(_MOST_STEPS):
        found = _first_failing(_children(value), trial, seen)
        if found is None:
            break
        (step, child), error = found
        if isinstance(value, types.FunctionType):
            labels.append(f"{kind} `{name}`" if name else kind)
            kind, name = "variable", step
        else:
            name += step
        value = child
        seen.add(id(child))
    labels.append(f"{kind} `{name}`" if name else kind)
    return Culprit(", ".join(labels), value, error)


def _first_failing(
    children: list[_Child], trial: Callable[[object], Exception | None], seen: set[int]
) -> tuple[_Child, Exception] | None:
    children = [one for one in children if id(one[1]) not in seen]
    # By halves: a list may be long.
    while len(children) > 1:
        middle = len(children) // 2
        fails = trial([child for _, child in children[:middle]]) is not None
        children = children[:middle] if fails else children[middle:]
    if children and (error := trial(children[0][1])) is not None:
        return children[0], error
    return None


def _children(value: Any) -> list[_Child]:
    whole: Any = value  # without the type that `isinstance` finds
    if isinstance(value, dict):
        items = whole.items()
        return [(f"[{key!r}]", one) for key, one in items] + [("'s key", key) for key, _ in items]
    if isinstance(value, set | frozenset):
        return [("'s element", one) for one in whole]
    if isinstance(value, list | tuple):
        return [(f"[{index}]", one) for index, one in enumerate(whole)]
    if isinstance(value, types.FunctionType):
        return list(_variables(value))
    if isinstance(value, types.MethodType):
        return [(".__self__", value.__self__), (".__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [(f".{name}", getattr(whole, name)) for name in ("func", "args", "keywords")]
    if isinstance(value, type):
        return [(f".{name}", one) for name, one in vars(value).items()]
    return list(_parts(value))


def _variables(function: types.FunctionType) -> Iterator[_Child]:
    """Yields what a function uses: variables around it, globals, defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for name in dict.fromkeys(_names(function.__code__)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield "__defaults__", function.__defaults__
    yield "__kwdefaults__", function.__kwdefaults__
    yield from vars(function).items()


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _names(one)


def _parts(value: Any) -> Iterator[_Child]:
    """Yields what pickle would take an object apart into."""
    try:
        reduce = copyreg.dispatch_table.get(value.__class__)
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(5)
    except Exception:
        return
    if isinstance(reduced, str):
        return
    made: Any = reduced
    args, state, items, pairs = (*made, None, None, None)[1:5]
    both: Any = state if state.__class__ is tuple else (state,)  # with slots there are two
    for one in both:
        yield from _attributes(one)
    yield from ((f"[{index}]", one) for index, one in enumerate(items or ()))
    yield from ((f"[{key!r}]", one) for key, one in pairs or ())
    yield from (("", one) for one in args or ())


# Under these names a module of torch keeps what is read as attributes.
_OF_MODULES = ("_modules", "_parameters", "_buffers")


def _attributes(state: Any) -> Iterator[_Child]:
    if not isinstance(state, dict):
        if state is not None:
            yield "", state
        return
    for name, one in cast("dict[str, Any]", state).items():
        if name in _OF_MODULES:
            yield from _attributes(one)
        else:
            yield f".{name}", one
