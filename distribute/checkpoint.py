"""Files that appear whole or not at all, and that are safe to read."""

from __future__ import annotations

import os
import pathlib
import pickle
import re
import sys
import tempfile
from typing import Any

import torch

from distribute.errors import RequestError


def write(obj: object, path: str) -> None:
    """Writes an object with `torch.save`, and makes missing directories."""
    directory = os.path.dirname(os.path.abspath(path))
    os.makedirs(directory, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(obj, file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(aside, 0o666 & ~umask)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def read(path: str, map_location: Any) -> Any:
    """Reads a file of tensors and plain data; nothing in it is run."""
    with torch.serialization.safe_globals(_plain_types()):
        try:
            return torch.load(path, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            found = _REFUSED.search(str(error))
            if found is None:
                raise
            raise RequestError(
                f"{found[1]} in {path}",
                "to read it might run code",
                "save plain data in its place, such as vars(args) or dataclasses.asdict(config), "
                "or read a file that you trust with torch.load(path, weights_only=False)",
            ) from error


# How torch says what it does not read.
_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global")


def _plain_types() -> list[Any]:
    """Returns types besides torch's own list that hold data and nothing else."""
    found: list[Any] = [
        pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath
    ]  # fmt: skip
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # What an array is pickled with: its maker, itself, its dtype.
        made = numpy.zeros(0).__reduce__()[0], numpy.float64(0).__reduce__()[0]
        dtypes: set[Any] = {numpy.dtype(one).__class__ for one in "?bhilqBHILQefdFD"}
        found += [*made, numpy.ndarray, numpy.dtype, *dtypes]
    return found
