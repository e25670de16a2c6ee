"""Where there is an NVSwitch: has the Fabric Manager taken this GPU into the fabric, and is that well?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_gpucluster.health.nvlink import switched_off
from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding

_LOG = "look at `systemctl status nvidia-fabricmanager` and /var/log/fabricmanager.log"


def check(situation: Situation) -> Iterator[Finding]:
    """Hold state, status and health of the registration against completed, success and nothing wrong."""
    fabric: Mapping[str, Any] | None = situation.before.get("fabric")
    if situation.mig_is_on:
        return
    if fabric is None or fabric["state"] == "not supported":
        yield from _not_told(situation)
    elif fabric["state"] != "completed":
        alone = switched_off(situation)
        yield situation.finding(
            "fabric_state",
            "note" if alone else "environment",
            f"the GPU's registration with the Fabric Manager is: {fabric['state']}",
            allowed="completed",
            remedy="nothing, if a hypervisor has switched this GPU's links off" if alone else f"start it: {_LOG}",
        )
    elif fabric["status"] != "success":
        yield situation.finding(
            "fabric_status",
            "hardware",
            f"the GPU's registration with the Fabric Manager ended with: {fabric['status']}",
            allowed="success",
            remedy=f"{_LOG}, then reset all GPUs and switches of this node",
        )
    elif fabric["health"]:
        yield situation.finding(
            "fabric_health",
            "hardware",
            f"NVML says of the fabric: {', '.join(fabric['health'])}",
            allowed="nothing wrong with it",
            remedy=f"{_LOG}, and have the link or the switch repaired",
        )


def _not_told(situation: Situation) -> Iterator[Finding]:
    promise = situation.promise
    if promise is None or not promise.nvswitch:
        return
    switch_links = situation.before.get("nvlink.switch")
    missing = situation.before.missing.get("fabric")
    if missing is not None and missing.kind == "lost":
        return  # the GPU is lost, which is told as what it is
    why = missing.reason if missing else "NVML says that it is not supported"
    if promise.fabric_state and switch_links:
        yield situation.finding(
            "fabric_state",
            "environment",
            f"{switch_links} NVLinks lead to an NVSwitch, and the state of the fabric is not told: {why}",
            allowed="completed",
            remedy=f"update the driver; {_LOG}",
        )
        return
    without = "no NVLink is known to lead to an NVSwitch" if promise.fabric_state else "not told on this GPU"
    yield situation.finding(
        "fabric_unknown",
        "note",
        f"state of the Fabric Manager: {without} ({why})",
        allowed="anything: CUDA does not start where an NVSwitch has no Fabric Manager",
        remedy="nothing, unless this board should have an NVSwitch",
    )
