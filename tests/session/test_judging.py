from dataclasses import replace
from types import SimpleNamespace

import pytest
from verdicts import LIMITS

from pytest_gpucluster.agreement.exchange import Merged, RankOutcome, merge
from pytest_gpucluster.journal.records import CollectedTest
from pytest_gpucluster.journal.test_record import TestRecord
from pytest_gpucluster.journal.verdict import ACCEPTED, INCOMPLETE, decide
from pytest_gpucluster.judge.loader import load, shipped_path
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.metrics.sampling import Series
from pytest_gpucluster.session.judging import judge_merged
from pytest_gpucluster.session.reporting import with_remedy

H100 = "NVIDIA H100 80GB HBM3"
BF16 = "matmul.bf16.tflops"
NAMES = {0: "rank 0 (gpu-06)", 1: "rank 1 (gpu-06)"}
GOOD, SLOW, NAN = 731.0, 312.4, float("nan")


def run(*, sku="H100 SXM", rehearsal=False):
    return SimpleNamespace(
        names=NAMES,
        rehearsal=rehearsal,
        slowdown=1.0,
        limits=LIMITS,
        gpu_name=lambda: H100,
        node_of=lambda: {0: 0, 1: 0},
        sku=lambda gpu: sku,
        roll=SimpleNamespace(hosts=("gpu-06", "gpu-06")),
        baseline=None,
        settings=SimpleNamespace(thresholds=None),
    )


def bf16(value, **more):
    return measurement(BF16, value, unit="TFLOPS", **more).to_json()


def said(*values, kinds=("passed", "passed")):
    """What the ranks measured, None for a rank that measured nothing."""
    return [
        RankOutcome(
            rank=rank,
            outcome=kind,
            message="" if kind == "passed" else f"m{rank}",
            text="" if kind == "passed" else f"text of {rank}",
            measurements=[] if value is None else [bf16(value)],
        )
        for rank, (value, kind) in enumerate(zip(values, kinds, strict=True))
    ]


def record(criterion="matmul"):
    return TestRecord(test=CollectedTest.of("a.py::test_matmul", ("a.py", 1, "test_matmul"), criterion))


def judged(outcomes, criterion="matmul", *, sku="H100 SXM"):
    test = record(criterion)
    return judge_merged(run(sku=sku), test, merge(outcomes, NAMES), outcomes), test.measurements


@pytest.mark.parametrize(
    ("outcomes", "criterion", "outcome", "culprits"),
    [
        pytest.param(said(GOOD, GOOD), "matmul", "passed", [], id="all above the limit"),
        pytest.param(said(GOOD, SLOW), "matmul", "failed", [1], id="one below it"),
        pytest.param(said(SLOW, SLOW), "matmul", "failed", [0, 1], id="all below it"),
        pytest.param(said(GOOD, SLOW), None, "failed", [1], id="below it in a test that is no criterion"),
        pytest.param(said(GOOD, None), "matmul", "error", [], id="one value is missing"),
        pytest.param(said(GOOD, NAN), "matmul", "error", [], id="one value is no number"),
        pytest.param(said(SLOW, NAN), "matmul", "failed", [0], id="too slow outweighs no number"),
        pytest.param(said(None, None), "matmul", "error", [], id="a criterion that measured nothing"),
        pytest.param(said(None, None), None, "passed", [], id="a test that measured nothing"),
        pytest.param(
            said(None, None, kinds=("failed", "passed")), "matmul", "failed", [0], id="a failure without a value"
        ),
        pytest.param(
            said(None, None, kinds=("error", "released")), "matmul", "error", [0], id="an error without a value"
        ),
        pytest.param(said(GOOD, GOOD, kinds=("error", "passed")), "matmul", "error", [0], id="good values, but broken"),
        pytest.param(said(GOOD, SLOW, kinds=("error", "passed")), "matmul", "failed", [1], id="slow outweighs broken"),
        pytest.param(said(GOOD, NAN, kinds=("error", "passed")), "matmul", "error", [0], id="the error stays"),
        pytest.param(said(SLOW, GOOD, kinds=("passed", "failed")), "matmul", "failed", [1], id="the failure stays"),
        pytest.param(said(GOOD, None, kinds=("passed", "lost")), "matmul", "error", [1], id="a lost rank stays lost"),
    ],
)
def test_what_was_measured_and_what_happened_make_one_outcome(outcomes, criterion, outcome, culprits):
    merged, _ = judged(outcomes, criterion)
    assert (merged.outcome, list(merged.culprits)) == (outcome, culprits)


def test_a_missed_limit_names_rank_value_and_limit_in_one_line():
    merged, _ = judged(said(GOOD, SLOW))
    assert merged.message.startswith(f"{BF16} 312.4 TFLOPS < 700 TFLOPS")
    assert "rank 1 (gpu-06)" in merged.message
    assert merged.ranks == [{"rank": 1, "outcome": "failed", "message": f"{BF16} 312.4 TFLOPS < 700 TFLOPS"}]
    assert "thresholds.yaml:" in merged.text
    assert (merged.judged, merged.group_invalid) == (True, False)


