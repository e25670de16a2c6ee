"""A criterion in few words: number, limit, margin, and who is to blame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.journal import Cluster, Journal, JudgedLimit, JudgedMetric, RankPlace, Run, TestResult
from pytest_gpucluster.reports.criterion_text import bound_text, culprit_text, headline_text, margin_text, value_text
from pytest_gpucluster.reports.outline import row_of
from pytest_gpucluster.reports.tables import rank_name

LIMIT = JudgedLimit(min=440.0)
BUSBW = JudgedMetric(
    metric="nccl.all_reduce.busbw", unit="GB/s", status="passed", value=482.12, worst_rank=3, limit=LIMIT, margin=0.0957
)
PLACE = RankPlace(rank=3, host="gpu-07", gpu={"index": "3", "uuid": "GPU-1f2e3d4c-0000", "name": "NVIDIA H100"})
JOURNAL = Journal(
    run=Run(run_id="1", started_at="", world_size=8), cluster=Cluster(ranks=(PLACE, RankPlace(rank=4, host="gpu-07")))
)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param({}, "482.1 >= 440 GB/s, +9.6 %", id="kept"),
        pytest.param(
            {"value": 439.9996, "status": "failed", "margin": -1e-6},
            "439.9996 >= 440 GB/s, -0.0 %",
            id="missed by a hair",
        ),
        pytest.param({"value": None, "status": "error", "margin": None}, "none >= 440 GB/s", id="no value"),
        pytest.param({"value": float("nan"), "status": "error", "margin": None}, "NaN >= 440 GB/s", id="no number"),
        pytest.param({"limit": None, "margin": None, "status": "recorded"}, "482.1 GB/s, recorded only", id="recorded"),
        pytest.param(
            {"limit": None, "margin": None, "status": "error"}, "482.1 GB/s, no limit", id="no limit is no pass"
        ),
        pytest.param({"limit": JudgedLimit(max=500.0)}, "482.1 <= 500 GB/s, +9.6 %", id="an upper limit"),
        pytest.param({"limit": JudgedLimit(min=1.0, max=500.0)}, "482.1 in 1 to 500 GB/s, +9.6 %", id="both"),
        pytest.param({"limit": JudgedLimit(min=0.0)}, "482.1 >= 0 GB/s", id="a limit of zero has no shares"),
        pytest.param({"margin": 1812.3}, "482.1 >= 440 GB/s, > +999 %", id="far above"),
        pytest.param({"inconclusive": "12 % wide"}, "482.1 >= 440 GB/s, inconclusive", id="not known"),
        pytest.param(
            {"limit": JudgedLimit(min_ratio_to_median=0.9)},
            "482.1 GB/s, each rank >= 90 % of the others' median, +9.6 %",
            id="held against the other ranks only",
        ),
        pytest.param(
            {"limit": JudgedLimit(expect_transport=("NET/IB",))},
            "482.1 GB/s, over NET/IB, +9.6 %",
            id="a transport only",
        ),
    ],
)
def test_the_number_stands_beside_its_limit(changes: dict[str, Any], text: str) -> None:
    assert headline_text(replace(BUSBW, **changes)) == text


def test_the_cells_of_a_table_say_the_same() -> None:
    assert (value_text(BUSBW), bound_text(BUSBW), margin_text(BUSBW)) == ("482.1", ">= 440", "+9.6 %")
    assert bound_text(replace(BUSBW, limit=None)) == "no limit"
    assert bound_text(replace(BUSBW, limit=JudgedLimit(min_ratio_to_median=0.9))) == ">= 90 % of median"


def failed(reason: str, *, why: str = "", culprits: tuple[int, ...] = (3,)) -> TestResult:
    judged = replace(BUSBW, status="failed", value=301.0, margin=-0.31, reason=reason)
    return TestResult(
        nodeid="t.py::test_it", outcome="failed", message=why or reason, measurements=(judged,), culprits=culprits
    )


MISSED = "nccl.all_reduce.busbw 301 GB/s < 440 GB/s (size=1 GB)"


@pytest.mark.parametrize(
    ("result", "text"),
    [
        pytest.param(
            failed(f"{MISSED} on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…)"),
            f"rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c): {MISSED}",
            id="one rank, told once",
        ),
        pytest.param(
            failed(f"{MISSED} on all 8 GPUs of gpu-07", culprits=(0, 3, 4)),
            f"rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c), and ranks 0, 4: {MISSED} on all 8 GPUs of gpu-07",
            id="a few ranks",
        ),
        pytest.param(
            failed(f"{MISSED} on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…), and rank 4 (gpu-07)", culprits=(3, 4)),
            f"{rank_name(JOURNAL, 3)}, and rank 4: {MISSED}",
            id="two ranks, neither told twice",
        ),
        pytest.param(
            failed(
                f"{MISSED} on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…), and 15 more ranks: all there are, look at them",
                culprits=tuple(range(16)),
            ),
            f"{rank_name(JOURNAL, 3)} and 15 more: {MISSED}: all there are, look at them",
            id="what they share is kept",
        ),
        pytest.param(
            failed(f"{MISSED}: too fast, on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…)"),
            f"{rank_name(JOURNAL, 3)}: {MISSED}: too fast, on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…)",
            id="a sentence that needs its end keeps it",
        ),
        pytest.param(
            failed(f"{MISSED} on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…), and 15 more ranks", culprits=tuple(range(16))),
            f"rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c) and 15 more: {MISSED}",
            id="many ranks",
        ),
        pytest.param(
            failed(MISSED, why=f"isolated: gpu-07; {MISSED}"),
            f"isolated: gpu-07; {MISSED}",
            id="who was isolated is first",
        ),
        pytest.param(
            TestResult(nodeid="t.py::test_it", outcome="error", message="rank 3 (gpu-07) is lost"),
            "rank 3 (gpu-07) is lost",
            id="nothing was measured",
        ),
        pytest.param(
            TestResult(
                nodeid="t.py::test_it", outcome="failed", message="rank 1 (gpu-07): boom", measurements=(BUSBW,)
            ),
            "rank 1 (gpu-07): boom",
            id="what was measured is not to blame",
        ),
    ],
)
def test_the_culprit_comes_first(result: TestResult, text: str) -> None:
    assert culprit_text(row_of(result), JOURNAL) == text


def test_a_rank_is_named_though_nothing_is_known_of_the_cluster() -> None:
    assert culprit_text(row_of(failed(MISSED)), None) == f"rank 3: {MISSED}"
