"""Whether all ranks make the same collective: one small message before each of them.

Every rank sends the same few integers, whatever the collective: a hash of what it is about to do,
and what the collective itself needs to know of every rank beforehand, such as sizes. So any two
collectives meet here, and where the hashes differ every rank learns of it before anything else is
sent: it raises, and all are in step again.

    hash | 3 integers of the collective
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from distribute import record
from distribute.errors import CollectiveMismatch
from distribute.groups import all_words, cpu_group, is_alone
from distribute.outcome import ORIGIN

if TYPE_CHECKING:
    from distribute.world import World

_dist: Any = dist

_LONGEST = 200


@dataclass(frozen=True)
class Call:
    """A collective that a rank is about to make.

    Attributes:
        name: Its name, such as `all_reduce`.
        signature: What must be equal on all ranks, for people to read.
        site: Where it is called from, as `file:line`; empty to look when it is needed.
    """

    name: str
    signature: str = ""
    site: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.name}{self.signature}"


def agree(world: World, call: Call, words: Sequence[int] = (0, 0, 0)) -> list[list[int]]:
    """Returns what every rank has to say for a collective, by rank.

    Args:
        world: The world.
        call: What this rank is about to do.
        words: Three integers of this rank.

    Raises:
        CollectiveMismatch: On every rank, when the ranks are about to do different things.
    """
    if is_alone(world):
        return [list(words)]
    rows = all_words(world, [digest(_told(world, call).encode()), *words])
    if any(row[0] != rows[0][0] for row in rows):
        _refuse(world, call)
    return [row[1:] for row in rows]


def _told(world: World, call: Call) -> str:
    """Returns what must be equal on all ranks: the collective, and where their loaders stand."""
    begun = ", ".join(f"{at} in epoch {epoch}" for at, epoch in sorted(world.epochs.items()))
    return f"{call} (loaders: {begun})" if begun else str(call)


def digest(data: bytes | bytearray) -> int:
    """Returns a hash that fits into a message."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _refuse(world: World, call: Call) -> None:
    told: list[Any] = [None] * world.world_size
    mine = _told(world, call), call.site or record.site()
    _dist.all_gather_object(told, mine, group=cpu_group(world))
    shown = _differing([what for what, _ in told])
    groups: dict[str, list[int]] = {}
    for rank, (_, site) in enumerate(told):
        groups.setdefault(f"{shown[rank]} at {site}", []).append(rank)
    lines = [f"{_ranks(ranks)}: {what}" for what, ranks in groups.items()]
    error = CollectiveMismatch(
        f"the ranks came to different collectives: {'; '.join(lines)}; make the same ones in the "
        "same order on every rank, with values of the same structure, shapes and dtypes"
    )
    setattr(error, ORIGIN, 0)  # every rank raises it: it is one failure
    raise error


def _differing(texts: list[str]) -> list[str]:
    """Shortens long texts to where they begin to differ."""
    if max(map(len, texts)) <= _LONGEST:
        return texts
    same = 0
    while len({text[: same + 1] for text in texts}) == 1:
        same += 1
    start = max(0, same - _LONGEST // 4)
    lead = "..." if start else ""
    return [
        lead + text[start : start + _LONGEST] + ("..." if len(text) > start + _LONGEST else "")
        for text in texts
    ]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
