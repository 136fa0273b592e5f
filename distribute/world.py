"""Where one rank stands in its world: plain facts, fixed for the length of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class World:
    """The facts about one rank of a running call.

    Attributes:
        rank: Index of this process among all processes, `0 <= rank < world_size`.
        local_rank: Index of this process among those of its node.
        node_rank: Index of the node.
        world_size: Number of processes on all nodes.
        local_world_size: Number of processes on this node.
        num_nodes: Number of nodes.
        device: The device on which this process computes.
        backend: Name of the torch process-group backend, such as `"gloo"` or `"nccl"`.
        seed: Seed of the data order; rank 0 fixed it and every rank has the same.
        grouped: Whether a torch process group exists; false in a world of one that has none.
        restart_count: How often the world was started again after a failure.
        check: Whether ranks tell each other what they are about to do before a collective.
        epochs: Of each loader of the call, by its ordinal, the epoch that it has begun last. It
            alone changes during a call.
    """

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int
    device: torch.device
    backend: str
    seed: int
    grouped: bool
    restart_count: int = 0
    check: bool = True
    epochs: dict[int, int] = field(default_factory=dict[int, int], compare=False)