def test_what_was_measured_goes_on_record_whatever_the_outcome():
    for outcomes in (said(GOOD, GOOD), said(GOOD, SLOW), said(GOOD, GOOD, kinds=("error", "passed"))):
        _, measurements = judged(outcomes)
        assert [(m["metric"], list(m["values"])) for m in measurements] == [(BF16, ["0", "1"])]


def test_a_missed_limit_beside_an_error_keeps_the_errors_text_and_blames_no_victim():
    merged, _ = judged(said(GOOD, SLOW, kinds=("error", "released")))
    assert merged.outcome == "failed"
    assert merged.text.endswith("not culprits: rank 1.")
    assert "text of 0" in merged.text
    assert (list(merged.culprits), list(merged.released)) == ([1], [])
    assert [(row["rank"], row["outcome"]) for row in merged.ranks] == [(1, "failed"), (0, "error")]
    assert merged.group_invalid


def test_a_gpu_without_limits_is_never_a_pass():
    merged, _ = judged(said(GOOD, GOOD), sku=None)
    assert merged.outcome == "error"
    assert "unknown GPU" in merged.message


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        pytest.param({**bf16(GOOD), "metric": "site.speed"}, "unknown metric 'site.speed'", id="an unknown metric"),
        pytest.param({"metric": BF16}, "a measurement in transit lacks inconclusive, ", id="half a measurement"),
        pytest.param(
            {key: value for key, value in bf16(GOOD).items() if key != "inconclusive"},
            "a measurement in transit lacks inconclusive",
            id="without whether it is inconclusive",
        ),
        pytest.param(
            {**bf16(GOOD), "value": "fast"}, "a measurement in transit: value must be a number", id="no number"
        ),
    ],
)
def test_a_measurement_that_cannot_be_read_is_an_error_and_not_the_end_of_rank_0(bad, message):
    for kinds, outcome in ((("passed", "passed"), "error"), (("passed", "failed"), "failed")):
        outcomes = said(GOOD, GOOD, kinds=kinds)
        outcomes[1] = RankOutcome(rank=1, outcome=kinds[1], message="m1", measurements=[bad])
        merged, _ = judged(outcomes)
        assert merged.outcome == outcome
        assert merged.message.startswith(message if outcome == "error" else "rank 1 (gpu-06): m1")


def test_a_criterion_whose_values_the_limits_file_only_records_is_not_judged():
    def values(*, record_only):
        measured = measurement(
            "nccl.all_reduce.busbw", 12.0, unit="GB/s", labels={"size": "1 GB"}, record_only=record_only
        )
        return [RankOutcome(rank=rank, outcome="passed", measurements=[measured.to_json()]) for rank in NAMES]

    test = record("nccl.all_reduce")
    outcomes = values(record_only=False)
    assert judge_merged(run(sku="GH200"), test, merge(outcomes, NAMES), outcomes).outcome == "passed"
    for words in ("nccl.all_reduce.busbw", "GH200", "calibrate", "recorded only"):
        assert words in test.unjudged

    as_the_test_asked = record("inventory")
    outcomes = values(record_only=True)
    judge_merged(run(sku="GH200"), as_the_test_asked, merge(outcomes, NAMES), outcomes)
    assert as_the_test_asked.unjudged == ""


@pytest.mark.parametrize(
    ("sku", "rehearsal", "is_judged"),
    [("H100 SXM", False, True), ("GH200", False, False), ("GH200", True, True)],
    ids=["with a floor", "recorded on this SKU", "in a rehearsal"],
)
def test_a_ratio_to_the_other_links_does_not_stand_for_their_rate(sku, rehearsal, is_judged):
    labels = {"nnodes": 1, "world_size": 2}
    values = [
        measurement("link.bandwidth", 300.0, unit="GB/s", labels=labels).to_json(),
        measurement("link.ratio_to_median", 1.0, unit="ratio", labels=labels).to_json(),
    ]
    outcomes = [RankOutcome(rank=rank, outcome="passed", measurements=values) for rank in NAMES]
    test = record("links")
    assert judge_merged(run(sku=sku, rehearsal=rehearsal), test, merge(outcomes, NAMES), outcomes).outcome == "passed"
    assert (test.unjudged == "") == is_judged
    passed = replace(test.result(), outcome="passed")
    found = decide([passed], pytest_exit=0, kind="", selection=False, manifest=True, topology="")
    assert (found.word, found.exit) == ((ACCEPTED, 0) if is_judged else (INCOMPLETE, 10))
    assert is_judged or all(words in found.reason for words in ("links", "link.bandwidth", sku, "calibrate"))


