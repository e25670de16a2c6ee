"""Does the memory that was measured with lie beside the GPU?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.affinity import REMEDY, Place, shown
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import identity

LEAST = 0.95
"""The kernel may put single pages elsewhere."""


def require_local(who: Mapping[str, Any], nodes: Mapping[int, float], gpu: Place | None) -> None:
    """Make sure that host memory lay on the NUMA node of the GPU, as far as both are known.

    Args:
        who: the rank's entry in the inventory.
        nodes: NUMA node -> the part of the memory that lay there; empty if it is not known.
        gpu: where its GPU is; None if it is not known.

    Raises: EnvironmentBroken: what was measured says more of the link between the sockets than of the GPU's.
    """
    if gpu is None or not nodes:
        return
    here = sum(part for node, part in nodes.items() if node in gpu.nodes)
    if here < LEAST:
        raise EnvironmentBroken(
            f"{identity(who)}: {100 * here:.3g} % of the host memory of rank {who['rank']} lay on NUMA node "
            f"{shown(gpu.nodes)}, beside this GPU; to measure its link, at least {100 * LEAST:g} % must; see whether "
            f"that node is full (`numactl -H`), and {REMEDY}"
        )
