"""A fleet of nodes from their runs: the newest run of each, outliers, the results by node and test, and the nodes to
drain; as text that fits the terminal, and as JSON for programs.

Each value is compared with the median of all others, also where no limit failed. It is an outlier where it is behind by
more than is allowed, and far beyond the scatter of the others: its modified z-score, 0.6745 (x - median) /
MAD, is beyond 3.5. Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (ASQC, 1993). Half of the values
can be bad without moving median or MAD. A limit's own ``min_ratio_to_median`` holds over the fleet as well, as it does
inside a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis.output import json_document, table, wrapped
from pytest_gpucluster.analysis.run_view import STATES, key_of
from pytest_gpucluster.isolation.finding import EXCLUDE_FILE, node_sections
from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.judge.misses import straggler_ratios
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.reports.summary import Row, is_better_higher, outline, short_name
from pytest_gpucluster.reports.tables import metric_name, percent, quantity, rank_name
from pytest_gpucluster.text import Column, clean, one_line, printable, shortened, some_of


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """One run of one node."""

    path: Path
    journal: Journal


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node and its runs."""

    name: str
    run: NodeRun
    """The newest."""
    earlier: tuple[NodeRun, ...] = ()

    @property
    def verdict(self) -> str:
        return self.run.journal.verdict

    @property
    def exit(self) -> int:
        return self.run.journal.exit

    @property
    def rejected(self) -> bool:
        """Return whether a limit was missed, or a GPU is bad."""
        return self.exit == 1

    @property
    def rows(self) -> tuple[Row, ...]:
        return outline(self.run.journal).rows

    @property
    def summary(self) -> str:
        """Return the verdict, and the first failure or else its reason."""
        bad = outline(self.run.journal).bad
        why = f"{bad[0].name}: {bad[0].why}" if bad and bad[0].why else self.run.journal.reason
        return f"{self.verdict}: {why}"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All nodes by name, and the journals of no single node."""

    nodes: tuple[Node, ...]
    without_journal: tuple[str, ...] = ()
    """Expected nodes without a journal."""
    unreadable: tuple[tuple[str, str], ...] = ()
    """(node, or path of the journal; why it cannot be read): as a rule the run died at its start."""
    multi_node: tuple[NodeRun, ...] = ()
    """Runs over several nodes: their values belong to no single node."""


def hosts_of(journal: Journal) -> tuple[str, ...]:
    """Return the hosts of a run."""
    own = (journal.run.hostname,) if journal.run.hostname and journal.run.nnodes == 1 else ()
    return journal.hosts or own


def fleet(
    runs: Iterable[NodeRun], *, expected: Sequence[str] = (), unreadable: Sequence[tuple[str, str]] = ()
) -> Fleet:
    """Return the fleet of these runs. Of a node that ran several times the newest run counts.

    Args:
        runs: in any order.
        expected: the nodes that should have run; others are included too.
        unreadable: journals that cannot be read, and why.
    """
    by_host: dict[str, list[NodeRun]] = {}
    multi_node = []
    for run in runs:
        hosts = hosts_of(run.journal)
        if len(hosts) == 1 and run.journal.run.nnodes == 1:
            by_host.setdefault(hosts[0], []).append(run)
        else:
            multi_node.append(run)
    nodes = []
    for name, own in sorted(by_host.items()):
        *earlier, newest = sorted(own, key=lambda run: run.journal.run.started_at)
        nodes.append(Node(name=name, run=newest, earlier=tuple(earlier)))
    absent = [name for name in dict.fromkeys(expected) if name not in by_host]
    failed = {}
    for path, why in unreadable:
        # A sweep leaves each node's run in a folder of its name. Otherwise the node is unknown.
        node = next((part for part in reversed(Path(path).parts) if part in absent), None)
        failed[path] = (path, why.removeprefix(f"{path}: ")) if node is None else (node, why)
    return Fleet(
        nodes=tuple(nodes),
        without_journal=tuple(name for name in absent if name not in {node for node, _ in failed.values()}),
        unreadable=tuple(failed.values()),
        multi_node=tuple(multi_node),
    )


def journals_below(place: Path) -> list[Path]:
    """Return every journal in a folder and below it, each once; links such as ``latest`` are not followed."""
    found = []
    for path in place.rglob(JOURNAL_FILE):
        inside = path.relative_to(place).parts[:-1]
        if not any(place.joinpath(*inside[: depth + 1]).is_symlink() for depth in range(len(inside))):
            found.append(path)
    return sorted(found)


BEHIND_RATIO = 0.03
"""A value that is behind by less is no outlier, at any scatter of the others."""
Z_SCORE = 3.5
FEWEST = 5
"""With fewer values the scatter is unknown, and only a limit's own ratio decides."""

