"""Which of several GPUs computes other bits than its equals? Pure: it compares what they have told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.benchmarks.gpu_fingerprint import Fingerprint
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

_NAMED = 8
"""So many are named in a message."""


@dataclass(frozen=True, kw_only=True)
class Dissent:
    """A stage in which the GPUs of one kind do not agree.

    Attributes:
        stage: what they have computed.
        holders: digest -> the ranks that gave it, those of the most first.
    """

    stage: str
    holders: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the kind."""
        return tuple(sorted(rank for ranks in self.holders.values() for rank in ranks))

    @property
    def majority(self) -> str | None:
        """The digest that more than half of them gave, or None: then nobody can tell who is right."""
        digest, ranks = next(iter(self.holders.items()))
        return digest if 2 * len(ranks) > len(self.ranks) else None

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks that are not in the majority; all of them, where there is none."""
        return tuple(rank for rank in self.ranks if rank not in self.holders.get(self.majority or "", ()))


class FingerprintAgreement:
    """What several GPUs' fingerprints say of each other.

    Args:
        prints: of each rank, in the order of ranks.
    """

    def __init__(self, prints: Sequence[Fingerprint]) -> None:
        self._prints = tuple(prints)
        of_kind: dict[str, list[int]] = {}
        for rank, one in enumerate(self._prints):
            of_kind.setdefault(one.kind, []).append(rank)
        self._of_kind = of_kind
        self.dissents = tuple(
            dissent
            for ranks in of_kind.values()
            for stage in self._stages(ranks)
            if (dissent := self._of(stage, ranks))
        )

    def _stages(self, ranks: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(stage for rank in ranks for stage in self._prints[rank].digests))

    def _of(self, stage: str, ranks: Sequence[int]) -> Dissent | None:
        # A stage that a rank has not computed is none that it agrees in.
        told = {rank: self._prints[rank].digests.get(stage, "nothing") for rank in ranks}
        counted = Counter(told.values()).most_common()
        if len(counted) == 1:
            return None
        return Dissent(
            stage=stage,
            holders={digest: tuple(rank for rank in ranks if told[rank] == digest) for digest, _ in counted},
        )

    def agreed(self, rank: int) -> float:
        """Return the part of the stages in which this rank gave the bits of the majority of its kind.

        Raises: EnvironmentBroken if there is no other GPU of its kind: nothing was compared.
        """
        kind = self._prints[rank].kind
        ranks = self._of_kind[kind]
        if len(ranks) < 2:
            others = ", ".join(sorted(other for other in self._of_kind if other != kind))
            raise EnvironmentBroken(
                f"rank {rank} has nobody to compare its bits with: it alone has {kind}, the others have {others}. Bring"
                " GPUs and software to the same model and version, or run this on at least two that are alike"
            )
        stages = self._stages(ranks)
        alone = sum(rank in dissent.suspects for dissent in self.dissents)
        return 1 - alone / len(stages)

    def require(self, rank: int, names: Mapping[int, str]) -> None:
        """Raise where this rank's GPU computes other bits than its equals, or where it is open whose are wrong.

        Args:
            rank: this one.
            names: how each rank is called in the message.

        Raises: WrongResult with the stages and who gave what.
        """
        mine = [dissent for dissent in self.dissents if rank in dissent.suspects]
        if not mine:
            return
        told = "; ".join(_told(dissent, rank, names) for dissent in mine)
        raise WrongResult(f"{names[rank]}: the same computation gives other bits here: {told}")


def _told(dissent: Dissent, rank: int, names: Mapping[int, str]) -> str:
    digest = next(digest for digest, ranks in dissent.holders.items() if rank in ranks)
    if dissent.majority is not None:
        many = len(dissent.holders[dissent.majority])
        return f"{dissent.stage} gives {digest}, and {many} of {len(dissent.ranks)} alike give {dissent.majority}"
    camps = "; ".join(f"{digest} on {_named(ranks, names)}" for digest, ranks in dissent.holders.items())
    if len(dissent.ranks) == 2:
        return (
            f"{dissent.stage} gives {camps}: one of the two is wrong, and which one only a third of their kind can tell"
        )
    return f"{dissent.stage} gives {camps}: no majority, so it is open who is wrong; more of their kind can tell"


def _named(ranks: Sequence[int], names: Mapping[int, str]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return ", ".join(names[rank] for rank in ranks[:_NAMED]) + more