def test_a_slow_node_is_called_by_its_host():
    """Four ranks on two nodes, of which one is slow throughout."""
    outcomes = said(GOOD, GOOD, SLOW, SLOW - 1, kinds=("passed",) * 4)
    names = {rank: f"rank {rank}" for rank in range(4)}
    world = run()
    world.names, world.node_of = names, lambda: {0: 0, 1: 0, 2: 1, 3: 1}
    world.roll = SimpleNamespace(hosts=("gpu-06", "gpu-06", "gpu-07", "gpu-07"))
    merged = judge_merged(world, record(), merge(outcomes, names), outcomes)
    missed = "matmul.bf16.tflops 311.4 TFLOPS < 700 TFLOPS"
    assert merged.message == f"{missed} on all 2 GPUs of gpu-07 (look at the node)"
    assert merged.culprits == [2, 3]


def noisy(rank, value):
    series = Series(samples=(value,) * 3, median=value, low=value, high=value, inconclusive="it varies")
    measured = measurement(BF16, series, unit="TFLOPS")
    return RankOutcome(rank=rank, outcome="passed", measurements=[measured.to_json()])


@pytest.mark.parametrize(
    ("outcomes", "rehearsal", "outcome"),
    [
        pytest.param([noisy(0, GOOD), noisy(1, GOOD)], True, "skipped", id="inconclusive in a rehearsal"),
        pytest.param([noisy(0, GOOD), noisy(1, GOOD)], False, "failed", id="inconclusive on GPUs"),
        pytest.param([noisy(0, GOOD), *said(GOOD, SLOW)[1:]], True, "failed", id="below the limit, and inconclusive"),
        pytest.param([noisy(0, GOOD), *said(GOOD, None)[1:]], True, "failed", id="a value is missing"),
        pytest.param(
            [noisy(0, GOOD), *said(0, GOOD, kinds=("passed", "failed"))[1:]], True, "failed", id="body failed"
        ),
    ],
)
def test_values_that_do_not_settle_skip_a_rehearsal_and_nothing_else(outcomes, rehearsal, outcome):
    test = record()
    merged = judge_merged(run(rehearsal=rehearsal), test, merge(outcomes, NAMES), outcomes)
    assert (merged.outcome, merged.too_slow) == (outcome, outcome == "skipped")
    if merged.too_slow:
        assert [one["status"] for one in test.measurements] == ["recorded"]


def test_floors_and_times_of_a_rehearsal_follow_its_slowdown_and_no_other_limits():
    shipped = load(shipped_path())
    slower = shipped.slower(4.0)

    def limit(limits, metric, sku="cpu-rehearsal"):
        return limits.limit(metric, sku=sku, world_size=2, nnodes=1, labels={"size": "1 MB"})

    for metric in ("matmul.bf16.tflops", "hbm.copy.bandwidth", "training.tokens_per_second"):
        assert limit(slower, metric).min == limit(shipped, metric).min / 4
        assert limit(slower, metric).min_ratio_to_median == limit(shipped, metric).min_ratio_to_median
    assert limit(slower, "nccl.all_reduce.latency").max == limit(shipped, "nccl.all_reduce.latency").max * 4
    for metric in ("gpu.findings", "gpu.usable_dtypes", "burn_in.retention", "scaling.efficiency"):
        assert limit(slower, metric) == limit(shipped, metric)
    others = [one for one in shipped.limits if one.sku != "cpu-rehearsal"]
    assert others == [one for one in slower.limits if one.sku != "cpu-rehearsal"]
    assert shipped.slower(1.0) is shipped
    own = replace(shipped, limits=tuple(replace(one, layer=1) for one in shipped.limits))
    assert own.slower(4.0) == own, "those of an operator"


def test_a_test_is_judged_by_the_limits_of_a_machine_as_slow_as_this_one():
    outcomes = said(None, None)
    slow = measurement("hbm.copy.bandwidth", 0.05, unit="GB/s").to_json()
    outcomes = [replace(outcome, measurements=[slow]) for outcome in outcomes]
    own = run(sku="cpu-rehearsal", rehearsal=True)
    own.limits = load(shipped_path())
    judged = []
    for own.slowdown in (1.0, 4.0):
        judged.append(judge_merged(own, record("hbm"), merge(outcomes, NAMES), outcomes).outcome)
    assert judged == ["failed", "passed"]


ADVICE = "what to do: look at `nvidia-smi`, then at the node."


def fails_with_advice():
    """Accepted: something.

    When it fails: look at ``nvidia-smi``,
    then at the node.

    On cpu it rehearses.
    """


@pytest.mark.parametrize(
    ("test", "merged", "text"),
    [
        (fails_with_advice, Merged(outcome="failed", text="slow"), f"slow\n\n{ADVICE}"),
        (fails_with_advice, Merged(outcome="failed", text="x; what to do: drain it"), "x; what to do: drain it"),
        (fails_with_advice, Merged(outcome="error", text="lost"), "lost"),
        (said, Merged(outcome="failed", text="slow"), "slow"),
    ],
    ids=["failed", "has advice", "error", "no such paragraph"],
)
def test_a_failure_has_what_to_do_from_the_tests_docstring(test, merged, text):
    assert with_remedy(merged, SimpleNamespace(obj=test)).text == text