_TO_SIGMA = 0.6745


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A value that is worse than the fleet's."""

    node: str
    nodeid: str
    test: str
    judged: JudgedMetric
    rank: int
    median: float
    """Of all other values of the fleet."""
    behind: float
    """Share by which it is worse than the median."""
    why: str

    @property
    def value(self) -> float:
        return self.judged.values[self.rank]


_Value = tuple[str, TestResult, JudgedMetric, int]
"""Node, test, metric and rank of a value."""


def outliers(fleet: Fleet, *, behind: float = BEHIND_RATIO) -> tuple[Outlier, ...]:
    """Return all outliers, the worst first. GPUs are compared with GPUs of the same SKU in runs of the same kind.

    Args:
        fleet: of nodes.
        behind: the share by which a value must be worse than the median.
    """
    groups: dict[tuple[object, ...], list[_Value]] = {}
    for node in fleet.nodes:
        journal = node.run.journal
        kind = (journal.run.rehearsal, journal.sku, journal.run.world_size)
        for result in journal.results:
            for judged in result.measurements:
                group = groups.setdefault((*kind, result.nodeid, judged.unit, key_of(judged)), [])
                group += [
                    (node.name, result, judged, rank)
                    for rank, value in judged.values.items()
                    if math.isfinite(value) and value >= 0
                ]
    found = [outlier for values in groups.values() if values for outlier in _in_group(values, behind)]
    return tuple(sorted(found, key=lambda outlier: (-outlier.behind, outlier.node)))


def _in_group(values: Sequence[_Value], behind: float) -> Iterator[Outlier]:
    """Yield the outliers among the values of one metric of the whole fleet."""
    metrics = [judged for _, _, judged, _ in values]
    higher = next((better for judged in metrics if (better := is_better_higher(judged)) is not None), None)
    if higher is None or metrics[0].metric in STATES or len({name for name, *_ in values}) < 2:
        return
    required = next(
        (ratio for judged in metrics if judged.limit and (ratio := judged.limit.min_ratio_to_median) is not None), None
    )
    numbers = [judged.values[rank] for _, _, judged, rank in values]
    ratios = straggler_ratios(dict(enumerate(numbers)), "higher" if higher else "lower")
    median, spread = stats.median(numbers), stats.mad(numbers)
    for number, (name, result, judged, rank) in enumerate(values):
        loss = median - numbers[number] if higher else numbers[number] - median
        if loss <= 0:
            continue
        share = _share(loss, judged, rank, median, higher)
        score = _TO_SIGMA * loss / spread if spread > 0 else math.inf
        if required is not None and ratios[number] < required:
            why = f"{100 * ratios[number]:.1f} % of the fleet's median, {100 * required:.4g} % is required"
        elif len(values) >= FEWEST and share > behind and score > Z_SCORE:
            scatter = f"{score:.3g} times" if math.isfinite(score) else "beyond"
            why = f"{100 * share:.3g} % behind the fleet's median, {scatter} its scatter"
        else:
            continue
        yield Outlier(
            node=name,
            nodeid=result.nodeid,
            test=result.name or short_name(result.nodeid),
            judged=judged,
            rank=rank,
            median=median,
            behind=share,
            why=why,
        )


