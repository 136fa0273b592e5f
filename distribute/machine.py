"""The facts about a machine and a process that `plan.resolve` chooses by."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from distribute import command, devices


@dataclass(frozen=True)
class Machine:
    """Facts about the machine and this process that a choice depends on.

    Attributes:
        accelerators: Count of present devices by torch's device type, the CPU left out.
        backends: Process-group backends that this torch has.
        cores: CPU cores that this process may use.
        can_fork: Whether the platform has a fork that torch survives.
        live_accelerator: What this process holds a context of, such as "CUDA", or empty.
        interactive: What kind of prompt or notebook this is, or empty.
        main_thread: Whether the caller is the main thread.
        other_threads: Whether other Python threads are running.
        script: The command that runs this program again, or empty.
        no_script: Why there is no such command.
        frozen: Whether there is no interpreter but this program itself.
        earlier_calls: Whether this process has made a distributed call before.
        kept: Device indices of living re-executed workers at their call, or None.
        kept_accelerator: Their device type.
        group: Rank, size and backend of a process group that the caller holds, or None.
        output_exists: Whether the request's `output` names a directory that is there.
        open_files: How many more files this process may open, or None where nothing limits it.
        working_directory: Whether it has one: it may have been removed.
    """

    accelerators: Mapping[str, int] = field(default_factory=dict[str, int])
    backends: frozenset[str] = frozenset({"gloo"})
    cores: int = 1
    can_fork: bool = True
    live_accelerator: str = ""
    interactive: str = ""
    main_thread: bool = True
    other_threads: bool = False
    script: tuple[str, ...] = ()
    no_script: str = ""
    frozen: bool = False
    earlier_calls: bool = False
    kept: tuple[int, ...] | None = None
    kept_accelerator: str = ""
    group: tuple[int, int, str] | None = None
    output_exists: bool = False
    open_files: int | None = None
    working_directory: bool = True


def read(
    *,
    earlier_calls: bool,
    kept: tuple[int, ...] | None,
    kept_accelerator: str,
    output: object = "all",
) -> Machine:
    """Reads the facts about this machine and this process.

    Args:
        earlier_calls: Whether this process has made a distributed call before.
        kept: Device indices of living re-executed workers, or None.
        kept_accelerator: Their device type.
        output: The request's `output`.
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
        frozen=command.frozen(),
        earlier_calls=earlier_calls,
        kept=kept,
        kept_accelerator=kept_accelerator,
        group=_group(),
        output_exists=isinstance(output, str) and os.path.isdir(output),
        open_files=_open_files(),
        working_directory=_working_directory(),
    )


def _open_files() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - len(os.listdir("/dev/fd")))


def _working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except OSError:
        return False


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
