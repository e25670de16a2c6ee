"""NCCL's own log: how it is enabled and read, and the transports and algorithms that NCCL chose for a group.

Names of transports, in labels and in ``expect_transport``:

- ``P2P``: straight from one GPU's memory to another's, over NVLink (also between nodes, where it is MNNVL) or PCIe;
  NVLS as well, which is NVLink's
- ``SHM``: through host memory, inside a node
- ``COLLNET/<name>``: the network reduces on the way (SHARP)
- ``NET/IB``: InfiniBand or RoCE verbs, also through NVIDIA's external plugin (``IBext_v8`` and the like)
- ``NET/AWS Libfabric``: EFA, also where its plugin is named Libfabric
- ``NET/Socket``: TCP; ``NET/<name>``: any other network plugin, by its own name
- ``gloo``: no NCCL; ``none``: one rank, which is connected to no other

NCCL reads the environment for its log once, at its first message. So it is set early, and an operator's own settings
are never changed: then their log files are read, or the reason is given why the transport is unknown.

Source: the formats are those of NCCL 2.27 to 2.30 (src/debug.cc, src/enqueue.cc, src/transport/*.cc); the variables,
NCCL User Guide, "Environment Variables", NCCL_DEBUG, NCCL_DEBUG_FILE, NCCL_DEBUG_SUBSYS.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.device.environment import PRIVATE_LOG, SUBSYSTEMS
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.text import rank_ranges

# ---- why something is not used

NETWORK, DIRECT, NODE = "network", "direct", "node"
"""What is not used: InfiniBand, RoCE or a plugin; GPUDirect RDMA; P2P between the GPUs of a node."""
_SET = r" set (?:by environment )?to (?P<value>\S+?)\.*(?:\s|$)"
"""A variable with any value."""
_ON = r" set by environment to (?P<value>-?[1-9]\d*)"
"""A flag that is on."""
_NO_DIRECT = r"GPU Direct RDMA Disabled for HCA \d+ '(?P<device>[^']*)'"
_SIGNS = (
    (NETWORK, rf"NCCL_IB_DISABLE{_ON}", "NCCL_IB_DISABLE={value} is set"),
    (NETWORK, rf"NCCL_NET{_SET}", "NCCL_NET={value} is set"),
    (NETWORK, r"NET/IB ?: No device found", "NCCL has found no InfiniBand device"),
    (NETWORK, r"NET/IB ?: No IP interface found", "NCCL has found no IP interface for InfiniBand's connections"),
    (NETWORK, r"NET/IB ?: Unable to open device (?P<device>\S+)", "InfiniBand device {device} could not be opened"),
    (NETWORK, r"Failed to open libibverbs\.so", "libibverbs is not installed here"),
    (NETWORK, r"External network plugin (?P<name>.+) is unsupported", "network plugin {name} does not fit this NCCL"),
    (NETWORK, r"Failed to initialize NET plugin (?P<name>.+)", "network plugin {name} could not be initialized"),
    # Only together with another one these explain it.
    (
        NETWORK,
        r"NET/Plugin ?: Could not find:? ?(?P<name>.+?)\.?(?: Using internal network plugin\.?)?$",
        "network plugin not found: {name}",
    ),
    (NETWORK, r"NET/Plugin ?: .*No plugin found \((?P<name>[^)]+)\)", "network plugin not found: {name}"),
    (NETWORK, rf"NCCL_IB_HCA{_SET}", "NCCL_IB_HCA={value} is set"),
    (NETWORK, rf"NCCL_SOCKET_IFNAME{_SET}", "NCCL_SOCKET_IFNAME={value} is set"),
    (NETWORK, r"NET/Socket ?: Using (?P<interfaces>\[0\]\S+.*)", "sockets go over {interfaces}"),
    (DIRECT, rf"{_NO_DIRECT} \((?P<why>[^)]+)\)", "{device} has {why}"),
    (DIRECT, rf"{_NO_DIRECT}$", "{device} has neither nvidia_peermem nor DMA-BUF"),
    (
        DIRECT,
        r"GPU Direct RDMA Disabled for GPU \S+ / HCA \S+ \(distance (?P<found>\d+) >=? (?P<most>\d+)\)",
        "GPU and network card are too far apart (distance {found}, up to {most} is allowed)",
    ),
    (DIRECT, rf"NCCL_NET_GDR_LEVEL{_SET}", "NCCL_NET_GDR_LEVEL={value} is set"),
    (DIRECT, r"NCCL_DMABUF_ENABLE set by environment to 0", "NCCL_DMABUF_ENABLE=0 is set"),
    (NODE, rf"NCCL_P2P_DISABLE{_ON}", "NCCL_P2P_DISABLE={value} is set"),
    (NODE, rf"NCCL_P2P_LEVEL{_SET}", "NCCL_P2P_LEVEL={value} is set"),
    (NODE, rf"NCCL_SHM_DISABLE{_ON}", "NCCL_SHM_DISABLE={value} is set"),
    (
        NODE,
        r"P2P is disabled between (?:NVLINK )?connected GPUs (?P<one>\d+) and (?P<two>\d+)",
        "P2P is disabled between the connected GPUs {one} and {two}",
    ),
)
"""What a line is about, a pattern, and a text with the groups of the pattern in braces; sufficient explanations first.
Source: NCCL 2.27 to 2.30, src/transport/net_ib.cc and src/transport/net_ib/, src/net.cc and src/plugin/net.cc,
src/plugin/plugin_open.cc, src/misc/ibvsymbols.cc, src/graph/paths.cc, src/misc/param.cc, src/transport/p2p.cc."""
_RELEVANT = re.compile("NET/|Plugin|plugin|RDMA|set (?:by environment )?to |libibverbs|P2P is disabled")
"""In every line with a reason: there are hundreds of thousands of others."""
_CALL = " Bytes -> "


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why something is not used: NCCL falls back silently, by one line of many. ``rank``: the place in the table of
    patterns, sufficient explanations first; ``about``: NETWORK, DIRECT or NODE."""

    rank: int
    about: str
    text: str