def _share(loss: float, judged: JudgedMetric, rank: int, median: float, higher: bool) -> float:
    """Return the share by which a value is behind: of the median, or of a larger max limit where it has no samples."""
    reference = median
    limit = judged.limit
    if not higher and limit is not None and limit.max is not None and rank not in judged.intervals:
        reference = max(reference, limit.max)
    return loss / reference if reference > 0 else math.inf


OUTLIER, ABSENT = "outlier", "absent"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The result of one test on one node."""

    outcome: str
    """Of its row; ``OUTLIER`` if it passed and is behind the fleet, ``ABSENT`` if its run does not have the test."""
    row: Row | None = None


@dataclass(frozen=True, kw_only=True)
class ListedNode:
    """A node in one of the lists, and why."""

    node: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The results of a fleet by node and test."""

    fleet: Fleet
    names: dict[str, str]
    """Id -> name of each test, in the order in which they ran."""
    cells: dict[tuple[str, str], Cell]
    """(node, test) -> its result."""
    outliers: tuple[Outlier, ...]

    @classmethod
    def of(cls, fleet: Fleet, outliers: Sequence[Outlier]) -> Matrix:
        """Return the matrix of a fleet whose outliers are known."""
        names: dict[str, str] = {}
        cells: dict[tuple[str, str], Cell] = {}
        behind = {(outlier.node, outlier.nodeid) for outlier in outliers}
        for node in fleet.nodes:
            for row in node.rows:
                names.setdefault(row.nodeid, row.name)
                is_outlier = row.outcome == "passed" and (node.name, row.nodeid) in behind
                cells[node.name, row.nodeid] = Cell(outcome=OUTLIER if is_outlier else row.outcome, row=row)
        return cls(fleet=fleet, names=names, cells=cells, outliers=tuple(outliers))

    @property
    def tests(self) -> tuple[str, ...]:
        """Ids, in the order in which they ran."""
        return tuple(self.names)

    def cell(self, node: str, test: str) -> Cell:
        return self.cells.get((node, test), Cell(outcome=ABSENT))

    @property
    def drained(self) -> tuple[ListedNode, ...]:
        """Return the nodes to leave out: those that were rejected, then those that are behind the fleet."""
        found = {node.name: node.summary for node in self.fleet.nodes if node.rejected}
        for outlier in self.outliers:
            found.setdefault(outlier.node, f"outlier: {outlier.test}: {outlier.judged.metric}: {outlier.why}")
        return tuple(ListedNode(node=name, why=why) for name, why in found.items())

    @property
    def without_answer(self) -> tuple[ListedNode, ...]:
        """Return the nodes without a conclusive result, and why."""
        drained = {each.node for each in self.drained}
        rest = [node for node in self.fleet.nodes if node.name not in drained]
        found = [(node.name, node.summary) for node in rest if node.exit != 0]
        for node in rest:
            # Tests of other nodes that this node's run does not have.
            missing = [name for test, name in self.names.items() if self.cell(node.name, test).outcome == ABSENT]
            if node.exit == 0 and missing:
                found.append((node.name, f"did not run {some_of(missing)}"))
        found += self.fleet.unreadable
        found += ((name, "no journal") for name in self.fleet.without_journal)
        return tuple(ListedNode(node=name, why=why) for name, why in found)

    @property
    def mixed(self) -> str:
        """Return why these runs cannot be compared as a fleet, or an empty text."""
        if len({node.run.journal.run.rehearsal for node in self.fleet.nodes}) > 1:
            return "a REHEARSAL on cpu states nothing about hardware, and cannot be compared with runs on GPUs"
        return ""

    @property
    def notes(self) -> Iterator[str]:
        """Yield the differences between nodes that should be alike, and the runs that were left out."""
        runs = [node.run.journal for node in self.fleet.nodes]
        for what, values in (
            ("SKUs", {journal.sku or "unknown" for journal in runs}),
            ("limits", {"+".join(d[:12] for _, d in journal.limit_files) or "not recorded" for journal in runs}),
            ("numbers of ranks", {str(journal.run.world_size) for journal in runs}),
            ("profiles", {journal.profile or "not recorded" for journal in runs}),
        ):
            if len(values) > 1:
                yield f"the nodes have different {what}: {', '.join(sorted(values))}"
        for run in self.fleet.multi_node:
            yield f"{run.path}: a run on {run.journal.run.nnodes} nodes, left out"
        for node in self.fleet.nodes:
            worse = [run for run in node.earlier if run.journal.exit != 0]
            if worse and node.exit == 0:
                yield f"{node.name} passed only when run again; before: {worse[-1].journal.verdict}"
            elif node.earlier:
                yield f"{node.name} ran {len(node.earlier) + 1} times, the newest run counts"


