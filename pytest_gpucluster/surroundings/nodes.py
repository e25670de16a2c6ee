"""The nodes of a run, and how they tell each other something without a process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Board(Protocol):
    """Where nodes leave notices for each other: ``agreement.board.Board``."""

    def post(self, name: str, value: Any) -> None: ...
    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> Mapping[int, Any]: ...
    def gather(self, name: str, value: Any, ranks: Sequence[int], *, within_seconds: float) -> Mapping[int, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run, each spoken for by one of its ranks.

    Attributes:
        speakers: node -> the rank that speaks for it.
        hosts: node -> its name.
        me: the node of this rank.
    """

    speakers: Mapping[int, int]
    hosts: Mapping[int, str]
    me: int

    @classmethod
    def of(cls, inventory: Iterable[Mapping[str, Any]], node_rank: int) -> Nodes:
        """Take them from what every rank has said of itself: the rank that is first on its node speaks for it."""
        first: dict[int, Mapping[str, Any]] = {}
        for who in sorted(inventory, key=lambda who: (who["node_rank"], who["local_rank"])):
            first.setdefault(int(who["node_rank"]), who)
        return cls(
            speakers={node: int(who["rank"]) for node, who in first.items()},
            hosts={node: str(who["host"]) for node, who in first.items()},
            me=node_rank,
        )

    @property
    def speaks(self) -> int:
        """The rank that speaks for this rank's node."""
        return self.speakers[self.me]

    def gather(self, board: Board, name: str, value: Any, *, within_seconds: float) -> dict[int, Any]:
        """Return node -> notice, of those that came within the time. Every speaker must call this."""
        came = board.gather(name, value, list(self.speakers.values()), within_seconds=within_seconds)
        return {node: came[rank] for node, rank in self.speakers.items() if rank in came}
