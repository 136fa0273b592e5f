"""Lines on stderr that must not stop whoever writes them: the consumer may stall, or not exist."""

from __future__ import annotations

import sys
import threading
from typing import TextIO

_SECONDS = 0.2


def tell(text: str) -> None:
    """Writes to `sys.stderr`, waiting for its consumer for a moment at most."""
    thread = threading.Thread(
        target=_write, args=(sys.stderr, text), name="distribute-notice", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:
        return  # no more threads
    thread.join(_SECONDS)


def _write(stream: TextIO | None, text: str) -> None:
    try:
        if stream is not None:
            stream.write(text)
            stream.flush()
    except Exception:
        pass  # closed, or its reader is gone
