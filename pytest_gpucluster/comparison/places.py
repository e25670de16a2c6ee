"""Which rank of one run is which of another: the same GPU, else the same slot, else the same number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from pytest_gpucluster.journal_lines import RankPlace

GPU, SLOT, NUMBER = "GPU", "slot", "rank number"
"""How two ranks were found to belong together."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """The rank that a rank had before, and how that is known."""

    old: int
    by: str
    swapped: str = ""
    """The GPU that was in this slot before, where it is another one now."""


def match(old: Mapping[int, RankPlace], new: Mapping[int, RankPlace], *, by_gpu: bool = True) -> dict[int, Match]:
    """Return the earlier rank of each rank that has one.

    A GPU is known by its UUID, wherever it is now. Where there is none, or it is new, the slot decides (host and local
    rank), and then the rank's number. No rank is taken twice.

    Args:
        old: the ranks before.
        new: the ranks now.
        by_gpu: whether it is the GPU that counts; not for what a node or the whole cluster has measured.
    """
    found: dict[int, Match] = {}
    taken: set[int] = set()

    def take(by: str, key: Callable[[RankPlace], Hashable | None]) -> None:
        free = {key(place): rank for rank, place in old.items() if rank not in taken and key(place) is not None}
        for rank, place in new.items():
            before = free.pop(key(place), None) if rank not in found else None
            if before is not None:
                taken.add(before)
                found[rank] = Match(old=before, by=by, swapped=_swapped(old[before], place) if by_gpu else "")

    if by_gpu:
        take(GPU, uuid)
    take(SLOT, lambda place: (place.host, place.local_rank) if place.host else None)
    take(NUMBER, lambda place: place.rank)
    return found


def uuid(place: RankPlace) -> str | None:
    """Return the UUID of a rank's GPU."""
    return (place.gpu or {}).get("uuid") or None


def _swapped(before: RankPlace, now: RankPlace) -> str:
    was, is_now = uuid(before), uuid(now)
    return was if was is not None and is_now is not None and was != is_now else ""
