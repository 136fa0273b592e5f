"""Applying a function to the leaves of a nested structure."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a structure like `tree` with `fn(leaf)` in the place of every leaf.

    Dicts, lists, tuples, namedtuples and dataclass instances are structure, their subclasses
    included; everything else is a leaf. `tree` itself is unchanged.

    Leaves are visited in an order that depends on the structure only, so that processes which
    filled a dict in different orders visit the same leaf at the same time.
    """
    kind = cast("Any", type(tree))
    if issubclass(kind, dict):
        return _map_dict(fn, tree)
    if issubclass(kind, list):
        return _map_list(fn, tree)
    if issubclass(kind, tuple):
        return _map_tuple(fn, tree)
    if dataclasses.is_dataclass(kind):
        return _map_dataclass(fn, tree)
    return fn(tree)


def described(fn: Callable[[Any], str], tree: Any) -> str:
    """Returns a text of a structure, with `fn(leaf)` for every leaf.

    It is the same for two structures in which `map_leaves` visits the same places.
    """
    kind = cast("Any", type(tree))
    if issubclass(kind, dict):
        items = (f"{key!r}: {described(fn, tree[key])}" for key in _in_fixed_order(tree))
        return f"{{{', '.join(items)}}}"
    if issubclass(kind, list):
        return f"[{', '.join(described(fn, item) for item in tree)}]"
    if issubclass(kind, tuple):
        return f"({', '.join(described(fn, item) for item in tree)})"
    if dataclasses.is_dataclass(kind):
        names = (field.name for field in dataclasses.fields(tree))
        items = (f"{name}={described(fn, getattr(tree, name))}" for name in names)
        return f"{type(tree).__qualname__}({', '.join(items)})"
    return fn(tree)


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a structure, in the order in which `map_leaves` visits them."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def filled(tree: Any, values: Iterable[Any]) -> Any:
    """Returns a structure like `tree` with other leaves, which come in the order of `leaves`."""
    rest = iter(values)
    return map_leaves(lambda _: next(rest), tree)


def _map_dict(fn: Callable[[Any], Any], tree: dict[Any, Any]) -> dict[Any, Any]:
    # A copy keeps the order of insertion and what a subclass holds, such as a default factory.
    result = copy.copy(tree)
    for key in _in_fixed_order(tree):
        result[key] = map_leaves(fn, tree[key])
    return result


def _map_list(fn: Callable[[Any], Any], tree: list[Any]) -> list[Any]:
    result = copy.copy(tree)
    result[:] = [map_leaves(fn, item) for item in tree]
    return result


def _map_tuple(fn: Callable[[Any], Any], tree: tuple[Any, ...]) -> tuple[Any, ...]:
    items = [map_leaves(fn, item) for item in tree]
    make = getattr(tree, "_make", type(tree))  # a namedtuple takes its fields one by one
    return cast("tuple[Any, ...]", make(items))


def _map_dataclass(fn: Callable[[Any], Any], tree: Any) -> Any:
    # Not dataclasses.replace: it refuses fields with init=False and runs __post_init__ again.
    result = copy.copy(tree)
    for field in dataclasses.fields(tree):
        object.__setattr__(result, field.name, map_leaves(fn, getattr(tree, field.name)))
    return result


def _in_fixed_order(keys: Iterable[Any]) -> list[Any]:
    try:
        return sorted(keys)
    except TypeError:  # keys of several types have no order of their own
        return list(keys)
