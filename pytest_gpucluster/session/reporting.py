"""Reporting through pytest on rank 0: failures and test reports of all ranks, terminal lines, testsuite properties.

A rank's traceback travels as text. Rank 0's reports go into the journal. Its terminal shows the header, a line for each
criterion and the closing summary, all made from what is recorded, so that they match any later report. pytest's own
words stay as they are: PASSED or FAILED, and the measurements after it; during a long test, how far it is: that goes
past pytest's capture, so no report holds it. ``record_testsuite_property`` works without pytest's own JUnit writer,
which this plugin has replaced.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from _pytest.outcomes import Failed  # pytest.fail.Exception, under the name that type checkers know

from pytest_gpucluster import short_fixtures
from pytest_gpucluster.agreement.exchange import Merged
from pytest_gpucluster.config.workload import predict
from pytest_gpucluster.errors import JournalError, text_of
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.test_record import TestRecord, unique
from pytest_gpucluster.reports.facts import cluster_lines, fact, header_lines
from pytest_gpucluster.reports.failures import failure_text
from pytest_gpucluster.reports.registry import existing_files
from pytest_gpucluster.reports.summary import Outline, Row, outline, row_of
from pytest_gpucluster.reports.tables import headline_text, rank_name
from pytest_gpucluster.reports.terminal import measurement_table, report_lines, summary, verdict_lines
from pytest_gpucluster.text import (
    MESSAGE_CHARACTERS,
    clean,
    clip,
    columns,
    duration,
    first_line,
    one_line,
    padded,
    paragraph,
    plural,
    printable,
)

if TYPE_CHECKING:
    from pytest_gpucluster.session.run import Run


LONGEST_TEXT = 32_000
"""Characters of one rank's failure that travel; the beginning and the end are kept."""
_MISSED = ("failed", "error")
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python")


class MergedRepr:
    """What pytest prints of a failure: rank 0's own traceback if it has one, and every culprit's; where measurements
    decided, the table of all of them, too."""

    def __init__(self, merged: Merged, report: pytest.TestReport, record: TestRecord | None = None) -> None:
        self.reprcrash = _Crash(merged.message)
        self._text, self._table = merged.text, ""
        if record is not None and merged.judged and any(one["status"] in _MISSED for one in record.measurements):
            self._table = measurement_table(record.result().measurements)
        own = report.longrepr
        # Of a hang the stack from before the release is shown, not the traceback of the release.
        hung = any(rank.get("outcome") == "hung" for rank in merged.ranks)
        alone = list(merged.culprits) == [0] and not (merged.released or merged.judged or hung)
        self._own = own if alone and hasattr(own, "toterminal") else None
        self._later = ""

    def explain(self, message: str, text: str) -> None:
        """Replace the one line, and add a text at the end: what is known only after the failure."""
        self.reprcrash.message = message
        self._later = text

    def toterminal(self, tw: Any) -> None:
        """Write to pytest's terminal writer."""
        if self._own is not None:
            self._own.toterminal(tw)  # type: ignore[union-attr]  # checked in __init__
            tw.line(self.reprcrash.message, red=True)
        else:
            for line in self._text.splitlines():
                tw.line(line, red=line.startswith("E  "))
        for text in ("" if self._own is not None else self._table, self._later):
            if text:
                tw.line(f"\n{text}")

    def __str__(self) -> str:
        return self._text


@dataclass
class _Crash:
    """What pytest's short summary reads of a failure."""

    message: str
    path: str = ""
    lineno: int = 0

    def __str__(self) -> str:  # what --tb=line prints
        return self.message


