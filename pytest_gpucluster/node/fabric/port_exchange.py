"""Exchange of ports and settings between ranks without a process group, for it happens before NCCL is used.

One rank compares for all. So a thousand ranks read one message each, and not a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.node.fabric import port_checks
from pytest_gpucluster.node.fabric.nccl_environment import Difference, Setting, differences, effective
from pytest_gpucluster.node.fabric.nccl_rules import number
from pytest_gpucluster.node.fabric.ports import FabricSources, NodePorts, read_ports
from pytest_gpucluster.text import rank_ranges

WITHIN_SECONDS = 60.0
"""How long ranks wait for each other here. None computes before."""
_JUDGED_WITHIN_SECONDS = 2 * WITHIN_SECONDS
"""The rank that compares has waited for the others before."""


class Board(Protocol):
    """Messages between ranks: ``agreement.store.Board``."""

    def post(self, name: str, value: Any) -> None: ...
    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> Mapping[int, Any]: ...


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


def reporters(inventory: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return node -> the rank that reports for it, which is its first."""
    first: dict[int, int] = {}
    for entry in sorted(inventory, key=lambda entry: (entry["node_rank"], entry["local_rank"])):
        first.setdefault(int(entry["node_rank"]), int(entry["rank"]))
    return first


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
    by_node = reporters(inventory)
    own = next(entry for entry in inventory if entry["rank"] == rank)
    node, judge = int(own["node_rank"]), by_node[min(by_node)]
    board.post("hca", settings.get("NCCL_IB_HCA", ""))
    if by_node[node] != rank:
        return None
    local = [int(entry["rank"]) for entry in inventory if entry["node_rank"] == node]
    hcas = board.read("hca", local, within_seconds=within_seconds)
    index = number(settings["NCCL_IB_GID_INDEX"]) if "NCCL_IB_GID_INDEX" in settings else -1
    mine = read_ports(
        sources,
        host=str(own["host"]),
        hcas=[hcas[one] for one in local if one in hcas],
        gid_index=index if index >= 0 else None,
    )
    board.post("ports", mine.to_json())
    if rank == judge:
        reports = board.read("ports", list(by_node.values()), within_seconds=within_seconds)
        nodes = {one: NodePorts.from_json(reports[by_node[one]]) for one in by_node if by_node[one] in reports}
        found = port_checks.examine_ports(nodes, expected=expected)
        of_node = {str(one): [asdict(finding) for finding in some] for one, some in found.of_node.items()}
        hosts = {int(entry["rank"]): str(entry["host"]) for entry in inventory}
        silent = [hosts[reporter] for one, reporter in by_node.items() if one not in nodes]
        of_node.setdefault(str(node), []).extend(asdict(_silent(host, within_seconds)) for host in silent)
        anywhere = any(one.used for one in nodes.values())
        board.post("port findings", {"of_node": of_node, "shared": list(found.shared), "anywhere": anywhere})
    answer = board.read("port findings", [judge], within_seconds=_JUDGED_WITHIN_SECONDS).get(judge)
    if answer is None:
        raise EnvironmentBroken(
            f"rank {judge}, which compares the ports of all nodes, has not answered within "
            f"{_JUDGED_WITHIN_SECONDS:g} s; see its output"
        )
    findings = [_finding(one) for one in answer["of_node"].get(str(node), ())]
    if any(finding.kind != "note" for finding in findings):
        findings += [_shared(mine.host, line) for line in answer["shared"]]
    return PortsReport(mine=mine, findings=tuple(findings), anywhere=answer["anywhere"])


@dataclass(frozen=True, kw_only=True)
class SettingsReport:
    """What the first rank knows after the exchange.

    Attributes:
        of_rank: rank -> its variables.
        differences: those that are not the same on all ranks.
        silent: ranks that have not reported.
    """

    of_rank: Mapping[int, tuple[Setting, ...]]
    differences: tuple[Difference, ...]
    silent: tuple[int, ...]

    def findings(self, inventory: Sequence[Mapping[str, Any]]) -> list[Finding]:
        """Return the differences as findings, each on the host of its first unusual rank."""
        hosts = {int(entry["rank"]): str(entry["host"]) for entry in inventory}
        found = []
        for one in self.differences:
            odd = list(one.by_value.values())[-1]
            places = ", ".join(dict.fromkeys(hosts[rank] for rank in odd))
            found.append(
                Finding(
                    code="differs",
                    kind="note" if one.is_meant else "environment",
                    gpu=Identity(host=hosts[odd[0]]),
                    found=f"{one} ({places})",
                    allowed="one value on all ranks"
                    + (", or one for each local rank, or each node, where that is meant" if one.is_meant else ""),
                    remedy="compare the shells' start files, /etc/nccl.conf and images of the hosts, and check how "
                    "the launcher passes the environment on",
                )
            )
        if self.silent:
            found.append(
                Finding(
                    code="silent",
                    kind="environment",
                    gpu=Identity(host=hosts[self.silent[0]]),
                    found=f"{rank_ranges(self.silent)} reported no settings within {WITHIN_SECONDS:g} s",
                    allowed="every rank",
                    remedy="see the output of the named ranks",
                )
            )
        return found

    def distinct(self) -> list[dict[str, Any]]:
        """Return each different set of variables with its ranks, in plain types."""
        groups: dict[tuple[Setting, ...], list[int]] = {}
        for rank, settings in self.of_rank.items():
            groups.setdefault(settings, []).append(rank)
        return [{"ranks": ranks, "settings": [one.to_json() for one in some]} for some, ranks in groups.items()]


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
    board.post("settings", [setting.to_json() for setting in mine])
    ranks = [int(entry["rank"]) for entry in inventory]
    if rank != min(ranks):
        return None
    reports = board.read("settings", ranks, within_seconds=within_seconds)
    of_rank = {one: tuple(Setting.from_json(setting) for setting in reports[one]) for one in ranks if one in reports}
    local = {int(entry["rank"]): int(entry["local_rank"]) for entry in inventory}
    nodes = {int(entry["rank"]): int(entry["node_rank"]) for entry in inventory}
    return SettingsReport(
        of_rank=of_rank,
        differences=tuple(differences({one: effective(some) for one, some in of_rank.items()}, local, nodes)),
        silent=tuple(one for one in ranks if one not in reports),
    )


def _silent(host: str, within_seconds: float) -> Finding:
    return Finding(
        code="silent",
        kind="environment",
        gpu=Identity(host=host),
        found=f"it has not reported its ports within {within_seconds:g} s",
        allowed="a report of every node",
        remedy="see the output of this host's ranks",
    )


def _shared(host: str, line: str) -> Finding:
    return Finding(
        code="shared",
        kind="note",
        gpu=Identity(host=host),
        found=line,
        allowed="faults of single ports",
        remedy="look at that switch before the nodes",
    )


def _finding(plain: Mapping[str, Any]) -> Finding:
    return Finding(**{**plain, "gpu": Identity(**plain["gpu"])})
