"""What became of one part of the caller's objects, and how the caller's own becomes the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

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


def taken(part: Any, kind: type, known: set[int]) -> Change:
    """Returns what became of a part.

    Args:
        part: The part, after the function has run.
        kind: Its class before that.
        known: Numbers of all the parts.
    """
    if isinstance(part, nn.Module):
        return _of_module(part, kind, known)
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


def _moved(value: Any, device: torch.device, *, copy: bool = True) -> Any:
    """Returns a value with its tensors on a device, in memory of their own if they are copied."""
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=copy)
    if type(value) is dict:
        return {key: _moved(one, device, copy=copy) for key, one in cast("Any", value).items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(one, device, copy=copy) for one in value)
    return value


# -- modules -----------------------------------------------------------------------------------


def _of_module(module: nn.Module, kind: type, known: set[int]) -> Change:
    if isinstance(module, torch.jit.ScriptModule):
        return OfMode(module.training)  # nobody can change what it consists of
    for one in module._parameters.values():
        if one is not None and hasattr(one, "full_tensor"):
            reason = f"a parameter is a {type(one.data).__name__}, of which rank 0 has a part"
            return OfMode(module.training, reason)
    return OfModule.of(module, kind, known)


@dataclass(frozen=True)
class OfMode:
    """The mode of a module, where it is all that comes back beside the tensors.

    Attributes:
        training: The mode.
        reason: Why there is no more, or empty if there is none.
    """

    training: bool
    reason: str = ""

    def apply(self, own: nn.Module, unsent: set[int]) -> str:
        """Sets it."""
        own.training = self.training
        return self.reason


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
    """

    training: bool
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    fleeting: frozenset[str]
    children: dict[str, Any]
    extra: tuple[Any, ...]
    became: tuple[type, dict[str, Any]] | None

    @classmethod
    def of(cls, module: nn.Module, kind: type, known: set[int]) -> OfModule:
        """Takes the state of a module.

        Args:
            module: The module.
            kind: Its class when the function was called.
            known: Numbers of all the parts.
        """
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

    def apply(self, own: nn.Module, unsent: set[int]) -> str:
        """Has the caller's module consist of the same."""
        own.training = self.training
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
        for group, theirs in zip(own.param_groups, self.groups, strict=True):
            for name, one in theirs.items():
                if name != "params":
                    # A learning rate may be a tensor, too.
                    before = group.get(name)
                    device = before.device if isinstance(before, torch.Tensor) else _HOST
                    theirs[name] = _moved(one, device)
            group.clear()
            group.update(theirs)
        own.state.clear()
        own.state.update(self.state)
        follow(own, copy=True)
        return ""


_HOST = torch.device("cpu")


def follow(optimizer: Optimizer, *, copy: bool = False) -> None:
    """Moves what an optimizer keeps for its parameters to the devices of these.

    Args:
        optimizer: The optimizer.
        copy: Whether it is to be in memory of its own, also where it is there already.
    """
    for group in optimizer.param_groups:
        # As torch does when it loads a state dict: the count of steps stays on the CPU, unless the
        # step is taken on the device.
        counted_there = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            if parameter in optimizer.state:
                optimizer.state[parameter] = {
                    name: _moved(
                        one,
                        _HOST if name == "step" and not counted_there else parameter.device,
                        copy=copy,
                    )
                    for name, one in optimizer.state[parameter].items()
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
