"""State that comes back: what a function did to the modules and optimizers that it was given.

Rank 0 takes it when the function has returned, one `Change` for each part of the caller's objects
(see `stateful.parts`), and the caller applies it to its own. In a change the parts themselves stand
for those of the caller, so that ties between them, old and new, are the same on both sides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distribute.payload import pack
from distribute.stateful import is_lazy


class Change(Protocol):
    """What became of one part."""

    def apply(self, own: Any, unsent: set[int]) -> str:
        """Does the same to the caller's part.

        Args:
            own: The caller's part.
            unsent: Numbers of those of the caller's parts that rank 0 did not have.

        Returns:
            Why it could not, or an empty string.
        """
        ...


class Held:
    """The parts of the caller's objects as rank 0 has them.

    Made before the function runs.

    Attributes:
        parts: The parts, in the caller's order; None for what was not sent.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self._kinds: list[type] = [type(one) for one in parts]

    def changes(self) -> list[Change | None]:
        """Returns what became of the parts; of one that was not sent None."""
        known = {id(one) for one in self.parts}
        return [
            _change(one, kind, known) for one, kind in zip(self.parts, self._kinds, strict=True)
        ]

    def sendable(self, changes: Iterable[Change | None]) -> list[Change | None]:
        """Replaces the changes that cannot be pickled by news of them."""
        return [*map(self._sendable, changes)]

    def _sendable(self, change: Change | None) -> Change | None:
        try:
            pack(change, home=True, known=self.parts).close()
        except Exception as error:
            reason = f"it cannot be sent ({type(error).__name__}: {error})"
            if isinstance(change, OfModule):
                return OfModule.mode_only(change.training, reason)
            return Unsent(reason)
        return change


def apply(changes: Sequence[Change | None], parts: Sequence[Any]) -> None:
    """Applies what became of rank 0's parts to the caller's."""
    missing: list[tuple[str, str]] = []
    unsent = {id(own) for change, own in zip(changes, parts, strict=True) if change is None}
    # The parameters first: what an optimizer holds goes to where they are.
    order = sorted(range(len(parts)), key=lambda index: not isinstance(changes[index], OfTensor))
    for index in order:
        change, own = changes[index], parts[index]
        try:
            reason = "" if change is None else change.apply(own, unsent)
        except Exception as error:  # the call has succeeded, and its value is not to be lost
            reason = f"it is refused here ({type(error).__name__}: {error})"
        if reason:
            missing.append((type(own).__name__, reason))
    for name, reason in missing:
        warnings.warn(
            f"the state of an argument ({name}) comes back in part: {reason}; return what is "
            "missing, or make it before the call",
            stacklevel=2,
        )


def _change(part: Any, kind: type, known: set[int]) -> Change | None:
    if part is None:
        return None
    try:
        return _taken(part, kind, known)
    except Exception as error:
        return Unsent(f"it cannot be read there ({type(error).__name__}: {error})")


def _taken(part: Any, kind: type, known: set[int]) -> Change:
    if isinstance(part, nn.Module):
        return OfModule.of(part, kind, known)
    if isinstance(part, Optimizer):
        return OfOptimizer([{**one} for one in part.param_groups], {**part.state})
    if isinstance(part, torch.Tensor):
        return _of_tensor(part)
    return OfStateDict(part.state_dict())


# -- parameters and buffers --------------------------------------------------------------------


@dataclass(frozen=True)
class OfTensor:
    """Values of a parameter or buffer, and whether it takes part in training."""

    data: torch.Tensor
    requires_grad: bool

    def apply(self, own: torch.Tensor, unsent: set[int]) -> str:
        """Writes into the caller's tensor; it takes another shape or type only where it must."""
        if is_lazy(own):
            cast("Any", own).materialize(self.data.shape, dtype=self.data.dtype)
        with torch.no_grad():
            if own.shape == self.data.shape and own.dtype == self.data.dtype:
                try:
                    own.copy_(self.data)
                except RuntimeError:  # it is expanded, for example
                    own.data = _moved(self.data, own.device)
            else:
                own.grad = None
                own.data = _moved(self.data, own.device)
        if own.is_leaf and own.requires_grad != self.requires_grad:
            own.requires_grad_(self.requires_grad)
        return ""


def _of_tensor(tensor: torch.Tensor) -> Change:
    if is_lazy(tensor) or tensor.is_meta:
        return Same()  # it has no values
    return OfTensor(tensor.detach(), tensor.requires_grad)


