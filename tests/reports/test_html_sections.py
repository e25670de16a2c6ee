"""What the sections of ``report.html`` say, and where: below a row, and about runs that were merged or compared."""

from __future__ import annotations

import dataclasses
import html
import math
import re
from pathlib import Path
from typing import Any

import example_runs
import pytest

from pytest_gpucluster import journal
from pytest_gpucluster.journal import (
    Cluster,
    Journal,
    JudgedLimit,
    JudgedMetric,
    MergedFrom,
    PartOfTime,
    RankOutcome,
    RankPlace,
    Run,
    TestResult,
)
from pytest_gpucluster.reports.html import page
from pytest_gpucluster.time_spent import MEASURING, PARTS, VERIFYING

BASELINE = {"kind": "regressed", "rank": 3, "old": {"value": 781.0}, "change_ratio": -0.052, "why": "beyond noise"}


def text_of(document: str) -> str:
    shown = re.sub(r"<(script|style)>.*?</\1>", "", document, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", shown)).split())


def page_of(*results: TestResult, run: Run | None = None, **others: Any) -> str:
    told = Journal(run=run or Run(run_id="r", started_at="2026-11-21T09:00:00Z"), results=results, **others)
    return page.render(told)


def measured(**others: Any) -> TestResult:
    told: dict[str, Any] = {"status": "failed", "value": 740.0, "worst_rank": 1, "values": {0: 780.0, 1: 740.0}}
    judged = JudgedMetric(metric="m.tflops", unit="TFLOPS", limit=JudgedLimit(min=700.0), **{**told, **others})
    return TestResult(nodeid="a::b", name="b", outcome="failed", measurements=(judged,))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = example_runs.write(tmp_path_factory.mktemp("cluster"), "cluster")
    return folder, page.render(journal.read(folder / journal.FILE_NAME, keep_samples=False), folder=folder)


def below(document: str, name: str) -> str:
    """Return what opens below a row."""
    return document.partition(f"<h3>{name}</h3>")[2].partition("</tbody>\n<tbody id=")[0]


def test_telemetry_stands_right_below_the_values_and_those_that_failed_come_first(cluster: tuple[Path, str]) -> None:
    told = below(cluster[1], "test_all_reduce[node-bf16]")
    titles = re.findall("<h4>([^<]*)</h4>", told)
    assert titles.index("Telemetry") == 1 + max(at for at, title in enumerate(titles) if title.endswith(" by rank"))
    during = re.findall(r"nccl.all_reduce.\w+{size=[^}]*}", told.partition("<h4>Telemetry</h4>")[2])
    assert during[:2] == ["nccl.all_reduce.busbw{size=1 GB}", "nccl.all_reduce.busbw{size=8 GB}"]


@pytest.mark.parametrize(("many", "shown"), [(24, 24), (65, 2)])
def test_of_many_ranks_only_telling_telemetry_is_in_the_page(many: int, shown: int) -> None:
    seen = {rank: {"sm_clock_mhz": [1755.0, 1770.0, 1980.0]} for rank in range(many)}
    seen[7] = {"sm_clock_mhz": [1200.0, 1275.0, 1980.0], "throttle": {"hw_thermal": 0.75}}
    result = TestResult(nodeid="a::b", name="b", outcome="failed", culprits=(40,) if many > 40 else (), telemetry=seen)
    document = page_of(result)
    assert document.count("the whole test") == shown
    assert (f"the journal has that of all {many} ranks" in document) is (shown < many)


def test_samples_are_one_click_away_where_values_are(cluster: tuple[Path, str]) -> None:
    said = 'Every sample of every rank is in <a href="./journal.jsonl">'
    assert said in below(cluster[1], "test_matmul[bf16]")
    assert said not in below(cluster[1], "test_kubernetes")
    assert "Every sample" not in page_of(measured()), "no journal lies beside the page"


def test_where_a_tests_seconds_went_stands_below_its_row_if_it_is_on_record() -> None:
    seconds = dict.fromkeys(PARTS, 0.0) | {MEASURING: 6.1, VERIFYING: 0.4}
    spent = {part: PartOfTime(seconds=each, most_seconds=each) for part, each in seconds.items()}
    document = page_of(dataclasses.replace(measured(), spent=spent))
    assert "Seconds of rank 0: measuring 6.1, verifying 0.4" in document
    assert "Seconds of rank 0" not in page_of(measured())


def test_files_of_a_test_are_in_the_order_of_their_numbers(cluster: tuple[Path, str]) -> None:
    names = re.findall(r">(burn-in-rank-\d+\.csv)</a>", below(cluster[1], "test_burn_in"))
    assert names == [f"burn-in-rank-{rank}.csv" for rank in range(16)]


def test_the_marks_of_a_chart_are_explained_beside_it() -> None:
    values = {0: 780.0, 1: 640.0}
    assert "A circle keeps the limit, a cross misses it." in page_of(measured(values=values))
    assert "a cross misses" not in page_of(measured(values=values, status="recorded"))
    many = dict.fromkeys(range(1024), 740.0)
    document = page_of(measured(values=many))
    assert "A box is where the middle half of 16 neighbouring ranks lies" in document
    assert "a cross misses" not in document, "there is none"
    assert "a cross misses the limit" in page_of(measured(values={**many, 7: 1.0}))


def test_what_all_ranks_say_and_the_row_has_already_is_not_said_again() -> None:
    ranks = tuple(RankOutcome(rank=rank, outcome="skipped", message="no such network") for rank in range(2))
    skipped = {"nodeid": "a::b", "name": "b", "outcome": "skipped", "message": "no such network"}
    document = page_of(TestResult(**skipped, text="no such network", ranks=ranks))
    assert "What each rank reported" not in document
    assert document.count("no such network") == 2, "in its row, and among what did not run"
    document = page_of(TestResult(**skipped, text="no such network", ranks=(ranks[0], RankOutcome(rank=1))))
    assert "What each rank reported" in document


def test_a_value_stands_beside_the_baselines() -> None:
    document = page_of(measured(baseline=BASELINE))
    assert "Beside the baseline" in document
    assert "regressed: 781 TFLOPS before (-5.2 %) on rank 3; beyond noise" in text_of(document)
    assert "Beside the baseline" not in page_of(measured())


@pytest.mark.parametrize(
    "told",
    [
        {"kind": "missing"},
        {"kind": 7, "old": "<b>", "change_ratio": "NaN", "rank": None},
        {"old": {"value": math.nan}, "change_ratio": math.inf},
        {"old": [1], "why": "<script>"},
    ],
)
def test_whatever_a_journal_says_of_a_baseline_is_shown_and_no_markup(told: dict[str, Any]) -> None:
    document = page_of(measured(baseline=told))
    assert "Beside the baseline" in document
    assert (str(told.get("kind", "unknown"))) in text_of(document)
    assert "<td><b>" not in document
    assert document.count("<script>") == 1


def test_which_baseline_it_was_stands_among_the_limits() -> None:
    document = page_of(properties=(("baseline", "held against old/journal.jsonl"), ("site", "hall 3")))
    limits = document.partition('id="limits"')[2].partition("</section>")[0]
    assert "held against old/journal.jsonl" in limits
    assert document.count("held against old") == 1


def test_merged_runs_are_named_and_so_is_that_they_are_of_different_clusters() -> None:
    runs = (
        MergedFrom(journal="/runs/1", sha256="ab12", run_id="first", verdict="REJECTED", exit=1),
        MergedFrom(journal="/runs/2", sha256="cd34", run_id="second", verdict="ACCEPTED", exit=0),
    )
    told = {"run_id": "r", "started_at": "", "merged_from": runs}
    properties = (("merged run 1", "why it ended"), ("merged run 1 sha256", "ab12"), ("site", "x"), ("site", "x"))
    document = page_of(run=Run(**told), properties=properties)
    assert document.count("why it ended") == document.count("ab12") == document.count("<dt>site</dt>") == 1
    merged = text_of(document.partition('id="merged"')[2])
    assert "1 first REJECTED, exit code 1 /runs/1 ab12 2 second ACCEPTED, exit code 0 /runs/2 cd34" in merged
    assert "different clusters" not in document
    document = page_of(run=Run(**told, merged_despite=("other GPUs: <b>",)))
    assert "Merged from runs of different clusters : it accepts none of them." in text_of(document)
    assert "other GPUs: &lt;b&gt;" in document
    assert "Merged runs" not in page_of()


def test_a_pass_after_a_failure_and_one_that_was_not_judged_say_so_in_their_row() -> None:
    attempts = (
        ("attempt 1", "run first: failed: 585 TFLOPS"),
        ("attempt 2", "run second: passed"),
        ("attempt 3", "run third, which counts: passed"),
    )
    passed = {"nodeid": "a::b", "name": "b", "outcome": "passed"}
    document = page_of(TestResult(**passed, attempts=3, properties=attempts), TestResult(**passed, unjudged="no SKU"))
    rows = [text_of(row) for row in re.findall(r'<tr class="why[^>]*>(.*?)</tr>', document, re.DOTALL)]
    assert rows == ["attempt 1: run first: failed: 585 TFLOPS", "not judged: no SKU"]


def test_facts_of_a_card_have_names_and_units() -> None:
    gpu = {
        "index": "0",
        "uuid": "GPU-1",
        "board_part_number": "900-2G520",
        "inforom": "G520.0200",
        "gsp_firmware": "580.95.05",
        "memory_bytes": "85520809984",
        "power_limit_watts": "700.0",
        "ecc": "True",
        "mig": "False",
        "vbios": "None",
        "slot": "7",
    }
    versions = {"pytest_gpucluster": "0.1.0"}
    places = tuple(RankPlace(rank=rank, host="gpu-01", gpu=gpu, versions=versions) for rank in range(2))
    run = Run(run_id="r", started_at="", plugin_version="0.1.0", world_size=2)
    document = page_of(run=run, cluster=Cluster(ranks=places))
    text = text_of(document)
    for expected in (
        *("Board part number 900-2G520", "InfoROM G520.0200", "GSP firmware 580.95.05", "Memory 79.6475 GiB"),
        *("Power limit 700 W", "ECC on", "MIG off", "VBIOS unknown", "slot 7"),
        "Launched as 2 ranks on 1 node",
    ):
        assert expected in text, expected
    versions_told = text_of(document.partition('id="environment"')[2].partition("</section>")[0])
    assert versions_told.count("0.1.0") == 1, "this project's version stands there once"
