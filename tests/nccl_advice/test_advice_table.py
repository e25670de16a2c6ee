"""The table of NCCL's variables in docs/infiniband.md is what the rules say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import made_nodes
from made_nodes import Node

from pytest_gpucluster.nccl_advice.advising import advise
from pytest_gpucluster.nccl_advice.fabric import KINDS
from pytest_gpucluster.nccl_advice.gathering import gather

PAGE = Path(__file__).parents[2] / "docs" / "infiniband.md"


def rows() -> Iterator[list[str]]:
    """The cells of each row of the table."""
    body = PAGE.read_text(encoding="utf-8").partition(f"| variable | {' | '.join(NODES)} |\n")[2].partition("\n\n")[0]
    for line in body.splitlines()[1:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def bridge_first(node: Node) -> None:
    """Let a bridge be the first of its networks."""
    kept, node.found[:] = list(node.found), []
    node.network("br-0", real=False, bridge=True)
    node.found += kept


def old_with_storage(node: Node) -> None:
    """Give it an NCCL that must be set, and a card that is no part of the fabric."""
    node.nccl = "2.18.5"
    node.roce("mlx5_8", "ens8")


NODES: dict[str, list[tuple[Callable[[Path], Node], Callable[[Node], object]]]] = {
    "InfiniBand": [
        (made_nodes.infiniband, lambda node: None),
        (made_nodes.infiniband, lambda node: node.card("mlx5_8", board="MT_0000000359", rate="100 Gb/sec (4X EDR)")),
        (made_nodes.infiniband, bridge_first),
        (made_nodes.azure, lambda node: None),
    ],
    "RoCE": [
        (made_nodes.roce, lambda node: None),
        (made_nodes.roce, old_with_storage),
        (made_nodes.roce, lambda node: node.found.reverse()),
    ],
    "Ethernet": [
        (made_nodes.ethernet, lambda node: node.network("ens9", speed=10_000)),
        (lambda root: made_nodes.ethernet(root, speed=25_000), lambda node: None),
    ],
    "EFA": [(made_nodes.efa, lambda node: None), (made_nodes.efa, bridge_first)],
}
"""Kind -> nodes on which everything that is said of it is said, each with what differs there."""


def test_the_table_of_nccls_variables_is_what_the_rules_say(tmp_path: Path) -> None:
    said: dict[str, dict[str, set[str]]] = {}
    for kind, makers in NODES.items():
        for number, (make, change) in enumerate(makers):
            change(node := make(tmp_path / f"{kind}{number}"))
            found = advise(gather(node.sources()))
            assert found.fabric.kind == kind
            for word, one in [*(("set", one) for one in found.set), *(("leave", one) for one in found.leave)]:
                said.setdefault(one.name, {}).setdefault(kind, set()).add(word)
    shown = {
        name.strip("`"): {
            kind: set(re.findall(r"\b(?:leave|set)\b", cell)) for kind, cell in zip(NODES, cells, strict=True) if cell
        }
        for name, *cells in rows()
    }
    assert shown == said
    assert set(NODES) == set(KINDS)
