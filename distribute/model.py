"""Models whose replicas stay in step, and which a user may treat as the module itself."""

from __future__ import annotations

import difflib
import inspect
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from distribute.agreement import Call, agree
from distribute.errors import RequestError
from distribute.replica import DistributedModel, replica
from distribute.stateful import is_lazy
from distribute.tree import described

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from distribute.world import World

M = TypeVar("M", bound=nn.Module)
B = TypeVar("B")

_dist: Any = dist  # torch annotates its collectives only in part


@overload
def wrap(
    world: World,
    module: M,
    *,
    sync_batchnorm: bool = ...,
    forward: str | Sequence[str] = ...,
    **ddp_options: Any,
) -> M: ...
@overload
def wrap(
    world: World,
    module: Callable[[], M],
    *,
    sync_batchnorm: bool = ...,
    forward: str | Sequence[str] = ...,
    **ddp_options: Any,
) -> M: ...
def wrap(
    world: World,
    module: M | Callable[[], M],
    *,
    sync_batchnorm: bool = False,
    forward: str | Sequence[str] = (),
    **ddp_options: Any,
) -> M:
    """Puts a module on the rank's device and keeps its replicas in step.

    All ranks must call it at the same point of their program.

    Args:
        world: The world.
        module: The module, or a function without arguments that makes it. The function is called
            with the rank's device as torch's default device. Layers on the meta device get memory
            on the rank's device and the values of their `reset_parameters()`.
        sync_batchnorm: Whether BatchNorm layers use the statistics of all ranks.
        forward: Names of methods of the module that train it as its forward does, such as
            `"loss"`: gradients of what they compute are synchronised.
        **ddp_options: Options of torch's `DistributedDataParallel`.

    Returns:
        The module as a `DistributedModel`; what was made one in this call already, itself. In a
        world of one, and when no parameter requires a gradient, the module itself, with the
        parameters and buffers of rank 0. The type that is stated is the module's in any case: its
        attributes and methods are there.

    Raises:
        TypeError: DDP has no such option.
        RequestError: It cannot be done with this module.
        CollectiveMismatch: The ranks do not all wrap the same module here.
    """
    _require_options(ddp_options)
    if sync_batchnorm and world.device.type == "cpu":
        raise RequestError(
            "sync_batchnorm=True on the CPU",
            "torch's SyncBatchNorm works on accelerators only",
            "leave it out, or ask for an accelerator",
        )
    wrapper = _living(module)
    if wrapper is not None:
        return _again(world, cast("M", module), wrapper, sync_batchnorm, forward, ddp_options)
    built = _on_device(world, module)
    methods = _methods(built, forward)
    if sync_batchnorm:
        convert: Any = nn.SyncBatchNorm
        built = convert.convert_sync_batchnorm(built)
    if world.world_size == 1:
        return built
    if world.check:
        agree(world, Call("model", f"({type(built).__name__}) with {_parameters(built)}"))
    if not any(parameter.requires_grad for parameter in built.parameters()):
        _share(built, world.device, ddp_options)
        return built
    device_ids = None if world.device.type == "cpu" else [world.device.index]
    wrapped = replica(built, methods=methods, device_ids=device_ids, **ddp_options)
    return cast("M", wrapped)


def _living(module: object) -> DistributedModel | None:
    """Returns the wrapper that a module has from `wrap` in this call."""
    wrapper = _wrapper(module) if isinstance(module, nn.Module) else None
    return wrapper if isinstance(wrapper, DistributedModel) and not wrapper.over() else None


def _again(
    world: World,
    model: M,
    wrapper: DistributedModel,
    sync_batchnorm: bool,
    forward: str | Sequence[str],
    options: dict[str, Any],
) -> M:
    """Returns the model itself, as a world of one does."""
    alone = sync_batchnorm and any(
        isinstance(one, _BatchNorm) and not isinstance(one, nn.SyncBatchNorm)
        for one in model.modules()
    )
    if alone or not wrapper.made_with(_methods(model, forward), options):
        raise RequestError(
            "other options for a model that ctx.model has made",
            "it keeps those that it was made with",
            "pass the module inside it, ctx.unwrap(model)",
        )
    if world.check:
        agree(world, Call("model", f" of a {type(unwrap(model)).__name__} that it has made"))
    return model


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
    wrapper = _wrapper(model)
    if wrapper is None:
        return nullcontext()
    return cast("AbstractContextManager[None]", wrapper.no_sync())


