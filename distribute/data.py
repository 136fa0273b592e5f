"""Loading data: every rank its share, in an order that does not depend on the number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import torch

from distribute.asked import Asked, check_state, check_whole
from distribute.errors import RequestError
from distribute.indices import UNKNOWN, indices_digest
from distribute.loading import Loading, prepare
from distribute.randomness import Announced, LoaderKey, RandomStream, WorkerStart, drive_guarded
from distribute.transfer import move

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from distribute.alike import Alike
    from distribute.indices import Step
    from distribute.sharding import Uneven
    from distribute.world import World

B = TypeVar("B", covariant=True)
T = TypeVar("T")

# Of what `state_dict` returns.
_VERSION = 1


class Indexed(Protocol):
    """A dataset of any type that has items at positions, such as a list or a tensor."""

    def __getitem__(self, position: int, /) -> Any: ...

    def __len__(self) -> int: ...


class ShardedLoader(Generic[B]):
    """Yields this rank's batches, on the rank's device; made by `dataloader`.

    The type argument is that of a batch.

    Attributes:
        loader: The torch DataLoader underneath, which reads this rank's share.
        dataset: The user's dataset.
        batch_size: Number of samples of a full batch of this rank; None if a batch sampler decides.
        sampler: The user's sampler, or torch's where there is none; None for a stream.
        epoch: The epoch of the iteration begun last, or of the first one.
    """

    def __init__(
        self,
        world: World,
        loading: Loading,
        *,
        to_device: bool,
        on_first_batch: Callable[[], None] | None,
        alike: Alike | None,
    ) -> None:
        self.loader = loading.loader
        self.dataset = loading.dataset
        self.batch_size = loading.loader.batch_size
        self.sampler = loading.sampler
        self.epoch = 0
        self._following = 0
        self._start: Any = None  # where in it the following epoch begins
        self._running = False  # whether the iteration begun last has not come to its end
        self._place: Any = None  # what it has delivered
        self._iterations = 0
        self._weight = 1.0
        self._device = world.device if to_device else None
        self._on_first_batch = on_first_batch
        self._alike = alike
        self._ordinal = loading.key.ordinal  # in this call; the key's is that of a loaded state
        self._epochs = world.epochs
        self._feed = loading.feed
        self._key = loading.key
        self._of_stream = loading.of_stream
        self._user_generator: torch.Generator | None = loading.loader.generator
        self._generators = loading.generators
        self._states: list[torch.Tensor] = []  # of these, where the iteration begun last began
        self._worker_start, self._announced = _listening(loading)
        self._require_alike("made", self._key)

    def __len__(self) -> int:
        """Returns the number of batches; TypeError for a stream that doesn't know its length.

        Of an epoch that is resumed in the middle, it is the number of those that are left.
        """
        return self._feed.length(self._key.start if self._running else self._start)

    def __iter__(self) -> Iterator[B]:
        """Begins an epoch: the one after the last, or the one that was set."""
        if self._on_first_batch is not None:
            call, self._on_first_batch = self._on_first_batch, None
            call()
        self.set_epoch(self._feed.epoch(self._following))
        self._states = [one.get_state() for one in self._generators]
        key = replace(self._key, epoch=self.epoch, start=self._start, drawn=self._draw())
        self._key, self._place, self._running = key, self._start, True
        self._following, self._start = self.epoch + 1, None
        self._require_alike(str(self._iterations), key)
        self._iterations += 1
        self._epochs[self._ordinal] = self.epoch
        self._feed.begin(key)
        self._tell_workers(key)
        return self._deliver(self._feed.steps(self._read(key)), self._iterations)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next iteration; each one after it is one further."""
        if epoch != self._following:
            self._start = None
        self.epoch = self._following = epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns where the loader stands: what the loop has taken, not what was fetched ahead.

        It is the same on every rank and makes no collective, so that rank 0 can save it. A loader
        of any number of ranks, batch size and number of workers goes on from it.

        Raises:
            RuntimeError: Where the place in the epoch is not known: in the middle of a stream that
                shards itself, and with `in_order=False`.
        """
        self._check_in_order("the place in an epoch")
        place = self._place if self._running else self._start
        if place is UNKNOWN:
            raise RuntimeError(
                "the place in a stream that shards itself (sharded=True) is known to its dataset "
                "only; save it there, or save the loader between two epochs"
            )
        states = self._states if self._running else [one.get_state() for one in self._generators]
        return {
            "version": _VERSION,
            "seed": self._key.seed,
            "ordinal": self._key.ordinal,
            "epoch": self._key.epoch if self._running else self._following,
            "place": copy.deepcopy(place),
            "kind": self._feed.kind,
            "total": self._feed.total(),
            "generators": states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the next iteration go on where another loader, or this one, stood.

        The order is that of the loader which gave the state, whatever this one's seed is.

        Args:
            state: What `state_dict` returned.

        Raises:
            RequestError: The state is not one of a loader, or in the middle of an epoch of other
                data.
        """
        check_state(state, _VERSION, self._feed.kind, self._feed.total(), len(self._generators))
        self._key = replace(self._key, seed=state["seed"], ordinal=state["ordinal"])
        self.epoch = self._following = state["epoch"]
        self._start, self._running = copy.deepcopy(state["place"]), False
        for generator, kept in zip(self._generators, state["generators"], strict=True):
            generator.set_state(kept)

    @property
    def weight(self) -> float:
        """This rank's number of samples over the mean number of all ranks, at the current step.

        With `(loss * loader.weight).backward()` the mean of the ranks' gradients, which is what
        DDP takes, is that of the mean loss over all samples of the step.
        """
        self._check_in_order("the weight of a batch")
        return self._weight

    def in_dataset_order(self, ranks: Sequence[Sequence[T] | torch.Tensor]) -> Any:
        """Puts values of all ranks, one for each sample of an epoch, into the dataset's order.

        Samples that `uneven="pad"` repeats count once. With a sampler it is the sampler's order.

        Args:
            ranks: Of each rank the values of its samples of the epoch begun last, as far as it was
                read: tensors, whose rows they are, or lists.

        Returns:
            A tensor or a list.

        Raises:
            RequestError: There is not one value for each sample, or the order is not known (of a
                stream, of a batch sampler).
        """
        self._check_in_order("the order of samples")
        samples = self._feed.samples(self._key, self._place)
        if samples is None:
            raise RequestError(
                f"a loader of {self._feed.kind}",
                "they have no positions to bring values into an order by",
                "have the dataset return each sample's number, and gather that as well",
            )
        for rank, (values, read) in enumerate(zip(ranks, samples, strict=True)):
            if len(values) != len(read):
                raise RequestError(
                    f"{len(values)} values on rank {rank}",
                    f"its loader has read {len(read)} samples of this epoch",
                    "pass one value for each sample",
                )
        flat = list(chain.from_iterable(samples))
        rows = sorted((at for at, sample in enumerate(flat) if sample >= 0), key=flat.__getitem__)
        if all(isinstance(values, torch.Tensor) for values in ranks):
            return torch.cat(cast("list[torch.Tensor]", list(ranks)))[rows]
        together = list(chain.from_iterable(ranks))
        return [together[at] for at in rows]

    def _require_alike(self, occasion: str, key: LoaderKey) -> None:
        if self._alike is None:
            return
        facts: dict[str, object] = {
            "a dataset of type": type(self.dataset).__qualname__,
            **self._feed.facts(),
            "a Subset with indices": indices_digest(self.dataset),
            "a seed of": (key.seed, key.ordinal),
            "an epoch of": key.epoch,
            "a start at": key.start,
        }
        self._alike.require(
            f"{self._ordinal}/{occasion}",
            facts,
            "make the same loaders of the same data in the same order on every rank "
            "(random_split before ctx.model, or with a seeded generator)",
        )

    def _check_in_order(self, wanted: str) -> None:
        if not getattr(self.loader, "in_order", True):
            raise RuntimeError(f"{wanted} is not known with in_order=False; leave out in_order")

    def _draw(self) -> int:
        # As torch's DataLoader does, so that a RandomSampler on the same generator draws the same.
        if self._user_generator is None:
            return 0
        return int(torch.empty((), dtype=torch.int64).random_(generator=self._user_generator))

    def _tell_workers(self, key: LoaderKey) -> None:
        # Otherwise torch draws from the global generator, which is the model's.
        self.loader.generator = torch.Generator().manual_seed(key.base() % 2**63)
        self._worker_start.key = key
        if self._announced is not None:
            self._announced.key = key

    def _read(self, key: LoaderKey) -> Iterator[Any]:
        """Returns torch's iterator, under a random stream if it reads in this process."""
        stream = RandomStream(key.shared("stream") if self._of_stream else key.worker(0))
        with stream.active():
            batches: Iterator[Any] = iter(self.loader)
        if self.loader.num_workers:
            return batches
        return stream.drive(batches) if self._of_stream else drive_guarded(batches)

    def _deliver(self, steps: Iterator[Step], iteration: int) -> Iterator[B]:
        for batch, self._weight, place in steps:
            if iteration == self._iterations:  # no other one has begun since
                self._place = place
            yield batch if self._device is None else move(batch, self._device)
        if iteration == self._iterations:
            self._running = False