def drain_text(found: Matrix, *, file: str = EXCLUDE_FILE) -> str:
    """Return the text of a drain list: sections as in exclude.txt, and why each node is in them.

    A fleet without such nodes has no sections.

    Raises:
        LaunchError: a host has no name that a host list can hold.
    """
    unknown = [
        f"# no answer, and not in the lists: {printable(one_line(each.node, 200))}" for each in found.without_answer
    ]
    if not found.drained:
        return "\n".join(["# No node of this fleet is to be drained.", *unknown]) + "\n"
    lines = ["# Nodes to leave out of the next jobs: rejected when run alone, or behind the fleet."]
    lines += [printable(one_line(f"# {each.node}: {each.why}", 240)) for each in found.drained]
    return "\n".join([*lines, *unknown, *node_sections((each.node for each in found.drained), file=file)]) + "\n"


_ROWS = 64
_OUTLIERS = 20
_HEADS = (Column(title="node"), Column(title="verdict"), Column(title="tests"))


def fleet_table(found: Matrix, *, width: int = 80, everything: bool = False) -> str:
    """Return a row for each node with the tests that did not pass, the outliers and the lists; the worst come first.

    Args:
        found: the matrix.
        width: columns of the terminal.
        everything: show all nodes, also the good ones of a large fleet, and all outliers.
    """
    width = max(width, 40)
    lines: list[str] = []
    for note in found.notes:
        lines += wrapped(f"note: {note}", width)
    order = _order_of(found)
    nodes = sorted(found.fleet.nodes, key=lambda node: (order[node.name], node.name))
    bad = sum(order[node.name] < _GOOD for node in nodes)
    listed = nodes if everything else nodes[: max(_ROWS, bad)]
    lines += ["", *table(_HEADS, (_node_row(found, node) for node in listed), width)]
    if len(listed) < len(nodes):
        lines.append(f"and {len(nodes) - len(listed)} more good nodes; --all shows them")
    lines += _outlier_lines(found, width, everything)
    for title, named in (("to be drained", found.drained), ("without an answer", found.without_answer)):
        if named:
            lines += ["", f"{title}:"]
            for each in named:
                lines += wrapped(f"{each.node}: {each.why}", width, 2)
    fleet = found.fleet
    total = len(fleet.nodes) + len(fleet.without_journal) + len(fleet.unreadable)
    drained, unanswered = len(found.drained), len(found.without_answer)
    good = total - drained - unanswered
    conclusion = f"{total} nodes: {good} good, {drained} to be drained, {unanswered} without an answer"
    return "\n".join([*lines, "", *wrapped(conclusion, width)]) + "\n"


def _node_row(found: Matrix, node: Node) -> tuple[list[str], list[str]]:
    """Return node, verdict and counts of its tests, and below them the names of those that did not pass."""
    names: dict[str, list[str]] = {}
    for test, name in found.names.items():
        names.setdefault(found.cell(node.name, test).outcome, []).append(name)
    titles = {OUTLIER: "behind", ABSENT: "not in its run"}
    counts = ", ".join(f"{len(tests)} {titles.get(outcome, outcome)}" for outcome, tests in names.items())
    details = [
        f"{titles.get(outcome, outcome)}: {some_of(tests, 6)}"
        for outcome, tests in names.items()
        if outcome != "passed"
    ]
    return [shortened(clean(node.name), 24), node.verdict, counts], details


