"""What must be the same on all ranks before the first step. Later each keeps a part only, and nothing tells."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.errors import WrongResult


def require_same(ranks: Ranks, found: Mapping[str, int]) -> None:
    """Compare fingerprints between the ranks of a group.

    Collective: every rank of the group must call this, with the same names.

    Args:
        ranks: of the group.
        found: by the name of what it is of: a number below 2^64.

    Raises: WrongResult on all ranks if one differs, naming the rank.
    """
    # In halves: numbers travel as fp64.
    halves = [float(half) for value in found.values() for half in (value >> 32, value & 0xFFFFFFFF)]
    told = ranks.gather(halves)
    for place, what in enumerate(found):
        kinds = [tuple(numbers[2 * place : 2 * place + 2]) for numbers in told]
        if len(set(kinds)) > 1:
            usual = max(kinds, key=kinds.count)
            odd = [rank for rank, kind in enumerate(kinds) if kind != usual]
            raise WrongResult(
                f"before the first step {what} are not the same on all ranks: {ranks.name(odd[0])} has others "
                f"than most, and {len(odd) - 1} more. Look at the versions of torch and transformers, at the files "
                "on each node, and at that rank's GPU"
            )
