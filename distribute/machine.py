"""Reads the facts that `plan.resolve` chooses by."""

from __future__ import annotations

import sys
import threading

from distribute import command, devices
from distribute.plan import Machine


def read(
    *, earlier_calls: bool, kept: tuple[int, ...] | None, kept_accelerator: str
) -> Machine:
    """Reads the facts about this machine and this process.

    Args:
        earlier_calls: Whether this process has made a distributed call before.
        kept: Device indices of living re-executed workers, or None.
        kept_accelerator: Their device type.
    """
    script, no_script = command.command()
    return Machine(
        accelerators=devices.available(),
        backends=_backends(),
        cores=devices.usable_cores(),
        can_fork=sys.platform == "linux",
        live_accelerator=devices.live(),
        interactive=command.interactive(),
        main_thread=threading.current_thread() is threading.main_thread(),
        other_threads=threading.active_count() > 1,
        script=script,
        no_script=no_script,
        earlier_calls=earlier_calls,
        kept=kept,
        kept_accelerator=kept_accelerator,
        group=_group(),
    )


def _backends() -> frozenset[str]:
    import torch.distributed as dist

    checks = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    missing = {name for name, check in checks.items() if not check()}
    return frozenset(dist.Backend.backend_list) - missing - {"undefined"}


def _group() -> tuple[int, int, str] | None:
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size(), dist.get_backend()
