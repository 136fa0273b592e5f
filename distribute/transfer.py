"""Moving a batch to a device, whatever it is made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any, cast

import torch


def move(value: Any, device: torch.device) -> Any:
    """Returns a batch on a device.

    Tensors and everything else that has a `.to` are moved, inside lists, tuples, named tuples,
    dicts and dataclass instances too. Containers are copied, what can't be moved stays itself.
    """
    if isinstance(value, torch.Tensor):
        # Without pinned memory a copy that does not wait would read memory that is being reused.
        pinned = device.type != "cpu" and value.is_pinned()
        return value.to(device, non_blocking=pinned)
    if isinstance(value, (str, bytes, int, float, type)) or value is None:
        return value
    # Before the containers: a PackedSequence is a tuple that knows what must stay on the CPU.
    if callable(to := getattr(value, "to", None)):
        return to(device)
    return _move_inside(value, device)


def _move_inside(value: Any, device: torch.device) -> Any:
    if isinstance(value, MutableMapping):
        return _move_mapping(cast("Any", value), device)
    if isinstance(value, list):
        return _move_list(cast("Any", value), device)
    if isinstance(value, tuple):
        return _move_tuple(cast("Any", value), device)
    if dataclasses.is_dataclass(value):
        return _move_fields(value, device)
    return value


def _move_mapping(value: MutableMapping[Any, Any], device: torch.device) -> Any:
    moved = copy.copy(value)  # keeps a default factory, and what else a subclass holds
    moved.update({key: move(item, device) for key, item in value.items()})
    return moved


def _move_list(value: list[Any], device: torch.device) -> list[Any]:
    moved = copy.copy(value)
    moved[:] = [move(item, device) for item in value]
    return moved


def _move_tuple(value: tuple[Any, ...], device: torch.device) -> Any:
    items = [move(item, device) for item in value]
    make = getattr(value, "_make", type(value))  # a named tuple takes its fields one by one
    return make(items)


def _move_fields(value: Any, device: torch.device) -> Any:
    # dataclasses.replace would refuse fields with init=False and run __post_init__ again.
    moved = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(moved, field.name, move(getattr(value, field.name), device))
    return moved