_REMEDY = re.compile(r"^When it fails: (.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


def with_remedy(merged: Merged, item: pytest.Item) -> Merged:
    """Return a failure with what its test's docstring has under "When it fails", unless its text has what to do."""
    found = _REMEDY.search(inspect.getdoc(getattr(item, "obj", None)) or "")
    if found is None or merged.outcome != "failed" or "what to do: " in merged.text:
        return merged
    remedy = " ".join(found[1].replace("``", "`").split())
    return replace(merged, text=f"{merged.text}\n\nwhat to do: {remedy}")


def traceback_of(item: pytest.Item, when: str, error: BaseException) -> str:
    try:
        excinfo = pytest.ExceptionInfo.from_exception(error)
        if when == "call":
            return str(item.repr_failure(excinfo))
        return str(item._repr_failure_py(excinfo, style=item.config.getoption("tbstyle", "auto")))
    except Exception as broken:  # an exception whose own repr raises must not hide the failure
        return f"{type(error).__name__} (its traceback cannot be shown: {type(broken).__name__})"


def where_released(error: BaseException) -> str:
    """Return where a rank was that was released from a wait, without what installed packages do there.

    With what was raised on the way, such as how far a long test had come.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _INSTALLED)]
    lines, seen = traceback.format_list(own), set()
    raised: BaseException | None = error
    while raised is not None and id(raised) not in seen:
        seen.add(id(raised))
        lines += traceback.format_exception_only(raised)
        raised = raised.__cause__ or raised.__context__
    return clip("".join(lines).rstrip(), LONGEST_TEXT)


def let_go(error: BaseException) -> None:
    """Free what the frames of a failure hold, once it has been reported.

    A plugin may keep the exceptions of failed tests until the session ends, as pytest-rerunfailures does. With them
    would stay the process group that was thrown away, with its threads and its sockets.
    """
    waiting: list[BaseException | None] = [error]
    known: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        traceback.clear_frames(one.__traceback__)  # all but those that still run
        for frame, _ in traceback.walk_tb(one.__traceback__):
            _ = frame.f_locals  # until Python 3.12 a copy, kept from when pytest has looked at it, and taken anew here
        waiting += [one.__cause__, one.__context__]
        # Of a group of exceptions, such as pytest's of fixtures that all fail when they are torn down.
        parts = getattr(one, "exceptions", ())
        waiting += [part for part in parts if isinstance(part, BaseException)] if isinstance(parts, tuple) else []


def summary_of(error: BaseException) -> str:
    """Return the type and the text of what a test has raised, in place of a text that only pytest can format."""
    if isinstance(error, pytest.FixtureLookupError):
        name = error.argname
        text = f"fixture {name!r} not found"
        if name in short_fixtures.__all__:
            text += f": the plugin's is gpucluster_{name}; pytest_gpucluster.short_fixtures has it as {name}"
    else:
        text = text_of(error)
    return text if isinstance(error, pytest.fail.Exception) else f"{type(error).__name__}: {text}"


def line_of(report: pytest.TestReport) -> str:
    if report.skipped:
        return first_line(skip_reason(report))
    crash = getattr(report.longrepr, "reprcrash", None)
    return first_line(crash.message if crash is not None else report.longreprtext)


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return getattr(report, "wasxfail", "") or report.longreprtext


class FailedSubtests(Failed):
    """Subtests have failed: raised at the end of the body, so that every rank learns of it."""

    def __init__(self, reports: Sequence[pytest.TestReport]) -> None:
        texts = [f"{_subtest(report)}\n{report.longreprtext}" for report in reports]
        summary = f"{plural(len(reports), 'subtest')} failed: {_subtest(reports[0])}: {line_of(reports[0])}"
        super().__init__("\n\n".join([summary, *texts]), pytrace=False)


class TestReports:
    """The reports of one rank's tests, as they pass by. Main thread only."""

    def __init__(self, run: Run, report_isolation: Callable[[TestRecord, MergedRepr | None], None]) -> None:
        self._run = run
        self._report_isolation = report_isolation
        self.merged: weakref.WeakKeyDictionary[pytest.TestReport, Merged] = weakref.WeakKeyDictionary()
        """Report -> the outcome of all ranks."""
        self.failed_subtests: list[pytest.TestReport] = []
        """Of the test in progress."""
        self.failure: MergedRepr | None = None
        """What the terminal shows of the last failure. Rank 0 only."""

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
        """Rank 0: let pytest's report show what all ranks agreed on, and record it."""
        if self.take_subtest(report):
            return
        if self._run.rank != 0 or not self._run.has_joined:
            return
        merged, record = self.merged.get(report), self._run.records.get(report.nodeid)
        if merged is not None and report.failed and merged.outcome in ("failed", "error"):
            self.failure = MergedRepr(merged, report, record)
            report.longrepr = self.failure  # type: ignore[assignment]  # pytest asks for toterminal only
        if record is None:
            return
        self._take(record, report, merged)
        if str(report.outcome) == "rerun":  # pytest-rerunfailures
            record.start_attempt(line_of(report))
            return
        shown: object = report.longrepr
        if report.when == "call" and self.failure is not None and shown is self.failure:
            self._name_culprit(self.failure, record)
        if report.when == "teardown":
            self._report_isolation(record, self.failure)
            if record.isolation is not None and self.failure is not None:
                self._name_culprit(self.failure, record)
        if report.when == "call" and record.measurements:
            report.user_properties.append(("gpucluster", {"measurements": record.measurements}))
        if report.when == "setup":
            record.between_attempts = False
        if report.when == "teardown" and not record.between_attempts:
            self._run.send(record.line())
            record.drop_samples()

    def _name_culprit(self, failure: MergedRepr, record: TestRecord) -> None:
        """Let pytest's short summary begin with the culprit, for it has room for little more; the journal has the
        missed limit, as it was judged."""
        with contextlib.suppress(JournalError):  # none is expected, and pytest's own word is there
            failure.reprcrash.message = failure_text(row_of(record.result()), self._run.journal_copy.journal())

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

    def is_error(self, report: pytest.TestReport) -> bool:
        """Return whether a failed call is an error of the run rather than a verdict about hardware."""
        if not report.failed:  # also of a subtest, which has no hash
            return False
        merged, record = self.merged.get(report), self._run.records.get(report.nodeid)
        if record is not None and record.isolation is not None and record.outcome == "failed":
            return False  # it began as an error; by now the faulty hardware is known
        return merged is not None and merged.outcome == "error" and report.when == "call"


def _subtest(report: pytest.TestReport) -> str:
    head = str(getattr(report, "head_line", "") or "")
    return head.removeprefix(report.location[2]).strip() or "(unnamed)"


_NAME_COLUMNS = 24
_WORD_COLUMNS = 7
_PROGRESS_COLUMNS = len(" [100%]") + 1
_DETAIL = " " * 4
Status = tuple[str, str, "str | tuple[str, Mapping[str, bool]]"]
"""What pytest calls a report: category, letter, and word, maybe with its colours."""
BROKE: Status = ("error", "E", "ERROR")
"""Of what broke the run, and is no failure of the hardware."""


class Console:
    """One session's terminal, as a plugin. Without one, and above rank 0, it prints nothing."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self._config, self._run = config, run
        config.pluginmanager.register(self, "gpucluster-console")
        self._begun: weakref.WeakKeyDictionary[pytest.TestReport, Row] = weakref.WeakKeyDictionary()
        """Reports whose line has begun with pytest's word."""
        self._printed: weakref.WeakSet[pytest.TestReport] = weakref.WeakSet()
        self._ends_at: int | None = None
        """The column at which the last line of a criterion ends."""

    @property
    def _reporter(self) -> pytest.TerminalReporter | None:
        if self._run.recorder is None:
            return None
        found: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        return found

    @property
    def _verbosity(self) -> int:
        return int(self._config.get_verbosity(pytest.Config.VERBOSITY_TEST_CASES))

    # ---- before the first test -------------------------------------------------------------------------------

    def pytest_report_header(self) -> list[str]:
        """Return the lines under pytest's own header, once the ranks have joined: cluster and settings in force."""
        reporter, journal = self._reporter, self._run.journal_copy.journal()
        if reporter is None or journal is None or not self._run.roll.hosts:
            return []
        width = reporter._tw.fullwidth
        return [
            *header_lines(journal, width=width),
            *report_lines([("gpucluster report", str(self._run.directory))]),
        ]

    def workload(self, tests: Sequence[tuple[str, str | None]] = ()) -> list[str]:
        """Return with what will be measured, and how long that is going to take.

        ``tests``: name and criterion of those that are going to run, where they are known.
        """
        reporter, record, workload = self._reporter, self._run.workload_record, self._run.loaded_workload
        if reporter is None or record is None or reporter.verbosity < 0:
            return []
        width = reporter._tw.fullwidth
        lines = fact("workload", str(record), width=width)
        if tests and workload is not None:
            lines += fact("predicted", str(predict(tests, workload)), width=width)
        return lines

    def cluster(self) -> list[str]:
        """Return which cluster it is and which limits are in force, where the header came too early for that."""
        reporter, journal = self._reporter, self._run.journal_copy.journal()
        if reporter is None or journal is None or reporter.verbosity < 0:
            return []
        return cluster_lines(journal, width=reporter._tw.fullwidth)

    def say(self, lines: Sequence[str]) -> None:
        """Write lines between those of pytest."""
        if self._reporter is not None and lines:
            self._run.write_lines(lines)

    # ---- a line for each criterion ---------------------------------------------------------------------------

    def status(self, report: pytest.TestReport, status: Status) -> Status:
        """Return what pytest prints of a report: a criterion's word begins a line, which is ended when it is logged."""
        reporter = self._reporter
        category, letter, word = status
        if hasattr(report, "context"):  # of a subtest, which pytest says something of, and which has no hash
            return status
        if (
            reporter is None
            or not letter
            or report in self._printed
            or report.when not in ("setup", "call", "teardown")
        ):
            return status
        row = self._row(report)
        if row is None:
            if self._verbosity == 0 and self._ends_at and reporter._tw.width_of_current_line == self._ends_at:
                self._ends_at = None
                return category, f"\n{letter}", word
            return status
        self._printed.add(report)
        self._begun[report] = row
        if self._verbosity != 0:
            return status
        shown = word if isinstance(word, str) else word[0]
        new = "\n" if reporter._tw.width_of_current_line else ""
        return category, f"{new}  {shown.ljust(_WORD_COLUMNS)}", word

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Print what was measured, once pytest has printed how the test ended."""
        yield
        row, reporter = self._begun.pop(report, None), self._reporter
        if row is None or reporter is None or self._verbosity < 0:
            return
        journal = self._run.journal_copy.journal()
        writer = reporter._tw
        if self._verbosity == 0:
            name = padded(clean(row.name.removeprefix("test_")), _NAME_COLUMNS)
            text = _result_text(row, journal, with_rank=False)
            begun, gap = " " * writer.width_of_current_line, "  " if columns(name) <= _NAME_COLUMNS else " "
            indent = " " * (2 + _WORD_COLUMNS + 1)
            lines = paragraph(
                text, writer.fullwidth - _PROGRESS_COLUMNS, first=f"{begun} {name}{gap * bool(text)}", rest=indent
            )
            writer.write("\n".join([lines[0][len(begun) :].rstrip(), *lines[1:]]))
            self._ends_at = writer.width_of_current_line
        else:
            text = "" if row.outcome == "skipped" else _result_text(row, journal, with_rank=True)
            lines = paragraph(text, writer.fullwidth, first=_DETAIL, rest=_DETAIL) if text else []
            writer.write("".join(f"\n{line}" for line in lines))
        reporter.flush()

    def _row(self, report: pytest.TestReport) -> Row | None:
        record = self._run.records.get(report.nodeid)
        if record is None or hasattr(report, "context"):
            return None
        if record.test.criterion is None and not record.measurements:
            return None
        try:
            return row_of(record.result())
        except JournalError:  # none is expected; the closing summary reports it, and pytest's own word is there
            return None

    # ---- after the last test ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Print the closing summary; its last line is the verdict."""
        reporter, run = self._reporter, self._run
        if reporter is None or run.verdict is None:
            return
        width, colour = reporter._tw.fullwidth, reporter._tw.hasmarkup
        verbosity, decided = int(self._config.option.verbose), run.verdict
        journal = run.journal_copy.journal()
        seen = outline(journal) if journal is not None else Outline(kind=run.kind, rows=(), counts={})
        seen = replace(seen, word=decided.word, exit=decided.exit, reason=one_line(decided.reason, 10_000))
        if journal is not None:
            blocks = summary(journal, seen, width=width, verbosity=verbosity, colour=colour)
            reporter.ensure_newline()
            for line in "\n\n".join("\n".join(block) for block in blocks if block).splitlines():
                reporter.write_line(line)
        for text in run.journal_copy.errors:
            reporter.write_line(one_line(f"this summary leaves a line out: {text}", MESSAGE_CHARACTERS), red=True)
        files = [("JUnit", str(run.junit_path))] if run.junit_path is not None and run.junit_path.exists() else []
        if run.directory is not None:
            files = existing_files(run.directory, junit=run.junit_path)
        for line in [
            *report_lines(files, verbose=verbosity > 0),
            *verdict_lines(seen, width=width if reporter.isatty else 10_000, colour=colour),  # whole in a log
        ]:
            reporter.write_line(line)


def _result_text(row: Row, journal: Journal | None, *, with_rank: bool) -> str:
    if not row.is_good:
        return failure_text(row, journal)
    judged = row.headline
    text = "" if judged is None else headline_text(judged)
    if with_rank and text and judged is not None and judged.worst_rank is not None and journal is not None:
        return f"{text}, {rank_name(journal, judged.worst_rank)}"
    return text


PLAIN_SECONDS = 10.0
"""From one line to the next, at least."""
Figure = float | Callable[[], float]
"""A number, or what returns it. It is called only where it is shown: reading a loss from a GPU waits for the GPU."""


class ReportProgress(Protocol):
    """Say how far it is. A benchmark takes one of these, or None."""

    def __call__(self, step: int, of: int, **figures: Figure) -> None: ...


class Progress:
    """Shows the steps of one test, as often as can be read: "step 3 of 100, loss 1.235, 8,573 tokens/s, 12:34 left".

    A figure whose name ends in ``_per_second`` is a rate, any other has its name before it.

    Args:
        write_line: prints a line that stays.
        what: the test.
        now: seconds that only grow.
    """

    def __init__(
        self, write_line: Callable[[str], None], what: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._write_line, self._what, self._now = write_line, printable(what), now
        self._of = 0
        self._first_step, self._last_step = 0, 0
        self._began = self._shown_at = 0.0

    def __call__(self, step: int, of: int, **figures: Figure) -> None:
        """Say that a step has been taken. The total may change; after the last step, and with a lower one, it
        begins anew."""
        now = self._now()
        if step <= self._last_step or self._last_step >= self._of:
            self._first_step, self._began, self._shown_at = step, now, now
        self._last_step, self._of = step, of
        if step < of and now - self._shown_at < PLAIN_SECONDS:
            return
        self._shown_at = now
        parts = [f"step {step} of {of}"]
        for name, figure in figures.items():
            value, what = float(figure() if callable(figure) else figure), name.removesuffix("_per_second")
            shown = f"{value:,.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.4g}"
            words = what.replace("_", " ")
            parts.append(f"{words} {shown}" if what == name else f"{shown} {words}/s")
        taken = step - self._first_step
        if taken > 0 and of > step:
            parts.append(f"{duration((now - self._began) / taken * (of - step))} left")
        self._write_line(f"{self._what}: {', '.join(parts)}")


def progress_of(config: pytest.Config, what: str, *, rank: int) -> ReportProgress:
    """Return what shows the steps of a test in this process: nothing above rank 0, under ``-q``, or in a local
    worker."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if rank != 0 or reporter is None or reporter.verbosity < 0:
        return lambda step, of, **figures: None
    capture = config.pluginmanager.get_plugin("capturemanager")

    def write_line(text: str) -> None:
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            reporter.ensure_newline()  # pytest has begun a line with the name of the file
            reporter.write_line(text)
            reporter.flush()

    return Progress(write_line, what)


class _Collector:
    """Stands where pytest's fixtures look for the JUnit writer."""

    family = "xunit1"
    """``record_property`` asks: in the families that it does not warn of, as here, properties reach the report."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self._send = send

    def add_global_property(self, name: str, value: object) -> None:
        """Record a property of the whole suite."""
        self._send({"type": "property", "name": str(name), "value": str(value)})

    def node_reporter(self, nodeid: object) -> _Collector:
        """Answer ``record_xml_attribute``."""
        return self

    def add_attribute(self, name: str, value: object) -> None:
        """Leave the attribute out: in a testcase of our own it would break the schema."""
        message = f"record_xml_attribute: {name!r} is left out of the report, whose schema has no place for it"
        warnings.warn(pytest.PytestWarning(message), stacklevel=2)


def register_suite_properties(config: pytest.Config, send: Callable[[Mapping[str, Any]], None]) -> None:
    """Let ``record_testsuite_property`` reach the journal."""
    from _pytest.junitxml import xml_key

    collector = _Collector(send)
    config.stash[xml_key] = collector  # type: ignore[misc]  # the fixtures use these methods only
    config.pluginmanager.register(collector)  # pytest's own unconfigure takes both back