def find_reasons(lines: Iterable[str]) -> Iterator[Reason]:
    """Yield the reasons in a log.

    >>> [reason.text for reason in find_reasons(["a:1:2 [0] NCCL INFO NET/IB : No device found."])]
    ['NCCL has found no InfiniBand device']
    """
    for line in lines:
        if _CALL in line or not _RELEVANT.search(line):
            continue
        for rank, (about, pattern, text) in enumerate(_SIGNS):
            if (found := re.search(pattern, line.rstrip())) is not None:
                groups = {name: group.strip() for name, group in found.groupdict().items()}
                if "interfaces" in groups:  # such as "[0]eth0:10.0.0.4<0> [1]eth1:10.0.1.4<0>"
                    names = re.findall(r"\[\d+\]([^:\s]+):", groups["interfaces"])
                    groups["interfaces"] = ", ".join(names) or groups["interfaces"]
                yield Reason(rank=rank, about=about, text=text.format(**groups))
                break


def describe_reasons(of_rank: Sequence[Sequence[Reason]], about: str) -> str:
    """Return the reasons of all ranks about one thing as a text, and the ranks where it is not all of them."""
    ranks = grouped((reason, rank) for rank, some in enumerate(of_rank) for reason in some if reason.about == about)
    return "; ".join(
        reason.text + ("" if len(ranks[reason]) == len(of_rank) else f" ({rank_ranges(ranks[reason])})")
        for reason in sorted(ranks, key=lambda reason: reason.rank)
    )


# ---- what a group uses

_HOP = re.compile(
    r"Channel \d+(?:/\d+)? : \d+\[[0-9a-f]+\] -> \d+\[[0-9a-f]+\](?: \[(?:send|receive)\])? via (?P<via>.+)"
)
_COLLNET_HOP = re.compile(r"CollNet \d+(?:/\d+)? : \d+ \[(?:send|receive)\] via (?P<via>COLLNET/.+)")
_CHOSEN = re.compile(
    r"(?P<collective>\w+)(?: \[(?:Symmetric|Copy Engine|Hierarchical CE)\])?: +(?P<size>\d+) Bytes -> "
    r"(?:Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)|Kernel (?P<kernel>\S+)|(?P<copied>cudaMemcpy|RMA proxy \+ CE))"
)
_NVLS = re.compile(r"NVLS comm 0x[0-9a-f]+ headRank|Connected NVLS tree")
_NVLS_SUPPORT = re.compile(r"NVLS multicast support is (?P<no>not )?available")
_VERSION = re.compile(r"NCCL version (?P<version>\S+)")
_NETWORK = re.compile(r"Using network (?P<network>.+)")
_DIRECT = "GDRDMA"
_RANKS = re.compile(r"comm 0x[0-9a-f]+ rank \d+ nranks (?P<ranks>\d+) .*Init COMPLETE")

