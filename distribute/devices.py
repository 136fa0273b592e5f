"""What torch knows about this machine's devices, asked without waking any of them up."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_own: torch.device | None = None

# Opened by a living context of these, whichever library made it.
_CONTEXT_FILES = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}


def available() -> dict[str, int]:
    """Returns the accelerators of this machine: torch's device type and how many there are."""
    import torch

    with _without_context():
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None:
            return {}
        count = torch.accelerator.device_count()
    return {found.type: count} if count else {}


def live() -> str:
    """Returns what this process holds a context of, which no fork survives, or an empty string."""
    import torch

    for name in ("cuda", "xpu", "mtia"):
        module: Any = getattr(torch, name, None)
        if module is not None and module.is_initialized():
            return name.upper()
    return next((_CONTEXT_FILES[one] for one in _open_files() if one in _CONTEXT_FILES), "")


def device(accelerator: str, index: int | None) -> torch.device:
    """Returns the device of a rank and makes it the current one, before anything uses it."""
    import torch

    global _own
    _own = torch.device(accelerator) if index is None else torch.device(accelerator, index)
    if index is not None and accelerator != "cpu":
        torch.accelerator.set_device_index(index)
    return _own


def own() -> torch.device | None:
    """Returns the device of the rank that this process is, or was last; None if it is none."""
    return _own


def default_backend(accelerator: str) -> str:
    """Returns torch's process-group backend for a device type."""
    import torch.distributed as dist

    return "gloo" if accelerator == "cpu" else dist.get_default_backend_for_device(accelerator)


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def _without_context() -> Generator[None]:
    # With this variable torch asks the driver's management library instead of making a context,
    # which would forbid a fork for the rest of the process's life.
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _open_files() -> Iterator[str]:
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return
    for entry in entries:
        try:
            yield os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
