"""Why NCCL did not take the fabric: what its log says about that, in a few words. Pure.

NCCL falls back quietly: each line is one of many, and no error. They are written once for a process, when it first uses
NCCL, so they are of all its groups.

Source: NCCL 2.18 to 2.28, src/transport/net_ib.cc and src/transport/net_ib/, src/net.cc and src/plugin/net.cc,
src/plugin/plugin_open.cc, src/misc/ibvsymbols.cc, src/graph/paths.cc, src/misc/param.cc, src/transport/p2p.cc.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.text import rank_ranges

_Tell = Callable[["re.Match[str]"], str]


@dataclass(frozen=True, kw_only=True, order=True)
class Reason:
    """Why something is not used.

    Attributes:
        rank: 0 for what explains by itself, 1 for what only explains beside something else, as a setting does.
        about: what is not used: "network" (InfiniBand, RoCE or a plugin), "direct" (GPUDirect RDMA), or "node" (P2P
            between the GPUs of a node).
        text: a few words.
    """

    rank: int
    about: str
    text: str


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A line that says why."""

    about: str
    pattern: re.Pattern[str]
    tell: _Tell
    rank: int


NETWORK, DIRECT, NODE = "network", "direct", "node"


def _sign(about: str, pattern: str, tell: str | _Tell, *, beside: bool = False) -> _Sign:
    words = tell if callable(tell) else lambda _: tell
    return _Sign(about=about, pattern=re.compile(pattern), tell=words, rank=int(beside))


_SIGNS = (
    _sign(
        NETWORK,
        r"NCCL_IB_DISABLE set by environment to (?P<value>-?[1-9]\d*)",
        lambda found: f"NCCL_IB_DISABLE={found['value']} is set",
    ),
    _sign(
        NETWORK,
        r"NCCL_NET set by environment to (?P<value>\S+?)\.?$",
        lambda found: f"NCCL_NET={found['value']} is set",
    ),
    _sign(NETWORK, r"NET/IB ?: No device found", "NCCL has found no InfiniBand device"),
    _sign(NETWORK, r"NET/IB ?: No IP interface found", "NCCL has found no IP interface for InfiniBand's connections"),
    _sign(
        NETWORK,
        r"NET/IB ?: Unable to open device (?P<device>\S+)",
        lambda found: f"InfiniBand device {found['device']} could not be opened",
    ),
    _sign(NETWORK, r"Failed to open libibverbs\.so", "libibverbs is not installed here"),
    _sign(
        NETWORK,
        r"NCCL_IB_HCA set to (?P<value>\S+)",
        lambda found: f"NCCL_IB_HCA={found['value']} is set",
        beside=True,
    ),
    _sign(
        NETWORK,
        r"NET/Plugin ?: Could not find:? ?(?P<name>.+?)\.?(?: Using internal network plugin\.?)?$",
        lambda found: f"network plugin not found: {found['name'].strip()}",
        beside=True,
    ),
    _sign(
        NETWORK,
        r"NET/Plugin ?: (?:dlerror=(?P<why>.+?) )?No plugin found \((?P<name>[^)]+)\)",
        lambda found: f"network plugin not found: {found['name']}",
        beside=True,
    ),
    _sign(
        NETWORK,
        r"External network plugin (?P<name>.+) is unsupported",
        lambda found: f"network plugin {found['name']} does not fit this NCCL",
    ),
    _sign(
        NETWORK,
        r"Failed to initialize NET plugin (?P<name>.+)",
        lambda found: f"network plugin {found['name'].strip()} could not be initialized",
    ),
    _sign(
        NETWORK,
        r"NET/Socket ?: Using (?P<interfaces>\[0\]\S+.*)",
        lambda found: f"sockets go over {_interfaces(found['interfaces'])}",
        beside=True,
    ),
    _sign(
        NETWORK,
        r"NCCL_SOCKET_IFNAME set (?:by environment )?to (?P<value>\S+)",
        lambda found: f"NCCL_SOCKET_IFNAME={found['value']} is set",
        beside=True,
    ),
    _sign(
        DIRECT,
        r"GPU Direct RDMA Disabled for HCA \d+ '(?P<device>[^']*)'(?: \((?P<why>[^)]+)\))?",
        lambda found: f"{found['device']} has {found['why'] or 'neither nvidia_peermem nor DMA-BUF'}",
    ),
    _sign(
        DIRECT,
        r"GPU Direct RDMA Disabled for GPU \S+ / HCA \S+ \(distance (?P<found>\d+) >=? (?P<most>\d+)\)",
        lambda found: (
            f"GPU and network card are too far apart (distance {found['found']}, up to {found['most']} is allowed)"
        ),
    ),
    _sign(
        DIRECT,
        r"NCCL_NET_GDR_LEVEL set by environment to (?P<value>\S+)",
        lambda found: f"NCCL_NET_GDR_LEVEL={found['value'].rstrip('.')} is set",
    ),
    _sign(
        DIRECT,
        r"NCCL_DMABUF_ENABLE set by environment to 0",
        "NCCL_DMABUF_ENABLE=0 is set",
    ),
    _sign(
        NODE,
        r"NCCL_P2P_DISABLE set by environment to (?P<value>-?[1-9]\d*)",
        lambda found: f"NCCL_P2P_DISABLE={found['value']} is set",
    ),
    _sign(
        NODE,
        r"NCCL_P2P_LEVEL set by environment to (?P<value>\S+)",
        lambda found: f"NCCL_P2P_LEVEL={found['value'].rstrip('.')} is set",
    ),
    _sign(
        NODE,
        r"NCCL_SHM_DISABLE set by environment to (?P<value>-?[1-9]\d*)",
        lambda found: f"NCCL_SHM_DISABLE={found['value']} is set",
    ),
    _sign(
        NODE,
        r"P2P is disabled between (?:NVLINK )?connected GPUs (?P<one>\d+) and (?P<two>\d+)",
        lambda found: f"P2P is disabled between the connected GPUs {found['one']} and {found['two']}",
    ),
)
_TELLING = re.compile("NET/|Plugin|plugin|RDMA|set (?:by environment )?to |libibverbs|P2P is disabled")
"""What a line must have to be worth a closer look: there are hundreds of thousands of others."""
_CALL = " Bytes -> "


