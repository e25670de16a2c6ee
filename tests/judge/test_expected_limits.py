"""What is expected is reported wherever the limit is, and decides nothing."""

import json

import pytest
from each import of_each
from verdicts import hold
from written_runs import MATMUL, case, read

from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.metrics.sampling import Series
from pytest_gpucluster.reports import junit, markdown
from pytest_gpucluster.reports.html import page

FP32 = "matmul.fp32.tflops"


def held(value, metric=FP32):
    return hold({rank: [measurement(metric, value, unit="TFLOPS")] for rank in range(2)}, size=2)


def run_of(value=50.5, **limit):
    """A journal with a value of fp32 as the judge records it, with these keys of its limit changed."""
    [line] = [judged.to_json() for judged in held(value).measurements]
    return read(case(MATMUL, "passed", {**line, "limit": {**line["limit"], **limit}}))


# Judging ---------------------------------------------------------------------------------------------------------


@of_each("value", [47.5, 50.5, Series(samples=(50.0, 50.5, 61.0), median=50.5, low=50.0, high=61.0), 60.0, 66.0, 47.4])
def test_only_the_limit_decides(value):
    verdict = held(value)
    low = value.low if isinstance(value, Series) else value
    assert verdict.outcome == ("failed" if low < 47.5 else "passed"), verdict.message
    [judged] = verdict.measurements
    assert (judged.limit.min, judged.limit.expected) == (47.5, 60.0)
    assert judged.margin == pytest.approx((low - 47.5) / 47.5), "the margin is that of the limit"


# In the journal -------------------------------------------------------------------------------------------------------


def test_it_is_on_record_where_it_is_set_and_only_there():
    [judged] = held(50.5).measurements
    assert judged.to_json()["limit"]["expected"] == 60.0
    [plain] = held(400.0, "matmul.tf32.tflops").measurements
    assert "expected" not in plain.to_json()["limit"], "a journal without it stays as it was"
    for found, expected in ((judged, 60.0), (plain, None)):
        line = json.loads(json.dumps(found.to_json()))
        [result] = read(case(MATMUL, "passed", line)).results
        assert result.measurements[0].limit.expected == expected


# Shown -----------------------------------------------------------------------------------------------------------

LIMIT = ">= 47.5 TFLOPS (expected 60 TFLOPS), each rank >= 92.9 % of the others' median"


def shown(render, run):
    return " ".join(str(render(run)).replace("&gt;", ">").replace("&#39;", "'").split())


def test_every_report_shows_it_next_to_the_limit():
    run = run_of()
    assert f"limit[{FP32}]" in junit.render(run)
    assert f"{LIMIT}; thresholds.yaml:" in shown(junit.render, run), "a property of the testsuite"
    assert f"(limit {LIMIT}, margin +6.3 %" in shown(junit.render, run), "the value's own line"
    assert LIMIT in shown(markdown.render, run)
    assert LIMIT in shown(page.render, run)


def test_a_file_of_ones_own_can_say_what_was_promised(tmp_path):
    path = tmp_path / "mine.yaml"
    entry = "{min: 700000 GFLOPS, expected: 0.77 PFLOPS, source: the order}"
    path.write_text(f"schema_version: 1\nskus: {{H100 SXM: {{limits: {{matmul.bf16.tflops: {entry}}}}}}}\n")
    limit = loader.load(loader.shipped_path(), path).limit(
        "matmul.bf16.tflops", sku="H100 SXM", world_size=8, nnodes=1, labels={"best_of": "4096, 8192, 16384"}
    )
    assert (limit.min, limit.expected, limit.min_ratio_to_median) == (700.0, 770.0, 0.929)
    assert limit.source.startswith("the order; ratio: ")
