"""What travels by its name: classes and functions that the receiver can import, or has already."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, cast

import cloudpickle


def lookup(module_name: str, qualname: str) -> Any:
    """Returns the object at a qualified name of a loaded module, or None."""
    found: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def main_classes() -> dict[str, type]:
    """Returns the classes that `__main__` defines, those inside others too, by qualified name."""
    found: dict[str, type] = {}
    waiting: list[object] = list(vars(sys.modules["__main__"]).values())
    while waiting:
        one = waiting.pop()
        if isinstance(one, type) and one.__module__ == "__main__":
            name = one.__qualname__
            if name not in found and lookup("__main__", name) is one:
                found[name] = one
                waiting += vars(one).values()
    return found


def imported(module_name: str, qualname: str) -> Any:
    """Returns the object at a qualified name of a module, which is imported for it."""
    importlib.import_module(module_name)
    return lookup(module_name, qualname)


def undecorated(module_name: str, qualname: str) -> Any:
    """Returns the function inside a decorated function."""
    return imported(module_name, qualname).__wrapped__


def decorated_reference(function: types.FunctionType) -> Any:
    """Reduces a function that has been decorated to its name, if the name leads to it.

    pickle would find the decorator there; with its globals by value the function would lose the
    identity of its module.
    """
    found = lookup(function.__module__, function.__qualname__)
    inside = getattr(found, "__wrapped__", None)
    if inside is function and importable(function.__module__):
        return undecorated, (function.__module__, function.__qualname__)
    return NotImplemented


def importable(module_name: str | None) -> bool:
    """Tells whether a fresh interpreter with this search path would import the same module."""
    if module_name is None or module_name == "__main__":
        return False
    module = sys.modules.get(module_name)
    if module is None:
        return False
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if spec is None or origin in ("built-in", "frozen"):
        return True  # pickle's own rule is right for them
    if module_name.partition(".")[0] in _STDLIB:
        return True
    path: Sequence[str] | None = None
    parent, _, _ = module_name.rpartition(".")
    if parent:
        if not importable(parent):
            return False
        path = cast("Sequence[str] | None", getattr(sys.modules.get(parent), "__path__", None))
    try:
        found = _find_spec(module_name, path)
    except (ImportError, ValueError):
        return False
    if found is None or found.origin != origin:
        return False
    # A package without a file is its directories.
    here: set[str] = set(getattr(module, "__path__", ()))
    return origin is not None or here <= set(found.submodule_search_locations or ())


def _find_spec(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    # Not importlib.util.find_spec: that answers with what is loaded here already.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)  # hooks of the old kind have none
        found = None if find is None else find(name, path)
        if found is not None:
            return cast("importlib.machinery.ModuleSpec", found)
    return None


def is_users(module_name: str, file: str | None) -> bool:
    """Tells whether a loaded module is one of the user's program, and of no installed package."""
    if file is None or module_name in ("__main__", "__mp_main__"):
        return False
    installed = "/site-packages/" in file or "/dist-packages/" in file
    return not installed and module_name.partition(".")[0] not in _STDLIB


_STDLIB = frozenset(sys.stdlib_module_names) | {"torch", "distribute", "cloudpickle", "numpy"}


class by_value:
    """Lets cloudpickle send a function or class by value when its module cannot be imported."""

    def __init__(self, obj: object) -> None:
        self._module: types.ModuleType | None = None
        if isinstance(obj, type | types.FunctionType) and not importable(obj.__module__):
            module = sys.modules.get(obj.__module__)
            known = obj.__module__ in cloudpickle.list_registry_pickle_by_value()
            if module is not None and obj.__module__ != "__main__" and not known:
                self._module = module

    def __enter__(self) -> None:
        if self._module is not None:
            cloudpickle.register_pickle_by_value(self._module)

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            cloudpickle.unregister_pickle_by_value(self._module)
