"""The random streams of data loading: which part of it draws from which stream.

    the order          drawn by every rank alike, of (seed, loader, epoch)
    a user's sampler   iterated by every rank under one stream, of (seed, loader, epoch)
    a batch            read under a stream of its own, of (seed, loader, epoch, rank, place in the
                       order), so that it is the same whoever reads it: any worker, a resumed run
    an IterableDataset read by every rank and worker under one stream, of (seed, loader, epoch)

A DataLoader worker is a process of its own: its global generators are seeded, by the indices of a
batch as they arrive there. In the rank's own process a stream is swapped into the global
generators and out again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch

from distribute.sharding import derive

T = TypeVar("T")


class _States(NamedTuple):
    """States of the global generators; those of numpy are None where it is not loaded."""

    torch: torch.Tensor
    python: Any
    numpy: Any  # the bit generator itself: exchanging it is much faster than reading its state
    numpy_normal: Any  # the whole state, if one of a pair of normal draws is still to be used


class RandomStream:
    """A state of the global generators (torch's CPU one, `random`, numpy) that can be swapped in.

    Args:
        seed: Where the stream starts.
    """

    def __init__(self, seed: int) -> None:
        self._states = _seeded(seed)

    @contextmanager
    def active(self) -> Generator[None]:
        """Draws come from this stream meanwhile; the generators outside are as before after it."""
        outside = _capture()
        _restore(self._states)
        try:
            yield
        finally:
            # numpy's bit generator holds its own state. The second of two normal draws is not
            # kept: it would cost more than all the rest.
            self._states = _States(
                torch.get_rng_state(), random.getstate(), self._states.numpy, None
            )
            _restore(outside)

    def drive(self, iterator: Iterator[T]) -> Iterator[T]:
        """Yields what an iterator yields, and lets it run under this stream only."""
        while True:
            with self.active():
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


@contextmanager
def kept_outside() -> Generator[None]:
    """The global generators may be seeded meanwhile; they are as before after it."""
    outside = _capture()
    try:
        yield
    finally:
        _restore(outside)


def drive_guarded(iterator: Iterator[T]) -> Iterator[T]:
    """Yields what an iterator yields, and lets it seed the global generators as it likes."""
    while True:
        with kept_outside():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def seed_generators(seed: int) -> None:
    """Seeds torch's CPU generator, `random`, and numpy if it is loaded."""
    # Not torch.manual_seed: in a worker it would queue a call per device at every batch.
    torch.default_generator.manual_seed(seed % 2**63)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # One of our own, because seeding changes it in place; the one outside is kept as it is.
        numpy.random.set_bit_generator(_numpy_generator(numpy))
        numpy.random.seed(_words(seed))


@cache
def _numpy_generator(numpy: Any) -> Any:
    return numpy.random.MT19937(0)


def _words(seed: int) -> list[int]:
    return [seed >> shift & 0xFFFFFFFF for shift in range(0, 256, 32)]


def _seeded(seed: int) -> _States:
    """Returns the states that `seed_generators` sets."""
    numpy, generator = sys.modules.get("numpy"), None
    if numpy is not None:
        generator = numpy.random.MT19937(0)
        generator.state = numpy.random.RandomState(_words(seed)).get_state(legacy=False)
    return _States(
        torch.Generator().manual_seed(seed % 2**63).get_state(),
        random.Random(seed).getstate(),
        generator,
        None,
    )


def _capture() -> _States:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _States(torch.get_rng_state(), random.getstate(), None, None)
    state = numpy.random.get_state(legacy=False)
    return _States(
        torch.get_rng_state(),
        random.getstate(),
        numpy.random.get_bit_generator(),
        state if state["has_gauss"] else None,
    )


def _restore(states: _States) -> None:
    torch.set_rng_state(states.torch)
    random.setstate(states.python)
    if states.numpy is not None:
        numpy = sys.modules["numpy"]
        numpy.random.set_bit_generator(states.numpy)
        if states.numpy_normal is not None:
            numpy.random.set_state(states.numpy_normal)


@dataclass(frozen=True, slots=True)
class LoaderKey:
    """What one rank's loader reads at one of its epochs, and what its streams are derived from.

    Attributes:
        seed: Seed of the data order.
        ordinal: The how-manieth loader of the call this is.
        rank: The rank.
        epoch: The epoch.
        drawn: What the user's own `generator` gave for this epoch, or 0.
        start: What has been read of the epoch in an earlier run, in the terms of the loader's
            feed; None if nothing.
    """

    seed: int
    ordinal: int
    rank: int
    epoch: int = 0
    drawn: int = 0
    start: Any = None

    def shared(self, purpose: str) -> int:
        """Returns a seed that is the same on every rank and in every worker."""
        return derive(purpose, self.seed, self.ordinal, self.epoch)

    def batch(self, position: int) -> int:
        """Returns the seed of this rank's batch that begins at a position of the order."""
        return derive("batch", *self._own, position)

    def worker(self, worker: int) -> int:
        """Returns the seed of one worker; the rank's own process counts as worker 0."""
        return derive("worker", *self._own, worker)

    def base(self) -> int:
        """Returns the seed of the generator from which torch seeds the workers."""
        return derive("base", *self._own)

    @property
    def _own(self) -> tuple[int, ...]:
        return (self.seed, self.ordinal, self.epoch, self.rank, self.drawn)


class WorkerStart:
    """A `worker_init_fn` that gives a worker its stream, then calls the user's.

    Attributes:
        key: What to derive the stream from; set before the workers are started.
    """

    def __init__(self, key: LoaderKey, user_fn: Callable[[int], None] | None) -> None:
        self.key = key
        self._user_fn = user_fn

    def __call__(self, worker: int) -> None:
        """Runs in a worker, before it reads the dataset."""
        seed_generators(self.key.worker(worker))
        if self._user_fn is not None:
            self._user_fn(worker)


class Parcel:
    """Indices on their way to a worker, which unpickles them just before it reads the dataset.

    Args:
        indices: The indices.
        on_arrival: Called in the worker; it is pickled.
    """

    def __init__(self, indices: Any, on_arrival: Callable[[], None]) -> None:
        self._contents = (indices, on_arrival)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unwrap, self._contents


def _unwrap(indices: Any, on_arrival: Callable[[], None]) -> Any:
    on_arrival()
    return indices


# In a worker that outlives an epoch: the key of the last one it heard of.
_heard: LoaderKey | None = None


def worker_key(started_with: LoaderKey) -> LoaderKey:
    """Returns the key of the epoch that this worker is in."""
    return started_with if _heard is None else _heard


def _hear(key: LoaderKey) -> None:
    global _heard
    _heard = key


class Announced:
    """An index sampler that tells persistent workers of each epoch, which torch doesn't.

    Attributes:
        key: The epoch's key, set before each `iter()`.
    """

    def __init__(self, sampler: Any, key: LoaderKey) -> None:
        self._sampler = sampler
        self.key = key

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        hear = partial(_hear, self.key)
        return (Parcel(indices, hear) for indices in self._sampler)
