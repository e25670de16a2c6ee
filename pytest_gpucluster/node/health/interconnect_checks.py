"""Health checks of the interconnect and the node: NVLinks, NVSwitch fabric, and GPUs that are missing.

- NVLink: all links are up and without errors
- NVSwitch: this GPU is registered with the Fabric Manager, and the fabric is healthy
- node: NVML lists all of its GPUs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_gpucluster.metrics.finding import Finding, Identity, Kind, environment, finding, hardware, note
from pytest_gpucluster.node.health.snapshot import HealthSnapshot
from pytest_gpucluster.node.pci import PciGpu, State
from pytest_gpucluster.node.sysfs import pci_address

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
"""Counters of NVLink 5 that must not grow during the test. Source: NVIDIA/DCGM, its health check of NVLink 5
error counters fails at one more within a minute."""

_REMEDY = "run `nvidia-smi nvlink -e` again after a reset; if they come back, have GPU, baseboard or cable replaced"


def check_nvlink(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check the links' states and error counters. With MIG on there are no links."""
    if snapshot.mig_is_on:
        return
    before: Mapping[int, bool] | None = snapshot.before.get("nvlink.up")
    if before is not None:
        later = snapshot.after.get("nvlink.up")
        after = before if later is None else later  # a link that is no longer reported is down
        yield from _states(snapshot, {link: up and after.get(link, False) for link, up in before.items()})
    yield from _errors(snapshot)


def switched_off(snapshot: HealthSnapshot) -> bool:
    """Whether this is the only GPU of its node and all its links are down.

    That is by design where a hypervisor gives a single GPU of a board to a virtual machine: there is no peer. A
    container or cgroup shows a single GPU too, but then the PCI bus, or other ranks of the node, show the others. Where
    the bus cannot be read, this is unknown, and the result is False.
    """
    states: Mapping[int, bool] = snapshot.before.get("nvlink.up") or {}
    node = snapshot.node
    alone = node is not None and node.nvml_gpus == node.ranks == 1 and not (node.unlisted or node.bus_unreadable)
    return alone and not any(states.values())


def _states(snapshot: HealthSnapshot, states: Mapping[int, bool]) -> Iterator[Finding]:
    down = [link for link, up in states.items() if not up]
    up = len(states) - len(down)
    promised = snapshot.promise.nvlinks if snapshot.promise is not None else None
    found = f"{up} NVLinks are up" + (f"; down: {', '.join(map(str, down))}" if down else "")
    if promised is not None and up < promised:
        alone = switched_off(snapshot)
        yield finding(
            "note" if alone else "hardware",
            "nvlink_down",
            snapshot.gpu,
            found + (", and this is the only GPU of its node" if alone else ""),
            allowed=f"{promised}, as the data sheet of the {snapshot.sku} states",
            remedy="nothing, if a hypervisor has switched them off; else look at the Fabric Manager's log"
            if alone
            else "look at `nvidia-smi nvlink -s` and the Fabric Manager's log, then reset the GPUs of this node",
        )
    elif promised is None and down:
        yield note(
            "nvlink_bridges",
            snapshot.gpu,
            found,
            allowed="any number: bridges are optional on this kind of GPU",
            remedy="nothing, unless a bridge was ordered",
        )


def _errors(snapshot: HealthSnapshot) -> Iterator[Finding]:
    before: Mapping[str, Mapping[int, int]] = snapshot.before.get("nvlink.errors") or {}
    later: Mapping[str, Mapping[int, int]] | None = snapshot.after.get("nvlink.errors")
    after = before if later is None else later
    old = []
    for counter, links in after.items():
        grown = {link: count - before.get(counter, {}).get(link, 0) for link, count in links.items()}
        grown = {link: count for link, count in grown.items() if count > 0}
        if counter in ZERO_TOLERANCE and any(links.values()):
            yield hardware(
                "nvlink_errors",
                snapshot.gpu,
                f"NVLink counter {counter} since the driver was loaded: {_by_link(links)}",
                allowed="0",
                remedy=_REMEDY,
            )
        elif counter in MUST_NOT_GROW and grown:
            yield hardware(
                "nvlink_errors",
                snapshot.gpu,
                f"NVLink counter {counter} has grown during this test: {_by_link(grown)}",
                allowed="no growth",
                remedy=_REMEDY,
            )
        elif any(links.values()):
            old.append(f"{counter}: {_by_link(links)}")
    if old:
        yield note(
            "nvlink_history",
            snapshot.gpu,
            f"NVLink counters that are not 0: {'; '.join(old)}",
            allowed="no growth under load",
            remedy="look at them again after the NCCL criteria (`nvidia-smi nvlink -e`)",
        )


