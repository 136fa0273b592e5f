"""The objects of a call that a function trains: modules, optimizers, schedulers, gradient scalers.

They are found wherever the arguments hold them. What they are made of (submodules, parameters,
buffers) is counted in the same order by who asks twice.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Iterable
from functools import cache, update_wrapper
from itertools import chain, islice
from pathlib import PosixPath, PurePosixPath
from typing import Any, cast

# A container of more items than that is data, unless its first items say otherwise.
MANY = 1_000
_FIRST = 100

# Exact types of what holds nothing of interest, for a test at C's speed.
LEAVES: frozenset[type] = frozenset(
    {
        type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice,
        type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType,
        PosixPath, PurePosixPath,
    }
)  # fmt: skip

_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_PLAIN: frozenset[type] = frozenset({list, tuple, dict})
_CLASSES = (type, types.ModuleType)


def found(function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the stateful objects of a call, in an order that its arguments alone decide.

    They may be anywhere in lists, tuples, dicts, sets, deques, in attributes and slots of other
    objects, in the arguments of a `functools.partial`, and in the object that a method is bound to;
    also in attributes of those that are found, as an agent that is a module has its optimizer.
    Of a container of more than `MANY` items, of which the first 100 hold none, the rest is not
    looked at. Closures, global variables and attributes of classes are not either.
    """
    return reach([function, args, kwargs])


def reach(roots: Iterable[object], *, tensors: bool = False) -> list[Any]:
    """Returns the stateful objects that others lead to; see `found`.

    Args:
        roots: The others.
        tensors: Whether tensors are wanted as well.
    """
    if "torch" not in sys.modules:
        return []
    wanted = (*kinds(), *_tensor()) if tensors else kinds()
    leaves = LEAVES if tensors else LEAVES | _tensors()
    found: list[Any] = []
    seen: dict[int, object] = {}  # and not their numbers alone, which others might get
    waiting: list[Any] = [*roots]
    while waiting:
        one = waiting.pop()
        kind = cast("Any", type(one))
        if kind is _Rest:
            waiting += one.wanted(len(found), leaves)
            continue
        if kind in leaves or id(one) in seen or issubclass(kind, _CLASSES):
            continue
        seen[id(one)] = one
        if issubclass(kind, wanted):
            found.append(one)
            waiting += _worth(_beside(one), leaves)
            continue
        base = _container(kind)
        if base is not None:
            items = _items(base, one)
            if base.__len__(one) > MANY:
                waiting.append(_Rest(base, one, len(found)))
                items = islice(items, _FIRST)
            waiting += _worth(items, leaves)
        if kind is not base:
            waiting += _worth(_attributes(kind, one), leaves)
    return found


class _Rest:
    """What comes after the first items of a large container, to be taken up after those."""

    def __init__(self, base: Any, container: object, before: int) -> None:
        self._base = base
        self._container = container
        self._before = before

    def wanted(self, now: int, leaves: frozenset[type]) -> list[object]:
        """Returns the items, if something has been found in the first ones."""
        return _worth(_items(self._base, self._container), leaves) if now > self._before else []


def _items(base: Any, container: Any) -> Iterable[object]:
    # By the container's own methods, whatever a subclass makes of them.
    if base is dict:
        return chain.from_iterable(cast("Iterable[Any]", dict.items(container)))
    return cast("Iterable[object]", base.__iter__(container))


def _worth(items: Iterable[object], leaves: frozenset[type]) -> list[object]:
    """Returns the items that may lead somewhere; in reverse, as the last one is taken first."""
    given = [*items]
    given.reverse()
    kinds = set(map(type, given)) - leaves
    if not kinds:
        return []
    if kinds <= _PLAIN:
        # A data set is many of them with leaves inside, which one look at all of them tells.
        inside: list[Any] = [one for one in given if type(one) in kinds]
        if max(map(len, inside)) <= MANY and leaves.issuperset(map(type, _insides(inside))):
            return []
    return given


def _insides(containers: list[Any]) -> Iterable[object]:
    values: list[Iterable[object]] = [one.values() for one in containers if type(one) is dict]
    return chain.from_iterable(containers + values)


@cache
def _container(kind: type) -> Any:
    return next((base for base in _CONTAINERS if issubclass(kind, base)), None)


