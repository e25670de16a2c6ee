"""What a journal answers, and that it fits into a termination message."""

import json

import pytest
from fake_ssh import journal_lines
from journal_lines import journal_of

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.runners.run_result import MOST_BYTES, RunResult


def result(**of):
    return RunResult.of(journal_of(journal_lines(**of)), "/j")


def test_the_first_failure_comes_before_any_error():
    lines = journal_lines(outcome="failed", message="slow\nthere", verdict=None)
    lines.insert(2, {"type": "problem", "name": "preflight", "outcome": "error", "message": "odd"})
    found = RunResult.of(journal_of(lines), "")
    assert found.failure == "matmul: slow there"
    assert (found.verdict, found.exit, found.ended) == ("REJECTED", 1, False)
    lines = [line for line in lines if line["type"] != "test"]
    found = RunResult.of(journal_of(lines), "")
    assert (found.verdict, found.exit, found.failure) == ("BROKEN", 11, "preflight: odd")


def test_a_journal_without_an_end_says_how_far_the_run_came():
    found = result(verdict=None)
    assert (found.verdict, found.exit, found.failure) == ("BROKEN", 11, found.failure)
    assert "t.py::test_next" in found.failure


@pytest.mark.parametrize("text", ["short", 'q"' * 2000, "\N{PILE OF POO}" * 2000], ids=["short", "long", "wide"])
def test_it_fits_and_is_read_back(text):
    written = result(outcome="failed", message=text, verdict="REJECTED", exit=1).to_json()
    assert len(written.encode()) <= MOST_BYTES
    found = RunResult.from_json(written)
    assert (found.verdict, found.exit, found.nnodes) == ("REJECTED", 1, 1)
    assert found.failure.startswith(f"matmul: {text[:20]}")


@pytest.mark.parametrize(
    "change", [{"exit": "0"}, {"exit": True}, {"ended": 1}, {"verdict": None}, {"schema_version": 2}, {"nnodes": 1.0}]
)
def test_what_is_no_answer_is_no_pass(change):
    read = json.loads(result().to_json()) | change
    for text in (json.dumps(read), "", "Killed", "[]", "[" * 4000, "{}"):
        with pytest.raises(JournalError):
            RunResult.from_json(text)
