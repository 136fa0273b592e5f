"""Leaving the caller's objects as they were where the function works on those themselves.

The function gets the objects with copies of their tensors' memory inside, and what was there before
is put back afterwards: what it kept of the copies stays what it was then.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from distribute import interrupt, stateful
from distribute.home import home

_CONTAINERS: tuple[Any, ...] = (dict, list, set, deque, tuple)


def untouched(objects: Sequence[Any], body: Callable[[], Any]) -> Any:
    """Calls a function, and leaves objects as they were before, whatever becomes of the call.

    Args:
        objects: Stateful objects; see `stateful.found`.
        body: The function.

    Returns:
        What it returned; a copy of it, if it holds the objects or what they are made of.
    """
    if not objects:
        return body()
    with interrupt.held():
        before = Snapshot(objects)
    try:
        return before.apart(body())
    finally:
        with interrupt.held():
            before.restore()


class Snapshot:
    """What objects are made of, down to the numbers in their tensors.

    These are modules, optimizers and so on with all attributes, the built-in containers in these,
    and tensors, whose memory is exchanged for a copy.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], None]] = []
        copies: dict[int, torch.UntypedStorage] = {}
        waiting: list[Any] = list(stateful.parts(objects))
        while waiting:
            one: Any = waiting.pop()
            if id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            kind = cast("Any", type(one))
            if issubclass(kind, torch.Tensor):
                self._undo.append(_Tensor(one, copies).restore)
            elif issubclass(kind, stateful.kinds()):
                self._undo.append(_Object(one).restore)
                waiting.extend(cast("Any", vars(one).values()))
            elif issubclass(kind, _CONTAINERS):
                if not issubclass(kind, tuple):
                    self._undo.append(_Container(one).restore)
                items: list[Any] = list(one)
                if issubclass(kind, dict):
                    items.extend(one.values())
                if not stateful.LEAVES.issuperset(map(type, items)):
                    waiting.extend(items)

    def apart(self, value: Any) -> Any:
        """Returns what the function returned, such that `restore` does not reach it."""
        value = home(value)
        inside = stateful.reach([value], tensors=True)
        return copy.deepcopy(value) if any(id(one) in self._seen for one in inside) else value

    def restore(self) -> None:
        """Puts everything back."""
        with torch.no_grad():
            for undo in self._undo:
                undo()


class _Object:
    def __init__(self, one: Any) -> None:
        self._one = one
        self._kind: Any = type(one)
        self._attributes = {**vars(one)}
        # The mode of a scripted module is no attribute of Python's.
        self._training: bool | None = (
            one.training if isinstance(one, torch.jit.ScriptModule) else None
        )

    def restore(self) -> None:
        self._one.__class__ = self._kind  # a lazy module has become another one
        vars(self._one).clear()
        vars(self._one).update(self._attributes)
        if self._training is not None:
            self._one.training = self._training


class _Container:
    def __init__(self, one: Any) -> None:
        self._one = one
        self._items: Any = {**one} if isinstance(one, dict) else [*one]

    def restore(self) -> None:
        self._one.clear()
        if isinstance(self._one, list | deque):
            self._one.extend(self._items)
        else:
            self._one.update(self._items)


class _Tensor:
    def __init__(self, tensor: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> None:
        self._tensor: Any = tensor
        self._kind = type(tensor)
        self._leaf = tensor.is_leaf
        self._trained = tensor.requires_grad
        self._data = tensor.data
        self._grad = tensor.grad if tensor.is_leaf else None
        self._lazy = stateful.is_lazy(tensor)
        if not self._lazy:
            tensor.data = _copy(tensor.data, copies)
            if self._grad is not None:
                tensor.grad = self._grad.clone()

    def restore(self) -> None:
        tensor = self._tensor
        if self._lazy:
            if type(tensor) is not self._kind:
                tensor.grad = None
                tensor.data = self._data
                tensor.__class__ = self._kind
            return
        if not self._leaf:
            tensor.data = self._data
            return
        if not tensor.is_leaf:
            tensor.detach_()
        tensor.grad = None  # it may be on another device
        tensor.data = self._data
        if tensor.requires_grad != self._trained:
            tensor.requires_grad_(self._trained)
        tensor.grad = self._grad


def _copy(data: torch.Tensor, copies: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Returns a copy of a tensor; tensors that share memory do so in their copies."""
    if type(data) is not torch.Tensor or data.layout is not torch.strided or data.is_quantized:
        return data.clone()
    storage: Any = data.untyped_storage()
    made = copies.get(storage._cdata)
    if made is None:
        made = copies[storage._cdata] = storage.clone()
    fresh: Any = torch.empty(0, dtype=data.dtype, device=data.device)
    fresh.set_(made, data.storage_offset(), data.size(), data.stride())
    return cast("torch.Tensor", fresh)
