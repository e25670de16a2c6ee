"""An earlier run as the baseline: a value that is worse than there fails, whatever its limit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.analysis.certificate import journal_digest
from pytest_gpucluster.analysis.compare import MISSING, REGRESSED, Change, Terms, changes_of, terms_of
from pytest_gpucluster.analysis.compare_output import pair_text
from pytest_gpucluster.analysis.run_view import Conditions, RunView, key_of, obstacles, without_samples
from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.journal.journal import locate
from pytest_gpucluster.journal.records import KIND_NAMES, TestResult
from pytest_gpucluster.journal.verdict import marked
from pytest_gpucluster.judge.judge import Judgement
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.metrics.codec import to_json
from pytest_gpucluster.reports.tables import metric_name
from pytest_gpucluster.text import MESSAGE_CHARACTERS, first_line, printable

Notes = list[tuple[str, str]]
"""Properties of a test: name and text."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """An earlier run, read once, and the share by which a value may be worse than there."""

    path: Path
    sha256: str
    run: str
    """Id, start and verdict of the run, as text."""
    view: RunView
    allowed: float

    @classmethod
    def read(cls, place: Path, *, allowed: float, kind: str) -> Baseline:
        """Read the baseline of a run that is starting.

        Raises:
            OptionError: it cannot be read, is of another kind of run, or has no value to compare with.
        """
        option = "--gpucluster-baseline"
        try:
            path = locate(place)
            digest, journal = journal_digest(path, without_samples)
        except JournalError as error:
            raise OptionError(f"{option}: {error}") from None
        if journal.run.kind != kind:
            raise OptionError(
                f"{option} {path}: is a {KIND_NAMES[journal.run.kind]}, and this is a {KIND_NAMES[kind]}: they "
                "cannot be compared; name a run of the same kind, or leave the option out"
            )
        view = RunView.of(journal)
        if not any(test.measurements and test.outcome == "passed" for test in view.tests.values()):
            raise OptionError(
                f"{option} {path}: none of its tests passed with a measurement, so there is nothing to "
                "compare with; name a run that was accepted"
            )
        run = f"{journal.run.title}, {marked(journal.verdict, kind)}"
        return cls(path=path, sha256=digest, run=run, view=view, allowed=allowed)

    @property
    def summary(self) -> str:
        """Return one line for the verdict: which baseline, and what is allowed."""
        return f"compared with the baseline {self.path} ({self.run}), {100 * self.allowed:g} % worse is allowed"

    def remark(self, tests: Iterable[Sequence[Mapping[str, Any]]]) -> str:
        """Return one line for the verdict: which baseline, and the number of values compared with it.

        Args:
            tests: the judged metrics of each finished test, as in the journal.
        """
        entries = [
            judged.get("baseline") or {} for measurements in tests for judged in measurements if _decides(judged)
        ]
        compared = sum(each.get("change_ratio") is not None for each in entries)
        if not compared:
            return f"NOTHING could be compared with the baseline {self.path} ({self.run})"
        return f"{self.summary}, {compared} of {len(entries)} values had one there"

    def line(self) -> dict[str, Any]:
        """Return the journal's line."""
        return {"type": "property", "name": "baseline", "value": f"{self.summary}; SHA-256 {self.sha256}"}

    def incompatibility(self, conditions: Conditions) -> str:
        """Return why this run cannot be compared with it, as far as that is known before the first test."""
        known = self.view.conditions
        return "; ".join(obstacles(known, replace(conditions, workload=known.workload)))

    def compare(
        self, judgement: Judgement, *, nodeid: str, name: str, conditions: Conditions, names: Mapping[int, str]
    ) -> tuple[Judgement, Notes]:
        """Compare the values of a test with the baseline's, once the limits have judged them.

        A value that is worse beyond noise and by more than is allowed fails. A value without a counterpart is a note.

        Args:
            judgement: by the limits.
            nodeid: of the test.
            name: of the test in messages.
            conditions: of this run.
            names: rank -> its name in messages.

        Returns:
            the new judgement, and the test's notes.
        """
        stop = "; ".join(obstacles(self.view.conditions, conditions))
        if stop:
            return _not_comparable(judgement, f"cannot be compared with the baseline: {stop}"), []
        before = self.view.tests.get(nodeid)
        if before is None or before.outcome != "passed":
            was = "has no such test" if before is None else f"did not pass it ({before.outcome})"
            return judgement, [("baseline", f"no value to compare with: the baseline {was}")]
        now = TestResult(nodeid=nodeid, name=name, outcome=judgement.outcome, measurements=judgement.measurements)
        terms = terms_of(self.view, RunView(conditions=conditions, tests={}), allowed=self.allowed)
        changes = [_without_absent_ranks(change, terms) for change in changes_of(before, now, terms)]
        by_key = {key_of(change.judged): change for change in changes if change.judged is not None}
        measurements = [self._with_baseline(judged, by_key[key_of(judged)], names) for judged in judgement.measurements]
        notes = [
            (f"baseline[{metric_name(change.judged)}]", _note(change, names))
            for change in sorted(changes, key=lambda change: change.worst.badness)
            if change.decides and change.judged is not None
        ]
        return _with_regressions(judgement, measurements), notes

    def _with_baseline(self, judged: JudgedMetric, change: Change, names: Mapping[int, str]) -> JudgedMetric:
        baseline = {**to_json(change.worst), "allowed_ratio": self.allowed, "decides": change.decides}
        if change.kind != REGRESSED or not change.decides:
            return replace(judged, baseline=baseline)
        worse = {pair.rank: pair for pair in change.of_kind(REGRESSED) if pair.rank is not None}
        what = f"{judged.metric} worse than the baseline by more than {100 * self.allowed:g} %"
        texts = {rank: f"{what}: {pair_text(pair, judged.unit)}" for rank, pair in worse.items()}
        first = next(iter(worse))
        others = [names.get(rank, f"rank {rank}") for rank in worse if rank != first]
        more = f", and {others[0]}" if len(others) == 1 else f", and {len(others)} more ranks" if others else ""
        labels = ", ".join(f"{name}={text}" for name, text in judged.labels.items())
        reason = f"{texts[first]}{f' ({labels})' if labels else ''} on {names.get(first, f'rank {first}')}{more}"
        if judged.reason and judged.status in ("failed", "error"):
            reason = f"{judged.reason}; also: {reason}"
        return replace(
            judged,
            status="failed",
            reason=printable(reason),
            misses={**{rank: printable(text) for rank, text in texts.items()}, **judged.misses},
            baseline=baseline,
        )


