"""Exchange of ports and settings between ranks without a process group, for it happens before NCCL is used.

One rank compares for all. So a thousand ranks read one message each, and not a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.metrics.finding import Finding, environment, finding, note
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.node.fabric.nccl_environment import Setting, effective
from pytest_gpucluster.node.fabric.nccl_rules import number
from pytest_gpucluster.node.fabric.ports import FabricSources, NodePorts, examine_ports, read_ports
from pytest_gpucluster.node.interfaces import Board, Nodes
from pytest_gpucluster.text import rank_ranges

WITHIN_SECONDS = 60.0
"""How long ranks wait for each other here. None computes before."""

MAY_DIFFER = {
    "NCCL_IB_HCA": "local_rank",
    "UCX_NET_DEVICES": "local_rank",
    "OMP_NUM_THREADS": "local_rank",
    "NCCL_SOCKET_IFNAME": "node_rank",
}
"""Variables that may differ between the ranks of a node, for a launcher may give each the card closest to its GPU; or
between nodes, as interface names depend on the kind of host."""


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
) -> PortsReport | None:
    """Read this node's ports, exchange them with the other nodes, and return the result of comparing them.

    Every rank must call this; on those that do not report for their node it returns None.

    ``settings`` are NCCL's variables on this rank.

    Raises: EnvironmentBroken, where the rank that compares has not answered.
    """
    own = next(entry for entry in inventory if entry["rank"] == rank)
    nodes = Nodes.of(inventory, int(own["node_rank"]))
    judge = nodes.representatives[min(nodes.representatives)]
    board.post("hca", settings.get("NCCL_IB_HCA", ""))
    if nodes.representative != rank:
        return None
    local = [int(entry["rank"]) for entry in inventory if entry["node_rank"] == nodes.me]
    hcas = board.read("hca", local, within_seconds=WITHIN_SECONDS)
    index = number(settings.get("NCCL_IB_GID_INDEX", "-1"))
    mine = read_ports(
        sources,
        host=str(own["host"]),
        hcas=[hcas[one] for one in local if one in hcas],
        gid_index=index if index >= 0 else None,
    )
    board.post("ports", codec.to_json(mine))
    if rank == judge:
        board.post("port findings", _compare_nodes(board, nodes, expected=expected))
    # The rank that compares has waited for the others before.
    answer = board.read("port findings", [judge], within_seconds=2 * WITHIN_SECONDS).get(judge)
    if answer is None:
        raise EnvironmentBroken(
            f"rank {judge}, which compares the ports of all nodes, has not answered within "
            f"{2 * WITHIN_SECONDS:g} s; see its output"
        )
    findings = [codec.read(Finding, one, "port findings") for one in answer["of_node"].get(str(nodes.me), ())]
    if any(finding.kind != "note" for finding in findings):
        for line in answer["shared"]:
            remedy = "look at that switch before the nodes"
            findings.append(note("shared", mine.host, line, allowed="faults of single ports", remedy=remedy))
    return PortsReport(mine=mine, findings=tuple(findings), anywhere=answer["anywhere"])


def _compare_nodes(board: Board, nodes: Nodes, *, expected: bool) -> dict[str, Any]:
    """Compare the ports of all nodes, as the first one; return the result in plain types."""
    reports = board.read("ports", list(nodes.representatives.values()), within_seconds=WITHIN_SECONDS)
    ports = {
        one: codec.read(NodePorts, reports[at], "ports") for one, at in nodes.representatives.items() if at in reports
    }
    found = examine_ports(ports, expected=expected)
    for node in sorted(nodes.representatives.keys() - ports.keys()):
        what = f"it has not reported its ports within {WITHIN_SECONDS:g} s"
        found.of_node.setdefault(nodes.me, []).append(_silent(nodes.hosts[node], what))
    anywhere = any(one.used for one in ports.values())
    return {"of_node": codec.to_json(found.of_node), "shared": found.shared, "anywhere": anywhere}


def _silent(host: str, found: str) -> Finding:
    return environment("silent", host, found, allowed="a report of each", remedy="see the output of this host's ranks")


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
        groups = grouped((settings, rank) for rank, settings in self.of_rank.items())
        return [{"ranks": ranks, "settings": [asdict(one) for one in some]} for some, ranks in groups.items()]


def settings_of_all(
    board: Board, mine: Sequence[Setting], inventory: Sequence[Mapping[str, Any]], rank: int
) -> SettingsReport | None:
    """Send this rank's variables, and return those of all on the first rank; None on the others.

    Every rank must call this. Arguments as of :func:`ports_of_all`.
    """
    board.post("settings", [asdict(setting) for setting in mine])
    hosts = {int(entry["rank"]): str(entry["host"]) for entry in inventory}
    if rank != min(hosts):
        return None
    reports = board.read("settings", list(hosts), within_seconds=WITHIN_SECONDS)
    of_rank = {
        one: tuple(codec.read(Setting, each, "settings") for each in reports[one]) for one in hosts if one in reports
    }
    findings = list(differences({one: effective(some) for one, some in of_rank.items()}, inventory))
    if silent := [one for one in hosts if one not in reports]:
        what = f"{rank_ranges(silent)} reported no settings within {WITHIN_SECONDS:g} s"
        findings.append(_silent(hosts[silent[0]], what))
    return SettingsReport(of_rank=of_rank, findings=tuple(findings))


def differences(settings: Mapping[int, Mapping[str, str]], inventory: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield each variable that is not the same on all ranks, on the host of its first unusual rank.

    It is a note where that is meant (:data:`MAY_DIFFER`), and each local rank, or each node, has one value.

    ``settings``: rank -> name -> value.
    """
    of_rank = {int(entry["rank"]): entry for entry in inventory}
    for name in sorted({name for one in settings.values() for name in one}):
        values = {rank: one.get(name) for rank, one in settings.items()}
        ranks = grouped((value, rank) for rank, value in values.items())
        if len(ranks) < 2:
            continue
        by = MAY_DIFFER.get(name)
        places = {(of_rank[rank][by], value) for rank, value in values.items()} if by else set()
        is_meant = bool(by) and len(places) == len({place for place, _ in places})
        (_, most), (_, second), *_ = common = sorted(ranks.items(), key=lambda one: -len(one[1]))
        parts = [f"{'not set' if value is None else value} on {rank_ranges(on)}" for value, on in common]
        # Of equally frequent values none is the usual one.
        odd = [rank for _, on in common[len(most) > len(second) :] for rank in sorted(on)]
        hosts = list(dict.fromkeys(str(of_rank[rank]["host"]) for rank in odd))
        differs = finding(
            "note" if is_meant else "environment",
            "differs",
            hosts[0],
            f"{name} is {'; '.join(parts)} ({', '.join(hosts)})",
            allowed="one value on all ranks" + (f", or one for each {by}, where that is meant" if is_meant else ""),
            remedy="compare the shells' start files, /etc/nccl.conf and images of the hosts, and check how the "
            "launcher passes the environment on",
        )
        yield replace(differs, ranks=tuple(odd))
