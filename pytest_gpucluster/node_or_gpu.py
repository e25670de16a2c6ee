"""Whether those who miss a limit are single GPUs, all GPUs of a node, or all there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def whole_nodes(ranks: Collection[int], nodes: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the nodes all of whose ranks are among ``ranks``, where that tells a node from a GPU.

    It does where there are several nodes, and several ranks on that node.

    >>> whole_nodes([2, 3, 5], {0: [0, 1], 1: [2, 3], 2: [4, 5]})
    [1]
    """
    if len(nodes) < 2:
        return []
    among = set(ranks)
    return [node for node, own in nodes.items() if len(own) > 1 and among.issuperset(own)]


def together(
    ranks: Collection[int], *, nodes: Mapping[int, Sequence[int]], host_of: Mapping[int, str], noun: str
) -> str:
    """Return which nodes are concerned as a whole, and where to look; empty where it is single ranks, or every rank.

    >>> nodes = {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    >>> together([3, 2], nodes=nodes, host_of={2: "gpu-b", 3: "gpu-b"}, noun="GPUs")
    'all 2 GPUs of gpu-b (look at the node)'

    Args:
        ranks: who misses it.
        nodes: node -> its ranks, of the whole run.
        host_of: rank -> its host; a node without one is called by its number.
        noun: what a rank stands for: "GPUs", or "ranks" in a rehearsal.
    """
    whole = whole_nodes(ranks, nodes)
    if not whole:
        return ""
    if len(set(ranks)) == sum(len(own) for own in nodes.values()):
        return ""  # no node stands out
    hosts = [host_of.get(nodes[node][0], f"node {node}") for node in whole]
    if len(hosts) == 1:
        said = f"all {len(nodes[whole[0]])} {noun} of {hosts[0]} (look at the node)"
    else:
        more = hosts[1] if len(hosts) == 2 else f"{len(hosts) - 1} more nodes"
        said = f"all {noun} of {hosts[0]} and {more} (look at the nodes)"
    beside = len(set(ranks)) - sum(len(nodes[node]) for node in whole)
    return said + (f" and {beside} more {noun}" if beside else "")
