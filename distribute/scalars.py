"""Numbers of all ranks, exact: ints stay ints, and ranks may mix them with floats.

A number is sent as two integers: its kind, and its value or the bits of it.
"""

from __future__ import annotations

import math
import numbers
import struct
import sys
from typing import TYPE_CHECKING, Any

from distribute.agreement import Call, agree
from distribute.errors import RequestError
from distribute.groups import all_words

if TYPE_CHECKING:
    from collections.abc import Callable

    from distribute.world import World

# The kinds of number in the order in which they widen, and a mark for an int that does not fit.
_KINDS = (bool, int, float)
_TOO_LARGE = len(_KINDS)

_FOLDS: dict[str, Callable[[list[Any]], Any]] = {
    "sum": sum,
    "min": min,
    "max": max,
    "product": math.prod,
}


def exchanged(world: World, call: Callable[[], Call], mine: list[Any]) -> list[list[Any]]:
    """Returns every rank's numbers: for each of this rank's, the list by rank.

    The ranks agree on what they do before.
    """
    words = [_encode(value) for value in mine]
    if len(words) == 1:
        # It goes with the message by which the ranks agree.
        rows = [row[:2] for row in agree(world, call(), [*words[0], 0])]
    else:
        if world.check:
            agree(world, call())
        rows = all_words(world, [one for pair in words for one in pair]) if words else []
    columns = [[row[at : at + 2] for row in rows] for at in range(0, 2 * len(words), 2)]
    return [_decoded(column) for column in columns]


def _decoded(column: list[list[int]]) -> list[Any]:
    too_large = [rank for rank, (kind, _) in enumerate(column) if kind == _TOO_LARGE]
    if too_large:
        raise RequestError(
            f"all_reduce of an int on rank {too_large[0]}",
            "it does not fit into 64 bits",
            "pass a float, or use all_gather_object",
        )
    widest = _KINDS[max(kind for kind, _ in column)]
    return [widest(_decode(kind, word)) for kind, word in column]


def is_number(value: object) -> bool:
    """Tells whether a value is a number or a bool, of Python or of numpy."""
    return isinstance(value, numbers.Real) or _is_bool(value)


def _is_bool(value: object) -> bool:
    numpy = sys.modules.get("numpy")  # its bools are no numbers
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))


def _encode(value: Any) -> list[int]:
    if _is_bool(value):
        return [0, int(value)]
    if isinstance(value, numbers.Integral):
        number = int(value)
        return [1, number] if -(2**63) <= number < 2**63 else [_TOO_LARGE, 0]
    return [2, *struct.unpack("<q", struct.pack("<d", float(value)))]


def _decode(kind: int, word: int) -> bool | int | float:
    bits: float = struct.unpack("<d", struct.pack("<q", word))[0]
    return bits if _KINDS[kind] is float else word


class Shares:
    """What each rank's value counts for in a reduction.

    Args:
        op: The operation.
        weights: By rank.
        rank: This one.
        weighted: Whether they differ, as far as one knows without them.
    """

    def __init__(self, op: str, weights: list[Any], rank: int, *, weighted: bool) -> None:
        self.op = op
        self.weights = weights
        self.weighted = weighted
        self.weight = weights[rank]
        self.total = sum(weights)

    @property
    def own(self) -> float:
        """This rank's part of a mean."""
        return self.weight / self.total if self.total else math.nan

    def fold(self, values: list[Any]) -> bool | int | float:
        """Combines numbers."""
        if self.op in ("min", "max") and any(value != value for value in values):
            return math.nan  # as torch does; Python's result would depend on the order
        if self.op != "mean":
            result: bool | int | float = _FOLDS[self.op](values)
            return result
        pairs = zip(values, self.weights, strict=True)
        summed: float = sum(value * weight for value, weight in pairs if weight)
        return summed / self.total if self.total else math.nan
