"""From what was asked of a loader to the torch DataLoader that does it."""

from __future__ import annotations

import copy
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from distribute.asked import (
    Asked,
    check_dataset,
    check_kept,
    check_order,
    check_policy,
    check_sizes,
    check_stream,
    check_whole,
)
from distribute.errors import RequestError
from distribute.indices import Drawn, Indices, Positions
from distribute.iterables import CountingCollate, Stream, StreamShard, stream_length
from distribute.sharding import Split, Uneven

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distribute.indices import Source, Step
    from distribute.randomness import LoaderKey
    from distribute.world import World

# The annotations of torch's DataLoader leave the types of its parts open.
TorchLoader: TypeAlias = Any


class Feed(Protocol):
    """What a loader reads, epoch by epoch.

    A place says what has been read of an epoch: None at its beginning, else as in `Step`.
    """

    @property
    def kind(self) -> str:
        """What a place counts; places of another kind mean something else."""
        ...

    def length(self, start: Any) -> int:
        """Returns the number of steps from a place on; TypeError if it can't be known."""
        ...

    def total(self) -> int | None:
        """Returns how many of what a place counts an epoch has, or None if it can't be known."""
        ...

    def facts(self) -> dict[str, object]:
        """Returns what must be equal on all ranks, in words."""
        ...

    def samples(self, key: LoaderKey, stop: Any) -> list[list[int]] | None:
        """Returns which samples each rank has read up to a place; -1 for one that repeats."""
        ...

    def epoch(self, following: int) -> int:
        """Returns the epoch to draw, if nobody asked for another: the following one."""
        ...

    def begin(self, key: LoaderKey) -> None:
        """Sets the epoch to draw, and the place to begin at."""
        ...

    def steps(self, batches: Iterator[Any]) -> Iterator[Step]:
        """Turns what torch's iterator yields into batches, their weights and places."""
        ...


class Loading(NamedTuple):
    """What a loader is made of.

    Attributes:
        loader: A torch DataLoader that reads this rank's share.
        feed: What it reads.
        key: What its random streams are derived from.
        dataset: The user's dataset.
        sampler: The user's sampler, or torch's; None for a stream.
        of_stream: Whether the dataset is an `IterableDataset`.
        generators: The user's own generators, of the loader and its samplers.
    """

    loader: TorchLoader
    feed: Feed
    key: LoaderKey
    dataset: Any
    sampler: Any
    of_stream: bool
    generators: list[torch.Generator]


def prepare(world: World, data: Any, asked: Asked, key: LoaderKey) -> Loading:
    """Returns what the asked-for loader is made of, or raises `RequestError`."""
    check_policy(asked.uneven)
    loader: TorchLoader = data
    if isinstance(data, DataLoader):
        check_whole(_is_ours(loader))
        check_kept(asked)
    else:
        loader = _made(world, data, asked)
    if _is_iterable(loader.dataset):
        return _stream(world, loader, asked, key)
    return _map_style(world, loader, asked, key)


# -- a DataLoader of our own -------------------------------------------------------------------


def _made(world: World, data: Any, asked: Asked) -> TorchLoader:
    """Returns a torch DataLoader that does what was asked, but for sharding."""
    check_sizes(world, asked)
    check_order(asked)
    if _is_iterable(data):
        check_stream(asked)
    else:
        check_dataset(data)
    can_pin: dict[str, Any] = {"pin_memory": asked.to_device and _can_pin(world)}
    options = can_pin | asked.options
    torch_loader: TorchLoader = DataLoader
    if asked.batch_sampler is not None:
        return torch_loader(data, batch_sampler=asked.batch_sampler, **options)
    if asked.sampler is not None:
        options["sampler"] = asked.sampler
    elif asked.shuffle and asked.generator is not None:
        options["shuffle"] = True  # torch then draws the order from that generator
    size = asked.batch_size
    if asked.global_batch_size is not None:
        size = _share(world, asked.global_batch_size)
    return torch_loader(
        data, batch_size=1 if size is None else size, drop_last=asked.drop_last, **options
    )


