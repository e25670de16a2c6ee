"""What rank 0 has put on record so far is what a reader of the journal finds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from example_runs import lines, write

from pytest_gpucluster.journal.journal import read
from pytest_gpucluster.journal.test_record import Account


@pytest.mark.parametrize("name", ["cluster", "accepted", "rehearsal", "hostile"])
def test_it_is_what_the_journal_says_without_its_samples(name: str, tmp_path: Path) -> None:
    account = Account()
    for line in lines(name):
        account.take(line)
    expected = read(write(tmp_path, name) / "journal.jsonl", keep_samples=False)
    assert repr(account.journal()) == repr(expected)  # of two NaN neither is equal to the other
    assert account.unread == []


def test_it_can_be_asked_at_any_time() -> None:
    account = Account()
    assert account.journal() is None
    told = lines("rehearsal")
    for number, line in enumerate(told, start=1):
        account.take(line)
        journal = account.journal()
        assert journal is not None
        assert (journal.end is None) == (number < len(told))


def test_what_json_lacks_is_read_as_it_is_written() -> None:
    account = Account()
    account.take({"type": "run", "schema_version": 1})
    measured = {"metric": "m", "status": "error", "value": math.nan, "samples": {"0": [object()]}}
    account.take({"type": "test", "nodeid": "t.py::test_it", "outcome": "error", "measurements": [measured]})
    journal = account.journal()
    assert journal is not None
    value = journal.results[0].measurements[0].value
    assert value is not None
    assert math.isnan(value)


def test_a_line_that_cannot_be_read_is_named_and_the_rest_is_kept() -> None:
    account = Account()
    account.take({"type": "run", "schema_version": 1})
    account.take({"type": "test", "nodeid": "t.py::test_it", "outcome": "splendid"})
    account.take({"type": "problem", "name": "p", "message": "oops"})
    journal = account.journal()
    assert journal is not None
    assert [problem.message for problem in journal.problems] == ["oops"]
    assert journal.results == ()
    assert len(account.unread) == 1
    assert "splendid" in account.unread[0]
