"""A fabric that exists in numbers only: what each link would carry, with planted faults and noise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from pytest_gpucluster.isolation.link_matrix import Matrix, Reading
from pytest_gpucluster.isolation.link_survey import Survey, matrix_of
from pytest_gpucluster.isolation.round_robin import Places, Round

GB = 10**9


def places(nodes: int, rails: int) -> Places:
    """Nodes with equally many ranks, in the order of torchrun."""
    return Places.of(
        [
            {
                "rank": node * rails + rail,
                "host": f"node-{node:03}",
                "node_rank": node,
                "local_rank": rail,
                "gpu": {"index": rail},
            }
            for node in range(nodes)
            for rail in range(rails)
        ]
    )


def everything(rounds: Iterable[Round]) -> list[tuple[int, int]]:
    """All pairs of some rounds."""
    return [link for round_ in rounds for link in round_]


def measured(
    rounds: Iterable[Round],
    fault: Callable[[int, int], float] = lambda sender, receiver: 1.0,
    *,
    rate: float = 48.0,
    noise: float = 0.05,
    seed: int = 0,
    wrong: Iterable[tuple[int, int]] = (),
) -> list[Reading]:
    """Measure every pair of the rounds in both directions.

    Args:
        rounds: as planned.
        fault: what is left of the rate from a sender to a receiver.
        rate: in GB/s.
        noise: the relative standard deviation.
        seed: of the noise.
        wrong: senders and receivers between which a word goes wrong.
    """
    chance, bad = random.Random(seed), set(wrong)
    found = []
    for one, other in everything(rounds):
        for sender, receiver in ((one, other), (other, one)):
            value = GB * rate * fault(sender, receiver) * max(0.5, chance.gauss(1.0, noise))
            found.append(
                Reading(
                    sender=sender,
                    receiver=receiver,
                    bytes_per_second=value,
                    low=value,
                    high=value,
                    payload_bytes=2**20,
                    defect=(1, 8, 0x10, 0x11) if (sender, receiver) in bad else (0, 0, 0, 0),
                )
            )
    return found


def surveyed(
    readings: Iterable[Reading], there: Places, scope: str = "node", *, alone: Iterable[Reading] = (), **changed: object
) -> Survey:
    """What was measured in three rounds."""
    given = {"below": 0.75, "rounds": 3, "planned_seconds": 1.5, "seconds": 2.0, **changed}
    matrix = matrix_of(list(readings), scope, there)
    return Survey(scope=scope, places=there, matrix=matrix, alone=Matrix(alone), **given)  # type: ignore[arg-type]
