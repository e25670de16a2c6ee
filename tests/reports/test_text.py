"""A run as plain text: at 80 columns, without colour, the bad ones first, and nothing that looks like a pass."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_runs import write

from pytest_gpucluster.journal import (
    CollectedTest,
    Journal,
    JudgedLimit,
    JudgedMetric,
    MergedFrom,
    Problem,
    Run,
    Started,
    TestResult,
    read,
)
from pytest_gpucluster.reports.layout import columns
from pytest_gpucluster.reports.text import measurement_table, render

EXAMPLES = ("cluster", "accepted", "rehearsal", "broken", "hostile")


@pytest.fixture
def example(tmp_path: Path) -> dict[str, Journal]:
    return {name: read(write(tmp_path / name, name) / "journal.jsonl", keep_samples=False) for name in EXAMPLES}


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
@pytest.mark.parametrize("width", [60, 80, 132, 200])
def test_no_line_is_wider_and_none_acts_on_a_terminal(example: dict[str, Journal], width: int, verbosity: int) -> None:
    for name, journal in example.items():
        for line in render(journal, width=width, verbosity=verbosity).splitlines():
            assert columns(line) <= width or line.startswith("JUnit"), name
            assert line.isprintable(), name
            assert line == line.rstrip(), name


def test_the_verdict_comes_first_and_failures_before_passes(example: dict[str, Journal]) -> None:
    text = render(example["cluster"])
    assert text.startswith("REJECTED, exit code 1: ")
    words = re.findall(r"^(FAILED|ERROR|BROKEN|PASSED) ", text, re.MULTILINE)
    assert words == ["FAILED"] * 5 + ["ERROR"] + ["PASSED"] * 6
    assert "Criteria: 5 failed, 1 error, 1 not run, 2 skipped, 6 passed" in text
    assert re.search(r"^FAILED  matmul\[bf16\] +585\.\d  >= 700 +TFLOPS +-16\.\d %  11$", text, re.MULTILINE)
    assert "        rank 11 (gpu-02, GPU 3 GPU-" in text
    assert "Did not run: 3" in text
    assert "  checkpoint_bandwidth\n      not run: the run ended before it\n" in text


def test_a_wide_terminal_shows_where_the_worst_rank_is(example: dict[str, Journal]) -> None:
    assert re.search(
        r"^FAILED  matmul\[bf16\] .* 11 gpu-02 GPU 3$", render(example["cluster"], width=120), re.MULTILINE
    )


def test_numbers_stand_under_each_other(example: dict[str, Journal]) -> None:
    lines = render(example["accepted"]).splitlines()
    head = next(number for number, line in enumerate(lines) if line.split()[:3] == ["test", "value", "limit"])
    table = [line for line in lines[head:] if line.startswith("PASSED")]
    ends = {line.index("limit") for line in lines[head : head + 1]} | {
        match.start() for line in table if (match := re.search(r"(>=|<=) |recorded", line))
    }
    assert len(ends) == 1
    assert len(table) > 5


def test_quiet_is_the_verdict_what_failed_and_where_the_reports_lie(example: dict[str, Journal]) -> None:
    text = render(example["cluster"], verbosity=-1, reports=[("journal", "run/journal.jsonl"), ("JUnit", "r.xml")])
    assert "PASSED" not in text
    assert "Did not run" not in text
    assert "gpucluster: " not in text
    assert text.startswith("REJECTED")
    assert "FAILED  matmul[bf16]" in text
    assert text.endswith("journal: run/journal.jsonl\nJUnit:   r.xml\n")
    accepted = render(example["accepted"], verbosity=-1)
    assert accepted.splitlines()[0].startswith("ACCEPTED, exit code 0")
    assert "PASSED" not in accepted


def test_verbose_is_every_value(example: dict[str, Journal]) -> None:
    for name, journal in example.items():
        flat = " ".join(render(journal, verbosity=1, width=200).split())
        for result in journal.results:
            for judged in result.measurements:
                assert judged.metric in flat, name
    text = " ".join(render(example["cluster"], verbosity=1).split())
    assert "recorded only" in text
    assert "95 % interval" in text
    assert "utilisation 100 %" in text


def test_colour_only_repeats_what_words_say(example: dict[str, Journal]) -> None:
    for journal in example.values():
        coloured = render(journal, colour=True)
        assert re.sub(r"\x1b\[\d+m", "", coloured) == render(journal)
        assert "\x1b[3" in coloured


def test_a_rehearsal_never_looks_like_a_verdict_about_hardware(example: dict[str, Journal]) -> None:
    for name in ("rehearsal", "broken"):
        assert "REHEARSAL" in render(example[name], verbosity=-1).splitlines()[0]
    assert not re.search("ACCEPTED", render(example["rehearsal"]))


def test_a_run_that_was_cut_off_says_where_it_ended(example: dict[str, Journal]) -> None:
    text = render(example["broken"])
    assert text.startswith("BROKEN (a REHEARSAL")
    assert "BROKEN  lora_tiny\n        the run ended here\n" in text
    assert "the journal's last line is cut off and left out" in text


def run_of(*results: TestResult, **changes: object) -> Journal:
    return replace(Journal(run=Run(run_id="1", started_at="")), results=results, **changes)


def passed(number: int, **changes: object) -> TestResult:
    return TestResult(nodeid=f"t.py::test_{number}", outcome="passed", **changes)  # type: ignore[arg-type]  # any field


def test_plain_tests_are_counted_and_not_listed() -> None:
    text = render(run_of(*(passed(number) for number in range(500)), passed(500, criterion="hbm")))
    assert "and 500 tests passed that measured nothing and are no criteria" in text
    assert len(text.splitlines()) < 12


def test_tests_with_one_reason_are_told_together() -> None:
    skipped = [
        TestResult(nodeid=f"t.py::test_{number}", outcome="skipped", message="needs 2 nodes, and there is 1")
        for number in range(10)
    ]
    text = render(run_of(*skipped))
    assert text.count("needs 2 nodes") == 1
    assert "  0, 1, 2, 3, 4, 5, and 4 more\n" in text
    assert ", 9\n" in render(run_of(*skipped), verbosity=1)


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
        passed(1, criterion="speed", unjudged="H100 SXM has no limit for it"),
    )
    demanded = replace(journal.run, options={"require": ("dns, hbm, lora", "command line")})
    text = render(replace(journal, run=demanded))
    assert "Did not run: 6, and 3 of them had to\n  disk\n      required: no disk\n  dns\n      required: " in text
    assert "  lora\n      required: no test of this run is of this criterion\n  plain\n      no plain\n" in text
    assert text.count("required: ") == 3
    assert re.search(r"^PASSED  1\n        not judged: H100 SXM has no limit for it$", text, re.MULTILINE)
    assert "not judged" in render(journal, verbosity=-1)
    assert "had to" not in render(run_of(skipped("plain")))


def test_nothing_measured_and_nothing_collected_is_still_a_verdict() -> None:
    assert render(run_of()).startswith("BROKEN, exit code 11: the run ended before the first test\n")
    cut = run_of(running=Started(nodeid="t.py::test_b"), collected=(CollectedTest(nodeid="t.py::test_c"),))
    text = render(cut)
    assert "BROKEN  b\n" in text
    assert "  c\n      not run: the run ended before it" in text


def test_problems_are_told_once_and_not_without_end() -> None:
    problems = tuple(Problem(name="p", message=f"problem {number // 2}") for number in range(100))
    text = render(run_of(problems=problems, recent_problem=Problem(name="x", message="the reason")))
    assert text.count("problem 7\n") == 1
    assert "and 30 more, which the journal has" in text


BUSBW = JudgedMetric(
    metric="nccl.all_reduce.busbw",
    unit="GB/s",
    labels={"size": "1 GB"},
    status="passed",
    value=442.1,
    worst_rank=3,
    limit=JudgedLimit(min=400.0),
    margin=0.105,
)


def test_the_table_of_one_test_has_the_missed_first() -> None:
    missed = replace(BUSBW, status="failed", value=391.0, margin=-0.0225, labels={"size": "8 GB"})
    assert measurement_table([BUSBW, missed]).splitlines() == [
        "        metric                            value  limit   unit   margin  rank",
        "FAILED  nccl.all_reduce.busbw{size=8 GB}    391  >= 400  GB/s   -2.2 %  3",
        "PASSED  nccl.all_reduce.busbw{size=1 GB}  442.1  >= 400  GB/s  +10.5 %  3",
    ]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_of_one_test_fits_and_loses_no_label(width: int) -> None:
    long = replace(
        BUSBW, labels={"size": "1 GB", "dtype": "bf16", "world_size": "16", "nnodes": "2", "transport": "NET/IB"}
    )
    lines = measurement_table([long, BUSBW], width=width).splitlines()
    assert max(map(columns, lines)) <= width
    flat = " ".join(" ".join(lines).split())
    assert "{size=1 GB, dtype=bf16, world_size=16, nnodes=2, transport=NET/IB}" in flat


def test_what_is_recorded_beside_a_judged_value_is_folded_and_counted() -> None:
    def row(metric: str, status: str, size: str) -> JudgedMetric:
        limit = BUSBW.limit if status != "recorded" else None
        return replace(BUSBW, metric=f"nccl.all_reduce.{metric}", status=status, limit=limit, labels={"size": size})

    rows = [
        row("busbw", "passed", "1 GB"),
        row("algbw", "recorded", "1 GB"),
        row("average_busbw", "recorded", "1 GB"),
        row("busbw", "recorded", "1 MB"),
        row("algbw", "recorded", "1 MB"),
    ]
    text = measurement_table(rows)
    assert "algbw" not in text
    assert text.splitlines()[-1] == "3 recorded values left out here, beside others of the same measurement"
    assert measurement_table(rows[:2]).splitlines()[-1].startswith("1 recorded value left out")
    assert "algbw" in measurement_table([row("algbw", "failed", "1 GB"), *rows])
    assert "algbw" in measurement_table([row("algbw", "recorded", "1 GB"), row("busbw", "recorded", "1 GB")])
    assert measurement_table([]) == ""


def test_a_merged_run_says_of_which_runs_it_is_and_what_came_of_each_attempt() -> None:
    runs = tuple(
        MergedFrom(journal="j", sha256="", run_id=name, started_at="2026-01-02T03:04:05Z", verdict=word, exit=code)
        for name, word, code in (("first", "REJECTED", 1), ("again", "SELECTION PASSED", 0))
    )
    attempts = (("attempt 1", "run first: failed: too slow"), ("attempt 2", "run again, which counts: passed"))
    journal = Journal(
        run=Run(
            run_id="m", started_at="2026-01-02T03:04:05Z", merged_from=runs, merged_despite=("other hosts: a and b",)
        ),
        results=(TestResult(nodeid="t.py::t", outcome="passed", criterion="c", attempts=2, properties=attempts),),
    )
    shown = " ".join(render(journal).split())
    assert "gpucluster merged: first of 2026-01-02T03:04:05Z (REJECTED), again of" in shown
    assert "gpucluster DIFFERENT CLUSTERS: other hosts: a and b" in shown
    for verbosity in (0, 1):
        assert render(journal, verbosity=verbosity).count("attempt 1: run first: failed: too slow") == 1
