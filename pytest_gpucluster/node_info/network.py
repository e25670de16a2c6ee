"""The network interfaces of a node, and its InfiniBand and RoCE ports with their way to GPU memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_gpucluster import infiniband, peer_memory
from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.kernel_log import normalised
from pytest_gpucluster.surroundings.interfaces import Interface

_NET = "/sys/class/net"


def interfaces(tree: Tree, with_addresses: Callable[[], Sequence[Interface]]) -> list[dict[str, Any]]:
    """Tell of each network interface but the loopback.

    Returns:
        ``name``; ``state``, such as up; ``speed_mbps``, null where there is none, as of a bridge; ``mtu``; ``mac``;
        ``driver``; ``pci``; ``addresses``.

    Source: Linux kernel, Documentation/ABI/testing/sysfs-class-net.
    """
    addresses = {one.name: list(one.addresses) for one in with_addresses()}
    try:
        names = sorted(entry.name for entry in tree.path(_NET).iterdir() if entry.name != "lo")
    except OSError:
        names = sorted(name for name in addresses if name != "lo")
    return [{**_interface(tree, name), "addresses": addresses.get(name, [])} for name in names]


def _interface(tree: Tree, name: str) -> dict[str, Any]:
    device = f"{_NET}/{name}/device"
    driver = f"{device}/driver"
    speed = tree.number(f"{_NET}/{name}/speed")  # -1, or no answer at all, where there is no link
    return {
        "name": name,
        "state": tree.text(f"{_NET}/{name}/operstate"),
        "speed_mbps": speed if speed is not None and speed > 0 else None,
        "mtu": tree.number(f"{_NET}/{name}/mtu"),
        "mac": tree.text(f"{_NET}/{name}/address") or None,
        "driver": tree.path(driver).resolve().name if tree.has(driver) else None,
        "pci": normalised(tree.path(device).resolve().name) if tree.has(device) else None,
    }


def adapters(tree: Tree) -> dict[str, Any]:
    """Tell of each HCA and its ports.

    Returns:
        ``why_not``, why none is to be seen, "" where there are some; ``devices``: ``name``, ``kind``, ``firmware``,
        ``board``, ``guid``, ``pci``, ``numa_node`` and ``ports``, each with ``number``, ``state``, ``phys_state``,
        ``rate``, ``rate_gbps``, ``link_layer``, ``lid``, ``sm_lid`` and ``errors``, the counters of errors that are not
        zero; ``peer_memory``: ``module`` and ``why_no_dma_buf``.
    """
    known = infiniband.read(tree.path("/sys"), gids=False)
    peer = peer_memory.read(tree.path("/sys"), tree.path("/proc"), tree.text("/proc/sys/kernel/osrelease"))
    wanted = ("number", "state", "phys_state", "rate", "rate_gbps", "link_layer", "lid", "sm_lid")
    bad = (*infiniband.ERRORS, *infiniband.HARDWARE_ERRORS, infiniband.CARRIER_DOWN)
    devices = []
    for device in known.devices:
        ports = [
            {
                **{name: getattr(port, name) for name in wanted},
                "errors": {name: count for name, count in port.counters.items() if name in bad and count},
            }
            for port in device.ports
        ]
        told = {
            name: getattr(device, name) for name in ("name", "kind", "firmware", "board", "guid", "pci", "numa_node")
        }
        devices.append({**told, "ports": ports})
    return {
        "why_not": known.why_not,
        "devices": devices,
        "peer_memory": {"module": peer.module, "why_no_dma_buf": peer.why_no_dma_buf},
    }
