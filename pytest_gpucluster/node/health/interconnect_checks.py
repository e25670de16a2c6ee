"""Health checks of the interconnect and the node: NVLinks, NVSwitch fabric, and GPUs that are missing or not used.

- NVLink: all links are up, and carry data without errors
- NVSwitch: the Fabric Manager has taken this GPU into the fabric, and the fabric is well
- node: it shows all of its GPUs, and the job uses them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_gpucluster.metrics.finding import Finding, Identity, Kind
from pytest_gpucluster.node.health.snapshot import Node, Situation
from pytest_gpucluster.node.kernel_log import normalised
from pytest_gpucluster.node.pci import PciGpu, State

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


def check_nvlink(situation: Situation) -> Iterator[Finding]:
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


_LOG = "look at `systemctl status nvidia-fabricmanager` and /var/log/fabricmanager.log"


def check_nvlink_fabric(situation: Situation) -> Iterator[Finding]:
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


_KINDS: dict[State, tuple[Kind, str]] = {
    "dead": ("hardware", "power the node off and on; if it stays so, have the GPU or its board replaced"),
    "answers": ("hardware", "look at `nvidia-smi` and the kernel log on this host, and reboot the node"),
    "no driver": (
        "environment",
        "bind the driver (`dmesg | grep -i nvrm`), or take the GPU out of the node's inventory",
    ),
    "hidden": ("note", "nothing, if this job was given fewer GPUs than the node has"),
    "elsewhere": ("note", "nothing, if this GPU is meant for virtual machines"),
}


def check_node(situation: Situation) -> Iterator[Finding]:
    """Report GPUs on the PCI bus that NVML does not show, GPUs that do not answer, and GPUs without a rank."""
    node = situation.node
    if node is None:
        return
    if node.bus_unreadable:
        yield situation.finding(
            "pci_bus",
            "note",
            f"the PCI bus cannot be looked at, so GPUs that have left it are not noticed: {node.bus_unreadable}",
            allowed="a bus that this job may read",
            remedy="compare `lspci | grep -i nvidia` on this host with `nvidia-smi -L`",
            gpu=Identity(host=situation.gpu.host),
        )
    for gpu in node.unlisted:
        yield _unlisted(situation, gpu)
    silent = node.nvml_gpus - node.answering
    named = sum(gpu.state in ("dead", "answers") for gpu in node.unlisted)
    if silent > named:
        yield situation.finding(
            "gpu_silent",
            "hardware",
            f"NVML counts {node.nvml_gpus} GPUs, and {silent} of them do not answer",
            allowed="every GPU answers",
            remedy="find them with `nvidia-smi` and `dmesg | grep -i xid`, and take the node out of service",
            gpu=Identity(host=situation.gpu.host),
        )
    yield from _unused(situation, node)


def _unlisted(situation: Situation, gpu: PciGpu) -> Finding:
    kind, remedy = _KINDS[gpu.state]
    address = normalised(gpu.address)
    xids = sorted({xid.code for xid in situation.kernel_log.xids() if address and xid.pci[:-2] == address[:-2]})
    log = f"; Xids in the kernel log: {', '.join(map(str, xids))}" if xids else ""
    return situation.finding(
        "gpu_not_listed",
        kind,
        f"the PCI bus shows a GPU that NVML does not: {gpu.detail}{log}",
        allowed="NVML shows every GPU of the node",
        remedy=remedy,
        gpu=Identity(host=situation.gpu.host, pci=gpu.address),
    )


def _unused(situation: Situation, node: Node) -> Iterator[Finding]:
    if node.ranks < node.answering:
        yield situation.finding(
            "gpus_without_rank",
            "note",
            f"{node.ranks} ranks on a node of {node.answering} GPUs: the others are not looked at",
            allowed="one rank for each GPU, for a node to be accepted as a whole",
            remedy=f"start {node.answering} ranks on this node",
            gpu=Identity(host=situation.gpu.host),
        )