_PLUGINS = {"IBext": "IB", "Libfabric": "AWS Libfabric"}
"""Name of a network plugin in the log, without its version -> its name here."""
_OVER_CARDS = ("NET/IB", "NET/AWS Libfabric", "COLLNET/")
"""Prefixes of the transports over the cards that :attr:`GroupTransport.nics` counts."""
_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")

_LOG_NAMES: Mapping[str, str] = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AlltoAll",
    "broadcast": "Broadcast",
}
"""Name of a collective in a line about an algorithm. Source: NCCL, src/collectives.cc, ncclFuncToString."""
_POINT_TO_POINT = ("all_to_all", "send_recv")
"""Made of single sends and receives, for which no algorithm is chosen. Source: NCCL user guide, "Point-to-point
communication"."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One rank's log about one communicator.

    Attributes:
        transports: every transport that a connection of this rank uses.
        connections: number of connections of each kind, as in NCCL's log without the device's number.
        algorithms: name of the collective in the log -> payload in bytes -> "Ring LL128" and the like. On the first
            rank of a group only.
        nvls: "used", "available", "not available", or "" where the log does not mention it.
        network: NCCL's network between nodes, whether or not this group needs it.
        version: of NCCL.
        ranks: sizes of the communicators that were made.
        unknown: why the transports are unknown; empty where they are known.
        reasons: why something is not used, from the whole log of this process.
        cards: network cards of this rank's node (``ports.network_cards``); None where the number is unknown.
    """

    transports: tuple[str, ...] = ()
    connections: Mapping[str, int] = field(default_factory=dict)
    algorithms: Mapping[str, Mapping[int, tuple[str, ...]]] = field(default_factory=dict)
    nvls: str = ""
    network: str = ""
    version: str = ""
    ranks: tuple[int, ...] = ()
    unknown: str = ""
    reasons: tuple[Reason, ...] = ()
    cards: int | None = None

    @property
    def indirect(self) -> tuple[int, int]:
        """Of the connections over InfiniBand or RoCE: those through host memory, and all."""
        over = {kind: count for kind, count in self.connections.items() if _transport(kind) == "NET/IB"}
        return sum(count for kind, count in over.items() if _DIRECT not in kind.split("/")), sum(over.values())


