"""pytest's own reports of a test: on rank 0 they say what all ranks agreed on, and go on record."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from _pytest.outcomes import Failed  # pytest.fail.Exception, under the name that type checkers know

from pytest_gpucluster.agreement.exchange import Merged
from pytest_gpucluster.failure import MergedRepr, line_of, skip_reason
from pytest_gpucluster.journal.test_record import TestRecord, unique
from pytest_gpucluster.reports.criterion_text import summary_text
from pytest_gpucluster.reports.summary import row_of

if TYPE_CHECKING:
    from pytest_gpucluster.isolating import Isolator
    from pytest_gpucluster.run import Run


class FailedSubtests(Failed):
    """Subtests have failed: told at the end of the body, so that every rank hears of it."""

    def __init__(self, reports: Sequence[pytest.TestReport]) -> None:
        count = f"{len(reports)} subtest{'s' * (len(reports) > 1)} failed"
        texts = [f"{_subtest(report)}\n{report.longreprtext}" for report in reports]
        summary = f"{count}: {_subtest(reports[0])}: {line_of(reports[0])}"
        super().__init__("\n\n".join([summary, *texts]), pytrace=False)


class Shown:
    """The reports of one rank's tests, as they pass by. Main thread only."""

    def __init__(self, run: Run, isolator: Isolator) -> None:
        self._run = run
        self._isolator = isolator
        self._merged: weakref.WeakKeyDictionary[pytest.TestReport, Merged] = weakref.WeakKeyDictionary()
        self.failed_subtests: list[pytest.TestReport] = []
        """Of the test in progress."""
        self.failure: MergedRepr | None = None
        """What the terminal shows of the last failure. Rank 0 only."""

    def begin(self) -> None:
        """A new test begins."""
        self.failed_subtests = []

    def remember(self, report: pytest.TestReport, merged: Merged | None) -> None:
        """Attach the merged outcome to the report just made."""
        if merged is not None:
            self._merged[report] = merged

    def take_subtest(self, report: pytest.TestReport) -> bool:
        """Keep the report of a failed subtest for the end of its test. Return whether it is of a subtest."""
        if not hasattr(report, "context"):
            return False
        if report.failed:
            self.failed_subtests.append(report)
            # As a failure of its own it would count for --maxfail, and end the session of this rank alone.
            report.outcome = "passed"
        return True

    def show(self, report: pytest.TestReport) -> None:
        """Rank 0: let pytest's report say what all ranks agreed on, and put it on record."""
        if self.take_subtest(report):
            return
        if self._run.rank != 0 or self._run.watch is None:
            return
        merged = self._merged.get(report)
        if merged is not None and report.failed and merged.outcome in ("failed", "error"):
            self.failure = MergedRepr(merged, report)
            report.longrepr = self.failure  # type: ignore[assignment]  # pytest asks for toterminal only
        record = self._run.records.get(report.nodeid)
        if record is None:
            return
        if str(report.outcome) == "rerun":  # pytest-rerunfailures
            self._take(record, report, merged)
            record.start_again(line_of(report))
            return
        self._take(record, report, merged)
        told: object = report.longrepr
        if report.when == "call" and self.failure is not None and told is self.failure:
            self._name_culprit(self.failure, record)
        if report.when == "teardown":
            self._isolator.tell(record, self.failure)
            if record.isolation is not None and self.failure is not None:
                self._name_culprit(self.failure, record)
        if report.when == "call" and record.measurements:
            report.user_properties.append(("gpucluster", {"measurements": record.measurements}))
        if report.when == "setup":
            record.between_attempts = False
        if report.when == "teardown" and not record.between_attempts:
            self._run.send(record.line())
            record.let_go()

    def _name_culprit(self, failure: MergedRepr, record: TestRecord) -> None:
        """Let pytest's short summary begin with who it was, for it has room for little more; on record is what was
        missed, as it was judged."""
        failure.reprcrash.message = summary_text(row_of(record.result()), self._run.account.journal())

    def _take(self, record: TestRecord, report: pytest.TestReport, merged: Merged | None) -> None:
        record.add(
            report.when or "call",
            outcome="failed" if str(report.outcome) == "rerun" else report.outcome,
            message=line_of(report),
            text=report.longreprtext if report.failed else skip_reason(report),
            seconds=report.duration,
            merged=merged,
            wasxfail=getattr(report, "wasxfail", None),
        )
        record.sections = list(report.sections)
        own = [(name, value) for name, value in report.user_properties if name != "gpucluster"]
        record.properties = unique([*record.properties, *own])

    def is_folded(self, report: pytest.TestReport) -> bool:
        """Tell whether a report is shown with its test, and not alone."""
        return any(report is kept for kept in self.failed_subtests)

    def is_error(self, report: pytest.TestReport) -> bool:
        """Tell whether a failed call is an error of the run rather than a verdict about hardware."""
        if not report.failed:
            return False
        merged = self._merged.get(report)
        record = self._run.records.get(report.nodeid)
        if record is not None and record.isolation is not None and record.outcome == "failed":
            return False  # it began as an error; by now the hardware to blame is known
        return merged is not None and merged.outcome == "error" and report.failed and report.when == "call"


def _subtest(report: pytest.TestReport) -> str:
    """Return how a subtest calls itself."""
    head = str(getattr(report, "head_line", "") or "")
    return head.removeprefix(report.location[2]).strip() or "(unnamed)"
