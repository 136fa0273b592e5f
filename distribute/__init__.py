"""Run a plain PyTorch training loop on every device: a function call, from anywhere."""

from __future__ import annotations

import os as _os
from typing import TYPE_CHECKING, Any

from distribute.api import distributed, is_worker, run, workers
from distribute.decorated import Distributed
from distribute.environment import worker_descriptors as _worker_descriptors
from distribute.errors import (
    BarrierTimeout,
    CallMismatch,
    CollectiveMismatch,
    DeadlineExceeded,
    DistributeError,
    JoinTimeout,
    MainFailed,
    RankOutcome,
    RequestError,
    WorkerDied,
    WorkerError,
)
from distribute.kept import Workers
from distribute.plan import Plan
from distribute.request import Options

if TYPE_CHECKING:
    from distribute.context import Context, current

__version__ = "0.1.0"

__all__ = [
    "BarrierTimeout",
    "CallMismatch",
    "CollectiveMismatch",
    "Context",
    "DeadlineExceeded",
    "DistributeError",
    "Distributed",
    "JoinTimeout",
    "MainFailed",
    "Options",
    "Plan",
    "RankOutcome",
    "RequestError",
    "WorkerDied",
    "WorkerError",
    "Workers",
    "current",
    "distributed",
    "is_worker",
    "run",
    "workers",
]


def __getattr__(name: str) -> Any:
    # These need torch, which takes seconds to import.
    if name in ("Context", "current"):
        from distribute import context

        return getattr(context, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_descriptors = _worker_descriptors(_os.environ, _os.getpid())
if _descriptors is not None:
    from distribute import record as _record

    _record.begin(_descriptors[2])
    from distribute.launchers import reexec as _reexec

    _reexec.arrive(*_descriptors)
