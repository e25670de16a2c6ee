"""Sentences around each group of criteria, for ``gpucluster demo --narrate``: a plugin, for ``-p`` of pytest.

A group is the tests of one file that run in a row. What it asks is the file's docstring, what is looked at are the
metrics of its criteria, and how it ended is what the journal has. Rank 0 alone has a terminal.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.reports.failures import failure_text
from pytest_gpucluster.reports.summary import Row, row_of
from pytest_gpucluster.reports.tables import headline_text
from pytest_gpucluster.session.selection import criterion_of
from pytest_gpucluster.text import paragraph, plural, some_of

if TYPE_CHECKING:
    from pytest_gpucluster.journal.journal import Journal
    from pytest_gpucluster.session.run import Run

_MARK = ">> "


def before(group: Sequence[pytest.Item]) -> list[str]:
    """Return what a group asks, and what to look at."""
    module = inspect.getdoc(getattr(group[0], "module", None)) or group[0].nodeid
    criteria = list(dict.fromkeys(filter(None, map(criterion_of, group))))
    metrics = [pattern for name in criteria if name in CRITERIA for pattern in CRITERIA[name].metrics]
    look = f"; look at {some_of(metrics, 6)}" if metrics else ""
    named = f" of {', '.join(criteria)}" if criteria else ""
    return [module.partition("\n")[0], f"{plural(len(group), 'test')}{named} on every rank{look}."]


def after(rows: Sequence[Row], journal: Journal | None) -> list[str]:
    """Return how a group ended: its culprit, or else the value that is closest to its limit.

    Args:
        rows: of its tests.
        journal: of the run until now.
    """
    counts = Counter(row.outcome for row in rows)
    ended = ", ".join(f"{number} {outcome}" for outcome, number in counts.items()) or "nothing was recorded"
    bad = [row for row in rows if row.outcome in ("failed", "error")]
    if bad:
        return [f"{ended}. {bad[0].name} names {failure_text(bad[0], journal)}"]
    judged = [(row.margin, row.name, row.headline) for row in rows if row.margin is not None]
    if not judged:
        return [f"{ended}."]
    _, name, headline = min(judged, key=lambda entry: entry[0])
    return [f"{ended}. The closest to its limit is {name}: {headline_text(headline) if headline else ''}"]


def pytest_configure(config: pytest.Config) -> None:
    """Narrate on rank 0 of a run."""
    session = config.pluginmanager.get_plugin("gpucluster-session")
    run: Run | None = getattr(session, "_run", None)
    if run is not None and run.rank == 0:
        config.pluginmanager.register(Narrator(run))


class Narrator:
    """Writes sentences before the first and after the last test of each group.

    Args:
        run: of rank 0.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._groups: dict[str, list[pytest.Item]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Find the groups, in the order in which they run."""
        for _, items in itertools.groupby(session.items, key=lambda item: item.path):
            group = list(items)
            self._groups.update((item.nodeid, group) for item in group)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Write before and after a group."""
        group = self._groups.get(item.nodeid, [])
        if item is group[0]:
            self._write(before(group))
        done = yield
        if item is group[-1]:
            rows = []
            for each in group:
                with suppress(JournalError, KeyError):  # not recorded: the closing summary reports it
                    rows.append(row_of(self._run.records[each.nodeid].result()))
            self._write(after(rows, self._run.journal_copy.journal()))
        return done

    def _write(self, sentences: Sequence[str]) -> None:
        lines = [
            line for sentence in sentences for line in paragraph(sentence, 100, first=_MARK, rest=" " * len(_MARK))
        ]
        self._run.write_lines(["", *lines], bold=True)
