"""The index batches of a map-style dataset that one rank reads."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch.utils.data import ConcatDataset, Sampler, Subset

from distribute.randomness import LoaderKey, Parcel, RandomStream, seed_generators
from distribute.sharding import Batch, Split, permutation

UNKNOWN: Any = object()

_PICKED = 1000


class Step(NamedTuple):
    """What a loader hands out at one step.

    Attributes:
        batch: The batch.
        weight: Its weight, as in `Batch`.
        place: What has been read of the epoch with this step, for `LoaderKey.start`; UNKNOWN where
            only the dataset knows.
    """

    batch: Any
    weight: float
    place: Any


class Source(Protocol):
    """Where the index batches of an epoch come from.

    Attributes:
        kind: What the positions of its order count; those of another kind are others.
    """

    kind: str

    def draw(self, key: LoaderKey) -> Iterator[Batch[Any]]:
        """Returns this rank's batches of the key's epoch, from its start on."""
        ...

    def count(self, start: int) -> int:
        """Returns the number of this rank's batches from a position on."""
        ...

    def total(self) -> int | None:
        """Returns the number of positions, or None if it can't be known."""
        ...

    def facts(self) -> dict[str, object]:
        """Returns what must be equal on all ranks, in words."""
        ...

    def samples(self, key: LoaderKey, stop: int) -> list[list[int]] | None:
        """Returns which samples each rank has read up to a position, -1 for one that repeats.

        None if it can't be known.
        """
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
        self.kind = "shuffled samples" if shuffle else "samples"
        self._split = split
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed

    def draw(self, key: LoaderKey) -> Iterator[Batch[int]]:
        """Returns this rank's batches of the key's epoch, from its start on."""
        return self._split.batches(self._order(key), key.start or 0)

    def count(self, start: int) -> int:
        """Returns the number of this rank's batches from a position on."""
        return self._split.count(len(self._dataset), start)

    def total(self) -> int:
        """Returns the number of samples."""
        return len(self._dataset)

    def facts(self) -> dict[str, object]:
        """Returns what must be equal on all ranks, in words."""
        return {"a dataset length of": self.total(), "an order of": self.kind} | self._split.facts()

    def samples(self, key: LoaderKey, stop: int) -> list[list[int]]:
        """Returns which samples each rank has read up to a position, -1 for one that repeats."""
        total = self.total()
        order: Any = self._order(key)
        ranks = self._split.positions(total, key.start or 0, stop)
        return [[int(order[p]) if p < total else -1 for p in positions] for positions in ranks]

    def _order(self, key: LoaderKey) -> range | torch.Tensor:
        total = len(self._dataset)
        if not self._shuffle:
            return range(total)
        if self._seed is not None:
            key = replace(key, seed=self._seed)
        return permutation(total, key.shared("order"))


class Drawn:
    """What a user's sampler draws, sample by sample, or a batch sampler, batch by batch.

    It runs on every rank, under a random stream that all ranks share, so that all draw the same.
    Batches are dealt out whole, each to one rank; under `uneven="balance"` those that do not go
    round join others of the last step.

    Args:
        split: How they are shared out.
        sampler: The sampler.
        batches: Whether its items are batches.
        shares: For how many ranks it divides the samples itself, or 1.
    """

    def __init__(
        self, split: Split, sampler: Iterable[Any], *, batches: bool, shares: int = 1
    ) -> None:
        self.kind = "batches of a batch sampler" if batches else "samples of a sampler"
        if shares > 1:
            self.kind += f" that divides them among {shares} ranks"
        self._split = split
        self._sampler = sampler
        self._batches = batches
        self._shares = shares

    def draw(self, key: LoaderKey) -> Iterator[Batch[Any]]:
        """Returns this rank's batches of the key's epoch, from its start on."""
        stream = RandomStream(key.shared("sampler"))
        samples = _samples if self._batches else None
        for share in stream.drive(self._split.batches_of(self._sampler, samples, key.start or 0)):
            yield share._replace(items=_joined(share.items)) if self._batches else share

    def count(self, start: int) -> int:
        """Returns the number of this rank's batches from a position on."""
        return self._split.count(len(cast("Sized", self._sampler)), start)

    def total(self) -> int | None:
        """Returns the number of samples or batches, if the sampler knows it."""
        return len(self._sampler) if isinstance(self._sampler, Sized) else None

    def facts(self) -> dict[str, object]:
        """Returns what must be equal on all ranks, in words."""
        facts: dict[str, object] = {"an order of": self.kind}
        if self._shares == 1:  # otherwise its length is that of this rank's share
            facts["a sampler length of"] = self.total()
            facts["a sampler's generator in state"] = _state_digest(self._sampler)
        return facts | self._split.facts()

    def samples(self, key: LoaderKey, stop: int) -> list[list[int]] | None:
        """Returns which samples each rank has read up to a position, in the sampler's order."""
        total = self.total()
        if self._batches or self._shares > 1 or total is None:
            return None
        ranks = self._split.positions(total, key.start or 0, stop)
        return [[p if p < total else -1 for p in positions] for positions in ranks]


