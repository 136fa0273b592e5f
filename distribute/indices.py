"""The index batches of a map-style dataset that one rank reads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.data import Sampler

from distribute.randomness import LoaderKey, RandomStream
from distribute.sharding import Batch, Split, permutation

T = TypeVar("T")


class Source(Protocol):
    """Where the index batches of an epoch come from."""

    def draw(self, key: LoaderKey) -> Iterator[Batch[Any]]:
        """Returns this rank's batches of the key's epoch."""
        ...

    def count(self) -> int:
        """Returns the number of this rank's batches."""
        ...


class Positions:
    """The positions of a dataset, in their own order or shuffled.

    Args:
        split: How they are shared out.
        dataset: The dataset, of which only the length is used.
        shuffle: Whether to shuffle them.
        seed: Seed of their order, instead of the loader's.
    """

    def __init__(
        self, split: Split, dataset: Sized, shuffle: bool, seed: int | None = None
    ) -> None:
        self._split = split
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed

    def draw(self, key: LoaderKey) -> Iterator[Batch[int]]:
        """Returns this rank's batches of the key's epoch."""
        total = len(self._dataset)
        if not self._shuffle:
            return self._split.batches(range(total))
        if self._seed is not None:
            key = replace(key, seed=self._seed)
        return self._split.batches(permutation(total, key.shared("order")))

    def count(self) -> int:
        """Returns the number of this rank's batches."""
        return self._split.count(len(self._dataset))


class Sampled:
    """What a user's sampler draws, sample by sample.

    It runs on every rank, under a random stream that all ranks share, so that all draw the same.
    """

    def __init__(self, split: Split, sampler: Iterable[Any]) -> None:
        self._split = split
        self._sampler = sampler

    def draw(self, key: LoaderKey) -> Iterator[Batch[Any]]:
        """Returns this rank's batches of the key's epoch."""
        stream = RandomStream(key.shared("sampler"))
        return stream.drive(self._split.batches_of(self._sampler))

    def count(self) -> int:
        """Returns the number of this rank's batches."""
        return self._split.count(len(cast("Sized", self._sampler)))


class Dealt:
    """What a user's batch sampler draws, batch by batch: each is one rank's.

    Under `uneven="balance"` the batches that do not go round join others of the last step, whole.
    """

    def __init__(self, split: Split, batches: Iterable[Any]) -> None:
        self._split = split
        self._batches = batches

    def draw(self, key: LoaderKey) -> Iterator[Batch[Any]]:
        """Returns this rank's batches of the key's epoch."""
        stream = RandomStream(key.shared("sampler"))
        for share in stream.drive(self._split.batches_of(self._batches, _samples)):
            yield share._replace(items=_joined(share.items))

    def count(self) -> int:
        """Returns the number of this rank's batches."""
        return self._split.count(len(cast("Sized", self._batches)))


class Indices(Sampler[Any]):
    """This rank's index batches, drawn anew at each `iter()`; torch's DataLoader iterates it.

    Args:
        source: Where the batches come from.
        key: What the random streams are derived from.
        sampler: The user's sampler, told of each epoch if it has `set_epoch`.

    Attributes:
        key: The key of the epoch to draw next.
    """

    def __init__(self, source: Source, key: LoaderKey, sampler: object = None) -> None:
        self.key = key
        self._source = source
        self._sampler = sampler
        self._told = 0
        self._weights: deque[float] = deque()

    def __len__(self) -> int:
        return self._source.count()

    def __iter__(self) -> Iterator[Any]:
        batches = self._source.draw(self.key)
        # Of this iteration only: another one may begin before this one has ended.
        self._weights = weights = deque[float]()
        return _noting(batches, weights)

    def epoch(self, following: int) -> int:
        """Returns the epoch to draw: the following one, or what the user told the sampler since.

        `sampler.set_epoch(e)` is a line of many training loops.
        """
        asked = _epoch_of(self._sampler)
        return following if asked is None or asked == self._told else asked

    def begin(self, key: LoaderKey) -> None:
        """Sets the epoch to draw."""
        self.key = key
        set_epoch = getattr(self._sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(key.epoch)
            self._told = key.epoch

    def steps(self, batches: Iterator[T]) -> Iterator[tuple[T, float]]:
        """Pairs the batches of the iteration begun last with their weights."""
        weights = self._weights
        return ((batch, weights.popleft()) for batch in batches)


def _noting(batches: Iterator[Batch[Any]], weights: deque[float]) -> Iterator[Any]:
    for batch in batches:
        weights.append(batch.weight)
        yield batch.items


def _epoch_of(sampler: object) -> int | None:
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None


def _samples(batch: Any) -> int:
    if isinstance(batch, (list, tuple, torch.Tensor)):
        return len(cast("Sized", batch))
    return 1


def _joined(batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else list(chain.from_iterable(batches))
