"""What was asked of a loader, and the refusals of what contradicts itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from distribute.errors import RequestError
from distribute.sharding import Uneven

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from distribute.world import World


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of `dataloader`, as they were given; None or False where they were not."""

    batch_size: int | None
    global_batch_size: int | None
    shuffle: bool
    sampler: Iterable[Any] | None
    batch_sampler: Iterable[Any] | None
    drop_last: bool
    uneven: Uneven | None
    seed: int | None
    sharded: bool
    to_device: bool
    options: dict[str, Any]

    def of_torch(self) -> dict[str, Any]:
        """Returns the options that a DataLoader has itself, of those that were given."""
        given = {
            "batch_size": self.batch_size,
            "global_batch_size": self.global_batch_size,
            "shuffle": self.shuffle,
            "sampler": self.sampler,
            "batch_sampler": self.batch_sampler,
            "drop_last": self.drop_last,
        }
        # Not by truth: an empty sampler or a batch size of 0 was given, too.
        return {k: v for k, v in given.items() if v is not None and v is not False} | self.options

    @property
    def generator(self) -> Any:
        """The user's own torch.Generator, or None."""
        return self.options.get("generator")


def check_policy(uneven: object) -> None:
    """Refuses an unknown policy for an uneven tail."""
    if uneven not in (None, *get_args(Uneven)):
        raise RequestError(
            f"uneven={uneven!r}",
            "the policies for an uneven tail are " + ", ".join(map(repr, get_args(Uneven))),
            "pass one of these",
        )


def check_whole(shared_out: bool) -> None:
    """Refuses a loader that gives this rank's share: a share of that would lose the rest."""
    if shared_out:
        raise RequestError(
            "a loader that ctx.dataloader has made",
            "its data are shared out among the ranks already",
            "use it as it is, or pass the dataset",
        )


def check_kept(asked: Asked) -> None:
    """Refuses what a given DataLoader has decided already."""
    for name, value in asked.of_torch().items():
        raise RequestError(
            f"{name}={value!r} with a DataLoader",
            "a DataLoader keeps all its settings (its batch_size is that of each rank)",
            f"set {name} where the DataLoader is made, or pass its dataset instead",
        )


def check_sizes(world: World, asked: Asked) -> None:
    """Refuses batch sizes that are none, or not for this world."""
    if asked.batch_size is not None and asked.global_batch_size is not None:
        raise RequestError(
            f"batch_size={asked.batch_size!r} and global_batch_size={asked.global_batch_size!r}",
            "one is the batch of each rank, the other that of all ranks together",
            "pass one of them",
        )
    for name in ("batch_size", "global_batch_size"):
        size = getattr(asked, name)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise RequestError(
                f"{name}={size!r}", "it is a number of samples", "pass a whole number from 1 on"
            )
    if asked.global_batch_size is not None and asked.global_batch_size < world.world_size:
        raise RequestError(
            f"global_batch_size={asked.global_batch_size}",
            f"each of {world.world_size} ranks takes at least one sample at a step",
            f"pass {world.world_size} or more, or use fewer ranks",
        )


def check_order(asked: Asked) -> None:
    """Refuses more than one decision about the order of samples."""
    if asked.shuffle and asked.sampler is not None:
        raise RequestError(
            "shuffle=True and sampler=...", "each sets the order of samples", "pass one of them"
        )
    others = [name for name in asked.of_torch() if name not in asked.options]
    if asked.batch_sampler is not None and len(others) > 1:
        others.remove("batch_sampler")
        raise RequestError(
            f"batch_sampler=... and {', '.join(others)}",
            "a batch sampler alone decides which samples make a batch",
            f"leave out {', '.join(others)}",
        )
    if asked.shuffle and asked.seed is not None and asked.generator is not None:
        raise RequestError(
            f"seed={asked.seed} and generator=... with shuffle=True",
            "each would set the order of samples",
            "pass one of them",
        )


def check_dataset(data: object) -> None:
    """Refuses what can't be read by position."""
    if not hasattr(type(data), "__getitem__"):
        raise RequestError(
            f"a dataset of type {type(data).__name__}",
            "a dataset has __getitem__ (and __len__), or is an IterableDataset",
            "make a list of it, or put its __iter__ into an IterableDataset",
        )


def check_stream(asked: Asked) -> None:
    """Refuses decisions about the order of an IterableDataset."""
    for name in ("shuffle", "sampler", "batch_sampler"):
        if name in asked.of_torch():
            raise RequestError(
                f"{name}={getattr(asked, name)!r} with an IterableDataset",
                "an IterableDataset sets its own order",
                f"leave out {name}, or shuffle inside the dataset",
            )


def check_state(
    state: Mapping[str, Any], version: int, kind: str, total: int | None, generators: int
) -> None:
    """Refuses a state of a loader that means something else here.

    Args:
        state: The state.
        version: Of the states that are understood.
        kind: What a place of the loader counts.
        total: How many of them an epoch has, or None if it can't be known.
        generators: How many generators of the user the loader has.
    """
    if state.get("version") != version:
        raise RequestError(
            f"a state with the keys {', '.join(map(str, state)) or 'none'}",
            "it was not made by state_dict() of a loader of this version",
            "pass what loader.state_dict() returned",
        )
    if len(state["generators"]) != generators:
        raise RequestError(
            f"a state of a loader with {len(state['generators'])} generators",
            f"this loader and its samplers have {generators}",
            "make the loader as it was made when the state was saved",
        )
    if state["place"] is None:
        return
    there = f"{state['total']} {state['kind']}" if state["total"] is not None else state["kind"]
    here = kind if total is None else f"{total} {kind}"
    if there != here:
        raise RequestError(
            f"a state in the middle of an epoch of {there}",
            f"this loader reads {here}, whose places are others",
            "load it into a loader of the same data, or call set_epoch to begin an epoch",
        )
