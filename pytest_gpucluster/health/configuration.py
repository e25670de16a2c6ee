"""Is the GPU set up as declared?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding


def check(situation: Situation) -> Iterator[Finding]:
    """Hold MIG against what the workload declares, and note where the driver does not stay loaded."""
    mode = "on" if situation.mig_is_on else "off"
    known = situation.before.get("mig.mode") is not None or situation.is_slice
    # A card that cannot be cut into slices is not; whether that is required to be known is the SKU's matter.
    if mode != situation.mig:
        yield situation.finding(
            "mig",
            "environment",
            f"MIG is {mode}" + ("" if known else ", as far as NVML tells"),
            allowed=f"{situation.mig}, as the workload declares (health.mig)",
            remedy=f"set it with `nvidia-smi -mig {int(situation.mig == 'on')}`, or declare"
            f" --gpucluster-workload health.mig={mode}",
        )
    if situation.before.get("persistence.mode") is False:
        yield situation.finding(
            "persistence",
            "note",
            "persistence mode is off: the driver is unloaded while nobody uses the GPU",
            allowed="anything",
            remedy="start nvidia-persistenced, so that jobs start faster and settings stay",
        )
