"""Sharing out an IterableDataset over ranks and their workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from distribute.groups import cpu_group
from distribute.indices import UNKNOWN, Step
from distribute.randomness import LoaderKey, RandomStream, seed_generators, worker_key
from distribute.sharding import Taken
from distribute.world import World

_END: Any = object()


class StreamShard(IterableDataset[Any]):
    """One (rank, worker)'s part of a dataset: every n-th item of it, for n of them in all.

    Every one of them runs through the whole dataset, under a random stream that all share:
    otherwise a dataset that shuffles would be a different one in each of them. For the same reason
    what was read in an earlier run is read again, and passed over.

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
        self.own = RandomStream(key.worker(worker))
        if info is not None:  # the rank's own process has swapped the shared stream in
            seed_generators(key.shared("stream"))
        items = _undivided(self._dataset)
        for taken in _places(key.start):
            items = taken.rest(items)
        first = key.rank * workers + worker
        yield from islice(items, first, None, self._world_size * workers)


class CountingCollate:
    """A `collate_fn` that tells how many samples went into a batch, and where it was made.

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

    def __call__(self, samples: Any) -> tuple[int, int, Any]:
        """Returns the number of samples, the worker and the batch."""
        count = len(samples) if self._batched else 1
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if self._shard is None or self._shard.own is None:
            return count, worker, self._collate_fn(samples)
        # A collate_fn that masks at random must not move the stream that all share.
        with self._shard.own.active():
            return count, worker, self._collate_fn(samples)


class Stream:
    """The batches of an IterableDataset that one rank reads; all ranks take equally many steps.

    Args:
        world: Where this rank stands.
        shard: The rank's part of the dataset, or None if the dataset shards itself.
        workers: Number of workers of each rank, at least 1.
        length: Returns the number of steps of a number of items.
        dataset: The user's dataset.
    """

    kind = "items of a stream"

    def __init__(
        self,
        world: World,
        shard: StreamShard | None,
        workers: int,
        length: Callable[[int], int],
        dataset: object,
    ) -> None:
        self._world = world
        self._shard = shard
        self._workers = workers
        self._length = length
        self._dataset = dataset
        self._start: Any = None

    def length(self, start: Any) -> int:
        """Returns the number of steps from a place on, or raises TypeError if it can't be known."""
        if self._shard is None:
            raise TypeError(
                "the number of steps of a dataset that shards itself (sharded=True) is not known; "
                "count them as they come"
            )
        left = len(cast("Sized", self._dataset))
        for taken in _places(start):
            left = taken.left(left)
        return self._length(left)

    def total(self) -> int | None:
        """Returns None: what a stream holds is known at its end."""
        return None

    def facts(self) -> dict[str, object]:
        """Returns what must be equal on all ranks, in words."""
        return {"an order of": self.kind, "a number of workers of": self._workers}

    def samples(self, key: LoaderKey, stop: Any) -> None:
        """Returns None: items of a stream have no positions."""

    def epoch(self, following: int) -> int:
        """Returns the epoch to draw, which is the following one."""
        return following

    def begin(self, key: LoaderKey) -> None:
        """Sets the epoch to draw."""
        self._start = key.start
        if self._shard is not None:
            self._shard.key = key

    def steps(self, batches: Iterator[tuple[int, int, Any]]) -> Iterator[Step]:
        """Yields batches, their weights and places until one of the ranks has none left."""
        return self._steps(batches, self._start)

    def _steps(self, batches: Iterator[tuple[int, int, Any]], start: Any) -> Iterator[Step]:
        world, workers = self._world, self._workers
        taken = [0] * (world.world_size * workers)
        while True:
            count, worker, batch = next(batches, (0, 0, _END))
            shares = step_shares(world, None if batch is _END else (count, worker))
            if shares is None:
                return
            for rank, (samples, by) in enumerate(shares):
                taken[rank * workers + by] += samples
            total = sum(samples for samples, _ in shares)
            place = UNKNOWN if self._shard is None else [*(start or ()), tuple(taken)]
            yield Step(batch, count * world.world_size / (total or 1), place)


def step_shares(world: World, share: tuple[int, int] | None) -> list[tuple[int, int]] | None:
    """Returns every rank's share of the next step, if every rank has one.

    A collective over the ranks, which thereby stop at the same step.

    Args:
        world: Where this rank stands.
        share: The number of samples in this rank's next batch and the worker that made it, or
            None if there is none.
    """
    if world.world_size == 1:
        return None if share is None else [share]
    facts: Any = torch.zeros(world.world_size, 3, dtype=torch.int64)
    if share is not None:
        facts[world.rank] = torch.tensor([1, *share])
    cast("Any", dist).all_reduce(facts, group=cpu_group(world))
    rows: list[list[int]] = facts.tolist()
    if not all(row[0] for row in rows):
        return None
    return [(samples, worker) for _, samples, worker in rows]


def _places(start: Any) -> list[Taken]:
    return [Taken(tuple(counts)) for counts in start or ()]


def stream_length(
    total: int, batches: Callable[[int, int], int], world_size: int, workers: int
) -> int:
    """Returns the number of steps that all ranks can take.

    Args:
        total: Number of items.
        batches: Returns the number of batches of a rank's worker that has that many samples.
        world_size: Number of ranks.
        workers: Number of workers of each rank, at least 1.
    """
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
