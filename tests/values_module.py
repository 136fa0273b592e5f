"""Classes that stand in a module, for values.py."""

from __future__ import annotations

import dataclasses
import enum


class Stage(enum.Enum):
    TRAIN = 1
    EVAL = 2


@dataclasses.dataclass
class Setting:
    size: int
    stage: Stage