_GOOD = 3


def _order_of(found: Matrix) -> dict[str, int]:
    """Return node -> its sort key: those to be drained first, then those without an answer; ``_GOOD`` is good."""
    drained, unanswered = ({each.node for each in group} for group in (found.drained, found.without_answer))

    def order(node: str) -> int:
        if node in drained or node in unanswered:
            return 0 if node in drained else 1
        outcomes = {found.cell(node, test).outcome for test in found.tests}
        return _GOOD if outcomes <= {"passed", "skipped", ABSENT} else 2

    return {node.name: order(node.name) for node in found.fleet.nodes}


def _outlier_lines(found: Matrix, width: int, everything: bool) -> Iterator[str]:
    if not found.outliers:
        return
    yield ""
    yield "behind the fleet:"
    listed = found.outliers if everything else found.outliers[:_OUTLIERS]
    journals = {node.name: node.run.journal for node in found.fleet.nodes}
    for outlier in listed:
        who = rank_name(journals[outlier.node], outlier.rank)
        yield from wrapped(f"{who}: {outlier_text(outlier)}", width, 2)
    if len(listed) < len(found.outliers):
        yield f"  and {len(found.outliers) - len(listed)} more; --all shows them"


def outlier_text(outlier: Outlier) -> str:
    """Return the value, the fleet's median, and why it is an outlier."""
    judged = outlier.judged
    metric = metric_name(judged)
    value = quantity(outlier.value, judged.unit, compared_with=outlier.median)
    middle = quantity(outlier.median, judged.unit, compared_with=outlier.value)
    return (
        f"{outlier.test}: {metric} {value}, the fleet's median is {middle} ({percent(-outlier.behind)}): {outlier.why}"
    )


def fleet_document(found: Matrix, *, exit_code: int) -> str:
    """Return the JSON text. docs/compare.md has what each key means."""
    content = {
        "schema_version": 1,
        "exit": exit_code,
        "notes": list(found.notes),
        "tests": [{"test": test, "name": found.names[test]} for test in found.tests],
        "nodes": [
            {
                "node": node.name,
                "journal": str(node.run.path),
                "run_id": node.run.journal.run.run_id,
                "started_at": node.run.journal.run.started_at,
                "verdict": node.verdict,
                "exit": node.exit,
                "reason": node.run.journal.reason,
                "earlier": [{"journal": str(run.path), "verdict": run.journal.verdict} for run in node.earlier],
                "cells": {test: _cell(found.cell(node.name, test)) for test in found.tests},
            }
            for node in found.fleet.nodes
        ],
        "outliers": [_outlier(outlier) for outlier in found.outliers],
        "drain": [{"node": each.node, "why": each.why} for each in found.drained],
        "without_answer": [{"node": each.node, "why": each.why} for each in found.without_answer],
        "left_out": [str(run.path) for run in found.fleet.multi_node],
    }
    return json_document(content)


def _cell(cell: Cell) -> dict[str, Any]:
    headline = cell.row.headline if cell.row is not None else None
    body: dict[str, Any] = {"outcome": cell.outcome}
    if cell.row is not None and cell.row.why:
        body["why"] = cell.row.why
    if headline is not None:
        body |= {
            "metric": headline.metric,
            "labels": dict(headline.labels),
            "value": headline.value,
            "unit": headline.unit,
            "margin_ratio": headline.margin,
        }
    return body


def _outlier(outlier: Outlier) -> dict[str, Any]:
    return {
        "node": outlier.node,
        "rank": outlier.rank,
        "test": outlier.nodeid,
        "metric": outlier.judged.metric,
        "labels": dict(outlier.judged.labels),
        "unit": outlier.judged.unit,
        "value": outlier.value,
        "median": outlier.median,
        "behind_ratio": outlier.behind,
        "why": outlier.why,
    }
