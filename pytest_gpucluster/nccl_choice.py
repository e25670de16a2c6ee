"""What NCCL chose for a group: transports and algorithms, from lines of its log, and what all ranks' choices make up.

Names of transports, as they stand in labels and in ``expect_transport``:

- ``P2P``: straight from one GPU's memory to another's, over NVLink (also between nodes, where it is MNNVL) or PCIe;
  NVLS as well, which is NVLink's
- ``SHM``: through the host's memory, inside a node
- ``COLLNET/<name>``: the network reduces on the way (SHARP)
- ``NET/IB``: InfiniBand or RoCE verbs, also through NVIDIA's external plugin (``IBext_v8`` and the like)
- ``NET/AWS Libfabric``: EFA, also where its plugin calls itself Libfabric
- ``NET/Socket``: TCP; ``NET/<name>``: any other network plugin, by its own name
- ``gloo``: no NCCL at all; ``none``: one rank, which is connected to nobody
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_gpucluster import nccl_reasons
from pytest_gpucluster.nccl_reasons import Reason

_HOP = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[[0-9a-f]+\])? -> \d+(?:\[[0-9a-f]+\])?(?: \[(?:send|receive)\])? "
    r"via (?P<via>.+)"
)
_COLLNET_HOP = re.compile(r"CollNet \d+(?:/\d+)? : \d+ \[(?:send|receive)\] via (?P<via>COLLNET/.+)")
_CHOSEN = re.compile(
    r"(?:(?P<collective>\w+)(?: \[(?:Symmetric|Copy Engine|Hierarchical CE)\])?: +)?(?P<size>\d+) Bytes -> "
    r"(?:Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)|Kernel (?P<kernel>\S+)|(?P<copied>cudaMemcpy|RMA proxy \+ CE))"
)
_NVLS = re.compile(r"NVLS comm 0x[0-9a-f]+ headRank|Connected NVLS tree")
_NVLS_SUPPORT = re.compile(r"NVLS multicast support is (?P<no>not )?available")
_VERSION = re.compile(r"NCCL version (?P<version>\S+)")
_NETWORK = re.compile(r"Using network (?P<network>.+)")
_DIRECT = "GDRDMA"
_RANKS = re.compile(r"comm 0x[0-9a-f]+ rank \d+ nranks (?P<ranks>\d+) .*Init COMPLETE")

# Older versions write the number of NCCL_ALGO_* and NCCL_PROTO_* (src/include/device.h).
_PLUGINS = {"IBext": "IB", "Libfabric": "AWS Libfabric"}
"""What a network plugin is called here that has another name in the log, its version left out."""
_OVER_CARDS = ("NET/IB", "NET/AWS Libfabric", "COLLNET/")
"""How the transports begin that go over the cards which :attr:`Agreed.nics` counts."""
_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")

_IN_LOG: Mapping[str, str] = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AlltoAll",
    "broadcast": "Broadcast",
}
"""What a line about an algorithm calls a collective. Source: NCCL, src/collectives.cc, ncclFuncToString."""
_UNNAMED = ""
"""In older versions such a line does not say of which collective it is."""
_SENT_PIECEWISE = ("all_to_all", "send_recv")
"""What is made of single sends and receives, for which no algorithm is chosen: source: NCCL user guide,
"Point-to-point communication"."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one rank's log tells of one communicator.

    Attributes:
        transports: every transport that a connection of this rank uses.
        connections: how often each kind of connection occurs, in NCCL's words without the device's number.
        algorithms: collective as the log calls it, "" where it does not -> payload in bytes -> "Ring LL128" and the
            like. On the first rank of a group only.
        nvls: "used", "available", "not available", or "" where nothing is said.
        network: what NCCL uses between nodes, whether or not this group needs it.
        version: of NCCL.
        ranks: sizes of the communicators that were made.
        unknown: why nothing is known of the transports; empty where something is.
        reasons: what the whole log of this process says about why something is not used.
        cards: network cards of this rank's node (``fabric_ports.network_cards``); None where the number is not known.
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
        """Of the connections over InfiniBand or RoCE: those that go through the host's memory, and all."""
        over = {kind: count for kind, count in self.connections.items() if _transport(kind) == "NET/IB"}
        return sum(count for kind, count in over.items() if _DIRECT not in kind.split("/")), sum(over.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain types, to be told to the other ranks."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all ranks of a run say together of the groups of one size.

    Attributes:
        transport: the farthest hop of any rank, or None where it is not known.
        unknown: why it is not known.
    """

    transport: str | None
    unknown: str = ""
    choices: Sequence[Choice] = ()

    @property
    def why(self) -> str:
        """Why no better transport carries the data, as far as NCCL's log says; "" where nothing better is known of.

        TCP is explained by what kept NCCL from InfiniBand, a way over InfiniBand through the host's memory by what kept
        it from GPUDirect RDMA, and the host's memory inside a node by what kept it from P2P.
        """
        of_rank = {rank: one.reasons for rank, one in enumerate(self.choices)}
        if self.transport is None:
            return ""
        if "NET/Socket" in self.transport:
            return nccl_reasons.told(of_rank, nccl_reasons.NETWORK)
        if self.transport == "SHM":
            return nccl_reasons.told(of_rank, nccl_reasons.NODE)
        indirect = [one.indirect for one in self.choices]
        without, over = sum(some for some, _ in indirect), sum(every for _, every in indirect)
        if not without:
            return ""
        why = nccl_reasons.told(of_rank, nccl_reasons.DIRECT)
        return f"GPUDirect RDMA is off on {without} of {over} connections" + (f": {why}" if why else "")

    @property
    def nics(self) -> int | None:
        """The network cards of a node: the most of any, for one that has lost cards lowers no floor. None: unknown."""
        counts = [one.cards for one in self.choices if one.cards is not None]
        return max(counts) if counts and len(counts) == len(self.choices) else None

    @property
    def _over_cards(self) -> bool:
        return self.transport is not None and self.transport.startswith(_OVER_CARDS)

    def beside(self, telemetry: Mapping[str, Any]) -> dict[str, Any]:
        """Return a measurement's telemetry with ``why``, or what is not known, as "transport": a miss is told so."""
        told = [self.why if self.transport is not None else f"transport not known: {self.unknown}"]
        if self._over_cards and self.nics is None:
            told.append("the number of network cards is unknown, so the floor of a full set applies")
        why = "; ".join(filter(None, told))
        return {**telemetry, **({"transport": why} if why else {})}

    @property
    def labels(self) -> dict[str, str]:
        """The labels of a measurement; empty where the transport is not known, which no expectation accepts.

        ``nics`` is among them where network cards carry the data and their number is known.
        """
        if self.transport is None:
            return {}
        known = {"nics": str(self.nics)} if self._over_cards and self.nics is not None else {}
        return {"transport": self.transport, **known}

    def properties(self, collective: str = "all_reduce") -> dict[str, str]:
        """Return what goes on record beside the measurements, as text. The algorithms are those of a collective."""
        told = {"transport": self.transport or f"not known: {self.unknown}", "why": self.why}
        connections: dict[str, int] = {}
        algorithms: dict[int, dict[str, None]] = {}
        for one in self.choices:
            for kind, count in one.connections.items():
                connections[kind] = connections.get(kind, 0) + count
            for name in dict.fromkeys((_IN_LOG.get(collective), _UNNAMED)):
                if name is None or (name == _UNNAMED and collective in _SENT_PIECEWISE):
                    continue
                for size, names in one.algorithms.get(name, {}).items():
                    algorithms.setdefault(size, {}).update(dict.fromkeys(names))
        told["connections"] = ", ".join(f"{count} {kind}" for kind, count in sorted(connections.items()))
        told["algorithms"] = "; ".join(f"{size} B: {' and '.join(algorithms[size])}" for size in sorted(algorithms))
        told["nvls"] = " and ".join(sorted({one.nvls for one in self.choices if one.nvls}))
        if self._over_cards:
            told["nics"] = "not known" if self.nics is None else str(self.nics)
        told["network"] = " and ".join(sorted({one.network for one in self.choices if one.network}))
        told["version"] = " and ".join(sorted({one.version for one in self.choices if one.version}))
        if self.choices and not algorithms and self.transport not in ("gloo", "none"):
            piecewise = collective in _SENT_PIECEWISE
            told["algorithms"] = (
                "none: single sends and receives" if piecewise else "not known: NCCL's log does not say"
            )
        return {name: text for name, text in told.items() if text}


def choice(lines: Iterable[str]) -> Choice:
    """Read the lines that NCCL wrote while a communicator was made and used.

    >>> choice(["a:1:2 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA"]).transports
    ('NET/IB',)
    """
    connections: dict[str, int] = {}
    algorithms: dict[str, dict[int, dict[str, None]]] = {}
    nvls = network = version = ""
    ranks: dict[int, None] = {}
    told: set[str] = set()
    for line in lines:
        if " Bytes -> " in line:
            # There is one for each call: hundreds of thousands, of which hardly any says something new.
            what = line.partition("NCCL INFO ")[2] or line
            if what in told:
                continue
            told.add(what)
        if hop := _HOP.search(line) or _COLLNET_HOP.search(line):
            kind = _kind(hop["via"].strip())
            connections[kind] = connections.get(kind, 0) + 1
        elif chosen := _CHOSEN.search(line):
            of_collective = algorithms.setdefault(chosen["collective"] or _UNNAMED, {})
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


def agreed(told: Sequence[Mapping[str, Any]], *, ranks: int, hosts: int) -> Agreed:
    """Put together what all ranks say, each of its own group.

    Args:
        told: ``Choice.to_json()`` of each rank.
        ranks: how many are in each group; one alone is connected to nobody.
        hosts: over how many hosts a group goes.
    """
    choices = [Choice(**{**one, "reasons": tuple(Reason(**why) for why in one["reasons"])}) for one in told]
    if ranks == 1:
        return Agreed(transport="none", choices=choices)
    silent = [(rank, one.unknown) for rank, one in enumerate(choices) if not one.transports]
    if silent or not choices:
        why = f"rank {silent[0][0]}: {silent[0][1]}" if silent else "no rank has said anything"
        return Agreed(transport=None, unknown=why, choices=choices)
    hops = {name for one in choices for name in one.transports}
    farthest = max(map(_distance, hops))
    across = any(kind.startswith("P2P/MNNVL") for one in choices for kind in one.connections)
    if hosts > 1 and farthest < _distance("COLLNET") and not across:
        why = f"no rank's log shows how the {hosts} hosts are connected, only {' and '.join(sorted(hops))} inside them"
        return Agreed(transport=None, unknown=why, choices=choices)
    # Two networks at once are no one's expectation.
    return Agreed(transport="+".join(sorted(hop for hop in hops if _distance(hop) == farthest)), choices=choices)


def _kind(via: str) -> str:
    """Leave out what numbers the device: "NET/IB/0(8)/GDRDMA" is one of "NET/IB/GDRDMA"."""
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
    # What is not known here is held to be the farthest, so that no expectation overlooks it.
    order = {"P2P": 0, "SHM": 1, "COLLNET": 2, "NET": 3}
    return 4 if transport == "NET/Socket" else order.get(family, 5)


def _algorithm(chosen: re.Match[str]) -> str:
    if chosen["kernel"]:
        return f"symmetric {chosen['kernel']}"
    if chosen["copied"]:
        return "copy engine" if chosen["copied"] == "cudaMemcpy" else "network and copy engine"
    return f"{_named(chosen['algorithm'], _ALGORITHMS)} {_named(chosen['protocol'], _PROTOCOLS)}"


def _named(found: str, names: Sequence[str]) -> str:
    if found.isdecimal():
        return names[int(found)] if int(found) < len(names) else f"number {found}"
    plain = found.replace("_", "").lower()
    return next((name for name in names if name.lower() == plain), found)