def dataloader(
    world: World,
    data: DataLoader[Any] | Dataset[Any] | Indexed,
    *,
    ordinal: int,
    on_first_batch: Callable[[], None] | None = None,
    alike: Alike | None = None,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    shuffle: bool = False,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    drop_last: bool = False,
    uneven: Uneven | None = None,
    seed: int | None = None,
    sharded: bool = False,
    to_device: bool = True,
    **loader_options: Any,
) -> ShardedLoader[Any]:
    """Returns a loader of this rank's share of some data.

    The ranks' batches of a step, one after the other, are what a single process would read at that
    step. No collective is made, except while iterating an `IterableDataset`.

    Args:
        world: Where this rank stands.
        data: A map-style dataset (a list or a tensor is one), an `IterableDataset`, or a torch
            `DataLoader`, which keeps all its settings: its `batch_size` is that of each rank, its
            shuffling, its sampler or batch sampler go on in all ranks together. A
            `DistributedSampler` in it (or as `sampler`) gives its shuffle, seed and drop_last;
            other samplers with `num_replicas` and `rank` are left to divide the data themselves.
        ordinal: The how-manieth loader of the call this is; the order depends on it.
        on_first_batch: Called once, before anything is drawn.
        alike: Compares with the other ranks, at each `iter()`, what this one is about to read.
        batch_size: Number of samples of each rank at a step; 1 if none is given.
        global_batch_size: Number of samples of all ranks together at a step, shared out by ceil
            and floor, instead of `batch_size`.
        shuffle: Whether to read in an order drawn from the seed and the epoch (or, as in torch,
            from `generator`).
        sampler: Draws the order of all ranks together. It is iterated on every rank, under random
            streams that all share; a generator of its own must be alike on all ranks.
        batch_sampler: Draws the batches, dealt out to the ranks in turn: step `t` covers batches
            `t * world_size` and following. It decides alone which samples make a batch.
        drop_last: Same as `uneven="drop"`.
        uneven: What happens to the samples at the end that don't fill a step. `"pad"`: a few
            samples are repeated, so that all ranks have equally many (the default with `shuffle`, a
            sampler or a batch sampler). `"drop"`: they are left out. `"balance"`: every sample is
            read exactly once, the ranks take equally many steps if there are at least as many
            samples as ranks, and the last two steps may be shared out together (the default
            otherwise). With a batch sampler this joins whole batches in the last step.
        seed: Seed of the order and of the dataset's random streams; that of the call by default.
        sharded: Whether the `IterableDataset` divides itself among ranks and workers. Otherwise
            each reads all of it and keeps every n-th item; meanwhile it sees no worker.
        to_device: Whether batches arrive on the rank's device, and through pinned memory where
            that is an accelerator.
        **loader_options: Options of torch's `DataLoader`, such as `num_workers`.

    Raises:
        RequestError: The options contradict each other or the data.
    """
    check_whole(isinstance(data, ShardedLoader))
    asked = Asked(
        batch_size=_plain(batch_size),
        global_batch_size=_plain(global_batch_size),
        shuffle=bool(shuffle),
        sampler=sampler,
        batch_sampler=batch_sampler,
        drop_last=drop_last,
        uneven=uneven,
        seed=seed,
        sharded=sharded,
        to_device=to_device,
        options=loader_options,
    )
    key = LoaderKey(world.seed if seed is None else seed, ordinal, world.rank)
    loading = prepare(world, data, asked, key)
    return ShardedLoader(
        world, loading, to_device=to_device, on_first_batch=on_first_batch, alike=alike
    )


def _plain(size: Any) -> Any:
    # One of numpy's, from a search, say: torch takes ints only.
    return size if isinstance(size, bool) or not isinstance(size, Integral) else int(size)


def _listening(loading: Loading) -> tuple[WorkerStart, Announced | None]:
    """Makes the loader's workers learn of their random streams."""
    loader = loading.loader
    start = WorkerStart(loading.key, loader.worker_init_fn)
    if loader.num_workers:
        loader.worker_init_fn = start
    if not (loading.of_stream and loader.persistent_workers):
        return start, None
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    announced = Announced(getattr(loader, place), loading.key)
    loader.__dict__[place] = announced  # past __setattr__, as in loading
    return start, announced
