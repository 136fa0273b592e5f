"""Which samples a rank takes at which step: arithmetic, without data and without collectives.

A global order of samples is cut into steps of `global_batch` positions, and each step into one
contiguous block per rank, so that the blocks of the ranks, one after the other, are the order in
which a single process would read:

    order   0 1 2 3 4 5 6 7 8 9 ...        global_batch 4, world_size 2
    step    [  0    ] [  1    ] [ 2 ...
    rank    [0 ][1 ]  [0 ][1 ]

Only the end of the order, where less than a step is left, depends on the policy `uneven`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch

T = TypeVar("T")

Uneven: TypeAlias = Literal["pad", "drop", "balance"]


class Batch(NamedTuple, Generic[T]):
    """What one rank takes at one step.

    Attributes:
        items: The rank's items, in order.
        start: Where they begin in the global order; different for each rank and step.
        stop: Where the next step begins: what stands before it has been taken by some rank.
        weight: The rank's number of samples over the mean number of all ranks at this step.
            The mean over the ranks of `weight * (mean over the rank's samples)` is the mean over
            all samples of the step.
    """

    items: list[T]
    start: int
    stop: int
    weight: float


@dataclass(frozen=True, slots=True)
class Split:
    """How a global order is cut into steps, and a step into shares.

    Attributes:
        world_size: Number of ranks.
        rank: The rank whose shares are asked for.
        global_batch: Number of samples of a full step over all ranks, at least `world_size`.
        uneven: What happens to the samples that do not fill a step. `"pad"`: the step is filled
            up to a multiple of `world_size` with samples from the start of the order. `"drop"`:
            they are left out. `"balance"`: they are shared out as evenly as possible, every
            sample once; where there are fewer than ranks, the last full step is shared out
            together with them, so that all ranks have equally many batches whenever there are
            at least as many samples as ranks. (With one sample per rank and step this puts two
            samples into some batches of the last step.)
    """

    world_size: int
    rank: int
    global_batch: int
    uneven: Uneven

    def facts(self) -> dict[str, object]:
        """Returns what must be equal on all ranks, in words."""
        return {"a global batch size of": self.global_batch, "uneven of": self.uneven}

    def count(self, total: int, start: int = 0) -> int:
        """Returns the number of batches of this rank, for an order of `total` samples.

        Args:
            total: Number of samples.
            start: How many of them have been taken before, by whatever split.
        """
        full, tail = self._cut(total - start)
        return full + sum(self.rank < size for size in tail)

    def steps(self, total: int, start: int = 0) -> Iterator[range]:
        """Yields the positions of each step; those from `total` on repeat the order's beginning.

        Args:
            total: Number of samples.
            start: Where the first step begins.
        """
        full, tail = self._cut(total - start)
        for size in chain(repeat(self.global_batch, full), tail):
            yield range(start, start + size)
            start += size

    def share(self, step: range, rank: int | None = None) -> range:
        """Returns a rank's block of a step (of this rank by default); it may be empty."""
        rank = self.rank if rank is None else rank
        least, more = divmod(len(step), self.world_size)
        start = rank * least + min(rank, more)
        return step[start : start + least + (rank < more)]

    def positions(self, total: int, start: int, stop: int) -> list[list[int]]:
        """Returns the positions that each rank reads, in its order; those from `total` on repeat.

        Args:
            total: Number of samples.
            start: Where the first step begins.
            stop: Where the last one ends.
        """
        ranks: list[list[int]] = [[] for _ in range(self.world_size)]
        for step in self.steps(total, start):
            if min(step.stop, total) > stop:
                break
            for rank, positions in enumerate(ranks):
                positions += self.share(step, rank)
        return ranks

    def batches(self, order: Sequence[T] | torch.Tensor, start: int = 0) -> Iterator[Batch[T]]:
        """Yields this rank's batches of an order that can be indexed.

        Args:
            order: The global order.
            start: Where the first step begins in it.
        """
        head: list[T] = _listed(order[: self.world_size])
        for step in self.steps(len(order), start):
            share = self.share(step)
            if share:
                weight = len(share) * self.world_size / len(step)
                stop = min(step.stop, len(order))
                yield Batch(_pick(order, head, share), share.start, stop, weight)

    def batches_of(
        self, order: Iterable[T], samples: Callable[[T], int] | None = None, start: int = 0
    ) -> Iterator[Batch[T]]:
        """Yields this rank's batches of an order that is read as it comes, endless ones too.

        Args:
            order: The global order; two steps of it are held at a time.
            samples: Number of samples of an item, for the weights; by default an item is one.
            start: Where the first step begins in it; what stands before is read and passed over.
        """
        iterator = iter(order)
        head = list(islice(iterator, self.world_size))
        done = start
        for window in windows(islice(chain(head, iterator), start, None), self.global_batch):
            for step in self.steps(len(window)):
                items = _pick(window, head, step)
                share = self.share(range(len(step)))
                if share:
                    weight = self._weight(items, share, samples)
                    stop = done + min(step.stop, len(window))
                    first = done + step.start + share.start
                    yield Batch(items[share.start : share.stop], first, stop, weight)
            done += len(window)

    def _cut(self, total: int) -> tuple[int, tuple[int, ...]]:
        """Returns the number of full steps and the sizes of those after them."""
        full, rest = divmod(total, self.global_batch)
        if rest == 0 or self.uneven == "drop":
            return full, ()
        if self.uneven == "pad":
            return full, (-(-rest // self.world_size) * self.world_size,)
        if rest >= self.world_size or full == 0:
            return full, (rest,)
        joint = self.global_batch + rest
        if joint < 2 * self.world_size:
            return full - 1, (joint,)
        return full - 1, (joint - joint // 2, joint // 2)

    def _weight(self, items: list[T], share: range, samples: Callable[[T], int] | None) -> float:
        if samples is None:
            return len(share) * self.world_size / len(items)
        sizes = [samples(item) for item in items]
        # A step of empty batches has no mean to weigh.
        return sum(sizes[share.start : share.stop]) * self.world_size / (sum(sizes) or 1)


class Taken(NamedTuple):
    """What all ranks and workers together have read of a sequence of items.

    Item `i` was in shard `i % len(counts)`, and `counts` says how many of each shard were read.
    """

    counts: tuple[int, ...]

    def rest(self, items: Iterable[T]) -> Iterator[T]:
        """Yields the items that were not read."""
        shards = len(self.counts)
        return (one for i, one in enumerate(items) if i // shards >= self.counts[i % shards])

    def left(self, total: int) -> int:
        """Returns how many of a number of items were not read."""
        shards = len(self.counts)
        sizes = (len(range(shard, total, shards)) for shard in range(shards))
        return sum(max(size - count, 0) for size, count in zip(sizes, self.counts, strict=True))


def windows(order: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields `size` items at a time; what does not fill a window joins the one before it.

    What follows a window can then be decided from that window alone, whatever the length of the
    order: all but the last hold `size` items, the last holds at most `2 * size - 1`.
    """
    iterator = iter(order)
    window = list(islice(iterator, size))
    while len(window) == size:
        following = list(islice(iterator, size))
        if len(following) < size:
            window += following
            break
        yield window
        window = following
    if window:
        yield window


def permutation(total: int, seed: int) -> torch.Tensor:
    """Returns the numbers below `total` in an order that depends on nothing but the seed."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    return torch.randperm(total, generator=generator)


def derive(purpose: str, *key: int) -> int:
    """Returns a seed of 256 bits for a purpose and a key, unlike that of any other.

    Sums such as `seed + epoch` would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    """
    digest = hashlib.blake2b(repr((purpose, *key)).encode(), digest_size=32).digest()
    return int.from_bytes(digest, "little")


def _pick(order: Sequence[T] | torch.Tensor, head: list[T], positions: range) -> list[T]:
    """Returns the items at some positions; those past the end are taken from `head`."""
    items = _listed(order[positions.start : positions.stop])
    repeated = range(max(positions.start, len(order)), positions.stop)
    return items + [head[(position - len(order)) % len(head)] for position in repeated]


def _listed(part: Sequence[T] | torch.Tensor) -> list[T]:
    if isinstance(part, torch.Tensor):
        items: list[Any] = cast("Any", part).tolist()
        return items
    return list(part)
