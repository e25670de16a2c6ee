"""What is demanded of a survey of links, told to the ranks that are to blame."""

from __future__ import annotations

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault, WrongResult
from pytest_gpucluster.links.survey import Survey, What
from pytest_gpucluster.links.survey_text import told


def require_sound(survey: Survey, rank: int) -> None:
    """Tell this rank whether its links are to blame. Every rank may call it: nothing is communicated.

    Raises:
        WrongResult: data arrived wrong over them.
        HardwareFault: they are far slower than the others.
    """
    kinds: dict[What, type[HardwareFault]] = {"wrong": WrongResult, "slow": HardwareFault}
    for what, kind in kinds.items():
        mine = [one for one in survey.culprits(what) if rank in one.ranks]
        if mine:
            raise kind("\n".join(told(survey, what, first=mine[0])))


def require_measured(survey: Survey) -> None:
    """Make sure that every pair was measured.

    Raises:
        EnvironmentBroken: the time was up before; names the first pair.
    """
    if survey.left_out:
        one, other = (survey.places.names[rank] for rank in survey.left_out[0])
        raise EnvironmentBroken(
            f"{len(survey.left_out)} of {len(survey.left_out) + len(survey.matrix.pairs)} pairs were not measured, "
            f"because the time was up: {survey.seconds:.3g} s have passed, {survey.planned_seconds:.3g} s planned. "
            f"The first of them is {one} with {other}. Look at what was measured (links-{survey.scope}.txt in the "
            "test's folder), or send less (--gpucluster-workload links.size=64MiB)"
        )
