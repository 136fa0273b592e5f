"""What a supervisor raises when a call has failed."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

from distribute.errors import DistributeError, RankOutcome
from distribute.outcome import note


@dataclass
class Failure(Exception):
    """Raised when a call did not succeed.

    Attributes:
        cause: The error that is the caller's news.
        rank: The rank that it comes from, or None.
        outcomes: What became of each rank.
        notes: What else belongs to the news.
        restartable: Whether the same call may succeed when it is made again.
    """

    cause: BaseException
    rank: int | None = None
    outcomes: tuple[RankOutcome, ...] = ()
    notes: list[str] = field(default_factory=list[str])
    restartable: bool = False

    @property
    def headline(self) -> str:
        """The news in one line."""
        told = "".join(traceback.format_exception_only(self.cause)).partition("\n")[0]
        return told if self.rank is None else f"rank {self.rank} failed: {told}"

    def news(self) -> BaseException:
        """Returns the error for the caller, with all that belongs to it."""
        for one in self.notes:
            note(self.cause, one)
        carry(self.cause, self.outcomes)
        return self.cause


def carry(error: BaseException, outcomes: tuple[RankOutcome, ...]) -> None:
    """Puts the outcomes of the ranks on the error that the caller gets."""
    try:
        object.__setattr__(error, "outcomes", outcomes)
    except Exception:
        pass  # a type that allows no more attributes


class NotReady(DistributeError):
    """Raised when a fork is no good now, for the reason in the text; another method takes over."""
