"""Rank 0's copy of the journal is what a reader of the file finds."""

import math

import pytest
from example_runs import lines, write

from pytest_gpucluster.journal.journal import read
from pytest_gpucluster.journal.test_record import JournalCopy


@pytest.mark.parametrize("name", ["cluster", "accepted", "rehearsal", "hostile"])
def test_it_is_what_the_journal_says_without_its_samples(name, tmp_path):
    journal_copy = JournalCopy()
    for line in lines(name):
        journal_copy.add(line)
    expected = read(write(tmp_path, name) / "journal.jsonl", keep_samples=False)
    assert repr(journal_copy.journal()) == repr(expected)  # of two NaN neither is equal to the other
    assert journal_copy.errors == []


def test_it_can_be_asked_at_any_time():
    journal_copy = JournalCopy()
    assert journal_copy.journal() is None
    sent = lines("rehearsal")
    for number, line in enumerate(sent, start=1):
        journal_copy.add(line)
        journal = journal_copy.journal()
        assert (journal.end is None) == (number < len(sent))


def test_what_json_lacks_is_read_as_it_is_written():
    journal_copy = JournalCopy()
    journal_copy.add({"type": "run", "schema_version": 1})
    measured = {"metric": "m", "status": "error", "value": math.nan, "samples": {"0": [object()]}}
    journal_copy.add({"type": "test", "nodeid": "t.py::test_it", "outcome": "error", "measurements": [measured]})
    journal = journal_copy.journal()
    value = journal.results[0].measurements[0].value
    assert math.isnan(value)


def test_a_line_that_cannot_be_read_is_named_and_the_rest_is_kept():
    journal_copy = JournalCopy()
    journal_copy.add({"type": "run", "schema_version": 1})
    journal_copy.add({"type": "test", "nodeid": "t.py::test_it", "outcome": "splendid"})
    journal_copy.add({"type": "problem", "name": "p", "message": "oops"})
    journal = journal_copy.journal()
    assert [problem.message for problem in journal.problems] == ["oops"]
    assert journal.results == ()
    assert len(journal_copy.errors) == 1
    assert "splendid" in journal_copy.errors[0]