class Indices(Sampler[Any]):
    """This rank's index batches, drawn anew at each `iter()`; torch's DataLoader iterates it.

    With the indices of a batch goes the seed of its random stream: to the worker that gets them,
    or into the global generators of this process.

    Args:
        source: Where the batches come from.
        key: What the random streams are derived from.
        sampler: The user's sampler, told of each epoch if it has `set_epoch`.
        to_workers: Whether workers read the batches, and not this process.

    Attributes:
        key: The key of the epoch to draw next.
    """

    def __init__(
        self, source: Source, key: LoaderKey, sampler: object, *, to_workers: bool
    ) -> None:
        self.key = key
        self._source = source
        self._sampler = sampler
        self._to_workers = to_workers
        self._told = 0
        self._drawn: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return self.length(None)

    def __iter__(self) -> Iterator[Any]:
        # Of this iteration only: another one may begin before this one has ended.
        self._drawn = drawn = deque[tuple[float, int]]()
        return self._noting(self.key, drawn)

    def _noting(self, key: LoaderKey, drawn: deque[tuple[float, int]]) -> Iterator[Any]:
        for batch in self._source.draw(key):
            drawn.append((batch.weight, batch.stop))
            seed = partial(seed_generators, key.batch(batch.start))
            if self._to_workers:
                yield Parcel(batch.items, seed)
            else:
                seed()
                yield batch.items

    @property
    def kind(self) -> str:
        """What the positions of the order count."""
        return self._source.kind

    def length(self, start: Any) -> int:
        """Returns the number of steps from a place on."""
        return self._source.count(start or 0)

    def total(self) -> int | None:
        """Returns the number of positions, or None if it can't be known."""
        return self._source.total()

    def facts(self) -> dict[str, object]:
        """Returns what must be equal on all ranks, in words."""
        return self._source.facts()

    def samples(self, key: LoaderKey, stop: Any) -> list[list[int]] | None:
        """Returns which samples each rank has read up to a place, if that can be known."""
        return self._source.samples(key, stop or 0)

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

    def steps(self, batches: Iterator[Any]) -> Iterator[Step]:
        """Pairs the batches of the iteration begun last with their weights and places."""
        drawn = self._drawn
        return (Step(batch, *drawn.popleft()) for batch in batches)


def indices_digest(dataset: object) -> str:
    """Returns a hash of the positions that a `Subset` picks, inside others too, or nothing.

    Of many only some count: two random splits do not agree in them by chance.
    """
    if isinstance(dataset, ConcatDataset):
        parts: list[object] = cast("Any", dataset).datasets
        return "+".join(map(indices_digest, parts)).strip("+")
    if not isinstance(dataset, Subset):
        return ""
    picked: Any = cast("Any", dataset).indices
    every = max(1, len(picked) // _PICKED)
    text = repr([int(picked[at]) for at in range(0, len(picked), every)])
    inside = indices_digest(cast("Any", dataset).dataset)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest() + inside


def _state_digest(sampler: object) -> str:
    """Returns a hash of the state of a sampler's own generator, or nothing."""
    inside = getattr(sampler, "sampler", None)
    generator = getattr(sampler, "generator", None) or getattr(inside, "generator", None)
    if not isinstance(generator, torch.Generator):
        return ""
    return hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()


def _epoch_of(sampler: object) -> int | None:
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None


def _samples(batch: Any) -> int:
    if isinstance(batch, (list, tuple, torch.Tensor)):
        return len(cast("Sized", batch))
    return 1


def _joined(batches: list[Any]) -> Any:
    return batches[0] if len(batches) == 1 else list(chain.from_iterable(batches))
