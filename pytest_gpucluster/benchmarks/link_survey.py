"""Every link of the nodes, or between them: a tournament of pairs, and once more those that are far behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.benchmarks.links import Progress
from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.isolation.link_matrix import Matrix, Scope
from pytest_gpucluster.isolation.link_survey import Survey, matrix_of
from pytest_gpucluster.isolation.round_robin import (
    Pair,
    Places,
    Round,
    across_nodes,
    one_at_a_time,
    predicted_seconds,
    rail_by_rail,
    within_node,
)


def rounds_of(scope: Scope, places: Places, rank: int) -> tuple[Round, ...]:
    """Return the rounds of the tournament that a rank takes part in: its node's, or those of all nodes.

    Raises:
        ValueError: there are no two to be paired.
    """
    return across_nodes(places) if scope == "world" else within_node(places, places.where()[rank][0])


def survey(
    world: dist.ProcessGroup,
    group: dist.ProcessGroup,
    device: torch.device,
    places: Places,
    scope: Scope,
    *,
    payload_bytes: int,
    round_seconds: float,
    repeats: int,
    below: float | None,
    longest_seconds: float,
    progress: Progress | None = None,
    during: AbstractContextManager[object] | None = None,
    sweeping: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Survey:
    """Measure all links of a scope, and those that are far behind once more, without what could have shared their way.

    Collective: every rank of the world must call this, with the same arguments but for the group. What the ranks find
    is the same on all of them afterwards.

    Args:
        world: all ranks.
        group: those that measure together: the ranks of this rank's node, or the world.
        device: where this rank's payload is.
        places: where the ranks are.
        scope: "node" for links within nodes, all nodes at once; "world" for links across nodes.
        payload_bytes: what is sent at a time; a multiple of 4.
        round_seconds: how long a round should take.
        repeats: so many rounds at most are spent on suspects.
        below: suspects are pairs with a smaller ratio to the median of the others. None: there are none.
        longest_seconds: after so long no other round of the tournament begins; what is left out is told.
        progress: told after each round of the tournament.
        during: entered for the time of the tournament.
        sweeping: makes what is entered while only ``group`` is used. Within nodes the world is used as well, to tell
            each other what was found: its connections are none of the group's.

    Raises:
        InconclusiveMeasurement, EnvironmentBroken, ValueError: as of :func:`links.sweep`.
    """
    ranks = Ranks(world, device)
    rank = ranks.index
    rounds = rounds_of(scope, places, rank)

    def swept(planned: Sequence[Round], told: Progress | None = None) -> tuple[Matrix, float]:
        with sweeping():
            found = links.sweep(
                group,
                device,
                planned,
                payload_bytes=payload_bytes,
                round_seconds=round_seconds,
                longest_seconds=longest_seconds,
                progress=told,
            )
        if scope == "world":
            return matrix_of(found.readings, scope, places), found.seconds
        everyones = links.gathered(ranks, [one for one in found.readings if one.receiver == rank])
        return matrix_of(everyones, scope, places), max(seconds for [seconds] in ranks.gather([found.seconds]))

    with during or nullcontext():
        matrix, seconds = swept(rounds, progress)
    suspects = [] if below is None else matrix.slow(below)
    alone = Matrix(())
    if suspects and repeats:  # equal on all ranks, for all of them have the same readings
        alone, _ = swept(_again(scope, places, rank, suspects, repeats))
    return Survey(
        scope=scope,
        places=places,
        matrix=matrix,
        alone=alone,
        below=below,
        rounds=len(rounds),
        planned_seconds=predicted_seconds(rounds, round_seconds),
        seconds=seconds,
        left_out=tuple(link for link in _all_pairs(scope, places) if link not in matrix.pairs),
    )


def _again(scope: Scope, places: Places, rank: int, suspects: Sequence[Pair], most: int) -> tuple[Round, ...]:
    """Return the rounds in which a rank, or its node's others, measure suspects once more."""
    if scope == "world":
        return rail_by_rail(places, suspects, most=most)
    own = set(places.ranks[places.where()[rank][0]])
    return one_at_a_time((link for link in suspects if own.issuperset(link)), most=most)


def _all_pairs(scope: Scope, places: Places) -> list[Pair]:
    rounds = (
        across_nodes(places)
        if scope == "world"
        else [round_ for node in range(places.nodes) for round_ in within_node(places, node)]
    )
    return sorted(link for round_ in rounds for link in round_)
