"""Progress bars that suit what they are shown on."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from distribute.display import Display

# Where lines stay, so often at most; a day of training is not to be a log of bars.
_EVERY_SECONDS = 10.0
_LINE = "{desc}: {percentage:.0f}% {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Bar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
    """A tqdm bar; `lines` turns it into a line from time to time."""

    # tqdm would start a thread that wakes up bars. It would stay in the calling process, where a
    # later call could not fork beside it; without it the time is looked at in every iteration.
    monitor_interval = 0

    def __init__(self, *args: Any, lines: bool = False, **options: Any) -> None:
        self._lines = lines
        self._shown = time.monotonic()
        self._told: int | float | None = None
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Shows how far it is, unless that was shown a moment ago."""
        if not self._lines:
            return super().display(msg, pos)
        if time.monotonic() - self._shown >= max(_EVERY_SECONDS, self.mininterval):
            self._write()
        return True

    def clear(self, *args: Any, **options: Any) -> None:
        """Removes the bar while something else is printed; lines stay."""
        if not self._lines:
            super().clear(*args, **options)

    def close(self) -> None:
        """Ends the bar."""
        if self._lines and not self.disable:
            self._ema_dt = lambda: None  # the rate of the whole, as tqdm does it
            if self.leave is not False and self._told != self.n:
                self._write()
            # Without its printer tqdm only tidies up.
            del self.sp
        super().close()

    def _write(self) -> None:
        self._shown = time.monotonic()
        self._told = self.n
        found: dict[str, Any] = {**self.format_dict, "ncols": None}
        found["prefix"] = found["prefix"].removesuffix(": ")  # which `set_description` adds
        total = found["total"]
        if total and found["n"] <= total and not found["bar_format"]:
            found["bar_format"] = _LINE  # otherwise tqdm's own line has no bar
        self.fp.write(f"{self.format_meter(**found)}\n")
        self.fp.flush()


def bar(iterable: Iterable[Any], display: Display, *, silent: bool, **options: Any) -> Bar:
    """Returns an iterable with a bar.

    Args:
        iterable: What to iterate over.
        display: What the bar is shown on.
        silent: Whether it is not shown.
        **options: tqdm's. With a `file` of one's own the bar is tqdm's own too.
    """
    lines = False
    if options.get("file") is None:
        lines = display.kind == "plain"
        if display.kind == "notebook":
            options["file"] = sys.stdout  # what comes on standard error looks like an accident
        elif display.columns and not sys.stderr.isatty():
            # One is left free, as tqdm does it: the cursor stays in the line.
            options.setdefault("ncols", display.columns - 1)
    options.setdefault("miniters", 1)
    silent = options.pop("disable", False) or silent
    # The same type everywhere, so that `set_postfix` and the like work on every rank.
    return Bar(iterable, disable=silent, lines=lines, **options)
