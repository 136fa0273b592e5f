"""Sharing out an IterableDataset over ranks and their workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from distribute.collectives import cpu_group
from distribute.randomness import LoaderKey, RandomStream, seed_generators, worker_key
from distribute.world import World

T = TypeVar("T")

_END: Any = object()


class StreamShard(IterableDataset[Any]):
    """One (rank, worker)'s part of a dataset: every n-th item of it, for n of them in all.

    Every one of them runs through the whole dataset, under a random stream that all share:
    otherwise a dataset that shuffles would be a different one in each of them.

    Attributes:
        key: What the random streams are derived from; set before the workers are started.
        own: The stream of this rank and worker alone, for what is not the dataset's.
    """

    def __init__(self, dataset: Iterable[Any], world_size: int, key: LoaderKey) -> None:
        self.key = key
        self.own: RandomStream | None = None
        self._dataset = dataset
        self._world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        key = worker_key(self.key)
        self.own = RandomStream(key.own(worker))
        if info is not None:  # the rank's own process has swapped the shared stream in
            seed_generators(key.shared("stream"))
        first = key.rank * workers + worker
        yield from islice(_undivided(self._dataset), first, None, self._world_size * workers)


class CountingCollate:
    """A `collate_fn` that tells how many samples went into a batch, for the weights.

    Args:
        collate_fn: The user's, or torch's.
        batched: Whether it is given lists of samples, rather than one sample.
        shard: Where the samples come from, if they are shared out here.
    """

    def __init__(
        self, collate_fn: Callable[[Any], Any], batched: bool, shard: StreamShard | None
    ) -> None:
        self._collate_fn = collate_fn
        self._batched = batched
        self._shard = shard

    def __call__(self, samples: Any) -> tuple[int, Any]:
        """Returns the number of samples and the batch."""
        count = len(samples) if self._batched else 1
        if self._shard is None or self._shard.own is None:
            return count, self._collate_fn(samples)
        # A collate_fn that masks at random must not move the stream that all share.
        with self._shard.own.active():
            return count, self._collate_fn(samples)


class Stream:
    """The batches of an IterableDataset that one rank reads; all ranks take equally many steps.

    Args:
        world: Where this rank stands.
        shard: The rank's part of the dataset, or None if the dataset shards itself.
        length: Returns the number of steps, or raises TypeError if it can't be known.
    """

    def __init__(self, world: World, shard: StreamShard | None, length: Callable[[], int]) -> None:
        self._world = world
        self._shard = shard
        self._length = length

    def __len__(self) -> int:
        return self._length()

    def epoch(self, following: int) -> int:
        """Returns the epoch to draw, which is the following one."""
        return following

    def begin(self, key: LoaderKey) -> None:
        """Sets the epoch to draw."""
        if self._shard is not None:
            self._shard.key = key

    def steps(self, batches: Iterator[tuple[int, T]]) -> Iterator[tuple[T, float]]:
        """Yields batches and their weights until one of the ranks has none left."""
        while True:
            count, batch = next(batches, (0, _END))
            total = step_total(self._world, None if batch is _END else count)
            if total is None:
                return
            yield batch, count * self._world.world_size / (total or 1)


def step_total(world: World, count: int | None) -> int | None:
    """Returns how many samples the ranks have for the next step, if every rank has a batch.

    A collective over the ranks, which thereby stop at the same step.

    Args:
        world: Where this rank stands.
        count: The number of samples in this rank's next batch, or None if it has none.
    """
    if world.world_size == 1:
        return count
    facts: Any = torch.tensor([count is not None, count or 0], dtype=torch.int64)
    cast("Any", dist).all_reduce(facts, group=cpu_group(world))
    ready: int
    total: int
    ready, total = facts.tolist()
    return total if ready == world.world_size else None


def stream_length(
    dataset: object, batches: Callable[[int, int], int], world_size: int, workers: int
) -> int:
    """Returns the number of steps that all ranks can take.

    Args:
        dataset: The user's dataset; without a length it raises TypeError.
        batches: Returns the number of batches of a rank's worker that has that many samples.
        world_size: Number of ranks.
        workers: Number of workers of each rank, at least 1.
    """
    total = len(cast("Sized", dataset))
    shards = world_size * workers

    def of_rank(rank: int) -> int:
        parts = range(rank * workers, (rank + 1) * workers)
        return sum(batches(rank, len(range(part, total, shards))) for part in parts)

    return min(of_rank(rank) for rank in range(world_size))


def _undivided(dataset: Iterable[Any]) -> Iterator[Any]:
    """Yields a dataset's items, and meanwhile lets it see no worker.

    A dataset that divides itself among the workers, as torch's documentation teaches, would
    otherwise be divided twice, and most of it lost.
    """
    state = get_worker_info.__globals__
    iterator: Iterator[Any] | None = None
    while True:
        info, state["_worker_info"] = state["_worker_info"], None
        try:
            iterator = iter(dataset) if iterator is None else iterator
            item = next(iterator, _END)
        finally:
            state["_worker_info"] = info
        if item is _END:
            return
        yield item
