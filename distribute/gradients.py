"""Gradients through collectives: what goes back for what went out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.autograd.function import Function, once_differentiable

# From the gradients of the results to those of the inputs.
Adjoint = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def has_gradient(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor is of a kind that can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def attach(
    inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], adjoint: Adjoint
) -> list[torch.Tensor]:
    """Returns the results such that backward leads from them to the inputs.

    All inputs and results are one step of the graph: `adjoint`, which is a collective, is called
    once on every rank, however many of the results a rank's loss depends on.
    """
    if not any(one.requires_grad for one in inputs):
        return list(results)
    apply: Any = cast("Any", _Collective).apply
    return list(apply(adjoint, list(results), *inputs))


class _Collective(Function):
    @staticmethod
    def forward(
        ctx: Any, adjoint: Adjoint, results: list[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.adjoint = adjoint
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[Any, ...]:
        return (None, None, *ctx.adjoint(gradients))