def _interfaces(listed: str) -> str:
    """Return the names in "[0]eth0:10.0.0.4<0> [1]eth1:10.0.1.4<0>"."""
    return ", ".join(re.findall(r"\[\d+\]([^:\s]+):", listed)) or listed.strip()


class Reasons:
    """Gathers the reasons of a log that grows: each once, in the order in which they came.

    >>> gathered = Reasons()
    >>> gathered.take(["a:1:2 [0] NCCL INFO NET/IB : No device found."])
    >>> [reason.text for reason in gathered.found]
    ['NCCL has found no InfiniBand device']
    """

    def __init__(self) -> None:
        self._found: dict[Reason, None] = {}

    @property
    def found(self) -> tuple[Reason, ...]:
        """All that was found until now."""
        return tuple(self._found)

    def take(self, lines: Iterable[str]) -> None:
        """Read more lines."""
        for line in lines:
            if _CALL in line or not _TELLING.search(line):
                continue
            for sign in _SIGNS:
                if match := sign.pattern.search(line.rstrip()):
                    self._found[Reason(rank=sign.rank, about=sign.about, text=sign.tell(match))] = None
                    break


def told(of_rank: Mapping[int, Sequence[Reason]], about: str) -> str:
    """Return the reasons of all ranks about one thing as a text, what explains by itself first.

    The ranks are named where it is not all of them.
    """
    ranks: dict[Reason, list[int]] = {}
    for rank, some in of_rank.items():
        for reason in some:
            if reason.about == about:
                ranks.setdefault(reason, []).append(rank)
    parts = []
    for reason in sorted(ranks, key=lambda reason: reason.rank):
        whose = "" if len(ranks[reason]) == len(of_rank) else f" ({rank_ranges(ranks[reason])})"
        parts.append(f"{reason.text}{whose}")
    return "; ".join(parts)
