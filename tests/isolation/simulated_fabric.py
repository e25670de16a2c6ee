"""A fabric that exists in numbers only: what each link would carry, with planted faults and noise."""

import random

from pytest_gpucluster.isolation.link_matrix import Matrix, Reading
from pytest_gpucluster.isolation.link_survey import Survey, matrix_of
from pytest_gpucluster.isolation.round_robin import Places

GB = 10**9


def places(nodes, rails):
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


def everything(rounds):
    """All pairs of some rounds."""
    return [link for round_ in rounds for link in round_]


def measured(rounds, fault=lambda sender, receiver: 1.0, *, rate=48.0, noise=0.05, seed=0, wrong=()):
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


def surveyed(readings, there, scope="node", *, alone=(), **changed):
    """What was measured in three rounds."""
    given = {"below": 0.75, "rounds": 3, "planned_seconds": 1.5, "seconds": 2.0, **changed}
    matrix = matrix_of(list(readings), scope, there)
    return Survey(scope=scope, places=there, matrix=matrix, alone=Matrix(alone), **given)
