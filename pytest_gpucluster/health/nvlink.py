"""Are all NVLinks up, and do they carry data without errors?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding

ZERO_TOLERANCE = ("replay", "recovery", "ecc_data", "link_recovery_failed")
"""Counters that must be 0 since the driver was loaded. Source: facebookresearch/gcm, health check "nvlink", tolerates
no replay and no recovery by default; NVIDIA/DCGM, DcgmHealthWatch, takes both for failures. The last two: this
suite's rule."""

MUST_NOT_GROW = (
    "malformed_packets",
    "buffer_overruns",
    "received_errors",
    "received_remote_errors",
    "received_general_errors",
    "local_link_integrity",
    "link_recovery",
    "effective_errors",
)
"""Counters of NVLink 5 that must not grow while they are watched. Source: NVIDIA/DCGM, its health check of NVLink 5
error counters fails at one more within a minute."""

_REMEDY = "run `nvidia-smi nvlink -e` again after a reset; if they come back, have GPU, baseboard or cable replaced"


def check(situation: Situation) -> Iterator[Finding]:
    """Look at the links' states and error counters. With MIG on there are no links."""
    if situation.mig_is_on:
        return
    before: Mapping[int, bool] | None = situation.before.get("nvlink.up")
    if before is not None:
        told = situation.after.get("nvlink.up")
        after = before if told is None else told  # a card that shows no link any more has lost them
        yield from _states(situation, {link: up and after.get(link, False) for link, up in before.items()})
    yield from _errors(situation)


def switched_off(situation: Situation) -> bool:
    """Tell whether this is the only GPU of its node and all its links are down.

    So are they by design where a hypervisor gives a single GPU of a board to a virtual machine. There is no other GPU
    that they could reach. A container or cgroup shows a single GPU too, but the PCI bus shows the others, and so do the
    other ranks of the node. Where the bus cannot be looked at, nobody knows, and nothing is excused.
    """
    states: Mapping[int, bool] = situation.before.get("nvlink.up") or {}
    node = situation.node
    alone = node is not None and node.nvml_gpus == node.ranks == 1 and not (node.unlisted or node.bus_unreadable)
    return alone and not any(states.values())


def _states(situation: Situation, states: Mapping[int, bool]) -> Iterator[Finding]:
    down = [link for link, up in states.items() if not up]
    up = len(states) - len(down)
    promised = situation.promise.nvlinks if situation.promise is not None else None
    found = f"{up} NVLinks are up" + (f"; down: {', '.join(map(str, down))}" if down else "")
    if promised is not None and up < promised:
        alone = switched_off(situation)
        yield situation.finding(
            "nvlink_down",
            "note" if alone else "hardware",
            found + (", and this is the only GPU of its node" if alone else ""),
            allowed=f"{promised}, as the {situation.sku} promises",
            remedy="nothing, if a hypervisor has switched them off; else look at the Fabric Manager's log"
            if alone
            else "look at `nvidia-smi nvlink -s` and the Fabric Manager's log, then reset the GPUs of this node",
        )
    elif promised is None and down:
        yield situation.finding(
            "nvlink_bridges",
            "note",
            found,
            allowed="any number: bridges are optional on this kind of GPU",
            remedy="nothing, unless a bridge was ordered",
        )


def _errors(situation: Situation) -> Iterator[Finding]:
    before: Mapping[str, Mapping[int, int]] = situation.before.get("nvlink.errors") or {}
    told: Mapping[str, Mapping[int, int]] | None = situation.after.get("nvlink.errors")
    after = before if told is None else told
    old = []
    for counter, links in after.items():
        grown = {link: count - before.get(counter, {}).get(link, 0) for link, count in links.items()}
        grown = {link: count for link, count in grown.items() if count > 0}
        if counter in ZERO_TOLERANCE and any(links.values()):
            yield situation.finding(
                "nvlink_errors",
                "hardware",
                f"NVLink counter {counter} since the driver was loaded: {_by_link(links)}",
                allowed="0",
                remedy=_REMEDY,
            )
        elif counter in MUST_NOT_GROW and grown:
            yield situation.finding(
                "nvlink_errors",
                "hardware",
                f"NVLink counter {counter} has grown during this test: {_by_link(grown)}",
                allowed="no growth",
                remedy=_REMEDY,
            )
        elif any(links.values()):
            old.append(f"{counter}: {_by_link(links)}")
    if old:
        yield situation.finding(
            "nvlink_history",
            "note",
            f"NVLink counters that are not 0: {'; '.join(old)}",
            allowed="anything that does not grow under load",
            remedy="look at them again after the NCCL criteria (`nvidia-smi nvlink -e`)",
        )


def _by_link(counts: Mapping[int, int]) -> str:
    return ", ".join(f"link {link}: {count}" for link, count in sorted(counts.items()) if count)
