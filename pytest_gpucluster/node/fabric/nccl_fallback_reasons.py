"""Why NCCL does not use the fabric, in a few words: from the lines of its log. Pure.

NCCL falls back silently: each line is one of many, and not an error. It logs them once for a process, when it first
uses NCCL, so they apply to all its groups.

Source: NCCL 2.18 to 2.28, src/transport/net_ib.cc and src/transport/net_ib/, src/net.cc and src/plugin/net.cc,
src/plugin/plugin_open.cc, src/misc/ibvsymbols.cc, src/graph/paths.cc, src/misc/param.cc, src/transport/p2p.cc.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.text import rank_ranges


@dataclass(frozen=True, kw_only=True, order=True)
class Reason:
    """Why something is not used.

    Attributes:
        rank: 0 for a sufficient explanation, 1 for one that only explains together with another, as a setting does.
        about: what is not used: "network" (InfiniBand, RoCE or a plugin), "direct" (GPUDirect RDMA), or "node" (P2P
            between the GPUs of a node).
        text: a few words.
    """

    rank: int
    about: str
    text: str


NETWORK, DIRECT, NODE = "network", "direct", "node"
_SET = r" set (?:by environment )?to (?P<value>\S+?)\.*(?:\s|$)"
"""A variable with any value."""
_ON = r" set by environment to (?P<value>-?[1-9]\d*)"
"""A flag that is on."""

_SIGNS = (
    (NETWORK, 0, rf"NCCL_IB_DISABLE{_ON}", "NCCL_IB_DISABLE={value} is set"),
    (NETWORK, 0, rf"NCCL_NET{_SET}", "NCCL_NET={value} is set"),
    (NETWORK, 0, r"NET/IB ?: No device found", "NCCL has found no InfiniBand device"),
    (NETWORK, 0, r"NET/IB ?: No IP interface found", "NCCL has found no IP interface for InfiniBand's connections"),
    (NETWORK, 0, r"NET/IB ?: Unable to open device (?P<device>\S+)", "InfiniBand device {device} could not be opened"),
    (NETWORK, 0, r"Failed to open libibverbs\.so", "libibverbs is not installed here"),
    (NETWORK, 1, rf"NCCL_IB_HCA{_SET}", "NCCL_IB_HCA={value} is set"),
    (
        NETWORK,
        1,
        r"NET/Plugin ?: Could not find:? ?(?P<name>.+?)\.?(?: Using internal network plugin\.?)?$",
        "network plugin not found: {name}",
    ),
    (NETWORK, 1, r"NET/Plugin ?: .*No plugin found \((?P<name>[^)]+)\)", "network plugin not found: {name}"),
    (
        NETWORK,
        0,
        r"External network plugin (?P<name>.+) is unsupported",
        "network plugin {name} does not fit this NCCL",
    ),
    (NETWORK, 0, r"Failed to initialize NET plugin (?P<name>.+)", "network plugin {name} could not be initialized"),
    (NETWORK, 1, r"NET/Socket ?: Using (?P<interfaces>\[0\]\S+.*)", "sockets go over {interfaces}"),
    (NETWORK, 1, rf"NCCL_SOCKET_IFNAME{_SET}", "NCCL_SOCKET_IFNAME={value} is set"),
    (DIRECT, 0, r"GPU Direct RDMA Disabled for HCA \d+ '(?P<device>[^']*)' \((?P<why>[^)]+)\)", "{device} has {why}"),
    (
        DIRECT,
        0,
        r"GPU Direct RDMA Disabled for HCA \d+ '(?P<device>[^']*)'$",
        "{device} has neither nvidia_peermem nor DMA-BUF",
    ),
    (
        DIRECT,
        0,
        r"GPU Direct RDMA Disabled for GPU \S+ / HCA \S+ \(distance (?P<found>\d+) >=? (?P<most>\d+)\)",
        "GPU and network card are too far apart (distance {found}, up to {most} is allowed)",
    ),
    (DIRECT, 0, rf"NCCL_NET_GDR_LEVEL{_SET}", "NCCL_NET_GDR_LEVEL={value} is set"),
    (DIRECT, 0, r"NCCL_DMABUF_ENABLE set by environment to 0", "NCCL_DMABUF_ENABLE=0 is set"),
    (NODE, 0, rf"NCCL_P2P_DISABLE{_ON}", "NCCL_P2P_DISABLE={value} is set"),
    (NODE, 0, rf"NCCL_P2P_LEVEL{_SET}", "NCCL_P2P_LEVEL={value} is set"),
    (NODE, 0, rf"NCCL_SHM_DISABLE{_ON}", "NCCL_SHM_DISABLE={value} is set"),
    (
        NODE,
        0,
        r"P2P is disabled between (?:NVLINK )?connected GPUs (?P<one>\d+) and (?P<two>\d+)",
        "P2P is disabled between the connected GPUs {one} and {two}",
    ),
)
"""What a line is about, the reason's rank, a pattern, and a text with the groups of the pattern in braces."""
_RELEVANT = re.compile("NET/|Plugin|plugin|RDMA|set (?:by environment )?to |libibverbs|P2P is disabled")
"""In every line with a reason: there are hundreds of thousands of others."""
_CALL = " Bytes -> "


class Reasons:
    """Collects the reasons of a growing log: each once, in the order of the log.

    >>> reasons = Reasons()
    >>> reasons.take(["a:1:2 [0] NCCL INFO NET/IB : No device found."])
    >>> [reason.text for reason in reasons.found]
    ['NCCL has found no InfiniBand device']
    """

    def __init__(self) -> None:
        self._found: dict[Reason, None] = {}

    @property
    def found(self) -> tuple[Reason, ...]:
        """All reasons so far."""
        return tuple(self._found)

    def take(self, lines: Iterable[str]) -> None:
        """Read more lines."""
        for line in lines:
            if _CALL in line or not _RELEVANT.search(line):
                continue
            for about, rank, pattern, text in _SIGNS:
                found = re.search(pattern, line.rstrip())
                if found is not None:
                    groups = {name: group.strip() for name, group in found.groupdict().items()}
                    if "interfaces" in groups:  # such as "[0]eth0:10.0.0.4<0> [1]eth1:10.0.1.4<0>"
                        names = re.findall(r"\[\d+\]([^:\s]+):", groups["interfaces"])
                        groups["interfaces"] = ", ".join(names) or groups["interfaces"]
                    self._found[Reason(rank=rank, about=about, text=text.format(**groups))] = None
                    break


def describe_reasons(of_rank: Mapping[int, Sequence[Reason]], about: str) -> str:
    """Return the reasons of all ranks about one thing as a text, sufficient explanations first.

    The ranks are named where it is not all of them.
    """
    ranks: dict[Reason, list[int]] = {}
    for rank, some in of_rank.items():
        for reason in some:
            if reason.about == about:
                ranks.setdefault(reason, []).append(rank)
    parts = []
    for reason in sorted(ranks, key=lambda reason: reason.rank):
        on = "" if len(ranks[reason]) == len(of_rank) else f" ({rank_ranges(ranks[reason])})"
        parts.append(f"{reason.text}{on}")
    return "; ".join(parts)
