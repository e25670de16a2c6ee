"""Ports and interfaces as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_gpucluster.node_info.lines import fact, facts, shown, table
from pytest_gpucluster.peer_memory import PeerMemory
from pytest_gpucluster.text import clean, paragraph

Told = Mapping[str, Any]


def of_infiniband(told: Told, width: int) -> Iterable[str]:
    """Yield a line for each port."""
    known = told["infiniband"]
    if known["why_not"]:
        yield from fact("ports", f"none: {known['why_not']}", width)
    rows = [
        [
            f"{device['name']}/{port['number']}",
            port["link_layer"] or "?",
            f"{port['state'] or '?'}, {port['phys_state'] or '?'}",
            port["rate"] or "?",
            shown(device["numa_node"]),
            device["firmware"] or "?",
        ]
        for device in known["devices"]
        for port in device["ports"]
    ]
    if rows:
        yield from table(("port", "kind", "state", "rate", "NUMA", "firmware"), rows, width, left=4)
    for device in known["devices"]:
        if not device["ports"]:
            yield from fact(clean(device["name"]), "shows no port", width)
    peer = known["peer_memory"]
    yield from fact("GPUDirect", str(PeerMemory(**peer)), width)


def of_infiniband_whole(told: Told, width: int) -> Iterable[str]:
    """Yield each HCA and its ports."""
    yield from of_infiniband(told, width)
    for device in told["infiniband"]["devices"]:
        yield ""
        yield from paragraph(f"{device['name']}: {device['kind'] or '?'}, PSID {device['board'] or '?'}", width)
        yield from facts([("PCI", f"{shown(device['pci'])}, GUID {device['guid'] or '?'}")], width)
        for port in device["ports"]:
            lids = f"LID {port['lid']}, subnet manager at {port['sm_lid']}"
            errors = ", ".join(f"{name} {count}" for name, count in port["errors"].items())
            yield from fact(f"port {port['number']}", f"{lids}; errors since it was reset: {errors or 'none'}", width)


def of_network(told: Told, width: int) -> Iterable[str]:
    """Yield a line for each interface."""
    rows = [
        [
            one["name"],
            one["state"] or "?",
            ", ".join(one["addresses"]) or "no address",
            "?" if one["speed_mbps"] is None else f"{one['speed_mbps'] / 1000:g} Gb/s",
            shown(one["mtu"]),
        ]
        for one in told["network"]
    ]
    if rows:
        yield from table(("interface", "state", "addresses", "speed", "MTU"), rows, width, left=3)
    else:
        yield from fact("interfaces", "none", width)
