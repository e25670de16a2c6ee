"""What a cluster consists of, by node and slot, as the ranks of a run have told it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import RankPlace
from pytest_gpucluster.launch.hostlist import compress_hostlist
from pytest_gpucluster.text import rank_ranges

OF_GPU = {
    "uuid": "UUID",
    "serial": "serial number",
    "board_part_number": "board part number",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP firmware",
    "pci_bus_id": "PCI address",
    "name": "name",
}
"""Key of a GPU -> what it is called."""

OF_ADAPTER = {"guid": "GUID", "board": "board (PSID)", "firmware": "firmware", "pci_bus_id": "PCI address"}
"""Key of a network adapter -> what it is called."""

COMPONENTS = ("driver", "cuda", "nccl", "torch", "python", "pytest_gpucluster")
"""What a node has installed, besides what its parts hold themselves."""

_PORTS = "fabric.active_ports"
"""The measurement beside which each node tells its network adapters."""


def nodes(journal: Journal) -> list[dict[str, Any]]:
    """Return each node with its GPUs, its network adapters and its versions; text throughout, "" for what is not
    known."""
    by_node: dict[tuple[int, str], list[RankPlace]] = {}
    for place in journal.cluster.ranks if journal.cluster is not None else ():
        by_node.setdefault((place.node_rank, place.host), []).append(place)
    told = _adapters(journal)
    return [
        {
            "node_rank": node_rank,
            "host": host,
            "versions": _versions(places),
            "gpus": [_gpu(place) for place in sorted(places, key=lambda place: place.local_rank)],
            "adapters": next((told[place.rank] for place in places if place.rank in told), None),
        }
        for (node_rank, host), places in sorted(by_node.items())
    ]


def missing(found: list[dict[str, Any]]) -> list[str]:
    """Return in words what is not known of the parts of these nodes."""
    absent: dict[str, list[int]] = {}
    for node in found:
        for gpu in node["gpus"]:
            for key, words in OF_GPU.items():
                if not gpu[key]:
                    absent.setdefault(words, []).append(gpu["rank"])
    lines = [f"{words} of the GPU of {rank_ranges(ranks)}" for words, ranks in absent.items()]
    of_nodes: dict[str, list[str]] = {}
    for node in found:
        for component in COMPONENTS:
            if not node["versions"][component]:
                of_nodes.setdefault(component, []).append(node["host"])
        if node["adapters"] is None:
            of_nodes.setdefault("network adapters", []).append(node["host"])
        for adapter in node["adapters"] or ():
            for key, words in OF_ADAPTER.items():
                if not adapter[key]:
                    what = f"{words} of {adapter['name'] or 'a network adapter'}"
                    of_nodes.setdefault(what, []).append(node["host"])
    lines += [f"{what} on {_listed(hosts)}" for what, hosts in of_nodes.items()]
    return lines


def _listed(hosts: list[str]) -> str:
    """Return hosts in Slurm's short form, or one by one where a name has no such form."""
    try:
        return compress_hostlist(hosts)
    except LaunchError:
        return ", ".join(hosts)


def _gpu(place: RankPlace) -> dict[str, Any]:
    known = place.gpu or {}
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "index": known.get("index", ""),
        "memory_bytes": known.get("memory_bytes", ""),
        **{key: known.get(key, "") for key in OF_GPU},
    }


def _versions(places: list[RankPlace]) -> dict[str, str]:
    """Return the versions of a node; the preflight refuses ranks that differ, so several are shown as they are."""
    return {
        component: " / ".join(sorted({place.versions.get(component, "") for place in places} - {""}))
        for component in COMPONENTS
    }


def _adapters(journal: Journal) -> dict[int, list[dict[str, str]]]:
    """Return rank -> the network adapters that it has told for its node; an empty list where there are none."""
    found: dict[int, list[dict[str, str]]] = {}
    for result in journal.results:
        for judged in result.measurements:
            if judged.metric != _PORTS:
                continue
            for rank, told in judged.telemetry.items():
                listed = told.get("adapters")
                if isinstance(listed, list) and all(isinstance(one, Mapping) for one in listed):
                    found[rank] = [{key: str(one.get(key, "")) for key in ("name", *OF_ADAPTER)} for one in listed]
    return found
