"""A node at a moment as one JSON object a line, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.node.health.node_reader import NVLINK, PROCESSES, QUERIES
from pytest_gpucluster.node.health.node_state import Node, Part

SCHEMA_VERSION = 1
_IDENTITY = ("index", "uuid", "name", "pci_bus_id")
_NVLINK_RATES = ("nvlink_sent_bytes_per_second", "nvlink_received_bytes_per_second")
_PORT = ("name", "link_layer", "state", "rate_gbps")
_PORT_RATES = ("sent_bytes_per_second", "received_bytes_per_second")
_HOST = ("load", "cpus", "memory_total_bytes", "memory_available_bytes")


def to_json(node: Node, *, host: str, at: str) -> dict[str, Any]:
    """Return plain JSON types. A figure that is not there is null, and ``not_available`` says why; what is stale keeps
    its last values, and says so.

    Args:
        node: what is known.
        host: the node's name.
        at: the time, as ISO 8601 in UTC.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "at": at,
        "host": host,
        "driver": node.driver,
        "load": {**_told(node.host, _HOST), "busy_ratio": node.host.rates.get("busy_ratio"), **_age(node.host)},
        "gpus": [_gpu(gpu) for gpu in node.gpus],
        "why_no_gpus": node.why_no_gpus or None,
        "nvml_silent_seconds": None if node.silent_seconds is None else round(node.silent_seconds, 1),
        "ports": [
            {**_told(port, _PORT), **{name: port.rates.get(name) for name in _PORT_RATES}, **_age(port)}
            for port in node.ports
        ],
        "why_no_ports": node.why_no_ports or None,
        "problem": node.problem or None,
    }


def line(node: Node, *, host: str, at: str) -> str:
    """Return :func:`to_json` as a line."""
    return json.dumps(to_json(node, host=host, at=at), allow_nan=False) + "\n"


def _gpu(gpu: Part) -> dict[str, Any]:
    figures = tuple(key for key in QUERIES if key not in (NVLINK, PROCESSES))
    return {
        **_told(gpu, (*_IDENTITY, *figures)),
        **{name: gpu.rates.get(name) for name in _NVLINK_RATES},
        PROCESSES: gpu.told.get(PROCESSES),
        "not_available": gpu.told.get("not_available", {}),
        "lost": gpu.told.get("lost") or None,
        **_age(gpu),
    }


def _told(part: Part, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {name: part.told.get(name) for name in names}


def _age(part: Part) -> Mapping[str, Any]:
    age = None if part.age_seconds is None else round(part.age_seconds, 1)
    return {"age_seconds": age, "stale": part.is_stale}
