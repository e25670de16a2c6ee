"""May the GPU draw the power that it was made for?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding

_ROUNDING_WATTS = 0.5


def check(situation: Situation) -> Iterator[Finding]:
    """Hold the enforced power limit against the card's default."""
    limit, default = situation.before.get("power.limit"), situation.before.get("power.limit.default")
    if limit is None or default is None or limit >= default - _ROUNDING_WATTS:
        return
    yield situation.finding(
        "power_limit",
        "hardware",
        f"the enforced power limit is {limit:g} W",
        allowed=f"the card's default of {default:g} W or more",
        remedy=f"set it with `nvidia-smi -pl {default:g}`, and find out who lowered it",
    )


def limit_ratio(situation: Situation) -> float | None:
    """Return the enforced limit as a part of the default; None where NVML does not tell."""
    limit, default = situation.before.get("power.limit"), situation.before.get("power.limit.default")
    return limit / default if limit is not None and default else None
