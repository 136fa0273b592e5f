"""torch's DistributedDataParallel, which a user may treat as the module itself."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribute import record
from distribute.errors import RequestError
from distribute.watch import Watch, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


# How DDP says, a step late, that parameters were not used.
_UNUSED = re.compile(
    r"Parameter indices which did not receive grad for rank (?P<rank>\d+):(?P<indices>[ \d]+)"
)


class DistributedModel(DistributedDataParallel):
    """torch's `DistributedDataParallel` that shows the module's face.

    State dicts and names have no `module.` prefix, attributes and methods of the module are read
    and written through it, a forward pass without gradients makes no collective, and copies and
    pickles are of the plain module.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, *, methods: Sequence[str] = (), **options: Any) -> None:
        cast("Any", super()).__init__(module, **options)
        del self.dim  # DDP does not use it, and many a module has one
        # Hooks and not methods: a parent module's state_dict() and load_state_dict() call only
        # hooks of its children. The underscored ones exist in every supported torch.
        untyped: Any = self
        untyped._register_state_dict_hook(_strip_prefix)
        untyped._register_load_state_dict_pre_hook(_add_prefix, with_module=True)
        untyped.register_load_state_dict_post_hook(_strip_reported)
        self._load_prefix = ""
        self._begun = False
        self._methods = frozenset(methods)
        self._options = options
        self._method = ""  # the one to call in the place of the module's forward
        own = ("delay_all_reduce_named_params", "mixed_precision")  # DDP has other ways then
        self._watch = Watch(
            self,
            find_unused=bool(options.get("find_unused_parameters")),
            listen=not any(options.get(name) for name in own) and not untyped._use_python_reducer,
        )
        _warn_of_hidden(self)
        self._complete = True  # from here on attributes go to the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; synchronises buffers and gradients only when gradients are enabled."""
        watch = self._watch
        if watch.over():
            return self._after_call(args, kwargs)
        if not torch.is_grad_enabled() or watch.all_frozen():
            return self._quietly(args, kwargs)
        watch.check()
        if self._begun:
            record.step()  # the one before has come to its end
        self._begun = True
        try:
            output = cast("Any", super()).forward(*args, **kwargs)
        except RuntimeError as error:
            self._explain(error)
            raise
        watch.begins(synchronised=self.require_backward_grad_sync)
        return output

    def _quietly(self, args: Any, kwargs: Any) -> Any:
        # DDP broadcasts buffers in its first forward without gradients but not in later ones, so
        # that one on one rank only, as in validation on rank 0, would wait for the others.
        due = self.require_forward_param_sync, self.require_backward_grad_sync
        self.require_forward_param_sync = self.require_backward_grad_sync = False
        try:
            return cast("Any", super()).forward(*args, **kwargs)
        finally:
            self.require_forward_param_sync, self.require_backward_grad_sync = due

    def over(self) -> bool:
        """Tells whether the call is over in which `ctx.model` made it: it is the module alone."""
        return self._watch.over()

    def made_with(self, methods: Sequence[str], options: dict[str, Any]) -> bool:
        """Tells whether it has these methods and options of DDP."""
        own = {name: self._options.get(name) for name in options}
        return self._methods.issuperset(methods) and own == options

    def _after_call(self, args: Any, kwargs: Any) -> Any:
        # In the caller, which was rank 0 and may keep the model: there is nobody to wait for.
        if dist.group.WORLD is not None:
            raise RequestError(
                f"a forward pass of {type(self.module).__name__}",
                "ctx.model wrapped it in a call that has ended, whose ranks were others",
                "wrap it again: model = ctx.model(ctx.unwrap(model))",
            )
        # With it go its hooks, which would reduce the gradients of a backward pass.
        untyped: Any = self
        untyped.reducer = untyped.logger = None
        name, self._method = self._method, ""
        return getattr(self.module, name or "__call__")(*args, **kwargs)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        name, self._method = self._method, ""
        if not name:
            return cast("Any", super())._run_ddp_forward(*args, **kwargs)
        with cast("Any", self)._inside_ddp_forward():
            return getattr(self.module, name)(*args, **kwargs)

    def _through_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the module as if it were its forward."""
        self._method = name
        try:
            return self(*args, **kwargs)
        finally:
            self._method = ""

    def _explain(self, error: RuntimeError) -> None:
        found = _UNUSED.search(str(error))
        if found is None:
            return
        trained = self._watch.trained
        names = [trained[int(one)] for one in found["indices"].split() if int(one) < len(trained)]
        raise RequestError(
            f"{quoted(names)} of {type(self.module).__name__} on rank {found['rank']}",
            "the step before gave no gradient, so the ranks could not finish synchronising it",
            "pass find_unused_parameters=True to ctx.model, or freeze before it what is not used",
        ) from error

    # -- attributes ----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__.get("_methods", ()):
                return partial(self._through_forward, name)
            if "module" not in self.__dict__.get("_modules", ()):
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def _is_own(self, name: str) -> bool:
        own = self.__dict__
        return (
            "_complete" not in own
            or name in own
            or name in own["_modules"]
            or name in _SET_LATER
            or hasattr(type(self), name)
        )

    # -- the module's tree in the place of ours ------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Returns what the module returns."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Returns what the module returns."""
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the module returns."""
        return cast("Any", self.module).named_modules(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Returns what the module returns."""
        return self.module.named_children()

    def train(self, mode: bool = True) -> DistributedModel:
        """Sets the mode of the module and of the wrapper."""
        self.training = mode
        self.module.train(mode)  # torch's goes over the children, which are now the module's
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> DistributedModel:
        """Applies `fn` to the module and its submodules."""
        self.module.apply(fn)
        return self

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> DistributedModel:
        cast("Any", self.module)._apply(fn, *args, **kwargs)
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers a parameter in the module."""
        self.module.register_parameter(name, param)

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """Registers a buffer in the module."""
        self.module.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a submodule to the module."""
        self.module.add_module(name, module)

    # -- copies --------------------------------------------------------------------------------

    def __copy__(self) -> nn.Module:
        return copy.copy(self.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _itself, (self.module,)


# What DDP sets on itself only after its constructor.
_SET_LATER = frozenset(
    {
        "buffer_hook",
        "_authoritative_rank",
        "_divide_by_initial_world_size",
        "_static_graph_delay_allreduce_enqueued",
    }
)


def replica(module: nn.Module, **options: Any) -> DistributedModel:
    """Wraps a module; see `DistributedModel`."""
    inside: object = getattr(module, "_orig_mod", module)  # torch.compile's wrapper has them all
    kind = inside.__class__
    # Python looks these up in the class: only a container's wrapper is to have them.
    named = {name: _forwarded(name) for name in _OF_CONTAINERS if hasattr(kind, name)}
    made = type("DistributedModel", (DistributedModel,), named) if named else DistributedModel
    return cast("DistributedModel", cast("Any", made)(module, **options))


_OF_CONTAINERS = (
    "__getitem__", "__setitem__", "__delitem__", "__len__", "__iter__", "__contains__"
)  # fmt: skip


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: DistributedModel, *args: Any) -> Any:
        return getattr(self.module, name)(*args)

    return method


