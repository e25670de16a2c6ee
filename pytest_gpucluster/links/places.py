"""Where the ranks are: nodes, and on each of them equally many rails.

A rail is the local rank: GPUs with the same number on different nodes reach each other through NICs with the same
number, and in many fabrics through the same leaf switch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken


@dataclass(frozen=True, kw_only=True)
class Places:
    """Node and rail of every rank.

    Attributes:
        ranks: the rank at each rail of each node: ``ranks[node][rail]``. Nodes count from 0 in the order of their rank.
        hosts: what each node calls itself.
        names: what each rank is called in reports.
    """

    ranks: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, inventory: Sequence[Mapping[str, Any]]) -> Places:
        """Read them from what every rank said of itself: rank, host, node_rank, local_rank, gpu.

        Raises:
            EnvironmentBroken: the nodes have different numbers of ranks, or their local ranks do not count from 0.
        """
        found: dict[int, dict[int, int]] = {}
        hosts: dict[int, str] = {}
        for who in inventory:
            hosts.setdefault(who["node_rank"], str(who["host"]))
            found.setdefault(who["node_rank"], {})[who["local_rank"]] = who["rank"]
        nodes = sorted(found)
        if len({len(found[node]) for node in nodes}) > 1:
            told = ", ".join(f"{hosts[node]} has {len(found[node])}" for node in nodes)
            raise EnvironmentBroken(
                f"the nodes have different numbers of ranks ({told}), so not every GPU has one to be paired with on "
                "each other node. Start equally many ranks on every node (--nproc-per-node), or run the suite on equal "
                "nodes only"
            )
        for node in nodes:
            if sorted(found[node]) != list(range(len(found[node]))):
                raise EnvironmentBroken(
                    f"{hosts[node]}: the local ranks are {sorted(found[node])}, and they must count from 0 to "
                    f"{len(found[node]) - 1}: look at LOCAL_RANK, or at what the launcher sets instead"
                )
        return cls(
            ranks=tuple(tuple(found[node][rail] for rail in sorted(found[node])) for node in nodes),
            hosts=tuple(hosts[node] for node in nodes),
            names=tuple(_name(who) for who in sorted(inventory, key=lambda who: int(who["rank"]))),
        )

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.ranks)

    @property
    def rails(self) -> int:
        """How many ranks each node has."""
        return len(self.ranks[0])

    def where(self) -> dict[int, tuple[int, int]]:
        """Return node and rail of every rank."""
        return {rank: (node, rail) for node, ranks in enumerate(self.ranks) for rail, rank in enumerate(ranks)}


def _name(who: Mapping[str, Any]) -> str:
    gpu = who.get("gpu")
    index = f", GPU {gpu['index']}" if gpu else ""
    return f"rank {who['rank']} ({who['host']}{index})"