def _attributes(kind: type, one: object) -> list[object]:
    values: list[object] = []
    try:
        # Not by getattr, for which an object may have an answer of its own.
        own: object = object.__getattribute__(one, "__dict__")
        if isinstance(own, dict):
            values += cast("dict[str, object]", own).values()
    except Exception:
        pass  # it has none
    for slot in _slots(kind):
        try:
            values.append(slot.__get__(one))
        except Exception:
            pass  # it is empty
    return values


def _beside(one: Any) -> list[object]:
    """Returns the attributes of what was found, but for what it is made of; see `parts`."""
    import torch

    if isinstance(one, torch.nn.Module):
        layers, made_of = [*one.modules()], _of_every_module()
    elif isinstance(one, torch.Tensor):
        return []
    else:
        layers, made_of = [one], _OF_OPTIMIZERS
    own = [cast("dict[str, object]", vars(layer)) for layer in layers]
    return [value for each in own for name, value in each.items() if name not in made_of]


_OF_OPTIMIZERS = frozenset({"state", "param_groups"})


@cache
def _of_every_module() -> frozenset[str]:
    import torch

    return frozenset(vars(torch.nn.Module()))


@cache
def _slots(kind: type) -> tuple[Any, ...]:
    # Those of functools.partial and of bound methods are of this kind, too.
    return tuple(
        value
        for base in kind.__mro__
        for value in vars(base).values()
        if isinstance(value, types.MemberDescriptorType)
    )


@cache
def kinds() -> tuple[type, ...]:
    """Returns the classes of stateful objects."""
    import torch

    amp: Any = torch.amp
    return (torch.nn.Module, torch.optim.Optimizer, amp.GradScaler, _scheduler())


@cache
def _scheduler() -> type:
    import torch

    return torch.optim.lr_scheduler.LRScheduler


def is_lazy(tensor: object) -> bool:
    """Tells whether a parameter or buffer waits for its shape, as those of lazy modules do."""
    from torch.nn import parameter

    return isinstance(tensor, (parameter.UninitializedParameter, parameter.UninitializedBuffer))


def _tensor() -> tuple[type, ...]:
    import torch

    return (torch.Tensor,)


def _tensors() -> frozenset[type]:
    import torch

    numpy = sys.modules.get("numpy")
    arrays: set[type] = set() if numpy is None else {numpy.ndarray}
    return frozenset({torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device} | arrays)


def parts(stateful: Iterable[Any]) -> tuple[Any, ...]:
    """Returns stateful objects, and the modules, parameters and buffers that they are made of."""
    import torch

    known: dict[int, Any] = {}
    waiting: list[Any] = [*stateful]
    waiting.reverse()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in known:
            continue
        known[id(one)] = one
        inside: list[Any] = []
        if isinstance(one, torch.nn.Module):
            inside += [*one._parameters.values(), *one._buffers.values(), *one._modules.values()]
        elif isinstance(one, torch.optim.Optimizer):
            inside += [tensor for group in one.param_groups for tensor in group["params"]]
        inside.reverse()
        waiting += inside
    return tuple(known.values())


def reduce_optimizer(optimizer: Any) -> Any:
    """Reduces an optimizer for pickle, with all that is its own.

    torch's way leaves out attributes, without which LBFGS and optimizers around others do not work,
    and hooks. It forgets as well that a scheduler counts its steps, which would warn of that.
    """
    import torch

    make, args, state = optimizer.__reduce_ex__(5)[:3]
    own = cast("dict[str, Any]", vars(optimizer))
    if type(optimizer).__getstate__ is cast("Any", torch.optim.Optimizer).__getstate__:
        # An object's own step is a wrapper around that of its class.
        state = {name: one for name, one in own.items() if name != "step"}
    if not hasattr(own.get("step"), _COUNTED):
        return make, args, state
    return make, args, state, None, None, _set_counted


# How torch's schedulers know their own wrapper of an optimizer's step.
_COUNTED = "_wrapped_by_lr_sched"


def _set_counted(optimizer: Any, state: Any) -> None:
    optimizer.__setstate__(state)
    own = weakref.ref(optimizer)
    step = cast("Any", type(optimizer)).step

    def counted(*args: Any, **kwargs: Any) -> Any:
        one: Any = own()
        one._opt_called = True
        return step(one, *args, **kwargs)

    setattr(counted, _COUNTED, True)
    optimizer.step = update_wrapper(counted, step)
