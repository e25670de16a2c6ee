"""A run as plain text: at 80 columns, without colour, the bad ones first, and nothing that looks like a pass."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from each import of_each
from example_runs import NAMES, journal_of

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import CollectedTest, Run, Started, TestResult
from pytest_gpucluster.reports.terminal import render
from pytest_gpucluster.text import columns


@of_each("name", NAMES)
def test_no_line_is_wider_and_none_acts_on_a_terminal(name: str) -> None:
    for width in (60, 80, 132, 200):
        for verbosity in (-1, 0, 1):
            for line in render(journal_of(name), width=width, verbosity=verbosity).splitlines():
                assert columns(line) <= width or line.startswith("JUnit"), (width, verbosity)
                assert line.isprintable(), (width, verbosity)
                assert line == line.rstrip(), (width, verbosity)


def test_quiet_is_the_verdict_what_failed_and_where_the_reports_lie() -> None:
    reports = [("journal", "run/journal.jsonl"), ("JUnit", "r.xml")]
    text = render(journal_of("cluster"), verbosity=-1, reports=reports)
    assert not re.search("PASSED|Did not run|gpucluster: ", text)
    assert text.startswith("REJECTED")
    assert "FAILED  matmul[bf16]" in text
    assert text.endswith("journal: run/journal.jsonl\nJUnit:   r.xml\n")
    accepted = render(journal_of("accepted"), verbosity=-1)
    assert accepted.startswith("ACCEPTED, exit code 0")
    assert "PASSED" not in accepted
    for name in ("rehearsal", "broken"):
        assert "REHEARSAL" in render(journal_of(name), verbosity=-1).splitlines()[0]


def run_of(*results: TestResult, **changes: object) -> Journal:
    return replace(Journal(run=Run(run_id="1", started_at="")), results=results, **changes)


def passed(number: int, **changes: object) -> TestResult:
    return TestResult(nodeid=f"t.py::test_{number}", outcome="passed", **changes)  # type: ignore[arg-type]  # any field


def test_what_makes_a_run_incomplete_stands_out() -> None:
    def skipped(name: str, **changes: Any) -> TestResult:
        return TestResult(nodeid=f"t.py::test_{name}", outcome="skipped", message=f"no {name}", **changes)

    journal = run_of(
        passed(0, criterion="hbm"),
        skipped("plain"),
        skipped("room", criterion="fabric", applicable=False),
        skipped("disk", criterion="checkpoint"),
        skipped("dns", criterion="dns", applicable=False),
        skipped("hbm_too", criterion="hbm", applicable=False),
        passed(1, criterion="speed", unjudged="no limit"),
    )
    demanded = replace(journal.run, options={"require": ("dns, hbm, lora", "command line")})
    text = render(replace(journal, run=demanded))
    assert "Did not run: 6, 3 " in text
    assert "\n  disk\n      required: no disk\n  dns\n      required: " in text
    assert "\n  lora\n      required: " in text
    assert "\n  plain\n      no plain\n" in text
    assert text.count("required: ") == 3
    assert re.search(r"^PASSED  1\n        not judged: no limit$", text, re.MULTILINE)
    assert "not judged" in render(journal, verbosity=-1)
    assert "required" not in render(run_of(skipped("plain")))


def test_nothing_measured_and_nothing_collected_is_still_a_verdict() -> None:
    assert render(run_of()).startswith("BROKEN, exit code 11: ")
    cut = run_of(running=Started(nodeid="t.py::test_b"), collected=(CollectedTest(nodeid="t.py::test_c"),))
    text = render(cut)
    assert "BROKEN  b\n" in text
    assert "\n  c\n      not run: " in text
