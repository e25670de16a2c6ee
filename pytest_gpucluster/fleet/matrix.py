"""The nodes and the criteria: what came of each, and who is to be left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.fleet.node import Fleet, Node
from pytest_gpucluster.fleet.outliers import Outlier
from pytest_gpucluster.reports.outline import NOT_RUN, RUNNING, Row

OUTLIER, ABSENT = "outlier", "absent"
MARKS = {
    "passed": ".",
    OUTLIER: "o",
    "failed": "F",
    "error": "E",
    RUNNING: "E",
    "skipped": "s",
    NOT_RUN: "-",
    ABSENT: " ",
}
"""Outcome of a cell -> its mark."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What came of one test on one node."""

    outcome: str
    row: Row | None = None
    outliers: tuple[Outlier, ...] = ()

    @property
    def mark(self) -> str:
        return MARKS.get(self.outcome, "E")


@dataclass(frozen=True, kw_only=True)
class Drained:
    """A node to leave out, and why."""

    node: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """All of it."""

    fleet: Fleet
    tests: tuple[str, ...]
    """Ids, in the order in which they ran."""
    names: dict[str, str]
    cells: dict[tuple[str, str], Cell]
    """(node, test) -> what came of it."""
    outliers: tuple[Outlier, ...]

    def cell(self, node: str, test: str) -> Cell:
        return self.cells.get((node, test), Cell(outcome=ABSENT))

    @property
    def drained(self) -> tuple[Drained, ...]:
        """Return the nodes to leave out: those that were rejected, then those that are behind the fleet."""
        found = [
            Drained(node=node.name, why=f"{node.verdict}: {node.failure}") for node in self.fleet.nodes if node.rejected
        ]
        named = {each.node for each in found}
        for outlier in self.outliers:
            if outlier.node not in named:
                named.add(outlier.node)
                found.append(
                    Drained(node=outlier.node, why=f"outlier: {outlier.test}: {outlier.judged.metric}: {outlier.why}")
                )
        return tuple(found)

    @property
    def without_answer(self) -> tuple[Drained, ...]:
        """Return the nodes of which nobody can say whether they are good, and why."""
        named = {each.node for each in self.drained}
        found = [
            Drained(node=node.name, why=f"{node.verdict}: {node.failure}")
            for node in self.fleet.nodes
            if node.exit != 0 and node.name not in named
        ]
        found += [
            Drained(
                node=node.name,
                why=f"did not run {', '.join(self.names[test] for test in missing[:3])}"
                + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
            )
            for node in self.fleet.nodes
            if node.exit == 0 and node.name not in named and (missing := self._missing(node))
        ]
        found += [Drained(node=where, why=why) for where, why in self.fleet.unreadable]
        return (*found, *(Drained(node=name, why="no journal") for name in self.fleet.silent))

    def _missing(self, node: Node) -> list[str]:
        """Return the tests that others have run and that this node does not even have."""
        return [test for test in self.tests if self.cell(node.name, test).outcome == ABSENT]

    @property
    def mixed(self) -> str:
        """Return why these runs are no fleet, or an empty text."""
        runs = [node.answer.journal for node in self.fleet.nodes]
        if len({journal.run.rehearsal for journal in runs}) > 1:
            return "a REHEARSAL on cpu says nothing about hardware, and cannot stand beside runs on GPUs"
        return ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return in what the nodes differ that should be alike, and what was left out."""
        runs = [node.answer.journal for node in self.fleet.nodes]
        said = []
        for what, values in (
            ("SKUs", [journal.limits.sku or "unknown" if journal.limits else "not on record" for journal in runs]),
            ("limits", [_digests(journal.limits.files if journal.limits else ()) for journal in runs]),
            ("numbers of ranks", [str(journal.run.world_size) for journal in runs]),
            ("profiles", [journal.workload.profile if journal.workload else "not on record" for journal in runs]),
        ):
            if len(set(values)) > 1:
                said.append(f"the nodes have different {what}: {', '.join(sorted(set(values)))}")
        said += [f"{answer.path}: a run on {answer.journal.run.nnodes} nodes, left out" for answer in self.fleet.joint]
        for node in self.fleet.nodes:
            worse = [answer for answer in node.earlier if answer.journal.exit != 0]
            if worse and node.exit == 0:
                said.append(f"{node.name} has passed only when run again; before: {worse[-1].journal.verdict}")
            elif node.earlier:
                said.append(f"{node.name} ran {len(node.earlier) + 1} times, the newest run counts")
        return tuple(said)


def matrix(fleet: Fleet, found: Sequence[Outlier]) -> Matrix:
    """Return the matrix of a fleet whose outliers are known."""
    names: dict[str, str] = {}
    cells: dict[tuple[str, str], Cell] = {}
    behind: dict[tuple[str, str], list[Outlier]] = {}
    for outlier in found:
        behind.setdefault((outlier.node, outlier.nodeid), []).append(outlier)
    for node in fleet.nodes:
        for row in node.rows:
            names.setdefault(row.nodeid, row.name)
            own = tuple(behind.get((node.name, row.nodeid), ()))
            outcome = OUTLIER if own and row.outcome == "passed" else row.outcome
            cells[node.name, row.nodeid] = Cell(outcome=outcome, row=row, outliers=own)
    return Matrix(fleet=fleet, tests=tuple(names), names=names, cells=cells, outliers=tuple(found))


def _digests(files: Sequence[tuple[str, str]]) -> str:
    return "+".join(digest[:12] for _, digest in files) or "not on record"
