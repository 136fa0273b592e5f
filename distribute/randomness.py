"""The random streams of data loading: which part of it draws from which stream.

    the order          drawn by every rank alike, of (seed, loader, epoch)
    a user's sampler   iterated by every rank under one stream, of (seed, loader, epoch)
    the dataset        read under a stream of its own, of (seed, loader, epoch, rank, worker)

A DataLoader worker is a process of its own, so its global generators simply are its stream. In
the rank's own process a stream is swapped into the global generators and out again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import get_worker_info

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


def seed_generators(seed: int) -> None:
    """Seeds torch's CPU generator, `random`, and numpy if it is loaded."""
    # Not torch.manual_seed: in a worker it would queue a call per device at every epoch.
    _restore(_seeded(seed))


def _seeded(seed: int) -> _States:
    numpy = sys.modules.get("numpy")
    words = [seed >> shift & 0xFFFFFFFF for shift in range(0, 256, 32)]
    return _States(
        torch.Generator().manual_seed(seed % 2**63).get_state(),
        random.Random(seed).getstate(),
        None if numpy is None else numpy.random.MT19937(words),
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
    """What the streams of one rank's loader are derived from at one of its epochs.

    Attributes:
        seed: Seed of the data order.
        ordinal: The how-manieth loader of the call this is.
        rank: The rank.
        epoch: The epoch.
        drawn: What the user's own `generator` gave for this epoch, or 0.
    """

    seed: int
    ordinal: int
    rank: int
    epoch: int = 0
    drawn: int = 0

    def shared(self, purpose: str) -> int:
        """Returns a seed that is the same on every rank and in every worker."""
        return derive(purpose, self.seed, self.ordinal, self.epoch)

    def own(self, worker: int) -> int:
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
        seed_generators(self.key.own(worker))
        if self._user_fn is not None:
            self._user_fn(worker)


# In a worker that outlives an epoch: the last one it heard of.
_heard: Announcement | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """Tells a persistent worker that an epoch has begun, which torch doesn't.

    Attributes:
        iteration: Counts the loader's iterations, because an epoch may be repeated.
        key: The epoch's key.
    """

    iteration: int
    key: LoaderKey

    def hear(self) -> None:
        """Gives this worker its stream of the epoch, the first time that it hears of it."""
        global _heard
        info = get_worker_info()
        if self == _heard or info is None:
            return
        _heard = self
        seed_generators(self.key.own(info.id))


def worker_key(started_with: LoaderKey) -> LoaderKey:
    """Returns the key of the epoch that this worker is in."""
    return started_with if _heard is None else _heard.key


class Announced:
    """An index sampler whose items carry an announcement to the worker that gets them.

    Attributes:
        announcement: What the items of the next `iter()` carry; None in the first, of which the
            workers know by being started.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.announcement: Announcement | None = None

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        indices: Iterator[Any] = iter(self._sampler)
        if self.announcement is None:
            return indices
        announcement = self.announcement
        return (_Parcel(item, announcement) for item in indices)


class _Parcel:
    """Indices on their way to a worker, which unpickles them just before it reads the dataset."""

    def __init__(self, indices: Any, announcement: Announcement) -> None:
        self._contents = (indices, announcement)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unwrap, self._contents


def _unwrap(indices: Any, announcement: Announcement) -> Any:
    announcement.hear()
    return indices