@dataclass(frozen=True, kw_only=True)
class GroupTransport:
    """The transport of all ranks of a run, in the groups of one size.

    Attributes:
        transport: the farthest hop of any rank, or None where it is unknown.
        unknown: why it is unknown.
    """

    transport: str | None
    unknown: str = ""
    choices: Sequence[Choice] = ()

    @property
    def why(self) -> str:
        """Why no better transport carries the data, by NCCL's log; "" where no better one is known.

        TCP is explained by the reasons against InfiniBand, InfiniBand through host memory by those against GPUDirect
        RDMA, and host memory inside a node by those against P2P.
        """
        of_rank = [one.reasons for one in self.choices]
        if self.transport is None:
            return ""
        if "NET/Socket" in self.transport:
            return describe_reasons(of_rank, NETWORK)
        if self.transport == "SHM":
            return describe_reasons(of_rank, NODE)
        indirect = [one.indirect for one in self.choices]
        without, over = sum(some for some, _ in indirect), sum(every for _, every in indirect)
        if not without:
            return ""
        why = describe_reasons(of_rank, DIRECT)
        return f"GPUDirect RDMA is off on {without} of {over} connections" + (f": {why}" if why else "")

    @property
    def nics(self) -> int | None:
        """The network cards of a node: the most of any, for a lost card must not lower a floor. None: unknown."""
        counts = [one.cards for one in self.choices if one.cards is not None]
        return max(counts) if counts and len(counts) == len(self.choices) else None

    @property
    def _over_cards(self) -> bool:
        return self.transport is not None and self.transport.startswith(_OVER_CARDS)

    def add_to(self, telemetry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a measurement's telemetry with ``why``, or what is unknown, as "transport": a miss reports it."""
        notes = [self.why if self.transport is not None else f"transport unknown: {self.unknown}"]
        if self._over_cards and self.nics is None:
            notes.append("the number of network cards is unknown, so the floor of a full set applies")
        why = "; ".join(filter(None, notes))
        return {**telemetry, **({"transport": why} if why else {})}

    @property
    def labels(self) -> dict[str, str]:
        """The labels of a measurement; empty where the transport is unknown, which no expectation accepts.

        ``nics`` is among them where network cards carry the data and their number is known.
        """
        if self.transport is None:
            return {}
        known = {"nics": str(self.nics)} if self._over_cards and self.nics is not None else {}
        return {"transport": self.transport, **known}

    def properties(self, collective: str = "all_reduce") -> dict[str, str]:
        """Return the properties to record with the measurements. The algorithms are those of a collective."""
        found = {"transport": self.transport or f"unknown: {self.unknown}", "why": self.why}
        connections: Counter[str] = Counter()
        algorithms: dict[int, dict[str, None]] = {}
        for one in self.choices:
            connections.update(one.connections)
            for size, names in one.algorithms.get(_LOG_NAMES.get(collective, ""), {}).items():
                algorithms.setdefault(size, {}).update(dict.fromkeys(names))
        found["connections"] = ", ".join(f"{count} {kind}" for kind, count in sorted(connections.items()))
        found["algorithms"] = "; ".join(f"{size} B: {' and '.join(algorithms[size])}" for size in sorted(algorithms))
        if self._over_cards:
            found["nics"] = "unknown" if self.nics is None else str(self.nics)
        for name in ("nvls", "network", "version"):
            found[name] = " and ".join(sorted({getattr(one, name) for one in self.choices} - {""}))
        if self.choices and not algorithms and self.transport not in ("gloo", "none"):
            point_to_point = collective in _POINT_TO_POINT
            found["algorithms"] = "none: single sends and receives" if point_to_point else "unknown: not in NCCL's log"
        return {name: text for name, text in found.items() if text}


def choice(lines: Iterable[str]) -> Choice:
    """Read the lines that NCCL wrote while a communicator was made and used.

    >>> choice(["a:1:2 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA"]).transports
    ('NET/IB',)
    """
    connections: Counter[str] = Counter()
    algorithms: dict[str, dict[int, dict[str, None]]] = {}
    nvls = network = version = ""
    ranks: dict[int, None] = {}
    seen: set[str] = set()
    for line in lines:
        if _CALL in line:
            # There is one for each call: hundreds of thousands, of which hardly any is new.
            content = line.partition("NCCL INFO ")[2] or line
            if content in seen:
                continue
            seen.add(content)
        if hop := _HOP.search(line) or _COLLNET_HOP.search(line):
            kind = _kind(hop["via"].strip())
            connections[kind] += 1
        elif chosen := _CHOSEN.search(line):
            of_collective = algorithms.setdefault(chosen["collective"], {})
            of_collective.setdefault(int(chosen["size"]), {})[_algorithm(chosen)] = None
        elif _NVLS.search(line):
            nvls = "used"
        elif support := _NVLS_SUPPORT.search(line):
            nvls = nvls or ("not available" if support["no"] else "available")
        elif found := _VERSION.search(line):
            version = found["version"]
        elif found := _NETWORK.search(line):
            network = found["network"].strip()
        elif found := _RANKS.search(line):
            ranks[int(found["ranks"])] = None
    transports = {_transport(kind) for kind in connections} | ({"P2P"} if nvls == "used" else set())
    return Choice(
        transports=tuple(sorted(transports, key=lambda name: (_distance(name), name))),
        connections=connections,
        algorithms={
            collective: {size: tuple(names) for size, names in sizes.items()}
            for collective, sizes in algorithms.items()
        },
        nvls=nvls,
        network=network,
        version=version,
        ranks=tuple(ranks),
        unknown="" if transports else "NCCL's log has no line about a connection of this group",
    )


_MEANT = re.compile(r" via |Bytes -> |Using network |NCCL version |Init COMPLETE$|NCCL WARN |NVLS (?:comm|multicast)")
"""In lines of the kinds that are read here, and in warnings."""


def unread(lines: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the lines of a log of which nothing here reads anything, and those of them that it was meant to read.

    >>> unread(["a:1:2 [0] NCCL INFO Channel 00/0 : 7 to 8 via NET/IB/0"])[1]
    ['Channel 00/0 : 7 to 8 via NET/IB/0']
    """
    patterns = (_HOP, _COLLNET_HOP, _CHOSEN, _NVLS, _NVLS_SUPPORT, _VERSION, _NETWORK, _RANKS)
    left = [line.rstrip() for line in lines if not any(pattern.search(line) for pattern in patterns)]
    left = [line for line in left if not any(find_reasons([line]))]
    content = [line.partition("NCCL INFO ")[2] or line for line in left if line]
    return content, [line for line in content if _MEANT.search(line)]


def group_transport(choices: Sequence[Choice], *, ranks: int, hosts: int) -> GroupTransport:
    """Combine the choices of all ranks, each of its own group.

    ``ranks`` and ``hosts`` are the numbers of each group; a single rank has no connections.
    """
    if ranks == 1:
        return GroupTransport(transport="none", choices=choices)
    silent = [(rank, one.unknown) for rank, one in enumerate(choices) if not one.transports]
    if silent or not choices:
        why = f"rank {silent[0][0]}: {silent[0][1]}" if silent else "no rank has reported"
        return GroupTransport(transport=None, unknown=why, choices=choices)
    hops = {name for one in choices for name in one.transports}
    farthest = max(map(_distance, hops))
    across = any(kind.startswith("P2P/MNNVL") for one in choices for kind in one.connections)
    if hosts > 1 and farthest < _distance("COLLNET") and not across:
        why = f"no rank's log shows how the {hosts} hosts are connected, only {' and '.join(sorted(hops))} inside them"
        return GroupTransport(transport=None, unknown=why, choices=choices)
    farthest_hops = sorted(hop for hop in hops if _distance(hop) == farthest)
    return GroupTransport(transport="+".join(farthest_hops), choices=choices)  # two networks match no expectation


def _kind(via: str) -> str:
    """Remove the number of the device: "NET/IB/0(8)/GDRDMA" is one of "NET/IB/GDRDMA"."""
    parts = via.split("/")
    return "/".join(part for part in parts if not re.fullmatch(r"\d+(?:\(\d+\)|\[[0-9a-f]+\])?", part))


def _transport(kind: str) -> str:
    family, _, rest = kind.partition("/")
    if family not in ("NET", "COLLNET"):
        return family
    name = re.sub(r"_v[0-9]+$", "", rest.partition("/")[0])
    return f"{family}/{_PLUGINS.get(name, name)}"


def _distance(transport: str) -> int:
    family = transport.partition("/")[0]
    # An unknown one counts as the farthest, so that no expectation overlooks it.
    order = {"P2P": 0, "SHM": 1, "COLLNET": 2, "NET": 3}
    return 4 if transport == "NET/Socket" else order.get(family, 5)


def _algorithm(chosen: re.Match[str]) -> str:
    if chosen["kernel"]:
        return f"symmetric {chosen['kernel']}"
    if chosen["copied"]:
        return "copy engine" if chosen["copied"] == "cudaMemcpy" else "network and copy engine"
    return f"{_named(chosen['algorithm'], _ALGORITHMS)} {_named(chosen['protocol'], _PROTOCOLS)}"


def _named(found: str, names: Sequence[str]) -> str:
    plain = found.replace("_", "").lower()
    return next((name for name in names if name.lower() == plain), found)


MAX_KEPT_BYTES = 2 * 2**20
"""Of a log that is kept with the report, on each rank."""

_LOG_LEVELS = ("INFO", "ABORT", "TRACE")


def own_settings(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the variables of NCCL that ``device.environment.prepare`` has set for the log."""
    file = environment.get("NCCL_DEBUG_FILE", "")
    if not (file and NcclLog._is_private(Path(file))):
        return frozenset()
    by_us = {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}
    return frozenset(by_us | ({"NCCL_DEBUG_SUBSYS"} if environment.get("NCCL_DEBUG_SUBSYS") == SUBSYSTEMS else set()))


class NcclLog:
    """The log of this process, and which parts of it belong to which communicator.

    NCCL connects ranks when they first need it, and its lines do not name the communicator. But a process uses one
    group at a time: lines that are written inside :meth:`reading` belong to that group.

    Attributes:
        path: the file, or None where there is none.
        why_not: why there is none.
    """

    def __init__(self, path: Path | None, why_not: str = "") -> None:
        self.path, self.why_not = path, why_not
        self._start = 0
        self._reasons: dict[Reason, None] = {}
        self._reasons_read = 0
        self._parts: list[tuple[Hashable, int, int]] = []

    @classmethod
    def of(cls, environment: Mapping[str, str], *, pid: int, hostname: str | None = None) -> NcclLog:
        """Return the log of a process with this environment. It need not exist yet."""
        level, file = environment.get("NCCL_DEBUG", ""), environment.get("NCCL_DEBUG_FILE", "")
        if level.upper() not in _LOG_LEVELS:
            found = f"NCCL_DEBUG={level} is" if level else "NCCL_DEBUG_FILE without NCCL_DEBUG is"
            why_not = f"{found} set in the environment; unset it, or set NCCL_DEBUG=INFO"
        elif not file:
            why_not = "NCCL_DEBUG is set in the environment without NCCL_DEBUG_FILE, so NCCL logs to the terminal"
        else:
            why_not = f"NCCL_DEBUG_FILE={file} has no %p, so that all ranks of a node write to one file"
            why_not = "" if "%p" in file else why_not
        if why_not:
            return cls(None, why_not)
        host = (hostname or socket.gethostname()).partition(".")[0]
        names = {"%%": "%", "%h": re.sub("[%/]", "-", host), "%p": str(pid)}
        return cls(Path(re.sub("%[%hp]", lambda place: names[place[0]], file)))

    def open(self) -> None:
        """Make the private folder for NCCL's log. An operator's own folder is not touched.

        Raises:
            OSError: it cannot be made, or belongs to another user.
        """
        if self.path is not None and self._is_private(self.path):
            # Local workers share the folder of the process that started them.
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            if self.path.parent.is_symlink() or self.path.parent.stat().st_uid != os.getuid():
                raise PermissionError(f"{self.path.parent} belongs to another user")

    def remove(self) -> None:
        """Remove the log, and its folder with the last log in it. An operator's own file stays."""
        if self.path is not None and self._is_private(self.path):
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a sibling's log is still there, or nothing ever was
                self.path.parent.rmdir()

    def begin_again(self) -> None:
        """Forget all parts: the groups are gone, and new ones will be made."""
        self._start, self._parts = self._end(), []

    def closed(self, communicator: Hashable) -> None:
        """Forget the parts of a closed communicator: a later one of the same ranks makes its own choice."""
        self._parts = [(None if key == communicator else key, start, end) for key, start, end in self._parts]

    @contextlib.contextmanager
    def reading(self, communicator: Hashable) -> Iterator[None]:
        """Assign the lines that are written inside to a communicator. No other group of this process may be used."""
        start = self._end()
        try:
            yield
        finally:
            self._parts.append((communicator, start, self._end()))

    def choice(self, communicator: Hashable, *, rest: bool = False) -> Choice:
        """Return what NCCL chose for a communicator.

        ``rest``: with the lines outside of any ``reading``, for the group of all ranks, which any code may use.
        """
        if self.path is None:
            return Choice(unknown=self.why_not)
        if not self.path.exists():
            return Choice(unknown=f"NCCL has written no log to {self.path}")
        parts = [(start, end) for key, start, end in self._parts if key == communicator]
        if rest:
            parts += self._outside()
        found = choice(line for start, end in sorted(parts) for line in self._lines(start, end))
        # NCCL looks for networks once for a process, so the reasons may be in any group's part.
        end = self._end()
        self._reasons |= dict.fromkeys(find_reasons(self._lines(self._reasons_read, end)))
        self._reasons_read = max(self._reasons_read, end)
        return replace(found, reasons=tuple(self._reasons))

    def keep(self, target: Path, *, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """Copy the log to a file without repeated lines, up to a size. Does nothing where there is no log."""
        if self.path is None or not self.path.exists():
            return
        seen: set[str] = set()
        left_out = written = 0
        with target.open("w", encoding="utf-8") as kept:
            for line in self._lines(0, self._end()):
                content = line.partition("NCCL INFO ")[2] or line
                if content in seen or written + len(line) > max_bytes:
                    left_out += 1
                    continue
                seen.add(content)
                written += kept.write(line)
            if left_out:
                kept.write(f"({left_out} lines left out here: repeated, or beyond {max_bytes} bytes)\n")

    def _outside(self) -> Iterator[tuple[int, int]]:
        position = self._start
        for _, start, end in sorted(self._parts, key=lambda part: part[1:]):
            if start > position:
                yield position, start
            position = max(position, end)
        yield position, self._end()

    def _lines(self, start: int, end: int) -> Iterator[str]:
        assert self.path is not None
        with self.path.open("rb") as file:
            file.seek(start)
            while start < end and (line := file.readline(end - start)):  # it ends early where the file was truncated
                start += len(line)
                yield line.decode("utf-8", errors="replace")

    def _end(self) -> int:
        with contextlib.suppress(OSError):
            if self.path is not None:
                return self.path.stat().st_size
        return 0

    @staticmethod
    def _is_private(path: Path) -> bool:
        return path.parent.name.startswith(PRIVATE_LOG)