def _generators(loader: TorchLoader) -> list[torch.Generator]:
    """Returns the user's own generators, from which the order and the workers' seeds are drawn."""
    holders = [loader, loader.sampler, loader.batch_sampler]
    holders.append(getattr(loader.batch_sampler, "sampler", None))
    found: dict[int, torch.Generator] = {}
    for holder in holders:
        one = getattr(holder, "generator", None)
        if isinstance(one, torch.Generator):
            found[id(one)] = one
    return list(found.values())


def _is_ours(loader: TorchLoader) -> bool:
    parts = (loader.batch_sampler, loader.sampler, loader.dataset)
    return any(isinstance(one, (Indices, StreamShard)) for one in parts)


def _is_iterable(dataset: object) -> bool:
    return isinstance(dataset, IterableDataset)


def _can_pin(world: World) -> bool:
    return world.device.type not in ("cpu", "mps", "meta")


def _share(world: World, global_batch: int, rank: int | None = None) -> int:
    split = Split(world.world_size, world.rank, global_batch, "drop")
    return len(split.share(range(global_batch), rank))


# -- sharding a DataLoader ---------------------------------------------------------------------


def _copy(world: World, loader: TorchLoader, **changed: Any) -> TorchLoader:
    """Returns a DataLoader (of the user's own class, if it is one) with some parts exchanged."""
    made = copy.copy(loader)
    # Past __setattr__, by which torch forbids what would be wrong after an iteration has begun.
    made.__dict__.update(changed, _iterator=None)
    made.pin_memory = loader.pin_memory and _can_pin(world)
    return made


def _map_style(world: World, loader: TorchLoader, asked: Asked, key: LoaderKey) -> Loading:
    if asked.sharded:
        raise RequestError(
            "sharded=True",
            "only an IterableDataset can shard itself; this dataset is read by position",
            "leave out sharded",
        )
    indices = _indices(world, loader, asked, key)
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    made = _copy(world, loader, **{place: indices})
    return Loading(made, indices, key, loader.dataset, loader.sampler, False, _generators(loader))


def _indices(world: World, loader: TorchLoader, asked: Asked, key: LoaderKey) -> Indices:
    batches: Any = loader.batch_sampler
    if not _is_just(batches, BatchSampler):
        return _of_batches(world, loader, asked, key)
    sampler: Any = batches.sampler
    size = asked.global_batch_size or batches.batch_size * world.world_size

    def split(drop_last: bool, default: Uneven) -> Split:
        uneven = _policy(asked, drop_last, default)
        return Split(world.world_size, world.rank, size, uneven)

    if _is_just(sampler, DistributedSampler):
        # Its shares are not ours, so what it would share out is taken instead.
        source: Source = Positions(
            split(batches.drop_last or sampler.drop_last, "pad"),
            sampler.dataset,
            sampler.shuffle,
            sampler.seed if asked.seed is None else asked.seed,
        )
    elif _is_divided(world, sampler):
        alone = _undivided_split(asked, batches.drop_last, batches.batch_size)
        source = Drawn(alone, sampler, batches=False, shares=world.world_size)
    elif _is_just(sampler, SequentialSampler) and asked.sampler is None:
        default: Uneven = "pad" if asked.shuffle or asked.batch_sampler is not None else "balance"
        dataset = _sized(sampler.data_source)
        source = Positions(split(batches.drop_last, default), dataset, asked.shuffle)
    else:
        source = Drawn(split(batches.drop_last, "pad"), sampler, batches=False)
    return Indices(source, key, sampler, to_workers=loader.num_workers > 0)


