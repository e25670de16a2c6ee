"""What is shown of a failure: a rank's traceback as text that can travel, and the merged one on pytest's terminal."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from pytest_gpucluster import short_fixtures
from pytest_gpucluster.agreement.exchange import Merged
from pytest_gpucluster.errors import text_of
from pytest_gpucluster.journal.test_record import TestRecord
from pytest_gpucluster.reports.terminal import measurement_table
from pytest_gpucluster.text import first_line

LONGEST_TEXT = 32_000
"""Characters of one rank's failure that travel; the beginning and the end are kept."""
_LONGEST_SECTION = 8_000
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
        self._write(tw)
        if self._later:
            tw.line()
            tw.line(self._later)

    def _write(self, tw: Any) -> None:
        if self._own is not None:
            self._own.toterminal(tw)  # type: ignore[union-attr]  # checked in __init__
            tw.line(self.reprcrash.message, red=True)
            return
        for line in self._text.splitlines():
            tw.line(line, red=line.startswith("E  "))
        if self._table:
            tw.line()
            tw.line(self._table)

    def __str__(self) -> str:
        return self._text


class _Crash:
    """What pytest's short summary reads of a failure."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.path, self.lineno = "", 0

    def __str__(self) -> str:  # what --tb=line prints
        return self.message


def clip(text: str, longest: int) -> str:
    """Keep the beginning and the end of a text that is too long to travel."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


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


def sections_of(item: pytest.Item) -> list[tuple[str, str]]:
    """Return what the failed test printed on this rank."""
    return [
        (f"Captured {key} {when}", clip(content, _LONGEST_SECTION))
        for when, key, content in item._report_sections
        if content
    ]


def line_of(report: pytest.TestReport) -> str:
    if report.skipped:
        return first_line(skip_reason(report))
    crash = getattr(report.longrepr, "reprcrash", None)
    return first_line(crash.message if crash is not None else report.longreprtext)


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return getattr(report, "wasxfail", "") or report.longreprtext
