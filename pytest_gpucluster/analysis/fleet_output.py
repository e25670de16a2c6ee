"""A fleet as text that fits the terminal, and as JSON for programs.

The text has one mark for each node and criterion, then the nodes that are behind and those to drain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pytest_gpucluster.analysis.fleet import ABSENT, Cell, Matrix, Outlier
from pytest_gpucluster.analysis.output import json_document, wrapped
from pytest_gpucluster.reports.tables import metric_name, percent, quantity, rank_name
from pytest_gpucluster.text import one_line, printable, shortened

LEGEND = (
    ". passed; o passed, but behind the fleet; F failed; E broke; s skipped",
    "- not run; no mark: not in its run",
)
_ROWS = 64
_OUTLIERS = 20
_LONGEST = 400
_NAME = 24
_VERDICT = 16
_LEAST = 10
_GOOD = 3


def fleet_table(found: Matrix, *, width: int = 80, everything: bool = False) -> str:
    """Return the matrix, the outliers and the lists; the worst nodes come first.

    Args:
        found: the matrix.
        width: columns of the terminal.
        everything: show all nodes, also the good ones of a large fleet, and all outliers.
    """
    width = max(width, 40)
    lines: list[str] = []
    for note in found.notes:
        lines += wrapped(f"note: {note}", width)
    lines += _matrix(found, width, everything)
    lines += _outliers(found, width, everything)
    for title, named in (("to be drained", found.drained), ("without an answer", found.without_answer)):
        if named:
            lines += ["", f"{title}:"]
            for each in named:
                lines += wrapped(f"{each.node}: {each.why}", width, 2)
    return "\n".join([*lines, "", *wrapped(fleet_conclusion(found), width)]) + "\n"


def fleet_conclusion(found: Matrix) -> str:
    """Return the last line."""
    fleet = found.fleet
    total = len(fleet.nodes) + len(fleet.without_journal) + len(fleet.unreadable)
    good = total - len(found.drained) - len(found.without_answer)
    return (
        f"{total} nodes: {good} good, {len(found.drained)} to be drained, {len(found.without_answer)} without an answer"
    )


def _matrix(found: Matrix, width: int, everything: bool) -> Iterator[str]:
    order = _order_of(found)
    nodes = sorted(found.fleet.nodes, key=lambda node: (order[node.name], node.name))
    bad = [node for node in nodes if order[node.name] < _GOOD]
    listed = nodes if everything or len(nodes) <= _ROWS else [*bad, *nodes[len(bad) :]][: max(_ROWS, len(bad))]
    name = min(_NAME, max([len("node"), *(len(_plain(node.name, _NAME)) for node in listed)]))
    verdict = max([len("verdict"), *(len(_plain(node.verdict, _VERDICT)) for node in listed)])
    room = max(_LEAST, width - name - verdict - 4)
    for start in range(0, max(len(found.tests), 1), room):
        tests = found.tests[start : start + room]
        yield ""
        numbers = [str(start + at + 1) for at in range(len(tests))]
        digits = max(map(len, numbers), default=1)
        for line in range(digits):
            head = ("node", "verdict") if line == digits - 1 else ("", "")
            column = "".join(number.rjust(digits)[line] for number in numbers)
            yield f"{head[0]:<{name}}  {head[1]:<{verdict}}  {column}".rstrip()
        for node in listed:
            marks = "".join(found.cell(node.name, test).mark for test in tests)
            yield f"{_plain(node.name, name):<{name}}  {_plain(node.verdict, verdict):<{verdict}}  {marks}".rstrip()
    if len(listed) < len(nodes):
        yield f"and {len(nodes) - len(listed)} more good nodes; --all shows them"
    yield ""
    for legend in LEGEND:
        yield from wrapped(legend, width)
    digits = len(str(len(found.tests)))
    names = (found.names[test] for test in found.tests)
    yield from _columns([f"{number:>{digits}} {_plain(name, _LONGEST)}" for number, name in enumerate(names, 1)], width)


def _columns(texts: Sequence[str], width: int) -> Iterator[str]:
    """Yield texts in as many columns as fit, read from top to bottom."""
    texts = [shortened(text, width) for text in texts]
    widest = max(map(len, texts), default=1)
    across = max(1, (width + 2) // (widest + 2))
    down = -(-len(texts) // across)
    for line in range(down):
        yield "  ".join(f"{text:<{widest}}" for text in texts[line::down]).rstrip()


def _order_of(found: Matrix) -> dict[str, int]:
    """Return node -> its sort key: those to be drained first, then those without an answer."""
    drained, unanswered = ({each.node for each in group} for group in (found.drained, found.without_answer))

    def order(node: str) -> int:
        if node in drained or node in unanswered:
            return 0 if node in drained else 1
        outcomes = {found.cell(node, test).outcome for test in found.tests}
        return _GOOD if outcomes <= {"passed", "skipped", ABSENT} else 2

    return {node.name: order(node.name) for node in found.fleet.nodes}


def _outliers(found: Matrix, width: int, everything: bool) -> Iterator[str]:
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


def _plain(text: str, characters: int) -> str:
    return printable(one_line(text, characters))


SCHEMA_VERSION = 1


def fleet_document(found: Matrix, *, exit_code: int) -> str:
    """Return the JSON text. docs/compare.md has what each key means."""
    content = {
        "schema_version": SCHEMA_VERSION,
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
