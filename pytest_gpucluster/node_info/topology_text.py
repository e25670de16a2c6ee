"""The topology as text: who reaches whom over what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_gpucluster.node_info.lines import fact, shown, table
from pytest_gpucluster.node_info.topology import LEGEND
from pytest_gpucluster.text import columns

Told = Mapping[str, Any]


def of_topology(told: Told, width: int) -> Iterable[str]:
    """Yield what lies between the GPUs, and between them and the HCAs."""
    known = told["topology"]
    names = [f"GPU{index}" for index in known["gpus"]]
    if not names:
        return
    beside = [[shown(node), shown(cpus)] for node, cpus in zip(known["numa_nodes"], known["cpus"], strict=True)]
    yield from _matrix(names, names, known["between_gpus"], width)
    if known["adapters"]:
        yield ""
        yield from _matrix(known["adapters"], names, known["to_gpus"], width)
    yield ""
    rows = [[name, *cells] for name, cells in zip(names, beside, strict=True)]
    yield from table(("", "NUMA node", "CPUs beside it"), rows, width, left=1)
    seen = {
        "NV#" if way.startswith("NV") else way for row in [*known["between_gpus"], *known["to_gpus"]] for way in row
    }
    yield ""
    for way, means in LEGEND.items():
        if way in seen:
            yield from fact(way, means, width)


def _matrix(names: Sequence[str], heads: Sequence[str], ways: Sequence[Sequence[str]], width: int) -> Iterable[str]:
    """Return a table of ways, in several blocks where it would be too wide."""
    most = max(1, (width - 2 - 10) // (max(columns(head) for head in heads) + 2))
    for first in range(0, len(heads), most):
        if first:
            yield ""
        rows = [[name, *row[first : first + most]] for name, row in zip(names, ways, strict=True)]
        yield from table(["", *heads[first : first + most]], rows, width)
