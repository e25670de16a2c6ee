"""A comparison of two runs as blocks for terminal and page, the worst first, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pytest_gpucluster.analysis import compare
from pytest_gpucluster.analysis.output import Block, Rows, json_document
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.metrics.codec import to_json
from pytest_gpucluster.reports.summary import is_better_higher
from pytest_gpucluster.reports.tables import metric_name, percent, quantity, rank_name
from pytest_gpucluster.text import heads

_ROWS = 40
_RANKS = 4
_HEADS = heads("kind, change, before, now", right="change, before, now")


def comparison_blocks(
    comparison: compare.Comparison, old: Journal, new: Journal, *, everything: bool = False
) -> Iterator[Block]:
    """Yield the answer, the differences between the runs, and a row for each relevant change, or for all changes.

    Args:
        comparison: of two runs.
        old: the journal before, which names its ranks.
        new: the journal now.
        everything: include changes that are the same, within noise, or decide nothing.
    """
    yield answer_text(comparison)
    yield from (f"not comparable: {obstacle}" for obstacle in comparison.obstacles)
    yield from (f"note: {note}" for note in comparison.notes)
    kinds = (compare.REGRESSED, *compare.OPEN, compare.WORSE, compare.BETTER)
    relevant = [each for each in comparison.changes if everything or (each.decides and each.kind in kinds)]
    rows = relevant if everything else relevant[:_ROWS]
    if rows:
        yield ""
        cells = [(_cells(change), list(_details(change, old, new))) for change in rows]
        yield Rows(caption="Changes, the worst first", heads=_HEADS, rows=cells)
    hidden = len(comparison.changes) - len(rows)
    if hidden:
        more = f"and {len(relevant) - len(rows)} more of these; " if len(relevant) > len(rows) else ""
        rest = len(comparison.changes) - len(relevant)
        irrelevant = f"{rest} more metrics are the same, within noise, or decide nothing; " if rest else ""
        yield ""
        yield f"{more}{irrelevant}--all shows them"


def answer_text(comparison: compare.Comparison) -> str:
    """Return the answer in one sentence."""
    allowed = f"{100 * comparison.allowed:g} %"
    regressed, undecided = (_count(len(some)) for some in (comparison.regressed, comparison.undecided))
    sentences = {
        compare.REGRESSION: f"REGRESSION: {regressed} worse than before beyond noise and by more than {allowed}",
        compare.NOT_COMPARED: "NOT COMPARABLE: no value that decides can be compared between these two runs",
        compare.NO_REGRESSION: f"NO REGRESSION: nothing is worse than before beyond noise and by more than {allowed}",
        compare.UNDECIDED: f"UNDECIDED: nothing is surely worse by more than {allowed}, but {undecided} without answer",
    }
    counts = ", ".join(f"{comparison.counts[kind]} {kind}" for kind in compare.KINDS if kind in comparison.counts)
    return sentences[comparison.answer] + (f" ({counts})" if counts else "")


def change_text(change: float | None) -> str:
    """Return a change as "-12.3 %"; beyond ten times as "< -1000 %"; "" where it is unknown."""
    if change is None or abs(change) <= 10:
        return "" if change is None else percent(change)
    return "< -1000 %" if change < 0 else "> +1000 %"


def _quantities(pair: compare.Pair, unit: str) -> tuple[str, str] | None:
    if pair.old is None or pair.new is None:
        return None
    before, now = pair.old.value, pair.new.value
    return quantity(before, unit, compared_with=now), quantity(now, unit, compared_with=before)


def pair_text(pair: compare.Pair, unit: str) -> str:
    """Return "731 TFLOPS before, 312.4 TFLOPS now (-57.3 %)", as far as both are known."""
    quantities = _quantities(pair, unit)
    if quantities is None:
        return pair.why
    change = "" if pair.change_ratio is None else f" ({change_text(pair.change_ratio)})"
    return f"{quantities[0]} before, {quantities[1]} now{change}" + (f": {pair.why}" if pair.why else "")


def _cells(change: compare.Change) -> tuple[str, str, str, str]:
    kind = change.kind if change.decides else f"({change.kind})"
    quantities = _quantities(change.worst, change.unit)
    return (kind, "", "", "") if quantities is None else (kind, change_text(change.worst.change_ratio), *quantities)


def _details(change: compare.Change, old: Journal, new: Journal) -> Iterator[str]:
    yield change.test.name if change.judged is None else f"{change.test.name}: {metric_name(change.judged)}"
    if change.note:
        yield change.note
    same_kind = change.of_kind(change.kind)
    listed = same_kind[: _RANKS if len(change.pairs) > 1 else 1]
    for number, pair in enumerate(listed):
        # The values of the first pair are in the row above.
        details = pair_text(pair, change.unit) if number else pair.why
        text = ": ".join(filter(None, (_name(pair, old, new), details)))
        if text:
            yield text
    if len(same_kind) > len(listed):
        yield f"and {len(same_kind) - len(listed)} more, {len(same_kind)} of {len(change.pairs)} in all"


def _name(pair: compare.Pair, old: Journal, new: Journal) -> str:
    if pair.rank is not None:
        return rank_name(new, pair.rank)
    return f"{rank_name(old, pair.old_rank)} before" if pair.old_rank is not None else ""


def _count(results: int) -> str:
    return "1 result is" if results == 1 else f"{results} results are"


SCHEMA_VERSION = 1


def comparison_document(
    comparison: compare.Comparison, *, old: dict[str, Any], new: dict[str, Any], exit_code: int
) -> str:
    """Return the JSON text; ``old`` and ``new`` identify the runs. docs/compare.md has what each key means."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "answer": comparison.answer,
        "exit": exit_code,
        "allowed_ratio": comparison.allowed,
        "partial": comparison.partial,
        "old": old,
        "new": new,
        "obstacles": list(comparison.obstacles),
        "notes": list(comparison.notes),
        "counts": comparison.counts,
    }
    # A change a line, each made text by itself: of a thousand ranks all of them at once are large.
    changes = ",\n".join(f"  {json.dumps(to_json(_change(change)), allow_nan=False)}" for change in comparison.changes)
    head = json_document(content).removesuffix("\n}\n")
    return f'{head},\n "changes": [\n{changes}\n ]\n}}\n'


def _change(change: compare.Change) -> dict[str, Any]:
    judged = change.judged
    higher = None if judged is None else is_better_higher(judged)
    return {
        "test": change.test.nodeid,
        "criterion": change.test.criterion,
        "metric": None if judged is None else judged.metric,
        "labels": {} if judged is None else dict(judged.labels),
        "unit": change.unit,
        "better": None if higher is None else "higher" if higher else "lower",
        "decides": change.decides,
        "kind": change.kind,
        "note": change.note,
        "values": change.pairs,
    }