def _by_link(counts: Mapping[int, int]) -> str:
    return ", ".join(f"link {link}: {count}" for link, count in sorted(counts.items()) if count)


_LOG = "look at `systemctl status nvidia-fabricmanager` and /var/log/fabricmanager.log"


def check_nvlink_fabric(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Check state, status and health of the registration with the Fabric Manager."""
    fabric: Mapping[str, Any] | None = snapshot.before.get("fabric")
    if snapshot.mig_is_on:
        return
    if fabric is None or fabric["state"] == "not supported":
        yield from _fabric_missing(snapshot)
    elif fabric["state"] != "completed":
        alone = switched_off(snapshot)
        yield finding(
            "note" if alone else "environment",
            "fabric_state",
            snapshot.gpu,
            f"the GPU's registration with the Fabric Manager is: {fabric['state']}",
            allowed="completed",
            remedy="nothing, if a hypervisor has switched this GPU's links off" if alone else f"start it: {_LOG}",
        )
    elif fabric["status"] != "success":
        yield hardware(
            "fabric_status",
            snapshot.gpu,
            f"the GPU's registration with the Fabric Manager ended with: {fabric['status']}",
            allowed="success",
            remedy=f"{_LOG}, then reset all GPUs and switches of this node",
        )
    elif fabric["health"]:
        yield hardware(
            "fabric_health",
            snapshot.gpu,
            f"NVML reports of the fabric: {', '.join(fabric['health'])}",
            allowed="no health problem",
            remedy=f"{_LOG}, and have the link or the switch repaired",
        )


def _fabric_missing(snapshot: HealthSnapshot) -> Iterator[Finding]:
    promise = snapshot.promise
    if promise is None or not promise.nvswitch:
        return
    switch_links = snapshot.before.get("nvlink.switch")
    missing = snapshot.before.missing.get("fabric")
    if missing is not None and missing.kind == "lost":
        return  # check_answers reports the lost GPU
    why = missing.reason if missing else "NVML reports that it is not supported"
    if promise.fabric_state and switch_links:
        yield environment(
            "fabric_state",
            snapshot.gpu,
            f"{switch_links} NVLinks lead to an NVSwitch, and the state of the fabric is not reported: {why}",
            allowed="completed",
            remedy=f"update the driver; {_LOG}",
        )
        return
    without = "no NVLink is known to lead to an NVSwitch" if promise.fabric_state else "not reported on this GPU"
    yield note(
        "fabric_unknown",
        snapshot.gpu,
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


def check_node(snapshot: HealthSnapshot) -> Iterator[Finding]:
    """Report GPUs on the PCI bus that NVML does not show, and GPUs that do not answer."""
    node = snapshot.node
    if node is None:
        return
    if node.bus_unreadable:
        yield note(
            "pci_bus",
            snapshot.gpu.host,
            f"the PCI bus cannot be read, so GPUs missing from NVML are not noticed: {node.bus_unreadable}",
            allowed="a bus that this job may read",
            remedy="compare `lspci | grep -i nvidia` on this host with `nvidia-smi -L`",
        )
    for gpu in node.unlisted:
        yield _unlisted(snapshot, gpu)
    silent = node.nvml_gpus - node.answering
    named = sum(gpu.state in ("dead", "answers") for gpu in node.unlisted)
    if silent > named:
        yield hardware(
            "gpu_silent",
            snapshot.gpu.host,
            f"NVML counts {node.nvml_gpus} GPUs, and {silent} of them do not answer",
            allowed="every GPU answers",
            remedy="find them with `nvidia-smi` and `dmesg | grep -i xid`, and take the node out of service",
        )


def _unlisted(snapshot: HealthSnapshot, gpu: PciGpu) -> Finding:
    kind, remedy = _KINDS[gpu.state]
    address = pci_address(gpu.address)
    xids = sorted({xid.code for xid in snapshot.kernel_log.xids() if address and xid.pci[:-2] == address[:-2]})
    log = f"; Xids in the kernel log: {', '.join(map(str, xids))}" if xids else ""
    return finding(
        kind,
        "gpu_not_listed",
        Identity(host=snapshot.gpu.host, pci=gpu.address),
        f"the PCI bus shows a GPU that NVML does not: {gpu.detail}{log}",
        allowed="NVML shows every GPU of the node",
        remedy=remedy,
    )
