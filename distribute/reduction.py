"""Reductions: one value of all ranks' values.

They take tensors, numbers, bools, and nested dicts, lists, tuples and dataclasses of them, and
never change what they are given.

How values travel: numbers by an all-gather of two integers each, so that ranks may mix ints with
floats and ints stay exact (a single one in the message by which the ranks agree); tensors by one
reduction for each wide dtype, in which neither small ints nor halves overflow.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from distribute import record
from distribute.agreement import Call, agree
from distribute.errors import RequestError
from distribute.gradients import attach, has_gradient
from distribute.groups import is_alone, pieces, require_dense, require_rank
from distribute.scalars import Shares, exchanged, is_number
from distribute.tree import described, filled, leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distribute.world import World

T = TypeVar("T")

_dist: Any = dist  # torch annotates its collectives only in part

# By our names, the operations of torch.distributed that carry them out. A mean is a sum divided
# afterwards: gloo cannot average ints, and in older torch nothing.
_OPS = {"sum": "SUM", "mean": "SUM", "min": "MIN", "max": "MAX", "product": "PRODUCT"}

# The dtype in which tensors are reduced: no backend sums small ints and halves without loss, and
# gloo refuses some of them.
_WIDE = {
    torch.bool: torch.int64,
    torch.uint8: torch.int64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.int8: torch.int64,
    torch.int16: torch.int64,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


def all_reduce(
    world: World,
    value: T,
    op: str = "sum",
    *,
    weight: float | None = None,
    differentiable: bool = False,
) -> T:
    """Combines a value over all ranks; every rank gets the result.

    Floats and complex numbers keep their dtype; halves are combined in float32. Integers and
    bools follow `torch.sum`: their sum and product are int64, so the sum of bools is a count.
    Their mean is float64. `min` and `max` keep the dtype, so they are "all" and "any" of bools.
    Python ints are exact, however large the result.

    Args:
        world: The world.
        value: A tensor of the same shape and dtype on every rank, a number, or a nested structure.
        op: `"sum"`, `"mean"`, `"min"`, `"max"` or `"product"`.
        weight: For a mean, how much this rank's value counts, such as the number of its samples.
            The value of a rank with weight 0 does not matter, not even NaN. If all weights are 0,
            the result is NaN.
        differentiable: Whether backward leads from the result to the value; for sums and means.

    Returns:
        A new value of the same structure.

    Raises:
        RequestError: The operation is not defined for what was given.
        CollectiveMismatch: The ranks came to different collectives.
    """
    _require_op(op, weight, differentiable)
    how = _Reduction("all_reduce", op, weight, None, differentiable)
    reduced: T = _reduced(world, how, value)
    return reduced


def reduce(
    world: World, value: T, dst: int = 0, op: str = "sum", *, weight: float | None = None
) -> T | None:
    """Combines a value over all ranks as `all_reduce` does; the others than `dst` get None."""
    require_rank(world, "dst", dst)
    _require_op(op, weight, False)
    reduced: T = _reduced(world, _Reduction("reduce", op, weight, dst, False), value)
    return reduced if world.rank == dst else None


@dataclass(frozen=True)
class _Reduction:
    """How values are combined.

    Attributes:
        name: Of the collective.
        op: The operation.
        weight: This rank's, for a weighted mean.
        dst: The rank that gets the result, or None for all.
        differentiable: Whether backward leads through it.
    """

    name: str
    op: str
    weight: float | None
    dst: int | None
    differentiable: bool

    def call(self, value: Any) -> Call:
        """Returns what must be equal on all ranks."""
        told = f"op={self.op!r}"
        if self.weight is not None:
            told += ", weight=..."
        if self.dst is not None:
            told += f", dst={self.dst}"
        if self.differentiable:
            told += ", differentiable=True"
        return Call(self.name, f"({told}) of {described(self._leaf, value)}")

    def _leaf(self, leaf: Any) -> str:
        if not isinstance(leaf, torch.Tensor):
            return "a number"
        dtype = str(leaf.dtype).removeprefix("torch.")
        linked = self.differentiable and torch.is_grad_enabled() and leaf.requires_grad
        return f"{dtype}{list(leaf.shape)}{' with gradient' if linked else ''}"


def _require_op(op: str, weight: float | None, differentiable: bool) -> None:
    if op not in _OPS:
        raise RequestError(
            f"op={op!r}", f"the operations are {', '.join(_OPS)}", "pass one of these"
        )
    if differentiable and op not in ("sum", "mean"):
        raise RequestError(
            f"differentiable=True with op={op!r}",
            "gradients go through sums and means",
            "pass one of these, or leave out differentiable",
        )
    if weight is None:
        return
    if op != "mean":
        raise RequestError(
            f"weight={weight!r} with op={op!r}", "a weight is for a mean", 'pass op="mean"'
        )
    # Not `weight < 0`, which is false for NaN.
    if not isinstance(weight, numbers.Real) or not 0 <= weight < math.inf:
        raise RequestError(
            f"weight={weight!r}",
            "it says how much a rank's value counts, such as a number of samples",
            "pass a number from 0 on",
        )


def _reduced(world: World, how: _Reduction, value: Any) -> Any:
    items = leaves(value)
    for leaf in items:
        _require_reducible(how, leaf)
    tensors = [leaf for leaf in items if isinstance(leaf, torch.Tensor)]
    plain = [leaf for leaf in items if not isinstance(leaf, torch.Tensor)]
    sent = plain if how.weight is None else [*plain, how.weight]
    columns = exchanged(world, lambda: how.call(value), sent)
    weights = [1] * world.world_size if how.weight is None else columns.pop()
    shares = Shares(how.op, weights, world.rank, weighted=how.weight is not None)
    folded = iter([shares.fold(column) for column in columns])
    results = _reduced_tensors(world, tensors, shares, how.dst)
    if how.differentiable:
        results = _linked(world, how, tensors, results, shares)
    reduced = iter(results)
    return filled(
        value, (next(reduced if isinstance(leaf, torch.Tensor) else folded) for leaf in items)
    )


def _linked(
    world: World,
    how: _Reduction,
    tensors: list[torch.Tensor],
    results: list[torch.Tensor],
    shares: Shares,
) -> list[torch.Tensor]:
    """Returns the results such that backward leads from them to the tensors."""
    call = Call(f"backward of {how.name}", site=record.site())
    scale = shares.own if how.op == "mean" else 1

    def adjoint(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [one * scale for one in summed_gradients(world, call, gradients)]

    members = [index for index, tensor in enumerate(tensors) if has_gradient(tensor)]
    linked = attach([tensors[i] for i in members], [results[i] for i in members], adjoint)
    found = dict(zip(members, linked, strict=True))
    return [found.get(index, one) for index, one in enumerate(results)]


def summed_gradients(
    world: World, call: Call, gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the sums of gradients over all ranks; made in backward."""
    if world.check:
        agree(world, call)
    with record.operation(call.name):
        shares = Shares("sum", [1] * world.world_size, world.rank, weighted=False)
        return _reduced_tensors(world, gradients, shares, None)


