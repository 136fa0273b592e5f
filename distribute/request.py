"""What the user asked for, and whether each single value makes sense by itself."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from numbers import Integral, Real
from os import PathLike, fsdecode
from pathlib import PurePath
from typing import Any, Literal, TypedDict, cast

from distribute.errors import RequestError

StartMethod = Literal["reexec", "fork", "forkserver", "spawn"]

START_METHODS: tuple[StartMethod, ...] = ("reexec", "fork", "forkserver", "spawn")

# What a strategy's name says about the start method; "ddp" leaves it open.
STRATEGIES: dict[str, StartMethod | None] = {
    "auto": None,
    "ddp": None,
    "ddp_spawn": "spawn",
    "ddp_fork": "fork",
    "ddp_notebook": "fork",
    "ddp_forkserver": "forkserver",
}


# torch takes a timedelta, which ends at about this many seconds.
_LONGEST = 1e13


class Options(TypedDict, total=False):
    """The keyword-only options of `distributed` and `run`, except `returns`.

    Attributes:
        devices: Devices of each node: a number, a list of indices, or `"auto"` (all accelerators;
            one process on a machine without). Default `"auto"`.
        num_nodes: Nodes; more than one needs an external launcher, where it is an assertion.
            Default 1.
        strategy: `"ddp"`, or `"ddp_spawn"`, `"ddp_fork"`, `"ddp_notebook"`, `"ddp_forkserver"` to
            fix the start method too. Default `"auto"`.
        start_method: `"reexec"`, `"fork"`, `"forkserver"` or `"spawn"`. Default `"auto"`.
        accelerator: torch's device type, such as `"cuda"` (or `"gpu"`) and `"cpu"`. Default
            `"auto"`.
        backend: torch's process-group backend. Default `"auto"`: nccl on CUDA, gloo on CPU.
        timeout: Seconds, or a `timedelta`, that a collective may take. Default: torch's.
        rendezvous_timeout: Seconds until all ranks have joined. Default 120.
        deadline: Seconds, or a `timedelta`, that the whole call may take, restarts included.
            Default: no limit.
        grace: Seconds between SIGTERM and SIGKILL for the ranks of a failed call. Default 5.
        max_restarts: How often all ranks are started again after one died or raised, if a
            collective or training step had been completed. Default 0.
        seed: Seed of torch, numpy and `random` in the function. Default: go on with the caller's
            streams.
        output: What becomes of the ranks' standard output and error: `"all"` shows it, that of
            the ranks above 0 with `[rank] ` before each line; `"main"` shows rank 0's only,
            `"none"` nothing; a directory gets a file of each rank, `rank-0.log` and so on. It is
            a path object, a string with a `/`, or the name of one that exists. A rank 0 that is
            the calling process prints as ever. Default `"all"`.
        write_back: Whether modules, optimizers, schedulers and gradient scalers that the function
            is given have rank 0's state when the call has returned, wherever in the arguments they
            are. False leaves the caller's as they were. See docs/values.md. Default True.
        check_collectives: Whether the ranks tell each other, before each collective of `Context`,
            what they are about to do, so that a mismatch is an error on every rank. See
            docs/collectives.md. Default True.
    """

    devices: int | Sequence[int] | Literal["auto"]
    num_nodes: int
    strategy: str
    start_method: str
    accelerator: str
    backend: str
    timeout: float | timedelta | None
    rendezvous_timeout: float | timedelta
    deadline: float | timedelta | None
    grace: float | timedelta
    max_restarts: int
    seed: int | None
    output: str | PathLike[str]
    write_back: bool
    check_collectives: bool


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user said, with the defaults for what was left unsaid. See `Options`."""

    devices: int | Sequence[int] | Literal["auto"] = "auto"
    num_nodes: int = 1
    strategy: str = "auto"
    start_method: str = "auto"
    accelerator: str = "auto"
    backend: str = "auto"
    timeout: float | timedelta | None = None
    rendezvous_timeout: float | timedelta = 120.0
    deadline: float | timedelta | None = None
    grace: float | timedelta = 5.0
    max_restarts: int = 0
    returns: str = "main"
    seed: int | None = None
    output: str | PathLike[str] = "all"
    write_back: bool = True
    check_collectives: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Request:
        """Makes a request of keyword options.

        Raises:
            TypeError: There is no such option.
        """
        names = [one.name for one in fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
                raise TypeError(f"{name!r} is not an option: {hint}")
        return cls(**options)


def _whole(value: object) -> int | None:
    """Returns a whole number, also one of numpy (from a search, say), as an int; others as None."""
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def indices(asked: object) -> tuple[int, ...] | None:
    """Returns the device indices that `devices` names, or None for `"auto"`."""
    if isinstance(asked, str) and asked == "auto":
        return None
    count = _whole(asked)
    if count is not None:
        if count >= 1:
            return tuple(range(count))
        fact = "the number of devices of each node is at least 1"
    elif isinstance(asked, Sequence) and not isinstance(asked, str):
        given = cast("Sequence[object]", asked)
        numbers = [one for one in map(_whole, given) if one is not None]
        if len(numbers) == len(given) and numbers and min(numbers) >= 0:
            if len(set(numbers)) == len(numbers):
                return tuple(numbers)
            fact = "an index is there twice, and two ranks cannot share a device"
        else:
            fact = "a list of devices holds at least one index from 0"
    else:
        fact = "it is neither a number, nor a list of indices, nor 'auto'"
    raise RequestError(
        f"devices={asked!r}", fact, 'pass a number such as 2, indices such as [0, 1], or "auto"'
    )


def one_of(name: str, value: object, valid: tuple[str, ...]) -> str:
    """Returns the value if it is one of the valid words."""
    if isinstance(value, str) and value in valid:
        return value
    near = difflib.get_close_matches(str(value), valid, 1)
    raise RequestError(
        f"{name}={value!r}",
        f"there are {', '.join(map(repr, valid))}",
        f"did you mean {near[0]!r}?" if near else "pass one of them",
    )


def output(value: object, *, exists: bool) -> str | PurePath:
    """Returns one of the words `"all"`, `"main"` and `"none"`, or the path of a directory.

    Args:
        value: What was given.
        exists: Whether it names a directory that is there.
    """
    if isinstance(value, PathLike):
        return PurePath(fsdecode(cast("PathLike[str]", value)))
    words = ("all", "main", "none")
    if isinstance(value, str):
        if value in words:
            return value
        if exists or "/" in value:
            return PurePath(value)
        if not difflib.get_close_matches(value, words, 1):
            raise RequestError(
                f"output={value!r}",
                f"there are {', '.join(map(repr, words))}, and no directory of that name",
                f"pass one of them, or {'./' + value!r} for a directory that is to be made",
            )
    return one_of("output", value, words)


def flag(name: str, value: object) -> bool:
    """Returns the value if it is True or False."""
    if isinstance(value, bool):
        return value
    raise RequestError(f"{name}={value!r}", "it is True or False", "pass one of them")


def number(name: str, value: object, least: int) -> int:
    """Returns the value if it is a whole number of at least that."""
    whole = _whole(value)
    if whole is not None and whole >= least:
        return whole
    fact = f"it is a whole number from {least}"
    raise RequestError(f"{name}={value!r}", fact, "pass such a number")


def seconds(name: str, value: object, least: float | None = None) -> float | None:
    """Returns a duration in seconds; None only for `timeout` and `deadline`."""
    if value is None and name in ("timeout", "deadline"):
        return None
    asked = value.total_seconds() if isinstance(value, timedelta) else value
    given = -1.0 if isinstance(asked, bool) or not isinstance(asked, Real) else float(asked)
    if math.isfinite(given) and (given > 0 or given == least) and given < _LONGEST:
        return given
    fact = (
        "it is a number of seconds from 0" if least == 0 else "it is a positive number of seconds"
    )
    raise RequestError(f"{name}={value!r}", f"{fact}, and finite", "pass a number or a timedelta")


def seed(value: object) -> int | None:
    """Returns the value if it is a seed."""
    if value is None:
        return None
    whole = _whole(value)
    if whole is not None and 0 <= whole < 2**63:
        return whole
    raise RequestError(
        f"seed={value!r}", "a seed is a whole number from 0 to 2**63 - 1", "pass such a number"
    )
