"""State that comes back: what a function did to the modules and optimizers that it was given.

Rank 0 takes it when the function has returned, one `Change` for each part of the caller's objects
(see `stateful.parts`), and the caller applies it to its own. In a change the parts themselves stand
for those of the caller, so that ties between them, old and new, are the same on both sides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from distribute.changes import Change, OfMode, OfModule, OfTensor, Unsent, taken
from distribute.payload import pack


class Held:
    """The parts of the caller's objects as rank 0 has them.

    Made before the function runs.

    Attributes:
        parts: The parts, in the caller's order; None for what was not sent.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self._kinds: list[type] = [type(one) for one in parts]

    def changes(self) -> list[Change | None]:
        """Returns what became of the parts; of one that was not sent None."""
        known = {id(one) for one in self.parts}
        return [
            _change(one, kind, known) for one, kind in zip(self.parts, self._kinds, strict=True)
        ]

    def sendable(self, changes: Iterable[Change | None]) -> list[Change | None]:
        """Replaces the changes that cannot be pickled by news of them."""
        return [*map(self._sendable, changes)]

    def _sendable(self, change: Change | None) -> Change | None:
        try:
            pack(change, home=True, known=self.parts).close()
        except Exception as error:
            reason = f"it cannot be sent ({type(error).__name__}: {error})"
            if isinstance(change, OfModule):
                return OfMode(change.training, reason)
            return Unsent(reason)
        return change


def apply(changes: Sequence[Change | None], parts: Sequence[Any]) -> None:
    """Applies what became of rank 0's parts to the caller's."""
    missing: list[tuple[str, str]] = []
    unsent = {id(own) for change, own in zip(changes, parts, strict=True) if change is None}
    # The parameters first: what an optimizer holds goes to where they are.
    order = sorted(range(len(parts)), key=lambda index: not isinstance(changes[index], OfTensor))
    for index in order:
        change, own = changes[index], parts[index]
        try:
            reason = "" if change is None else change.apply(own, unsent)
        except Exception as error:  # the call has succeeded, and its value is not to be lost
            reason = f"it is refused here ({type(error).__name__}: {error})"
        if reason:
            missing.append((type(own).__name__, reason))
    for name, reason in missing:
        warnings.warn(
            f"the state of an argument ({name}) comes back in part: {reason}; return what is "
            "missing, or make it before the call",
            stacklevel=2,
        )


def _change(part: Any, kind: type, known: set[int]) -> Change | None:
    if part is None:
        return None
    try:
        return taken(part, kind, known)
    except Exception as error:
        return Unsent(f"it cannot be read there ({type(error).__name__}: {error})")