def _require_reducible(how: _Reduction, leaf: Any) -> None:
    if isinstance(leaf, torch.Tensor):
        complex_ = leaf.is_complex() and how.op not in ("sum", "mean")
        if leaf.dtype not in _WIDE or complex_:
            raise RequestError(
                f"{how.name} of a tensor of {leaf.dtype} with op={how.op!r}",
                "this operation is not defined for this dtype",
                "convert the tensor first",
            )
        require_dense(leaf)
    elif not is_number(leaf):
        raise RequestError(
            f"a {type(leaf).__qualname__} in the value of {how.name}",
            "tensors, ints, floats and bools can be reduced",
            "pass torch.as_tensor() of it"
            if hasattr(leaf, "__array__")
            else "pass one of these, or use all_gather_object",
        )


# -- tensors -----------------------------------------------------------------------------------


def _reduced_tensors(
    world: World, tensors: Sequence[torch.Tensor], shares: Shares, dst: int | None
) -> list[torch.Tensor]:
    """Reduces tensors; those of one wide dtype travel together."""
    together: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        wide = _WIDE[tensor.dtype]
        if shares.weighted and wide == torch.int64:
            wide = _mean_dtype(world.device)
        together.setdefault(wide, []).append(index)
    results: dict[int, torch.Tensor] = {}
    for wide, members in together.items():
        given = [tensors[index] for index in members]
        flat = torch.empty(sum(one.numel() for one in given), dtype=wide, device=world.device)
        parts = [part.view(one.shape) for part, one in zip(pieces(flat, given), given, strict=True)]
        for part, one in zip(parts, given, strict=True):
            part.copy_(one.detach())
        flat = _combined(world, flat, shares, dst)
        for index, part, one in zip(members, pieces(flat, given), given, strict=True):
            result = part.view(one.shape).to(
                device=one.device, dtype=_result_dtype(one.dtype, shares.op, world.device)
            )
            shared = len(members) > 1 and result.data_ptr() == part.data_ptr()
            results[index] = result.clone() if shared else result
    return [results[index] for index in range(len(tensors))]


def _combined(world: World, flat: torch.Tensor, shares: Shares, dst: int | None) -> torch.Tensor:
    if shares.weighted:
        # Not a product with 0: what a rank without samples passes may be NaN.
        flat = flat.mul_(shares.weight) if shares.weight else flat.zero_()
    if not is_alone(world):
        flat = _over_ranks(flat, shares.op, dst)
    if shares.op == "mean":
        flat = (
            flat
            if flat.dtype.is_floating_point or flat.is_complex()
            else flat.to(_mean_dtype(world.device))
        )
        flat = flat.div_(shares.total) if shares.total else flat.fill_(math.nan)
    return flat


def _over_ranks(flat: torch.Tensor, op: str, dst: int | None) -> torch.Tensor:
    if op not in ("min", "max") or not flat.is_floating_point():
        _send(flat, op, dst)
        return flat
    # As ints of the same order, with NaN at the end that wins: gloo keeps or loses it by chance.
    ints = _in_order(flat.view(torch.int64 if flat.dtype == torch.float64 else torch.int32))
    ends = torch.iinfo(ints.dtype)
    ints.masked_fill_(flat.isnan(), ends.min if op == "min" else ends.max)
    _send(ints, op, dst)
    return _in_order(ints).view(flat.dtype)


def _send(flat: torch.Tensor, op: str, dst: int | None) -> None:
    torch_op = getattr(dist.ReduceOp, _OPS[op])
    if dst is None:
        _dist.all_reduce(flat, op=torch_op)
    else:
        _dist.reduce(flat, dst, op=torch_op)


def _in_order(bits: torch.Tensor) -> torch.Tensor:
    """Turns the bits of floats into ints of the same order, and back."""
    sign = bits >> (8 * bits.itemsize - 1)
    return bits ^ (sign & torch.iinfo(bits.dtype).max)


def _result_dtype(dtype: torch.dtype, op: str, device: torch.device) -> torch.dtype:
    if op in ("min", "max") or dtype.is_floating_point or dtype.is_complex:
        return dtype
    return _mean_dtype(device) if op == "mean" else torch.int64


def _mean_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