def accumulate(
    model: nn.Module | Sequence[nn.Module], loader: Iterable[B], n: int
) -> Iterator[tuple[B, bool]]:
    """Yields each batch with whether to step after it: after every n-th, and after the last one.

    Forward passes of the other batches add gradients up without synchronising them.

    Args:
        model: The model, or the models, that the loop trains.
        loader: The batches. Without a length it is read one batch ahead.
        n: How many batches make a step.

    Raises:
        RequestError: `n` is not a number of batches, or the model was made with `static_graph`.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:  # pyright: ignore
        raise RequestError(f"n={n!r}", "it is the number of batches of a step", "pass 1 or more")
    models = [model] if isinstance(model, nn.Module) else list(model)
    if any(getattr(_wrapper(one), "static_graph", False) for one in models):
        raise RequestError(
            "accumulate with static_graph=True",
            "DDP then takes every step for the same as the first one",
            "leave static_graph out of ctx.model",
        )
    return _accumulated(models, loader, n)


def _accumulated(models: list[nn.Module], loader: Iterable[B], n: int) -> Iterator[tuple[B, bool]]:
    for number, (batch, last) in enumerate(_with_last(loader), 1):
        step = last or number % n == 0
        with ExitStack() as stack:
            if not step:
                for one in models:
                    stack.enter_context(no_sync(one))
            yield batch, step


def _with_last(loader: Iterable[B]) -> Iterator[tuple[B, bool]]:
    """Yields each batch with whether it is the last one."""
    try:
        total = len(cast("Sized", loader))
    except TypeError:
        batches = iter(loader)
        batch = next(batches, _END)
        while batch is not _END:
            following = next(batches, _END)
            yield batch, following is _END
            batch = following
        return
    for number, batch in enumerate(loader, 1):
        yield batch, number >= total


_END: Any = object()


def sync_buffers(world: World, model: nn.Module) -> None:
    """Gives every rank the buffers of rank 0, such as BatchNorm's running statistics.

    Call it on all ranks before they evaluate: in training every rank updates its own buffers.
    """
    if world.world_size > 1:
        buffers = dict(unwrap(model).named_buffers())
        if world.check:
            agree(world, Call("sync_buffers", f" of {described(_told, buffers)}"))
        _broadcast_into(buffers.values(), world.device)


def _wrapper(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the wrapper of data parallelism that a model is, or has inside."""
    layer: nn.Module | None = model
    while layer is not None and not isinstance(layer, DistributedDataParallel):
        layer = _inside(layer)
    return layer


def _parameters(module: nn.Module) -> str:
    named = {
        name: one if one.requires_grad else _Frozen(one) for name, one in module.named_parameters()
    }
    return described(_told, named)


class _Frozen:
    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter


def _told(tensor: Any) -> str:
    if isinstance(tensor, _Frozen):
        return f"{_told(tensor.parameter)} frozen"
    if is_lazy(tensor):
        return "a lazy parameter"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _methods(module: nn.Module, forward: str | Sequence[str]) -> list[str]:
    names = [forward] if isinstance(forward, str) else list(forward)
    known = [name for name in dir(type(unwrap(module))) if not hasattr(nn.Module, name)]
    for name in names:
        if not callable(getattr(module, name, None)):
            near = difflib.get_close_matches(name, known, 1)
            raise RequestError(
                f"forward={name!r}",
                f"{type(unwrap(module)).__name__} has no method of that name",
                f"did you mean {near[0]!r}?" if near else "pass the name of one of its methods",
            )
    return names


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
    if isinstance(module, DistributedModel) and module.over():
        module = cast("M", module.module)  # a caller that was rank 0 has kept it
    if isinstance(module, DistributedDataParallel):
        raise RequestError(
            "a DistributedDataParallel", "it is wrapped already", "pass the module inside it"
        )
    if isinstance(module, nn.Module):
        return _materialised(world, cast("M", module)).to(world.device)
    if not callable(module):  # pyright: ignore[reportUnnecessaryComparison]
        raise RequestError(
            f"a {type(module).__name__}",
            "it is no module, nor a function that makes one",
            "pass an nn.Module",
        )
    with world.device:
        built = module()
    if not isinstance(built, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(
            f"{module!r}",
            f"it made a {type(built).__name__}",
            "pass a function that makes a module",
        )
    return _materialised(world, built).to(world.device)


def _materialised(world: World, module: M) -> M:
    """Gives memory and first values to what is on the meta device."""
    layers: dict[str, Any] = dict(cast("Any", module).named_modules())
    for name, one in layers.items():
        mine: dict[str, torch.Tensor | None] = {**one._parameters, **one._buffers}
        bare = [each for each, tensor in mine.items() if tensor is not None and tensor.is_meta]
        if not bare:
            continue
        reset = getattr(one, "reset_parameters", getattr(one, "_reset_parameters", None))
        if reset is None:
            full = f"{name}.{bare[0]}" if name else bare[0]
            raise RequestError(
                f"{full!r} of {type(module).__name__}, on the meta device",
                f"{type(one).__name__} has no reset_parameters() that would set its values",
                "give it one, or make the module with a function: ctx.model(lambda: ...)",
            )
        one.to_empty(device=world.device, recurse=False)
        reset()
    return module


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
