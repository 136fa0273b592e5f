"""What a distributed function holds in its hand: where it runs, and help that is right there."""

from __future__ import annotations

import contextvars
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO, TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer

from distribute import barriers, checkpoint, collectives, data, record, reduction
from distribute import model as models
from distribute.alike import Alike
from distribute.ambient import Fold
from distribute.changes import follow
from distribute.display import PLAIN, Display
from distribute.errors import MainFailed
from distribute.outcome import ORIGIN, obstacle
from distribute.world import World

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    from distribute.data import ShardedLoader

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
P = ParamSpec("P")

_FIRST = "main_process_first"


class Context:
    """A rank's view of a running call.

    Every member works in a world of one as well, where no process group exists.

    Args:
        world: Where the rank stands.
        display: What rank 0's output is shown on.
    """

    def __init__(self, world: World, display: Display = PLAIN) -> None:
        self._world = world
        self._display = display
        self._fold = Fold(world.rank)
        self._loaders = 0
        self._alike = Alike(world)
        self._optimizers: Sequence[Optimizer] = ()

    def __repr__(self) -> str:
        return f"<Context rank {self.rank} of {self.world_size} on {self.device}>"

    @property
    def rank(self) -> int:
        """Index of this process among all processes, from 0."""
        return self._world.rank

    @property
    def local_rank(self) -> int:
        """Index of this process among those of its node, from 0."""
        return self._world.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this node, from 0."""
        return self._world.node_rank

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return self._world.world_size

    @property
    def local_world_size(self) -> int:
        """Number of processes on this node."""
        return self._world.local_world_size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self._world.num_nodes

    @property
    def device(self) -> torch.device:
        """The device on which this process computes."""
        return self._world.device

    @property
    def backend(self) -> str:
        """Name of the torch process-group backend, such as `"gloo"`."""
        return self._world.backend

    @property
    def restart_count(self) -> int:
        """How often all ranks were started again after a failure (see `max_restarts`)."""
        return self._world.restart_count

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    # -- model ---------------------------------------------------------------------------------

    @overload
    def model(
        self,
        module: M,
        *,
        sync_batchnorm: bool = False,
        forward: str | Sequence[str] = (),
        **ddp_options: Any,
    ) -> M: ...
    @overload
    def model(
        self,
        module: Callable[[], M],
        *,
        sync_batchnorm: bool = False,
        forward: str | Sequence[str] = (),
        **ddp_options: Any,
    ) -> M: ...
    def model(
        self,
        module: Any,
        *,
        sync_batchnorm: bool = False,
        forward: str | Sequence[str] = (),
        **ddp_options: Any,
    ) -> Any:
        """Puts a model on this rank's device and keeps its ranks in step.

        Args:
            module: A module, or a function that makes one (it is made on the device). What is on
                the meta device gets memory and the values of `reset_parameters()`.
            sync_batchnorm: Whether to convert BatchNorm layers to torch's SyncBatchNorm. Default
                False.
            forward: Names of methods, beside its forward, whose gradients are synchronised, such
                as `"loss"`. Default none.
            **ddp_options: Options of `torch.nn.parallel.DistributedDataParallel`.

        Returns:
            The module wrapped in DDP, usable as the module itself (hence its type). In a world of
            one, and without trainable parameters, the module itself; what `model` has returned in
            this call, itself.

        Raises:
            TypeError: DDP has no such option.
            RequestError: It cannot be done with this module; later, from a forward or backward
                pass, that gradients would not be synchronised.
            CollectiveMismatch: The ranks do not all wrap the same module here.
        """
        wrapped: nn.Module = models.wrap(
            self._world, module, sync_batchnorm=sync_batchnorm, forward=forward, **ddp_options
        )
        self._fold()
        for one in self._optimizers:
            follow(one)
        return wrapped

    def _attend(self, given: Iterable[object]) -> None:
        """Has what optimizers keep follow their parameters, where `model` moves these."""
        self._optimizers = [one for one in given if isinstance(one, Optimizer)]

    def unwrap(self, module: M) -> M:
        """Returns the module inside `model`'s wrapper (and torch.compile's)."""
        return models.unwrap(module)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[None]:
        """Returns a context in which backward passes do not synchronise gradients."""
        return models.no_sync(module)

    def accumulate(
        self, module: nn.Module | Sequence[nn.Module], loader: Iterable[T], n: int
    ) -> Iterator[tuple[T, bool]]:
        """Yields each batch and whether to step after it: every n-th time, and the last time.

        Gradients are synchronised just there. Divide the loss by `n`.

        Args:
            module: The model, or the models, that the loop trains.
            loader: The batches. Without a length it is read one batch ahead.
            n: How many batches make a step.

        Raises:
            RequestError: `n` is not a number of batches, or `static_graph` was asked for.
        """
        return models.accumulate(module, loader, n)

    def sync_buffers(self, module: nn.Module) -> None:
        """Gives every rank rank 0's buffers, such as BatchNorm's running statistics."""
        with record.operation("sync_buffers"):
            models.sync_buffers(self._world, module)

    # -- data ----------------------------------------------------------------------------------

    def dataloader(
        self, dataset: Dataset[T] | Sequence[T] | DataLoader[T] | torch.Tensor, **options: Any
    ) -> ShardedLoader[Any]:
        """Returns a loader of this rank's share of a dataset; see `distribute.data.dataloader`.

        Args:
            dataset: A dataset, or a torch `DataLoader` whose settings are kept.
            **options: `batch_size` (of each rank) or `global_batch_size`, `shuffle`, `sampler`,
                `batch_sampler`, `drop_last`, `uneven`, `seed`, `sharded`, `to_device`, and every
                option of torch's `DataLoader`.
        """
        ordinal = self._loaders
        self._loaders += 1
        return data.dataloader(
            self._world,
            dataset,
            ordinal=ordinal,
            on_first_batch=self._fold,
            alike=self._alike,
            **options,
        )

    def gather_samples(self, values: Any, loader: ShardedLoader[Any]) -> Any:
        """Returns the values of all samples of an epoch, in the dataset's order, on every rank.

        Samples that `uneven="pad"` repeats count once. With a sampler the order is the sampler's.

        Args:
            values: This rank's values of the samples that it has read of the epoch begun last, in
                that order: a tensor, whose rows they are, or a list.
            loader: The loader that read them.

        Raises:
            RequestError: There is not one value for each sample, or the order is not known.
        """
        with record.operation("gather_samples"):
            return loader.in_dataset_order(collectives.all_gather(self._world, values))

    # -- collectives ---------------------------------------------------------------------------

    def all_reduce(
        self,
        value: T,
        op: str = "sum",
        *,
        weight: float | None = None,
        differentiable: bool = False,
    ) -> T:
        """Reduces a value over all ranks; every rank gets the result. The input is unchanged.

        Args:
            value: A tensor, a number, or nested containers of them; equal in shape on all ranks.
            op: `"sum"` (default), `"mean"`, `"min"`, `"max"` or `"product"`. The mean of ints is
                a float, the sum of bools a count, and small ints and halves do not overflow on
                the way.
            weight: For a mean, how much this rank's value counts, such as its number of samples.
                Default: as much as any other.
            differentiable: Whether backward leads through it, for sums and means. Default False.

        Raises:
            RequestError: The operation is not defined for what was given.
            CollectiveMismatch: The ranks came to different collectives, or with different values.
        """
        with record.operation("all_reduce"):
            return reduction.all_reduce(
                self._world, value, op, weight=weight, differentiable=differentiable
            )

    def reduce(
        self, value: T, dst: int = 0, op: str = "sum", *, weight: float | None = None
    ) -> T | None:
        """Reduces a value as `all_reduce` does; rank `dst` gets the result, the others None."""
        with record.operation("reduce"):
            return reduction.reduce(self._world, value, dst, op, weight=weight)

    def all_gather(self, value: T, *, differentiable: bool = False) -> list[T]:
        """Returns the list of every rank's value, by rank.

        Args:
            value: A tensor, whose shape may be another on every rank (its dtype may not), any
                picklable object, or nested containers of them.
            differentiable: Whether backward leads through it. Default False.

        Raises:
            RequestError: A rank's value cannot be sent.
            CollectiveMismatch: The ranks came to different collectives, or with other dtypes.
        """
        with record.operation("all_gather"):
            return collectives.all_gather(self._world, value, differentiable=differentiable)

    def gather(self, value: T, dst: int = 0) -> list[T] | None:
        """Returns what `all_gather` does on rank `dst`, and None on the others."""
        with record.operation("gather"):
            return collectives.gather(self._world, value, dst)

    def broadcast(self, value: T, src: int = 0) -> T:
        """Returns rank `src`'s value on every rank; the others may pass None."""
        with record.operation("broadcast"):
            return collectives.broadcast(self._world, value, src)

    def scatter(self, values: Sequence[T] | None, src: int = 0) -> T:
        """Returns to every rank its own of rank `src`'s values, which are one for each rank.

        The others may pass None.
        """
        with record.operation("scatter"):
            return collectives.scatter(self._world, values, src)

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the list of every rank's picklable object, by rank."""
        with record.operation("all_gather_object"):
            return collectives.all_gather_object(self._world, value)

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Returns rank `src`'s picklable object on every rank; the others may pass None."""
        with record.operation("broadcast_object"):
            return collectives.broadcast_object(self._world, value, src)

    def barrier(self, *, timeout: float | None = None, name: str = "") -> None:
        """Waits until all ranks are here.

        Args:
            timeout: Seconds to wait. Default: as long as for any collective, see `timeout` of
                the call.
            name: What it is for, to be seen in errors; the same on all ranks.

        Raises:
            BarrierTimeout: On every rank, and it names those that had not come in time.
        """
        with record.operation(f"barrier {name!r}" if name else "barrier"):
            barriers.barrier(self._world, timeout=timeout, name=name)

    # -- one rank at a time --------------------------------------------------------------------

    @contextmanager
    def main_process_first(self) -> Generator[None]:
        """Lets rank 0 run the block first, and the other ranks when it has finished.

        They wait as long as it takes: `timeout` does not bound it.

        Raises:
            MainFailed: On the other ranks, at once, when rank 0 left the block by an exception.
        """
        failure: str | None = None
        if self.is_main_process:
            try:
                yield
            except BaseException as error:
                failure = f"{type(error).__name__}: {error}"
                raise
            finally:
                barriers.from_main(self._world, failure, _FIRST)
            return
        with record.operation(_FIRST):
            failure = barriers.from_main(self._world, None, _FIRST)
        if failure is not None:
            told = MainFailed(f"rank 0 failed in main_process_first: {failure}")
            raise _of_main(told)
        yield

    def on_main(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a function on rank 0 and returns its value on every rank.

        The others wait as long as it takes: `timeout` does not bound it.

        Args:
            function: What to call; its value must be picklable.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Raises:
            Exception: On every rank, what the function raised.
            MainFailed: On the other ranks, in its place, if that cannot be sent.
        """
        report: tuple[bool, Any] | None = None
        with record.operation("on_main"):
            if self.is_main_process:
                try:
                    report = True, function(*args, **kwargs)
                except Exception as error:
                    barriers.from_main(self._world, (False, _to_send(error)), "on_main")
                    raise
            done, value = cast(
                "tuple[bool, Any]", barriers.from_main(self._world, report, "on_main")
            )
        if not done:
            raise _of_main(value)
        return cast("T", value)

    # -- output and files ----------------------------------------------------------------------

    def print(
        self,
        *values: object,
        sep: str = " ",
        end: str = "\n",
        file: IO[str] | None = None,
        flush: bool = True,
    ) -> None:
        """Prints on rank 0 only, as a whole and, unless `flush` is False, at once."""
        if self.is_main_process:
            stream = sys.stdout if file is None else file
            stream.write(sep.join(map(str, values)) + end)
            if flush:
                stream.flush()

    def progress(self, iterable: Iterable[T], **options: Any) -> Iterable[T]:
        """Returns the iterable with a tqdm progress bar on rank 0.

        A bar in a terminal and a notebook; elsewhere, as in a log file, a line every 10 seconds
        at most, and one at the end.

        Args:
            iterable: What to iterate over.
            **options: Options of `tqdm.tqdm`, such as `desc`.
        """
        from distribute import progress

        silent = not self.is_main_process
        return progress.bar(iterable, self._display, silent=silent, **options)

    def save(self, obj: object, path: str | os.PathLike[str]) -> None:
        """Writes rank 0's object to a file with `torch.save`; every rank must call it.

        The file appears whole or not at all, and is there on every rank's return.

        Args:
            obj: What to save, such as a dict of state dicts.
            path: Where; missing directories are made.
        """
        self.on_main(checkpoint.write, obj, os.fspath(path))

    def load(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
        """Reads a file that `save` wrote; every rank reads it.

        Tensors, plain containers, numbers, strings, paths, numpy arrays and the states of random
        number generators are read. Anything else is an error, since to read it might run code.

        Args:
            path: The file.
            map_location: Where tensors go, as in `torch.load`.
        """
        return checkpoint.read(os.fspath(path), map_location)


def _to_send(error: Exception) -> Exception:
    if obstacle(error):
        return MainFailed(f"rank 0 failed in on_main: {type(error).__name__}: {error}")
    return error


def _of_main(error: BaseException) -> BaseException:
    """Marks an exception as rank 0's: raised here as well, it is no second failure."""
    setattr(error, ORIGIN, 0)
    return error


_current: contextvars.ContextVar[Context] = contextvars.ContextVar("distribute.current")


def current() -> Context:
    """Returns the context of the running distributed call.

    Raises:
        RuntimeError: No distributed call is running here.
    """
    found = _current.get(None)
    if found is None:
        msg = (
            "current(): no distributed call is running here; call it inside a function that is "
            "decorated with @distributed or passed to run()"
        )
        raise RuntimeError(msg)
    return found


def running() -> Context | None:
    """Returns the context of the running distributed call, or None."""
    return _current.get(None)


class entered:
    """Makes a context the current one.

    No generator: contextlib assigns to the user's exception, which may be a frozen dataclass.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = _current.set(self._context)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
