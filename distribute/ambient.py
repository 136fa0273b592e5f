"""What surrounds a function invisibly: random-number streams, torch's settings, logging.

A rank runs under the launcher's surroundings, so that a call means the same under every start
method; see docs/random.md for the rule.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from dataclasses import dataclass
from typing import Any, cast

_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: an odd constant that spreads small ranks


@dataclass(frozen=True)
class Streams:
    """States of the random-number generators of torch (CPU), `random` and numpy if loaded."""

    torch: bytes
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> Streams:
        """Reads the states of this process."""
        import torch

        numpy = sys.modules.get("numpy")
        return cls(
            torch=bytes(cast("list[int]", torch.get_rng_state().tolist())),
            python=random.getstate(),
            numpy=None if numpy is None else numpy.random.get_state(),
        )

    def restore(self) -> None:
        """Sets the states of this process."""
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        random.setstate(self.python)
        if self.numpy is not None:
            import numpy

            numpy.random.set_state(self.numpy)

    def seed(self) -> int:
        """Returns a number that is a pure function of torch's state, drawing nothing from it."""
        return int.from_bytes(hashlib.blake2b(self.torch, digest_size=7).digest(), "little")


@dataclass(frozen=True)
class Logging:
    """How the caller's program logs: the root logger's level and its handlers for the terminal.

    Attributes:
        level: The root logger's level.
        handlers: Of each handler its stream's name, its level and its formatter.
    """

    level: int
    handlers: tuple[tuple[str, int, logging.Formatter | None], ...]

    @classmethod
    def capture(cls) -> Logging:
        """Reads the configuration of this process."""
        streams = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
        streams |= {id(sys.__stdout__): "stdout", id(sys.__stderr__): "stderr"}
        root = logging.getLogger()
        handlers: list[tuple[str, int, logging.Formatter | None]] = []
        for one in root.handlers:
            name = streams.get(id(getattr(one, "stream", None)))
            # Of other kinds, files for example, a rank would open a second one.
            if type(one) is logging.StreamHandler and name is not None:
                plain = type(one.formatter) is logging.Formatter
                handlers.append((name, one.level, one.formatter if plain else None))
        return cls(root.level, tuple(handlers))

    def apply(self) -> None:
        """Configures this process in the same way, if nobody has configured it."""
        root = logging.getLogger()
        if root.handlers or not self.handlers:
            return
        root.setLevel(self.level)
        for name, level, formatter in self.handlers:
            handler = logging.StreamHandler(getattr(sys, name))
            handler.setLevel(level)
            handler.setFormatter(formatter)
            root.addHandler(handler)


@dataclass(frozen=True)
class Settings:
    """Process-wide settings that change what a loop computes, or how it speaks."""

    default_dtype: Any
    matmul_precision: str
    deterministic: bool
    deterministic_warn_only: bool
    cudnn: tuple[bool, bool, bool]
    logging: Logging

    @classmethod
    def capture(cls) -> Settings:
        """Reads the settings of this process."""
        import torch

        cudnn = torch.backends.cudnn
        return cls(
            default_dtype=torch.get_default_dtype(),
            matmul_precision=torch.get_float32_matmul_precision(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            deterministic_warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn=(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
            logging=Logging.capture(),
        )

    def apply(self) -> None:
        """Sets those settings of this process that differ."""
        import torch

        now = Settings.capture()
        if now.default_dtype != self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        if now.matmul_precision != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        wanted = self.deterministic, self.deterministic_warn_only
        if (now.deterministic, now.deterministic_warn_only) != wanted:
            # Not without need: this imports torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])
        if now.cudnn != self.cudnn:
            cudnn = torch.backends.cudnn
            cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self.cudnn
        self.logging.apply()


def seed_all(seed: int) -> None:
    """Seeds torch on every device, `random`, and numpy if it is loaded."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(seed % 2**32)


class Fold:
    """Gives a rank streams of its own, once.

    All ranks share rank 0's streams until then, so that initialisation and splits agree on all of
    them; afterwards dropout and augmentation differ. Rank 0's streams are left as they are: it
    draws what a single process would draw.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._done = rank == 0

    def __call__(self) -> None:
        """Folds the rank in; nothing from the second time on."""
        if self._done:
            return
        self._done = True
        seed_all((Streams.capture().seed() ^ (self._rank * _MIX)) % 2**63)