def _of_batches(world: World, loader: TorchLoader, asked: Asked, key: LoaderKey) -> Indices:
    """Returns the indices of a batch sampler, or of a DataLoader that does not batch."""
    batched = loader.batch_sampler is not None
    batches: Any = loader.batch_sampler if batched else loader.sampler
    told = batches if hasattr(batches, "set_epoch") else getattr(batches, "sampler", None)
    if _is_divided(world, batches) or _is_divided(world, getattr(batches, "sampler", None)):
        alone = _undivided_split(asked, False, 1)
        source = Drawn(alone, batches, batches=True, shares=world.world_size)
        return Indices(source, key, told, to_workers=loader.num_workers > 0)
    whole = not batched and not _is_just(batches, BatchSampler)
    if whole and (
        asked.uneven == "balance" or (asked.uneven is None and _is_just(batches, SequentialSampler))
    ):
        raise RequestError(
            "a DataLoader with batch_size=None",
            "its items are batches that can't be shared out evenly over ranks",
            "pass uneven='pad' or uneven='drop'",
        )
    uneven = _policy(asked, False, "pad")
    split = Split(world.world_size, world.rank, world.world_size, uneven)
    source = Drawn(split, batches, batches=True)
    return Indices(source, key, told, to_workers=loader.num_workers > 0)


def _is_just(sampler: object, kind: type) -> bool:
    """Returns whether a sampler is one of torch's own: a subclass may do anything."""
    return type(sampler) is kind


def _policy(asked: Asked, drop_last: bool, default: Uneven) -> Uneven:
    if not drop_last:
        return asked.uneven or default
    if asked.uneven not in (None, "drop"):
        raise RequestError(
            f"uneven={asked.uneven!r} with drop_last=True",
            "drop_last=True is the policy 'drop'",
            "pass one of them",
        )
    return "drop"


def _is_divided(world: World, sampler: object) -> bool:
    """Returns whether a sampler draws this rank's samples only, as torch's distributed one."""
    replicas = getattr(sampler, "num_replicas", None)
    rank = getattr(sampler, "rank", None)
    if not isinstance(replicas, int) or not isinstance(rank, int) or replicas == 1:
        return False
    if (replicas, rank) != (world.world_size, world.rank):
        raise RequestError(
            f"a {type(sampler).__name__} for rank {rank} of {replicas}",
            f"this is rank {world.rank} of {world.world_size}",
            "make it with num_replicas=1 and rank=0, so that it draws what all ranks share out",
        )
    return True


def _undivided_split(asked: Asked, drop_last: bool, batch_size: int) -> Split:
    if asked.uneven is not None:
        raise RequestError(
            f"uneven={asked.uneven!r}",
            "the sampler divides the samples among the ranks itself",
            "leave out uneven, or make the sampler with num_replicas=1 and rank=0",
        )
    return Split(1, 0, batch_size, "drop" if drop_last else "balance")


def _sized(dataset: object) -> Sized:
    if not isinstance(dataset, Sized):
        raise RequestError(
            f"a dataset of type {type(dataset).__name__}",
            "without a length it has no positions to share out",
            "give it a __len__, or pass a sampler",
        )
    return dataset


def _stream(world: World, loader: TorchLoader, asked: Asked, key: LoaderKey) -> Loading:
    if asked.uneven in ("pad", "balance"):
        raise RequestError(
            f"uneven={asked.uneven!r} with an IterableDataset",
            "its end is unknown until it comes; all ranks stop when one has no batch left",
            "leave out uneven, or pass uneven='drop' to drop batches that are not full, too",
        )
    batched = loader.batch_sampler is not None
    shard = None if asked.sharded else StreamShard(loader.dataset, world.world_size, key)
    drop_last = loader.drop_last or asked.uneven == "drop"
    collate = CountingCollate(loader.collate_fn, batched, shard)
    made = _copy(
        world,
        loader,
        dataset=loader.dataset if shard is None else shard,
        collate_fn=collate,
        drop_last=drop_last,
    )

    def batches(rank: int, samples: int) -> int:
        size = loader.batch_size if batched else 1
        if asked.global_batch_size is not None:
            size = _share(world, asked.global_batch_size, rank)
        assert size is not None, "an IterableDataset has no batch sampler"
        return samples // size if drop_last else -(-samples // size)

    workers = max(loader.num_workers, 1)

    def length(total: int) -> int:
        return stream_length(total, batches, world.world_size, workers)

    stream = Stream(world, shard, workers, length, loader.dataset)
    return Loading(made, stream, key, loader.dataset, None, True, _generators(loader))
