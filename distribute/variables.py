"""Plain variables of the user's modules, which code between two calls may have set.

A function of a module is sent by its name, and finds the variables of its module where it runs.
In a worker that has run the script up to its first call those are of that time, so that
`config.lr = 0.2` before a later call would hold on rank 0 alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from distribute import reference

# Exact types of what is sent; a larger variable is data, and not looked at.
_LEAVES: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, pathlib.PosixPath, pathlib.PurePosixPath}
)
_CONTAINERS: frozenset[type] = frozenset({dict, list, tuple, set, frozenset})
_MOST = 1_000
_DEEPEST = 5

Changed = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Holder:
    """A container or an object, taken apart.

    Attributes:
        kind: Its class; None for an object, of which the receiver has its own.
        inside: Its items or attributes.
    """

    kind: type | None
    inside: Any


class Variables:
    """The variables of this process's modules at the end of a call."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def note(self) -> None:
        """Takes them as they are now."""
        self._known = _taken()

    def changed(self) -> Changed:
        """Returns those that have changed since, by module and name."""
        found: dict[str, dict[str, Any]] = {}
        for module, now in _taken().items():
            # What a module has computed when it was imported may be its process's own.
            then = self._known.get(module, now)
            new = {name: one for name, one in now.items() if name not in then or then[name] != one}
            if new:
                found[module] = new
        return found


def put(changed: Changed) -> None:
    """Sets variables of modules, where these are loaded; containers and objects stay themselves."""
    for module, variables in changed.items():
        if module in sys.modules:
            _put_into(_variables(module), variables)


def _put_into(mine: dict[str, Any], variables: Mapping[str, Any]) -> None:
    for name, one in variables.items():
        own = mine.get(name)
        if not isinstance(one, _Holder) or one.kind is not None:
            mine[name] = _same(own, _made(one))
        elif _is_object(own):
            _put_into(vars(own), one.inside)


def _same(own: Any, value: Any) -> Any:
    """Returns the own container with the items of another one, if it is of the same class."""
    if type(own) is not type(value) or not isinstance(own, list | dict | set):
        return value
    untyped: Any = cast("Any", own)
    untyped.clear()
    (untyped.extend if isinstance(own, list) else untyped.update)(value)
    return untyped


def _made(one: Any) -> Any:
    if not isinstance(one, _Holder):
        return one
    kind: Any = one.kind
    if kind is dict:
        return {name: _made(value) for name, value in one.inside.items()}
    return kind(map(_made, one.inside))


# -- taking --------------------------------------------------------------------------------------


def _taken() -> dict[str, dict[str, Any]]:
    names = _users(len(sys.modules), next(reversed(sys.modules)))
    return {name: dict(_plain(_variables(name))) for name in names}


@lru_cache(maxsize=1)
def _users(count: int, last: str) -> list[str]:
    """Returns the names of the user's modules, among thousands, until there are others."""
    return [
        name
        for name in list(sys.modules)
        if reference.is_users(name, _variables(name).get("__file__"))
    ]


def _variables(module: str) -> dict[str, Any]:
    found: object = getattr(sys.modules.get(module), "__dict__", None)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _plain(variables: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    for name, value in list(variables.items()):
        if not name.startswith("__"):
            try:
                yield name, _Taker(depth).apart(value)
            except _NotPlain:
                pass


class _NotPlain(Exception):
    pass


class _Taker:
    """Takes one variable or attribute apart.

    Args:
        depth: How many objects it is inside of.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._room = _MOST

    def apart(self, value: Any, level: int = 0) -> Any:
        """Returns a value that is compared and sent; _NotPlain if it is not of plain data."""
        kind = cast("Any", type(value))
        if kind in _LEAVES or isinstance(value, enum.Enum):
            return value
        if level + self._depth >= _DEEPEST:  # it may be inside of itself
            raise _NotPlain
        if kind in _CONTAINERS:
            self._room -= len(value)
            if self._room < 0 or not all(type(one) in _LEAVES for one in _keys(value)):
                raise _NotPlain
            if kind is dict:
                items: Any = {name: self.apart(one, level + 1) for name, one in value.items()}
            elif kind in (list, tuple):
                items = [self.apart(one, level + 1) for one in value]
            else:
                items = frozenset(value)
            return _Holder(kind, items)
        if level == 0 and _is_object(value):
            return _Holder(None, dict(_plain(value.__dict__, self._depth + 1)))
        raise _NotPlain


def _keys(container: Any) -> Any:
    return () if isinstance(container, list | tuple) else container


def _is_object(value: object) -> bool:
    """Tells whether a value is a configuration: an object that is its attributes."""
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    return dataclasses.is_dataclass(type(value)) and hasattr(value, "__dict__")
