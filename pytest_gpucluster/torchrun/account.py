"""What torchrun's agent says of its own end, in a file: how, and which of its ranks had not ended well."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

FILE_NAME = "agent.json"
How = Literal["done", "ranks failed", "signal", "usage", "error"]


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """A rank whose process did not end with 0. ``code`` is negative where a signal has ended it."""

    rank: int
    code: int

    def __str__(self) -> str:
        how = f"killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with {self.code}"
        return f"rank {self.rank} {how}"


@dataclass(frozen=True, kw_only=True)
class Account:
    """How the agent has ended.

    Attributes:
        how: "done" every rank of this node ended with 0; "ranks failed" some did not; "signal" somebody has ended the
            agent; "usage" torchrun has refused its options; "error" anything else, such as ranks that did not meet.
        message: in words; "" where there is nothing more to say.
        ranks: those that have not ended well, the first one first.
    """

    how: How
    message: str = ""
    ranks: tuple[RankEnd, ...] = ()

    def write(self, folder: Path) -> None:
        """Leave it in a folder."""
        beside = folder / f".{FILE_NAME}"
        beside.write_text(json.dumps(asdict(self)), encoding="ascii")
        beside.replace(folder / FILE_NAME)

    @classmethod
    def read(cls, folder: Path) -> Account | None:
        """Read it back; None if the agent has left none, as one that was killed."""
        try:
            told: Mapping[str, Any] = json.loads((folder / FILE_NAME).read_bytes())
            ranks = tuple(RankEnd(rank=int(one["rank"]), code=int(one["code"])) for one in told["ranks"])
            return cls(how=told["how"], message=str(told["message"]), ranks=ranks)
        except (OSError, ValueError, KeyError, TypeError):
            return None


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15.

    >>> signal_name(15), signal_name(99)
    ('SIGTERM', 'signal 99')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
