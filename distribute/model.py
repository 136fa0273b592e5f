"""Models whose replicas stay in step, and which a user may treat as the module itself."""

from __future__ import annotations

import copy
import difflib
import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distribute import record
from distribute.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from distribute.world import World

M = TypeVar("M", bound=nn.Module)

_dist: Any = dist  # torch annotates its collectives only in part


@overload
def wrap(world: World, module: M, *, sync_batchnorm: bool = ..., **ddp_options: Any) -> M: ...
@overload
def wrap(
    world: World, module: Callable[[], M], *, sync_batchnorm: bool = ..., **ddp_options: Any
) -> M: ...
def wrap(
    world: World,
    module: M | Callable[[], M],
    *,
    sync_batchnorm: bool = False,
    **ddp_options: Any,
) -> M:
    """Puts a module on the rank's device and keeps its replicas in step.

    All ranks must call it at the same point of their program.

    Args:
        world: The world.
        module: The module, or a function without arguments that makes it. The function is called
            with the rank's device as torch's default device.
        sync_batchnorm: Whether BatchNorm layers use the statistics of all ranks.
        **ddp_options: Options of torch's `DistributedDataParallel`.

    Returns:
        The module as a `DistributedModel`. In a world of one, and when no parameter requires a
        gradient, the module itself, with the parameters and buffers of rank 0. The type that is
        stated is the module's in any case: its attributes and methods are there.
    """
    _require_options(ddp_options)
    if sync_batchnorm and world.device.type == "cpu":
        raise RequestError(
            "sync_batchnorm=True on the CPU",
            "torch's SyncBatchNorm works on accelerators only",
            "leave it out, or ask for an accelerator",
        )
    built = _on_device(world, module)
    if sync_batchnorm:
        convert: Any = nn.SyncBatchNorm
        built = convert.convert_sync_batchnorm(built)
    if world.world_size == 1:
        return built
    if not any(parameter.requires_grad for parameter in built.parameters()):
        _share(built, world.device, ddp_options)
        return built
    device_ids = None if world.device.type == "cpu" else [world.device.index]
    return cast("M", DistributedModel(built, device_ids=device_ids, **ddp_options))


def unwrap(model: M) -> M:
    """Returns the module inside the wrappers of data parallelism and of `torch.compile`."""
    inner: nn.Module = model
    while (deeper := _inside(inner)) is not None:
        inner = deeper
    return cast("M", inner)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Returns a context in which forward passes do not make backward synchronise gradients.

    They add up on each rank, and the first backward of a forward outside of it synchronises the
    sum. For a module that is not distributed the context does nothing.
    """
    layer: nn.Module | None = model
    while layer is not None:
        if isinstance(layer, DistributedDataParallel):
            return cast("AbstractContextManager[None]", layer.no_sync())
        layer = _inside(layer)
    return nullcontext()


def sync_buffers(world: World, model: nn.Module) -> None:
    """Gives every rank the buffers of rank 0, such as BatchNorm's running statistics.

    Call it on all ranks before they evaluate: in training every rank updates its own buffers.
    """
    if world.world_size > 1:
        _broadcast_into(unwrap(model).buffers(), world.device)


class DistributedModel(DistributedDataParallel):
    """torch's `DistributedDataParallel` that shows the module's face.

    State dicts and names have no `module.` prefix, attributes and methods of the module are read
    and written through it, a forward pass without gradients makes no collective, and copies and
    pickles are of the plain module.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, **options: Any) -> None:
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
        _warn_of_hidden(self)
        self._complete = True  # from here on attributes go to the module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; synchronises buffers and gradients only when gradients are enabled."""
        forward = cast("Any", super()).forward
        if torch.is_grad_enabled():
            if self._begun:
                record.step()  # the one before has come to its end
            self._begun = True
            return forward(*args, **kwargs)
        # Otherwise DDP broadcasts buffers in its first forward but not in later ones, so that a
        # forward on one rank only, as in validation on rank 0, would wait for the others.
        due = self.require_forward_param_sync
        self.require_forward_param_sync = False
        try:
            return forward(*args, **kwargs)
        finally:
            self.require_forward_param_sync = due

    # -- attributes ----------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
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


def _itself(module: nn.Module) -> nn.Module:
    return module


def _inside(module: nn.Module) -> nn.Module | None:
    """Returns the module that a wrapper wraps, or None when it is not a wrapper."""
    if isinstance(module, DistributedDataParallel):
        return cast("nn.Module", cast("Any", module).module)
    # torch.compile's wrapper; a test of its type would import dynamo.
    return dict(module.named_children()).get("_orig_mod")


def _require_options(options: dict[str, Any]) -> None:
    constructor: Any = DistributedDataParallel
    known = inspect.signature(constructor).parameters
    for name in options:
        if name not in known or name == "module":
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"DistributedDataParallel has no option {name!r}{hint}")
        if name in ("device_ids", "output_device"):
            raise RequestError(
                f"{name}={options[name]!r}",
                "a rank's model is on the rank's device",
                "leave it out",
            )


def _on_device(world: World, module: M | Callable[[], M]) -> M:
    if isinstance(module, DistributedDataParallel):
        raise RequestError(
            "a DistributedDataParallel", "it is wrapped already", "pass the module inside it"
        )
    if isinstance(module, nn.Module):
        return cast("M", module.to(world.device))
    with world.device:
        built = module()
    if not isinstance(built, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(
            f"{module!r}",
            f"it made a {type(built).__name__}",
            "pass a function that makes a module",
        )
    return built.to(world.device)


def _share(module: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
    """Does to a frozen module what DDP's constructor does to another."""
    if not options.get("init_sync", True):
        return
    mesh = options.get("device_mesh")
    group = options.get("process_group") if mesh is None else mesh.get_group(mesh_dim=0)
    _broadcast_into([*module.parameters(), *module.buffers()], device, group)


def _broadcast_into(
    tensors: Iterable[torch.Tensor], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Overwrites tensors with those of the group's first rank."""
    src = 0 if group is None else dist.get_global_rank(group, 0)
    pending: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
    for tensor in tensors:
        wire = tensor.detach().to(device).contiguous()
        raw = wire.reshape(-1).view(torch.uint8)  # as bytes: gloo does not know every dtype
        pending.append((tensor, wire, _dist.broadcast(raw, src, group=group, async_op=True)))
    for tensor, wire, work in pending:
        work.wait()
        if wire.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(wire)


def _warn_of_hidden(model: DistributedModel) -> None:
    # DDP needs these names itself, so they cannot lead to the module.
    ours = (set(dir(model)) - set(dir(nn.Module()))) - {"device", "module"}
    theirs = set(dir(model.module))
    for name in sorted(ours & theirs):
        if not name.startswith("_"):
            warnings.warn(
                f"{type(model.module).__name__}.{name} is hidden by DistributedDataParallel's "
                f"attribute of that name; reach it as unwrap(model).{name}",
                stacklevel=4,
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
