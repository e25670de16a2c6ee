"""What the sections of ``report.html`` say, and where: below a row, and about runs that were merged or compared."""

from __future__ import annotations

import html
import math
import re
from typing import Any

from each import of_each

from pytest_gpucluster.journal.fields import JudgedLimit, JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import MergedFrom, Run, TestResult
from pytest_gpucluster.reports.html import page

BASELINE = {"kind": "regressed", "rank": 3, "old": {"value": 781.0}, "change_ratio": -0.052, "why": "beyond noise"}


def text_of(document: str) -> str:
    shown = re.sub(r"<(script|style)>.*?</\1>", "", document, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", shown)).split())


def page_of(*results: TestResult, run: Run | None = None, **others: Any) -> str:
    journal = Journal(run=run or Run(run_id="r", started_at="2026-11-21T09:00:00Z"), results=results, **others)
    return page.render(journal)


def measured(**others: Any) -> TestResult:
    fields: dict[str, Any] = {"status": "failed", "value": 740.0, "worst_rank": 1, "values": {0: 780.0, 1: 740.0}}
    judged = JudgedMetric(metric="m.tflops", unit="TFLOPS", limit=JudgedLimit(min=700.0), **{**fields, **others})
    return TestResult(nodeid="a::b", name="b", outcome="failed", measurements=(judged,))


@of_each(
    "case",
    [
        ({"kind": "missing"}, "missing"),
        ({"kind": 7, "change_ratio": "NaN", "rank": None}, "7"),
        ({"old": {"value": math.nan}, "change_ratio": math.inf}, "unknown"),
        ({"kind": "worse", "why": "<script>"}, "worse; <script>"),
        ({"kind": "worse", "old": "<b>"}, "unknown; baseline: old must be a JSON object, found '<b>'; see the journal"),
    ],
)
def test_any_baseline_in_a_journal_is_shown_and_no_markup(case: tuple[dict[str, Any], str]) -> None:
    baseline, expected = case
    shown = text_of(page_of(measured(baseline=BASELINE)))
    assert "regressed: 781 TFLOPS before (-5.2 %) on rank 3" in shown
    document = page_of(measured(baseline=baseline))
    assert "Compared with the baseline" in document
    assert expected in text_of(document)
    assert "<td><b>" not in document
    assert document.count("<script>") == 1


def test_merged_runs_are_named_and_so_is_that_they_are_of_different_clusters() -> None:
    runs = (
        MergedFrom(journal="/runs/1", sha256="ab12", run_id="first", verdict="REJECTED", exit=1),
        MergedFrom(journal="/runs/2", sha256="cd34", run_id="second", verdict="ACCEPTED", exit=0),
    )
    fields = {"run_id": "r", "started_at": "", "merged_from": runs}
    properties = (("merged run 1", "why it ended"), ("merged run 1 sha256", "ab12"), ("site", "x"), ("site", "x"))
    document = page_of(run=Run(**fields), properties=properties)
    assert document.count("why it ended") == document.count("<dt>site</dt>") == 1
    merged = text_of(document.partition('id="merged"')[2])
    assert "1 first REJECTED, exit code 1 /runs/1 ab12 2 second ACCEPTED, exit code 0 /runs/2 cd34" in merged
    assert "different clusters" not in document
    document = page_of(run=Run(**fields, merged_despite=("other GPUs: <b>",)))
    assert "different clusters" in text_of(document)
    assert "other GPUs: &lt;b&gt;" in document
    assert "Merged runs" not in page_of()


def test_a_pass_after_a_failure_and_one_that_was_not_judged_say_so_in_their_row() -> None:
    attempts = (
        ("attempt 1", "failed: 585 TFLOPS"),
        ("attempt 2", "run second: passed"),
        ("attempt 3", "run third, which counts: passed"),
    )
    passed = {"nodeid": "a::b", "name": "b", "outcome": "passed"}
    document = page_of(TestResult(**passed, attempts=3, properties=attempts), TestResult(**passed, unjudged="no SKU"))
    rows = [text_of(row) for row in re.findall(r'<tr class="why[^>]*>(.*?)</tr>', document, re.DOTALL)]
    assert rows == ["attempt 1: failed: 585 TFLOPS", "not judged: no SKU"]