def _itself(module: nn.Module) -> nn.Module:
    return module


def _warn_of_hidden(model: DistributedModel) -> None:
    # DDP needs these names itself, so they cannot lead to the module.
    ours = (set(dir(model)) - set(dir(nn.Module()))) - {"device", "module"}
    theirs = set(dir(model.module))
    for name in sorted(ours & theirs):
        if not name.startswith("_"):
            warnings.warn(
                f"{type(model.module).__name__}.{name} is hidden by DistributedDataParallel's "
                f"attribute of that name; reach it as unwrap(model).{name}",
                stacklevel=5,
            )


# -- state dicts -------------------------------------------------------------------------------


def _strip_prefix(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    _rename(state_dict, prefix + "module.", prefix)
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        inner = metadata.pop(prefix + "module", {})
        _rename(metadata, prefix + "module.", prefix)
        metadata[prefix[:-1]] = inner


def _add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    cast("Any", module)._load_prefix = prefix
    _rename(state_dict, prefix, prefix + "module.")


def _strip_reported(module: nn.Module, incompatible: Any) -> None:
    prefix: str = cast("Any", module)._load_prefix
    for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
        keys[:] = [_renamed(key, prefix + "module.", prefix) for key in keys]


def _rename(mapping: dict[str, Any], old: str, new: str) -> None:
    # Takes all out before it puts any back: a new name may be the old name of another.
    moved = [(key, mapping.pop(key)) for key in list(mapping) if key.startswith(old)]
    mapping.update((_renamed(key, old, new), value) for key, value in moved)


def _renamed(key: str, old: str, new: str) -> str:
    return new + key[len(old) :] if key.startswith(old) else key
