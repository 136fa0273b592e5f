"""What a value looks like when it comes home from a rank."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from typing import Any, cast


def home(value: Any) -> Any:
    """Returns a value as it arrives from another process: the same type under every method.

    Tensors are detached and on the CPU, models without their data-parallel wrapper, also inside
    dicts, lists, tuples and dataclasses. What needs no change is the very object: the caller may
    hold it already.
    """
    return _home(value, {})


def _home(value: Any, seen: dict[int, Any]) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    kind = value.__class__
    if kind is torch.Tensor:
        return value.detach().cpu() if value.requires_grad or value.device.type != "cpu" else value
    if isinstance(value, DistributedDataParallel):
        return cast("Any", value.module)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = value  # a structure may hold itself
    parts = _parts(value)
    changed = {key: new for key, one in parts.items() if (new := _home(one, seen)) is not one}
    if changed:
        seen[id(value)] = value = _with_parts(value, parts | changed, changed)
    return value


# Not their subclasses, which may refuse to be rebuilt.
_DICTS: list[Any] = [dict, OrderedDict, defaultdict]
_SEQUENCES: list[Any] = [list, tuple]


def _parts(value: Any) -> dict[Any, Any]:
    kind = value.__class__
    if kind in _DICTS:
        return {**value}
    if kind in _SEQUENCES or _is_named_tuple(kind):
        return dict(enumerate(cast("tuple[Any, ...]", value)))
    if dataclasses.is_dataclass(kind):
        names = [one.name for one in dataclasses.fields(cast("Any", kind))]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {}


def _is_named_tuple(kind: Any) -> bool:
    return hasattr(kind, "_make") and issubclass(kind, tuple)


def _with_parts(value: Any, parts: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        make = getattr(cast("Any", value).__class__, "_make", tuple)
        return make(parts.values())
    copied = copy.copy(value)
    has_items = isinstance(value, dict | list)
    for key, one in changed.items():
        if has_items:
            copied[key] = one
        else:
            object.__setattr__(copied, key, one)  # a dataclass may be frozen
    return copied