def _moved(value: Any, device: torch.device) -> Any:
    """Returns a value with its tensors on a device, and in memory of their own."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if type(value) is dict:
        return {key: _moved(one, device) for key, one in cast("Any", value).items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device) for one in value)
    return value


# -- modules -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OfModule:
    """What a module consists of, and its mode.

    Attributes:
        training: The mode.
        parameters: Its own parameters by name; known ones, and those that the function made.
        buffers: Its own buffers by name.
        fleeting: Names of the buffers that are not in its state dict.
        children: Its submodules by name.
        extra: What its `get_extra_state` returned, in a tuple, if it has one.
        became: Its class and attributes, if it has become one of another class.
        unsent: Why the function's changes of what it consists of are not here, or empty.
    """

    training: bool
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    fleeting: frozenset[str]
    children: dict[str, Any]
    extra: tuple[Any, ...]
    became: tuple[type, dict[str, Any]] | None
    unsent: str = ""

    @classmethod
    def of(cls, module: nn.Module, kind: type, known: set[int]) -> OfModule:
        """Takes the state of a module.

        Args:
            module: The module.
            kind: Its class when the function was called.
            known: Numbers of all the parts.
        """
        for one in module._parameters.values():
            if one is not None and hasattr(one, "full_tensor"):
                reason = f"a parameter is a {type(one.data).__name__}, of which rank 0 has a part"
                return cls.mode_only(module.training, reason)
        extra: tuple[Any, ...] = ()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra = (module.get_extra_state(),)
        became = None
        if type(module) is not kind:
            # As a lazy module does once it has seen a batch.
            became = (
                type(module),
                {name: one for name, one in vars(module).items() if name not in _MADE_OF},
            )
        return cls(
            training=module.training,
            parameters={**module._parameters},
            buffers={**module._buffers},
            fleeting=frozenset(module._non_persistent_buffers_set),
            children={name: _inner(one, known) for name, one in module._modules.items()},
            extra=extra,
            became=became,
        )

    @classmethod
    def mode_only(cls, training: bool, reason: str) -> OfModule:
        """Returns what there is of a module when the rest of it cannot be sent."""
        return cls(training, {}, {}, frozenset(), {}, (), None, reason)

    def apply(self, own: nn.Module, unsent: set[int]) -> str:
        """Has the caller's module consist of the same."""
        own.training = self.training
        if self.unsent:
            return self.unsent
        if self.became is not None:
            kept = {name: one for name, one in vars(own).items() if name in _MADE_OF}
            own.__class__, attributes = self.became
            vars(own).clear()
            vars(own).update(attributes | kept)
        consists = (
            (own._parameters, self.parameters),
            (own._buffers, self.buffers),
            (own._modules, self.children),
        )
        for mine, theirs in consists:
            for name in [*mine]:
                if name not in theirs and id(mine[name]) not in unsent:
                    del mine[name]
        for mine, theirs in consists:
            for name, one in theirs.items():
                before = mine.get(name, mine)
                if before is not one and id(before) not in unsent:
                    vars(own).pop(name, None)  # what has had the name
                    mine[name] = None
                    setattr(own, name, one)  # a module may want to know
        own._non_persistent_buffers_set.clear()
        own._non_persistent_buffers_set.update(self.fleeting)
        for one in self.extra:
            own.set_extra_state(one)
        return ""


_MADE_OF = frozenset({"_parameters", "_buffers", "_modules", "training"})


def _inner(module: Any, known: set[int]) -> Any:
    """Returns the module in a wrapper that the function has put around it."""
    while module is not None and id(module) not in known:
        if isinstance(module, DistributedDataParallel):
            deeper: Any = cast("Any", module).module
        else:
            # torch.compile's wrapper; a test of its type would import dynamo.
            deeper = module._modules.get("_orig_mod")
        if deeper is None:
            break
        module = deeper
    return module


# -- what is made of parameters ----------------------------------------------------------------


@dataclass(frozen=True)
class OfOptimizer:
    """The groups of an optimizer, and what it keeps for each parameter."""

    groups: list[dict[str, Any]]
    state: dict[Any, Any]

    def apply(self, own: Optimizer, unsent: set[int]) -> str:
        """Sets them; the caller's objects that hold them stay."""
        del own.param_groups[len(self.groups) :]
        own.param_groups += [{} for _ in self.groups[len(own.param_groups) :]]
        follows: dict[Any, bool] = {}
        for group, theirs in zip(own.param_groups, self.groups, strict=True):
            step_too = bool(theirs.get("capturable") or theirs.get("fused"))
            follows |= dict.fromkeys(theirs["params"], step_too)
            for name, one in theirs.items():
                if name != "params":
                    # A learning rate may be a tensor, too.
                    before = group.get(name)
                    device = before.device if isinstance(before, torch.Tensor) else _HOST
                    theirs[name] = _moved(one, device)
            group.clear()
            group.update(theirs)
        own.state.clear()
        for parameter, one in self.state.items():
            own.state[parameter] = _beside(parameter, one, follows.get(parameter, False))
        return ""


_HOST = torch.device("cpu")


def _beside(parameter: Any, state: Any, step_too: bool) -> Any:
    """Returns an optimizer's state of a parameter on that one's device."""
    if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
        return _moved(state, _HOST)
    # As in torch: the count of steps stays on the CPU, unless the step is taken on the device.
    return {
        name: _moved(one, _HOST if name == "step" and not step_too else parameter.device)
        for name, one in cast("Any", state).items()
    }


@dataclass(frozen=True)
class OfStateDict:
    """The state of a scheduler or of a gradient scaler."""

    state: dict[str, Any]

    def apply(self, own: Any, unsent: set[int]) -> str:
        """Loads it."""
        own.load_state_dict(self.state)
        return ""


# -- what does not come back ---------------------------------------------------------------------


@dataclass(frozen=True)
class Same:
    """Stands for no change."""

    def apply(self, own: Any, unsent: set[int]) -> str:
        """Does nothing."""
        return ""


@dataclass(frozen=True)
class Unsent:
    """Stands for a change that cannot be sent.

    Attributes:
        reason: Why.
    """

    reason: str

    def apply(self, own: Any, unsent: set[int]) -> str:
        """Does nothing."""
        return self.reason
