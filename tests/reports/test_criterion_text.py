"""A criterion in few words: number, limit, margin, and culprit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpucluster.journal.fields import JudgedLimit, JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Cluster, RankPlace, Run, TestResult
from pytest_gpucluster.reports.criterion_text import culprit_text, headline_text
from pytest_gpucluster.reports.summary import row_of

LIMIT = JudgedLimit(min=440.0)
BUSBW = JudgedMetric(
    metric="nccl.all_reduce.busbw", unit="GB/s", status="passed", value=482.12, worst_rank=3, limit=LIMIT, margin=0.0957
)
PLACE = RankPlace(rank=3, host="gpu-07", gpu={"index": "3", "uuid": "GPU-1f2e3d4c-0000", "name": "NVIDIA H100"})
JOURNAL = Journal(
    run=Run(run_id="1", started_at="", world_size=8), cluster=Cluster(ranks=(PLACE, RankPlace(rank=4, host="gpu-07")))
)


UNLIMITED = {"limit": None, "margin": None}
HEADLINES: dict[str, dict[str, Any]] = {
    "482.1 >= 440 GB/s, +9.6 %": {},
    "439.9996 >= 440 GB/s, -0.0 %": {"value": 439.9996, "status": "failed", "margin": -1e-6},
    "none >= 440 GB/s": {"value": None, "status": "error", "margin": None},
    "NaN >= 440 GB/s": {"value": float("nan"), "status": "error", "margin": None},
    "482.1 GB/s, recorded only": {**UNLIMITED, "status": "recorded"},
    "482.1 in 1 to 500 GB/s, +9.6 %": {"limit": JudgedLimit(min=1.0, max=500.0)},
    "482.1 >= 440 GB/s, > +999 %": {"margin": 1812.3},
    "482.1 >= 440 GB/s, inconclusive": {"inconclusive": "12 % wide"},
    "482.1 GB/s, each rank >= 90 % of the others' median, +9.6 %": {"limit": JudgedLimit(min_ratio_to_median=0.9)},
    "482.1 GB/s, over NET/IB, +9.6 %": {"limit": JudgedLimit(expect_transport=("NET/IB",))},
}


def test_the_number_and_its_limit() -> None:
    assert {headline_text(replace(BUSBW, **changes)): changes for changes in HEADLINES.values()} == HEADLINES


def failed(reason: str, *, why: str = "", culprits: tuple[int, ...] = (3,)) -> TestResult:
    judged = replace(BUSBW, status="failed", value=301.0, margin=-0.31, reason=reason)
    return TestResult(
        nodeid="t.py::test_it", outcome="failed", message=why or reason, measurements=(judged,), culprits=culprits
    )


MISSED = "nccl.all_reduce.busbw 301 GB/s < 440 GB/s (size=1 GB)"


ON_3 = "on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…)"
RANK_3 = "rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c)"
ALL = tuple(range(16))
CULPRITS = {
    f"{RANK_3}: {MISSED}": failed(f"{MISSED} {ON_3}"),
    f"{RANK_3}, and ranks 0, 4: {MISSED} on all 8 GPUs of gpu-07": failed(
        f"{MISSED} on all 8 GPUs of gpu-07", culprits=(0, 3, 4)
    ),
    f"{RANK_3}, and rank 4: {MISSED}": failed(f"{MISSED} {ON_3}, and rank 4 (gpu-07)", culprits=(3, 4)),
    # What they share is kept, and so is a sentence that needs its end.
    f"{RANK_3} and 15 more: {MISSED}: all": failed(f"{MISSED} {ON_3}, and 15 more ranks: all", culprits=ALL),
    f"{RANK_3}: {MISSED}: too fast, {ON_3}": failed(f"{MISSED}: too fast, {ON_3}"),
    f"{RANK_3} and 15 more: {MISSED}": failed(f"{MISSED} {ON_3}, and 15 more ranks", culprits=ALL),
    f"isolated: gpu-07; {MISSED}": failed(MISSED, why=f"isolated: gpu-07; {MISSED}"),
    # Nothing was measured, or the measurement is not the cause.
    "rank 3 (gpu-07) is lost": TestResult(nodeid="a", outcome="error", message="rank 3 (gpu-07) is lost"),
    "rank 1: boom": TestResult(nodeid="a", outcome="failed", message="rank 1: boom", measurements=(BUSBW,)),
}


def test_the_culprit_comes_first() -> None:
    assert {culprit_text(row_of(result), JOURNAL): result for result in CULPRITS.values()} == CULPRITS
    # A rank is named though nothing is known of the cluster.
    assert culprit_text(row_of(failed(MISSED)), None) == f"rank 3: {MISSED}"