def _without_absent_ranks(change: Change, terms: Terms) -> Change:
    """Return a change without the baseline's ranks that this run does not have, such as those of its other nodes.

    They would hide the comparison of the ranks that this run has. A rank of this run without a value stays.
    """
    if not terms.new_ranks:
        return change
    present = {match.old for match in (*terms.of_gpu.values(), *terms.of_slot.values())}
    pairs = tuple(pair for pair in change.pairs if pair.rank is not None or pair.old_rank in (None, *present))
    return replace(change, pairs=pairs) if pairs else change


def _decides(judged: Mapping[str, Any]) -> bool:
    """Return whether a baseline could fail a metric: without a comparison, whether a limit judges it."""
    baseline = judged.get("baseline")
    return bool(baseline["decides"]) if baseline else judged.get("status") != "recorded"


def _note(change: Change, names: Mapping[int, str]) -> str:
    pair = change.worst
    who = f" on {names.get(pair.rank, f'rank {pair.rank}')}" if pair.rank is not None else ""
    kind = "no value to compare with" if pair.kind == MISSING else pair.kind
    return first_line("; ".join(filter(None, (f"{kind}: {pair_text(pair, change.unit)}{who}", change.note))), 300)


def _not_comparable(judgement: Judgement, message: str) -> Judgement:
    """Return the judgement of a test that cannot be compared with the requested baseline: never a pass."""
    if judgement.outcome != "passed":
        return replace(judgement, text=f"{judgement.text}\n\n{message}")
    return replace(judgement, outcome="error", message=first_line(message), text=message)


def _with_regressions(judgement: Judgement, measurements: Sequence[JudgedMetric]) -> Judgement:
    measured = tuple(measurements)
    worse = [
        each
        for each, was in zip(measured, judgement.measurements, strict=True)
        if each.status == "failed" and each.reason != was.reason
    ]
    if not worse:
        return replace(judgement, measurements=measured)
    reasons = [each.reason for each in worse]
    if judgement.outcome == "failed":  # the missed limit comes first
        tail = "; also worse than the baseline"
        message = judgement.message[: MESSAGE_CHARACTERS - len(tail)] + tail
    else:
        more = f"; {len(worse) - 1} more" if len(worse) > 1 else ""
        message = first_line(reasons[0], MESSAGE_CHARACTERS - len(more)) + more
    text = "\n\n".join(filter(None, ("\n".join(reasons), judgement.text)))
    return replace(judgement, outcome="failed", message=message, text=text, measurements=measured)
