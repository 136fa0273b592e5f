"""Has the limits of a call come when its ranks are where a test wants them, and not by the clock.

A limit of a second would be over before ranks on a busy machine have come to the line that the test
is about.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from distribute.supervise import Supervisor

T = TypeVar("T")

# Long enough to be over at a word only.
LONG = 600
# A rank that has said that it is there is in what it does next after this.
_MOMENT = 0.3


class Overdue:
    """A limit that is over when some ranks are there; pass `LONG` as the limit of the call.

    Args:
        folder: An empty directory.
        ranks: How many ranks have to be there.
    """

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self._folder = str(folder)
        self._ranks = ranks
        self._since = math.inf

    def there(self, value: T) -> T:
        """Says that the rank that this process is has come here; returns the value."""
        Path(self._folder, str(os.getpid())).touch()
        return value

    def come(self) -> bool:
        """Tells whether all are there, since a moment ago."""
        now = time.monotonic()
        if len(os.listdir(self._folder)) >= self._ranks:
            self._since = min(self._since, now)
        return now >= self._since + _MOMENT

    def limit(self, patch: Callable[[object, str, object], None], joining: int = 0) -> None:
        """Makes this the deadline of calls, and their limit for joining.

        Args:
            patch: Sets an attribute of an object, as long as the test runs.
            joining: How many ranks must have come to where all meet.
        """
        tick = Supervisor._tick

        def ticks(supervisor: Supervisor, now: float) -> None:
            met = len(supervisor._arrival._joining) >= joining
            if supervisor.cause is None and self.come() and met:
                if supervisor._ends is not None:
                    supervisor._ends = now
                supervisor._arrival.shift(-LONG)
            tick(supervisor, now)

        patch(Supervisor, "_tick", ticks)
