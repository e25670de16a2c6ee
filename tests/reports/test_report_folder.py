"""Reports in a run's folder: all of them, or a word for each that is not there."""

import os

import example_runs
import pytest

from pytest_gpucluster.journal import journal
from pytest_gpucluster.reports import prometheus, registry


@pytest.fixture
def run(tmp_path):
    return example_runs.write(tmp_path / "run", "rehearsal")


def test_every_report_of_a_run_is_written_next_to_its_journal(run):
    found = journal.read(run / journal.JOURNAL_FILE, keep_samples=False)
    assert registry.write(found, run) == {}
    for kind in registry.OF_A_RUN:
        text = (run / registry.FILES[kind]).read_text(encoding="utf-8")
        assert text == registry.render(kind, found, folder=run)
    assert [name for name in os.listdir(run) if name.startswith(".")] == []


def test_a_report_that_trips_over_something_is_named_and_the_others_are_there(run, monkeypatch):
    monkeypatch.setattr(prometheus, "render", lambda _: 1 / 0)
    missing = registry.write(journal.read(run / journal.JOURNAL_FILE, keep_samples=False), run)
    assert list(missing) == ["metrics.prom"]
    assert "ZeroDivisionError" in missing["metrics.prom"]
    assert {"results.json", "report.html"} <= set(os.listdir(run))
    assert not (run / "metrics.prom").exists()


def test_a_report_that_cannot_be_written_is_named_and_what_was_there_stays(run):
    (run / "metrics.prom" / "mine").mkdir(parents=True)
    [(name, why)] = registry.write(journal.read(run / journal.JOURNAL_FILE, keep_samples=False), run).items()
    assert (name, why.startswith("not written: ")) == ("metrics.prom", True)
    assert (run / "metrics.prom" / "mine").exists()
