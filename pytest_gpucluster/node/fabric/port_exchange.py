"""Exchange of ports and settings between ranks without a process group, for it happens before NCCL is used.

One rank compares for all. So a thousand ranks read one message each, and not a thousand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.metrics.finding import Finding, Identity, environment, finding, note
from pytest_gpucluster.node.fabric import port_checks
from pytest_gpucluster.node.fabric.nccl_environment import Setting, effective
from pytest_gpucluster.node.fabric.nccl_rules import number
from pytest_gpucluster.node.fabric.ports import FabricSources, NodePorts, read_ports
from pytest_gpucluster.node.interfaces import Board, Nodes
from pytest_gpucluster.text import rank_ranges

WITHIN_SECONDS = 60.0
"""How long ranks wait for each other here. None computes before."""
_JUDGED_WITHIN_SECONDS = 2 * WITHIN_SECONDS
"""The rank that compares has waited for the others before."""

OF_A_RANK = ("NCCL_IB_HCA", "UCX_NET_DEVICES", "OMP_NUM_THREADS")
"""A launcher may set these for each rank of a node, so that each uses the card closest to its GPU."""
OF_A_NODE = ("NCCL_SOCKET_IFNAME",)
"""These may differ between nodes: interface names depend on the kind of host."""


@dataclass(frozen=True, kw_only=True)
class PortsReport:
    """What a node knows after the exchange.

    Attributes:
        mine: this node's ports.
        findings: about this node; the first node also has those about nodes that have not reported. Where there are any
            but notes, a note for each rail or leaf switch on which several nodes have a fault is among them.
        anywhere: some node has ports.
    """

    mine: NodePorts
    findings: tuple[Finding, ...]
    anywhere: bool


def ports_of_all(
    board: Board,
    sources: FabricSources,
    settings: Mapping[str, str],
    inventory: Sequence[Mapping[str, Any]],
    rank: int,
    *,
    expected: bool,
    within_seconds: float = WITHIN_SECONDS,
) -> PortsReport | None:
    """Read this node's ports, exchange them with the other nodes, and return the result of comparing them.

    Every rank must call this; on those that do not report for their node it returns None.

    Args:
        board: of this run.
        sources: of the ports.
        settings: NCCL's variables on this rank.
        inventory: the facts of every rank.
        rank: this one.
        expected: InfiniBand or RoCE is expected between the nodes.
        within_seconds: how long to wait for other ranks.

    Raises: EnvironmentBroken, where the rank that compares has not answered.
    """
    own = next(entry for entry in inventory if entry["rank"] == rank)
    nodes = Nodes.of(inventory, int(own["node_rank"]))
    judge = nodes.representatives[min(nodes.representatives)]
    board.post("hca", settings.get("NCCL_IB_HCA", ""))
    if nodes.representative != rank:
        return None
    local = [int(entry["rank"]) for entry in inventory if entry["node_rank"] == nodes.me]
    hcas = board.read("hca", local, within_seconds=within_seconds)
    index = number(settings["NCCL_IB_GID_INDEX"]) if "NCCL_IB_GID_INDEX" in settings else -1
    mine = read_ports(
        sources,
        host=str(own["host"]),
        hcas=[hcas[one] for one in local if one in hcas],
        gid_index=index if index >= 0 else None,
    )
    board.post("ports", codec.to_json(mine))
    if rank == judge:
        board.post("port findings", _compare_nodes(board, nodes, expected=expected, within_seconds=within_seconds))
    answer = board.read("port findings", [judge], within_seconds=_JUDGED_WITHIN_SECONDS).get(judge)
    if answer is None:
        raise EnvironmentBroken(
            f"rank {judge}, which compares the ports of all nodes, has not answered within "
            f"{_JUDGED_WITHIN_SECONDS:g} s; see its output"
        )
    plain = answer["of_node"].get(str(nodes.me), ())
    findings = [Finding(**{**one, "gpu": Identity(**one["gpu"])}) for one in plain]
    if any(finding.kind != "note" for finding in findings):
        for line in answer["shared"]:
            remedy = "look at that switch before the nodes"
            findings.append(note("shared", mine.host, line, allowed="faults of single ports", remedy=remedy))
    return PortsReport(mine=mine, findings=tuple(findings), anywhere=answer["anywhere"])


def _compare_nodes(board: Board, nodes: Nodes, *, expected: bool, within_seconds: float) -> dict[str, Any]:
    """Compare the ports of all nodes, as the first one; return the result in plain types."""
    reports = board.read("ports", list(nodes.representatives.values()), within_seconds=within_seconds)
    ports = {
        one: codec.read(NodePorts, reports[at], "ports") for one, at in nodes.representatives.items() if at in reports
    }
    found = port_checks.examine_ports(ports, expected=expected)
    of_node = {str(one): [asdict(finding) for finding in some] for one, some in found.of_node.items()}
    for node in sorted(nodes.representatives.keys() - ports.keys()):
        silent = environment(
            "silent",
            nodes.hosts[node],
            f"it has not reported its ports within {within_seconds:g} s",
            allowed="a report of every node",
            remedy="see the output of this host's ranks",
        )
        of_node.setdefault(str(nodes.me), []).append(asdict(silent))
    return {"of_node": of_node, "shared": found.shared, "anywhere": any(one.used for one in ports.values())}


@dataclass(frozen=True, kw_only=True)
class SettingsReport:
    """What the first rank knows after the exchange.

    Attributes:
        of_rank: rank -> its variables.
        findings: variables that are not the same on all ranks, each on the host of its first unusual rank, and ranks
            that have not reported.
    """

    of_rank: Mapping[int, tuple[Setting, ...]]
    findings: tuple[Finding, ...]

    def distinct(self) -> list[dict[str, Any]]:
        """Return each different set of variables with its ranks, in plain types."""
        groups: dict[tuple[Setting, ...], list[int]] = {}
        for rank, settings in self.of_rank.items():
            groups.setdefault(settings, []).append(rank)
        return [{"ranks": ranks, "settings": [asdict(one) for one in some]} for some, ranks in groups.items()]


def settings_of_all(
    board: Board,
    mine: Sequence[Setting],
    inventory: Sequence[Mapping[str, Any]],
    rank: int,
    *,
    within_seconds: float = WITHIN_SECONDS,
) -> SettingsReport | None:
    """Send this rank's variables, and return those of all on the first rank; None on the others.

    Every rank must call this. Arguments as of :func:`ports_of_all`.
    """
    board.post("settings", [asdict(setting) for setting in mine])
    ranks = [int(entry["rank"]) for entry in inventory]
    if rank != min(ranks):
        return None
    reports = board.read("settings", ranks, within_seconds=within_seconds)
    of_rank = {one: tuple(map(Setting.from_json, reports[one])) for one in ranks if one in reports}
    findings = list(differences({one: effective(some) for one, some in of_rank.items()}, inventory))
    if silent := [one for one in ranks if one not in reports]:
        findings.append(
            environment(
                "silent",
                next(str(entry["host"]) for entry in inventory if entry["rank"] == silent[0]),
                f"{rank_ranges(silent)} reported no settings within {within_seconds:g} s",
                allowed="every rank",
                remedy="see the output of the named ranks",
            )
        )
    return SettingsReport(of_rank=of_rank, findings=tuple(findings))


def differences(settings: Mapping[int, Mapping[str, str]], inventory: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield each variable that is not the same on all ranks, on the host of its first unusual rank.

    It is a note where that is meant: each node has the same values on the same local ranks, as set by a launcher that
    gives each rank a card of its own; or the variable may differ between nodes, and each node has one value.

    Args:
        settings: rank -> name -> value.
        inventory: the facts of every rank.
    """
    of_rank = {int(entry["rank"]): entry for entry in inventory}
    for name in sorted({name for one in settings.values() for name in one}):
        values = {rank: one.get(name) for rank, one in settings.items()}
        ranks = {
            value: [rank for rank, other in values.items() if other == value]
            for value, _ in Counter(values.values()).most_common()
        }
        if len(ranks) < 2:
            continue
        by = "local_rank" if name in OF_A_RANK else "node_rank" if name in OF_A_NODE else ""
        # Each local rank, or node, has one value.
        is_meant = bool(by) and len({(of_rank[rank][by], value) for rank, value in values.items()}) == len(
            {of_rank[rank][by] for rank in values}
        )
        parts = [f"{'not set' if value is None else value} on {rank_ranges(on)}" for value, on in ranks.items()]
        odd = list(ranks.values())[-1]
        places = ", ".join(dict.fromkeys(str(of_rank[rank]["host"]) for rank in odd))
        yield finding(
            "note" if is_meant else "environment",
            "differs",
            str(of_rank[odd[0]]["host"]),
            f"{name} is {'; '.join(parts)} ({places})",
            allowed="one value on all ranks"
            + (", or one for each local rank, or each node, where that is meant" if is_meant else ""),
            remedy="compare the shells' start files, /etc/nccl.conf and images of the hosts, and check how the "
            "launcher passes the environment on",
        )
