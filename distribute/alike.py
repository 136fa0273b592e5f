"""Whether all ranks read the same data: compared through the group's store, without waiting.

The ranks divide what each believes to be the same order. Where it is not, some samples are read
twice and others never, and nothing shows it. A collective would show it, but loaders make none:
one rank may read alone. So whoever comes first writes down what it reads, and who comes later
compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from distribute.errors import RequestError

if TYPE_CHECKING:
    from distribute.world import World

_dist: Any = dist

# How many calls each default group has served: kept workers hold on to theirs.
_calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Alike:
    """Compares facts between the ranks of a call; every rank makes one when the call begins.

    Args:
        world: Where this rank stands.
    """

    def __init__(self, world: World) -> None:
        self._rank = world.rank
        self._compares = False
        self._call = 0
        if world.world_size > 1 and dist.is_initialized():
            group = dist.group.WORLD
            self._call = _calls[group] = _calls.get(group, -1) + 1
            self._compares = True

    def require(self, name: str, facts: Mapping[str, object], advice: str) -> None:
        """Raises if another rank has other facts.

        Args:
            name: What the facts are about; each rank asks once for a name.
            facts: The facts, by what they say.
            advice: What to do.

        Raises:
            RequestError: Another rank, which came earlier, has other facts.
        """
        if not self._compares or not dist.is_initialized():
            return
        # Not kept: a context outlives its call, in the frames of an exception say.
        store = _dist.distributed_c10d._get_default_store()
        mine = {what: str(fact) for what, fact in facts.items()}
        key = f"distribute/alike/{self._call}/{name}"
        found = store.compare_set(key, "", json.dumps([self._rank, mine]))
        rank, theirs = json.loads(found)
        for what, fact in mine.items():
            if theirs.get(what) != fact:
                raise RequestError(
                    f"{what} {fact} on rank {self._rank}",
                    f"on rank {rank} it is {theirs.get(what)}, and the ranks divide one order",
                    advice,
                )
