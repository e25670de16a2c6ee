"""Nodes at a moment, for tests of what shows them."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster.node.health.node_reader import Node, Part

HOSTILE = "train\x1b[2J \u202e <script>\n" + "x" * 10_000


def gpu(index: int = 0, *, age: float | None = 0.2, stale: bool = False, **changes: Any) -> Part:
    """A GPU that works hard."""
    values = {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{index:02X}:00.0",
        "utilization_percent": 98,
        "memory_used_bytes": 76_450_000_000,
        "memory_total_bytes": 85_520_809_984,
        "temperature_celsius": 61,
        "power_watts": 690.2,
        "power_limit_watts": 700.0,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "throttle": [],
        "processes": [],
        "not_available": {},
        "lost": "",
        **changes,
    }
    rates = {"nvlink_sent_bytes_per_second": 312e9, "nvlink_received_bytes_per_second": 310e9}
    return Part(values=values, rates=rates, age_seconds=age, is_stale=stale)


def port(name: str = "mlx5_0/1", *, stale: bool = False, **changes: Any) -> Part:
    """An InfiniBand port that carries data."""
    values = {"name": name, "state": "ACTIVE", "rate_gbps": 400.0, **changes}
    rates = {"sent_bytes_per_second": 45.12e9, "received_bytes_per_second": 44.9e9}
    return Part(values=values, rates=rates, age_seconds=0.2, is_stale=stale)


def node(gpus: int | tuple[Part, ...] = 8, ports: int | tuple[Part, ...] = 8, **changes: Any) -> Node:
    """A node with this number of them, or with these."""
    values = {
        "load": [12.3, 11.0, 9.8],
        "cpus": 192,
        "memory_total_bytes": 2015 * 2**30,
        "memory_available_bytes": 1781 * 2**30,
    }
    settings: dict[str, Any] = {
        "gpus": tuple(gpu(index) for index in range(gpus)) if isinstance(gpus, int) else gpus,
        "driver": "580.65.06",
        "why_no_gpus": "",
        "silent_seconds": None,
        "host": Part(values=values, rates={"busy_ratio": 0.071}, age_seconds=0.1),
        "ports": tuple(port(f"mlx5_{index}/1") for index in range(ports)) if isinstance(ports, int) else ports,
        "why_no_ports": "",
    }
    return Node(**{**settings, **changes})
