"""A fleet of nodes from their runs: the newest run of each, outliers, the results by node and test, and the nodes to
drain; for terminal and page.

Each value is compared with the median of all others, also where no limit failed. It is an outlier where it is behind by
more than is allowed, and far beyond the scatter of the others: its modified z-score, 0.6745 (x - median) /
MAD, is beyond 3.5. Source: Iglewicz and Hoaglin, "How to Detect and Handle Outliers" (ASQC, 1993). Half of the values
can be bad without moving median or MAD. A limit's own ``min_ratio_to_median`` holds over the fleet as well, as it does
inside a run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pytest_gpucluster.analysis.output import Block, Rows, as_page
from pytest_gpucluster.analysis.run_view import STATES, key_of, without_samples
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.isolation.finding import EXCLUDE_FILE, node_sections
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal, read
from pytest_gpucluster.journal.records import KIND_NAMES, TestResult
from pytest_gpucluster.journal.verdict import marked
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.judge.misses import straggler_ratios
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.units import show_apart
from pytest_gpucluster.reports.summary import Row, is_better_higher, outline, short_name
from pytest_gpucluster.reports.tables import metric_name, percent, rank_name
from pytest_gpucluster.text import Column, clean, heads, one_line, plural, printable, shortened, some_of


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
    def journal(self) -> Journal:
        return self.run.journal

    @cached_property
    def rows(self) -> Mapping[str, Row]:
        """Test -> its row in a summary, in the order in which they ran."""
        return {row.nodeid: row for row in outline(self.journal).rows}

    @property
    def summary(self) -> str:
        """Return the verdict, and the first failure or else its reason."""
        bad = outline(self.journal).bad
        why = f"{bad[0].name}: {bad[0].why}" if bad and bad[0].why else self.journal.reason
        return f"{marked(self.journal.verdict, self.journal.run.kind)}: {why}"


def read_runs(paths: Iterable[Path]) -> tuple[list[NodeRun], list[tuple[str, str]]]:
    """Return the runs of all journals that are named or lie below a folder, and the unreadable ones below a folder.

    Raises:
        JournalError: a named journal cannot be read, or a folder has none.
    """
    runs: dict[Path, NodeRun] = {}
    unreadable: dict[Path, tuple[str, str]] = {}
    for path in paths:
        journals = journals_below(path) if path.is_dir() else [path]
        if not journals:
            raise JournalError(f"{path}: no journal.jsonl in this folder or below it")
        for journal in journals:
            try:
                content = read(journal, slim=without_samples, live=True)
            except JournalError as error:
                if journal == path:
                    raise
                unreadable[journal.resolve()] = str(journal), str(error)
            else:
                runs[journal.resolve()] = NodeRun(path=journal, journal=content)
    return list(runs.values()), list(unreadable.values())


def mixed(runs: Iterable[NodeRun]) -> str:
    """Return why these runs cannot be compared, or an empty text."""
    kinds = sorted({f"a {KIND_NAMES[run.journal.run.kind]}" for run in runs})
    return f"{' and '.join(kinds)} cannot be compared" if len(kinds) > 1 else ""


def journals_below(place: Path) -> list[Path]:
    """Return every journal in a folder and below it, each once; links such as ``latest`` are not followed."""
    return sorted(Path(folder, JOURNAL_FILE) for folder, _, files in os.walk(place) if JOURNAL_FILE in files)


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

    def __str__(self) -> str:
        value, middle = show_apart(self.judged.values[self.rank], self.median, self.judged.unit)
        metric = metric_name(self.judged)
        return f"{self.test}: {metric} {value}, the fleet's median is {middle} ({percent(-self.behind)}): {self.why}"


_Value = tuple[str, TestResult, JudgedMetric, int]
"""Node, test, metric and rank of a value."""


def _outliers(nodes: Iterable[Node], behind: float) -> tuple[Outlier, ...]:
    """Return all outliers, the worst first. GPUs are compared with GPUs of the same SKU in runs of the same kind."""
    groups: dict[tuple[object, ...], list[_Value]] = {}
    for node in nodes:
        journal = node.journal
        kind = (journal.run.kind, journal.sku, journal.run.world_size)
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
        reference = median
        if not higher and judged.limit is not None and judged.limit.max is not None and rank not in judged.intervals:
            reference = max(reference, judged.limit.max)  # where a value has no samples
        share = loss / reference if reference > 0 else math.inf
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


OUTLIER, ABSENT = "outlier", "absent"
"""The outcome of a test that passed and is behind the fleet, and of one that a node's run does not have."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All nodes by name, and the journals of no single node."""

    nodes: tuple[Node, ...]
    outliers: tuple[Outlier, ...]
    """The worst first."""
    without_journal: tuple[str, ...]
    """Expected nodes without a journal."""
    unreadable: Mapping[str, str]
    """Node, or path of the journal, -> why it cannot be read: as a rule the run died at its start."""
    multi_node: tuple[NodeRun, ...]
    """Runs over several nodes: their values belong to no single node."""

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Id -> name of each test, in the order in which they ran."""
        found: dict[str, str] = {}
        for node in self.nodes:
            for test, row in node.rows.items():
                found.setdefault(test, row.name)
        return found

    @cached_property
    def _behind(self) -> frozenset[tuple[str, str]]:
        return frozenset((outlier.node, outlier.nodeid) for outlier in self.outliers)

    def outcome(self, node: Node, test: str) -> str:
        """Return the outcome of a test on a node, ``OUTLIER`` or ``ABSENT``."""
        row = node.rows.get(test)
        if row is None:
            return ABSENT
        return OUTLIER if row.outcome == "passed" and (node.name, test) in self._behind else row.outcome

    @cached_property
    def drained(self) -> Mapping[str, str]:
        """Return the nodes to leave out, and why: those that were rejected, then those that are behind the fleet."""
        found = {node.name: node.summary for node in self.nodes if node.journal.exit == 1}
        for outlier in self.outliers:
            found.setdefault(outlier.node, f"outlier: {outlier.test}: {outlier.judged.metric}: {outlier.why}")
        return found

    @cached_property
    def without_answer(self) -> Mapping[str, str]:
        """Return the nodes without a conclusive result, and why."""
        rest = [node for node in self.nodes if node.name not in self.drained]
        found = {node.name: node.summary for node in rest if node.journal.exit != 0}
        for node in rest:
            # Tests of other nodes that this node's run does not have.
            missing = [name for test, name in self.names.items() if test not in node.rows]
            if missing:
                found.setdefault(node.name, f"did not run {some_of(missing)}")
        return {**found, **self.unreadable, **dict.fromkeys(self.without_journal, "no journal")}

    @property
    def is_good(self) -> bool | None:
        """Whether every node is good; None if none is to be drained, but one gave no answer."""
        return False if self.drained else None if self.without_answer else True

    @property
    def notes(self) -> Iterator[str]:
        """Yield the differences between nodes that should be alike, and the runs that were left out."""
        runs = [node.journal for node in self.nodes]
        for what, values in (
            ("SKUs", {journal.sku or "unknown" for journal in runs}),
            ("limits", {"+".join(file.sha256[:12] for file in run.limit_files) or "not recorded" for run in runs}),
            ("numbers of ranks", {str(journal.run.world_size) for journal in runs}),
            ("profiles", {journal.profile or "not recorded" for journal in runs}),
        ):
            if len(values) > 1:
                yield f"the nodes have different {what}: {', '.join(sorted(values))}"
        for run in (one for node in self.nodes for one in (node.run, *node.earlier) if one.journal.cut):
            yield f"{run.path}: its last line is truncated and left out"
        for run in self.multi_node:
            yield f"{run.path}: a run on {run.journal.run.nnodes} nodes, left out"
        for node in self.nodes:
            worse = [run for run in node.earlier if run.journal.exit != 0]
            if worse and node.journal.exit == 0:
                yield f"{node.name} passed only when run again; before: {worse[-1].journal.verdict}"
            elif node.earlier:
                yield f"{node.name} ran {len(node.earlier) + 1} times, the newest run counts"


def fleet(
    runs: Iterable[NodeRun],
    *,
    expected: Sequence[str] = (),
    unreadable: Sequence[tuple[str, str]] = (),
    behind: float = BEHIND_RATIO,
) -> Fleet:
    """Return the fleet of these runs. Of a node that ran several times the newest run counts.

    Args:
        runs: in any order.
        expected: the nodes that should have run; others are included too.
        unreadable: journals that cannot be read, and why.
        behind: the share by which the value of an outlier is worse than the median.
    """
    by_host: dict[str, list[NodeRun]] = {}
    multi_node = []
    for run in runs:
        about = run.journal.run
        hosts = run.journal.hosts or ((about.hostname,) if about.hostname else ())
        if len(hosts) == 1 and about.nnodes == 1:
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
        failed[node or path] = why if node is not None else why.removeprefix(f"{path}: ")
    return Fleet(
        nodes=tuple(nodes),
        outliers=_outliers(nodes, behind),
        without_journal=tuple(name for name in absent if name not in failed),
        unreadable=failed,
        multi_node=tuple(multi_node),
    )


def drain_text(found: Fleet, *, file: str = EXCLUDE_FILE) -> str:
    """Return the text of a drain list: sections as in exclude.txt, and why each node is in them.

    A fleet without such nodes has no sections.

    Raises:
        LaunchError: a host has no name that a host list can hold.
    """
    unknown = [f"# no answer, and not in the lists: {printable(one_line(name, 200))}" for name in found.without_answer]
    if not found.drained:
        return "\n".join(["# No node of this fleet is to be drained.", *unknown]) + "\n"
    lines = ["# Nodes to leave out of the next jobs: rejected when run alone, or behind the fleet."]
    lines += [printable(one_line(f"# {name}: {why}", 240)) for name, why in found.drained.items()]
    return "\n".join([*lines, *unknown, *node_sections(found.drained, file=file)]) + "\n"


_ROWS = 64
_OUTLIERS = 20
_HEADS = heads("node, verdict, tests")


def fleet_blocks(found: Fleet) -> Iterator[Block]:
    """Yield a row for each node with the tests that did not pass, the outliers and the lists; the worst come first.

    Of a large fleet the good nodes and the outliers are listed in part; the page has the matrix of nodes and tests.
    """
    yield from (f"note: {note}" for note in found.notes)
    nodes = sorted(found.nodes, key=lambda node: _order(found, node))
    bad = sum(_order(found, node) < _GOOD for node in nodes)
    yield ""
    rows = [_node_row(found, node) for node in nodes[: max(_ROWS, bad)]]
    yield Rows(caption="Nodes, the worst first", heads=_HEADS, rows=rows)
    if len(nodes) > max(_ROWS, bad):
        yield f"and {len(nodes) - max(_ROWS, bad)} more good nodes"
    yield Rows(
        caption="Nodes and tests",
        heads=[Column(title=name) for name in ("node", *found.names.values())],
        rows=[
            ([node.name, *(_MARKS.get(found.outcome(node, test), "?") for test in found.names)], ()) for node in nodes
        ],
        on_page_only=True,
    )
    if found.outliers:
        yield from ("", "behind the fleet:")
    journals = {node.name: node.journal for node in found.nodes}
    for outlier in found.outliers[:_OUTLIERS]:
        yield f"  {rank_name(journals[outlier.node], outlier.rank)}: {outlier}"
    if len(found.outliers) > _OUTLIERS:
        yield f"  and {len(found.outliers) - _OUTLIERS} more"
    for title, named in (("to be drained", found.drained), ("without an answer", found.without_answer)):
        if named:
            yield from ("", f"{title}:")
        yield from (f"  {name}: {why}" for name, why in named.items())
    yield from ("", fleet_text(found))


def fleet_text(found: Fleet) -> str:
    """Return how many nodes are good, to be drained, and without an answer."""
    total = len(found.nodes) + len(found.without_journal) + len(found.unreadable)
    drained, unanswered = len(found.drained), len(found.without_answer)
    conclusion = f"{total - drained - unanswered} good, {drained} to be drained, {unanswered} without an answer"
    return f"{plural(total, 'node')}: {conclusion}"


_MARKS = {"passed": "OK", "failed": "failed", "error": "broken", OUTLIER: "behind", "skipped": "-", ABSENT: ""}
"""Outcome -> its mark in the matrix."""
_GOOD = 3


def _order(found: Fleet, node: Node) -> int:
    """Return a sort key: nodes to be drained first, then those without an answer; ``_GOOD`` is good."""
    if node.name in found.drained:
        return 0
    if node.name in found.without_answer:
        return 1
    outcomes = {found.outcome(node, test) for test in found.names}
    return _GOOD if outcomes <= {"passed", "skipped"} else 2


def _node_row(found: Fleet, node: Node) -> tuple[list[str], list[str]]:
    names: dict[str, list[str]] = {}
    titles = {OUTLIER: "behind", ABSENT: "not in its run"}
    for test, name in found.names.items():
        outcome = found.outcome(node, test)
        names.setdefault(titles.get(outcome, outcome), []).append(name)
    counts = ", ".join(f"{len(tests)} {title}" for title, tests in names.items())
    details = [f"{title}: {some_of(tests, 6)}" for title, tests in names.items() if title != "passed"]
    return [shortened(clean(node.name), 24), marked(node.journal.verdict, node.journal.run.kind), counts], details


def fleet_page(found: Fleet) -> str:
    """Return the fleet as an HTML document, with the matrix of nodes and tests."""
    kind = found.nodes[0].journal.run.kind if found.nodes else ""
    return as_page(marked("Fleet", kind), fleet_blocks(found), is_good=found.is_good, reasons=[fleet_text(found)])
