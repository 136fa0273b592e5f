"""Structures and objects as bytes: what collectives that do not compute send."""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from distribute.errors import RequestError
from distribute.groups import wire
from distribute.tree import map_leaves

if TYPE_CHECKING:
    from distribute.world import World


class Spec:
    """Stands for a tensor in a structure that travels as an object.

    A leaf, and therefore no dataclass.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.on_cpu = tensor.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor's elements."""
        return self.shape.numel() * self.dtype.itemsize


def split(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Takes a structure apart into one without tensors, and its tensors."""
    tensors: list[torch.Tensor] = []

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Spec(leaf)

    return map_leaves(take, value), tensors


def specs(skeleton: Any) -> list[Spec]:
    """Returns what stands for tensors in a structure that was taken apart."""
    found: list[Spec] = []
    map_leaves(lambda leaf: found.append(leaf) if isinstance(leaf, Spec) else None, skeleton)
    return found


def fill(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Puts a structure together again."""
    rest = iter(tensors)
    return map_leaves(lambda leaf: next(rest) if isinstance(leaf, Spec) else leaf, skeleton)


def join(world: World, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of tensors, one after the other, on the world's device."""
    # As bytes, every dtype works on every backend.
    parts = [wire(world, one, one.dtype).reshape(-1).view(torch.uint8) for one in tensors]
    if not parts:
        return torch.empty(0, dtype=torch.uint8, device=world.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def cut(data: torch.Tensor, wanted: list[Spec]) -> list[torch.Tensor]:
    """Returns the tensors whose bytes stand one after the other; what follows is padding."""
    found: list[torch.Tensor] = []
    start = 0
    for spec in wanted:
        part = data[start : start + spec.nbytes]
        if part.numel() < part.untyped_storage().nbytes():
            part = part.clone()  # lets go of the rest, and is aligned
        found.append(part.view(spec.dtype).reshape(spec.shape))
        start += spec.nbytes
    return found


@dataclass(frozen=True)
class _Unsendable:
    """Sent in the place of an object that cannot be pickled, so that every rank learns of it."""

    type_name: str
    reason: str


def pack(obj: object) -> bytearray:
    """Returns the bytes of an object."""
    try:
        return bytearray(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception:
        # Lambdas and classes that only this process has travel by value.
        cloudpickle = importlib.import_module("cloudpickle")
        try:
            return bytearray(cloudpickle.dumps(obj))
        except Exception as error:
            told = _Unsendable(type(obj).__qualname__, f"{type(error).__name__}: {error}")
            return bytearray(pickle.dumps(told))


def unpack(parcel: bytearray, rank: int) -> Any:
    """Returns the object of a rank; what follows its bytes is padding.

    Raises:
        RequestError: The rank could not send it.
    """
    obj: Any = pickle.loads(parcel)
    if isinstance(obj, _Unsendable):
        raise RequestError(
            f"a {obj.type_name} from rank {rank}",
            f"it cannot be pickled ({obj.reason})",
            "send plain data",
        )
    return obj


def as_tensor(parcel: bytearray) -> torch.Tensor:
    """Returns a tensor in the memory of a parcel."""
    return torch.frombuffer(parcel, dtype=torch.uint8)


def as_parcel(tensor: torch.Tensor) -> bytearray:
    """Returns a copy of a tensor of bytes, as a parcel."""
    parcel = bytearray(tensor.numel())
    as_tensor(parcel).copy_(tensor)
    return parcel
