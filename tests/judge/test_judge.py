import dataclasses
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from complaints import in_order
from hypothesis import given
from hypothesis import strategies as st
from verdicts import ALGBW, BUSBW, GB, LIMITS, all_ranks, bf16, busbw, hold

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judge import judge, loader
from pytest_gpucluster.judge.judge import judge_value
from pytest_gpucluster.metrics import measurement as metrics
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.measurement import WITHOUT_NVLS, Measurement, measurement


def test_values_above_the_limit_pass_and_the_slowest_rank_decides():
    verdict = hold(all_ranks(r5=420.0))
    assert (verdict.outcome, verdict.message, verdict.text) == ("passed", "", "")
    (judged,) = verdict.measurements
    assert (judged.status, judged.value, judged.worst_rank, judged.median) == ("passed", 420.0, 5, 442.1)
    assert judged.margin == pytest.approx(0.05)
    assert judged.peak_ratio == pytest.approx(420 / 450)
    assert judged.reason == ""


def test_slow_ranks_fail_and_are_named_in_one_line():
    verdict = hold(all_ranks(r3=312.4))
    assert verdict.outcome == "failed"
    assert verdict.message == (
        "nccl.all_reduce.busbw 312.4 GB/s < 400 GB/s (size=1 GB) on rank 3 (gpu-00, GPU 3 GPU-1f2e)"
    )
    assert "[limit: thresholds.yaml:" in verdict.text
    assert verdict.measurements[0].margin == pytest.approx(-0.219)
    assert in_order(hold(all_ranks(r3=312.4, r1=390)).message, "312.4 GB/s < 400 GB/s rank 3 and rank 1 (gpu-00,")
    assert in_order(hold(all_ranks(300.0, r2=299)).message, "299 GB/s < all 8 ranks: look at what they share")
    assert "399.9996 GB/s < 400 GB/s" in hold(all_ranks(r3=399.9996)).message, "not shown as equal"
    assert "what they share" in hold(all_ranks(300.0, size=16), size=16).message
    assert "what they share" not in hold(all_ranks(442.0, size=16, r3=300.0, r9=300.0), size=16).message
    assert hold(all_ranks(400.0)).outcome == "passed"
    long = hold({rank: [busbw(312.4, labels=GB | {"note": "x" * 300})] for rank in range(8)}).message
    assert len(long) <= 200
    assert "on all 8 ranks" in long
    reason = f"a {'x' * 90}: {'why ' * 30}on rank 3 (gpu-00, GPU 3); also: b on rank 1"
    explained = judge._message([SimpleNamespace(reason=reason, labels={})] * 2)
    assert len(explained) == 200
    assert explained.endswith("… on rank 3 (gpu-00, GPU 3); 1 more")


@pytest.mark.parametrize("gbps", [442.1, 312.4], ids=["above the limit", "below"])
def test_a_value_for_which_nvls_was_switched_off_is_neither_accepted_nor_a_rejection(gbps):
    without = {rank: [busbw(gbps, labels=GB | WITHOUT_NVLS)] for rank in range(8)}
    verdict = hold(without)
    assert verdict.outcome == "error"
    assert in_order(verdict.message, f"{BUSBW} NVLS no verdict")
    assert verdict.measurements[0].value == gbps
    recorded = {rank: [dataclasses.replace(one, record_only=True) for one in ones] for rank, ones in without.items()}
    assert hold(recorded).outcome == "passed"


def test_a_maximum_is_missed_from_above_and_the_slowest_rank_decides():
    labels = {"size": "4 B"}
    slow = {
        rank: [measurement("nccl.all_reduce.latency", 400 * (1 + rank), unit="ms", labels=labels)] for rank in range(3)
    }
    verdict = hold(slow, size=3, sku="cpu-rehearsal", gpu_name=None)
    assert verdict.outcome == "failed"
    assert verdict.message == (
        "nccl.all_reduce.latency 1200000 us > 1000000 us (size=4 B) on rank 2 (gpu-00, GPU 2 GPU-1f2e)"
    )


def test_what_cannot_be_judged_is_an_error_even_if_only_recorded():
    for bad, why in ((busbw(-5.0), "(-5)"), (busbw(442.1, samples=[442.1, math.nan]), "1 of 2 NaN")):
        judged = all_ranks() | {3: [bad]}
        recorded = {rank: [dataclasses.replace(one, record_only=True) for one in ones] for rank, ones in judged.items()}
        for by_rank in (judged, recorded):
            verdict = hold(by_rank)
            assert verdict.outcome == "error"
            assert in_order(verdict.message, f"{BUSBW} (size=1 GB): {why} rank 3 (gpu-00, GPU 3 GPU-1f2e)")
            assert verdict.measurements[0].worst_rank == 3


def test_a_missing_rank_is_an_error_and_so_is_one_with_other_labels_and_one_from_outside():
    by_rank = all_ranks()
    del by_rank[2], by_rank[6]
    verdict = hold(by_rank)
    assert verdict.outcome == "error"
    assert in_order(verdict.message, f"{BUSBW} size=1 GB rank 2 (gpu-00, GPU 2 GPU-1f2e) 1 more ranks")
    verdict = hold(all_ranks() | {7: [busbw(442.1, labels={"size": "2 GB"})]})
    assert verdict.outcome == "error"
    assert [judged.status for judged in verdict.measurements] == ["error", "error"]
    verdict = hold(all_ranks() | {9: [busbw(442.1)]})
    assert (verdict.outcome, "rank 9" in verdict.message) == ("error", True)


def test_of_many_problems_the_first_three_are_named_and_the_rest_counted():
    for wrong in (3, 4, 6):
        verdict = hold(all_ranks() | {rank: [busbw(-5.0)] for rank in range(wrong)})
        assert verdict.outcome == "error"
        reason = verdict.measurements[0].reason
        assert [rank for rank in range(wrong) if f"rank {rank} " in reason] == [0, 1, 2], reason
        assert (f"{wrong - 3} more" in reason) == (" more" in reason) == (wrong > 3), reason


def test_a_value_measured_twice_under_the_same_labels_is_an_error():
    by_rank = all_ranks()
    by_rank[4] = [busbw(442.1), busbw(410.0)]
    verdict = hold(by_rank)
    assert verdict.outcome == "error"
    assert in_order(verdict.message, "2 rank 4 gpu-00 GPU 4 GPU-1f2e")
    assert verdict.measurements[0].values[4] == 410.0


def test_a_failure_wins_over_an_error_and_keeps_it_in_the_text():
    by_rank = all_ranks(r3=312.4)
    by_rank[5] = [busbw(math.nan)]
    verdict = hold(by_rank)
    assert verdict.outcome == "failed"
    assert verdict.message.startswith("nccl.all_reduce.busbw 312.4 GB/s < 400 GB/s")
    assert in_order(verdict.text, "NaN rank 5")
    other_metric = {rank: [busbw(312.4), bf16(math.nan)] for rank in range(8)}
    verdict = hold(other_metric)
    assert verdict.outcome == "failed"
    assert "NaN" in verdict.text
    assert [judged.status for judged in verdict.measurements] == ["failed", "error"]


def test_the_largest_miss_speaks_for_several():
    by_rank = {0: [busbw(399.0, labels={"size": "2 GB"}), busbw(100.0), bf16(699.0)]}
    for rank in range(1, 8):
        by_rank[rank] = [busbw(440.0, labels={"size": "2 GB"}), busbw(440.0), bf16(730.0)]
    verdict = hold(by_rank)
    assert verdict.message == (
        "nccl.all_reduce.busbw 100 GB/s < 400 GB/s (size=1 GB) on rank 0 (gpu-00, GPU 0 GPU-1f2e); 2 more"
    )
    assert verdict.text.count("[limit: ") == 3


def test_the_miss_that_explains_the_others_speaks_for_them_however_far_they_miss():
    names = ("lora.tokens_per_second", "lora.resume_error", "lora.loss_error", "lora.gradient_error")
    units = ("tokens/s", "ratio", "ratio", "ratio")
    labels = {"model": "tiny", "precision": "fp32"}
    each = [
        measurement(name, value, unit=unit, labels=labels)
        for name, unit, value in zip(names, units, (1.0, 9e9, 9e3, 9.0), strict=True)
    ]
    verdict = hold(dict.fromkeys(range(8), each))
    missed = [judged for judged in verdict.measurements if judged.status == "failed"]
    assert {judged.metric for judged in missed} >= set(names[1:])
    assert min(missed, key=lambda judged: judged.margin or 0.0).metric == "lora.resume_error"
    assert verdict.message.startswith("lora.gradient_error ")


# Too fast to be true ---------------------------------------------------------------------------------------------


def test_a_product_above_the_data_sheet_peak_is_an_error():
    verdict = hold({rank: [bf16(990.0 if rank == 3 else 730.0)] for rank in range(8)})
    assert verdict.outcome == "error"
    assert in_order(verdict.message, "matmul.bf16.tflops 990 TFLOPS > 989 TFLOPS H100 SXM rank 3 gpu-00 GPU 3 GPU-1f2e")
    assert verdict.measurements[0].peak_ratio == pytest.approx(990 / 989)
    assert hold({rank: [bf16(989.0)] for rank in range(8)}).outcome == "passed"


def algbw(value, size):
    return {rank: [measurement(ALGBW, value, unit="GB/s", labels=GB)] for rank in range(size)}


def test_algbw_above_the_link_is_too_fast_inside_a_node_only():
    assert in_order(hold(algbw(451.0, 8)).message, "451 GB/s > 450 GB/s")
    assert hold(algbw(450.0, 8)).outcome == "passed"
    assert hold(algbw(451.0, 16), size=16).outcome == "passed"
    assert hold(algbw(451.0, 1), size=1).outcome == "passed"


def test_busbw_may_pass_the_link_peak():
    verdict = hold(all_ranks(482.0))
    assert verdict.outcome == "passed"
    assert verdict.measurements[0].peak_ratio == pytest.approx(482 / 450)
    ib = {"labels": GB | {"transport": "NET/IB"}}
    across = hold({rank: [busbw(435.0, **ib)] for rank in range(16)}, size=16)
    assert across.outcome == "passed"
    assert across.measurements[0].peak_ratio is None


# Limits that are not there ---------------------------------------------------------------------------------------


def test_what_the_limits_only_record_passes_and_says_why():
    by_rank = {rank: [busbw(22.3, labels={"size": "1 MB"})] for rank in range(8)}
    verdict = hold(by_rank)
    assert verdict.outcome == "passed"
    (judged,) = verdict.measurements
    assert (judged.status, judged.limit, judged.margin) == ("recorded", None, None)
    assert in_order(judged.reason, "1 GB thresholds.yaml")


def test_what_the_test_only_records_is_not_judged_unless_some_rank_asks_for_it():
    slow = {rank: [busbw(1.0, record_only=True)] for rank in range(8)}
    assert hold(slow).outcome == hold(slow, sku=None, gpu_name="NVIDIA H300").outcome == "passed"
    slow[0] = [busbw(1.0)]
    assert hold(slow).outcome == "failed"


def resolved(text, value, tmp_path):
    """Load the YAML of an error text, with the placeholders filled in as its reader would."""
    yaml = text[text.index("schema_version") :].split("\n\n")[0]
    assert "<what you accept>" in yaml
    assert yaml.count("<") == 2
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.replace("<what you accept>", value).replace("<where the figure comes from>", "us"))
    return loader.load(loader.shipped_path(), path)


def test_a_missing_limit_is_an_error_whose_yaml_resolves_it(tmp_path):
    by_rank = all_ranks(300.0, size=12)
    judged = replace(LIMITS, limits=tuple(limit for limit in LIMITS.limits if limit.record_only is None))
    verdict = hold(by_rank, size=12, ranks_per_node=6, limits=judged)
    assert verdict.outcome == "error"
    assert in_order(verdict.message, "nccl.all_reduce.busbw size=1 GB H100 SXM these conditions YAML")
    assert "world_size 16, nnodes 2, size 1 GB or more (thresholds.yaml:" in verdict.text
    mine = resolved(verdict.text, "250", tmp_path)
    assert hold(by_rank, size=12, ranks_per_node=6, limits=mine).outcome == "passed"
    assert hold(all_ranks(240.0, size=12), size=12, ranks_per_node=6, limits=mine).outcome == "failed"


@pytest.mark.parametrize(
    "gpu_name",
    ["NVIDIA H300", "NVIDIA H200 NVL", "NVIDIA B200 (rev. 2) [x+y]", "O'Brien\\GPU: #1 {a}"],
)
def test_an_unknown_gpu_is_an_error_whose_yaml_makes_it_known(gpu_name, tmp_path):
    verdict = hold(all_ranks(), sku=None, gpu_name=gpu_name)
    assert verdict.outcome == "error"
    assert f"unknown GPU {gpu_name!r}: no SKU matches it" in verdict.message
    mine = resolved(verdict.text, "400", tmp_path)
    assert mine.sku_for(gpu_name) == "my-gpu"
    assert hold(all_ranks(), sku="my-gpu", gpu_name=gpu_name, limits=mine).outcome == "passed"


def test_an_unknown_gpu_s_message_states_what_is_unknown_and_on_which_side_the_limit_to_add_lies(tmp_path):
    for sku, gpu_name, words in ((None, None, "name GPU not known"), ("H300", "NVIDIA H300", "unknown SKU 'H300'")):
        verdict = hold(all_ranks(), sku=sku, gpu_name=gpu_name)
        assert verdict.outcome == "error"
        assert in_order(verdict.message, words)
    odd = hold(all_ranks(), sku="a: b #2", gpu_name="NVIDIA H300").text
    assert "a: b #2" in resolved(odd, "400", tmp_path).skus, "as a key of YAML"
    latency = measurement("nccl.all_reduce.latency", 20.0, unit="us")
    verdict = hold({0: [latency]}, size=1, sku=None, gpu_name="NVIDIA H300")
    assert " max: <" in verdict.text
    assert "min:" not in verdict.text
    with pytest.raises(MeasurementError, match="'zzz'"):
        hold({0: [Measurement(metric="zzz", value=1.0, unit="GB/s")]}, size=1)


def test_the_yaml_of_a_missing_limit_has_the_labels_that_limits_can_depend_on():
    labels = {"note": "mine", "transport": "NET/IB", "dtype": "bf16", "size": "4 MB"}
    verdict = hold({0: [bf16(730.0, labels=labels)]}, size=1, limits=replace(LIMITS, limits=()))
    assert "when: {size: 4 MB, dtype: bf16, transport: NET/IB}" in verdict.text
    assert "conditions" not in verdict.text, "no limit is there under any conditions"


def test_a_value_of_elsewhere_is_judged_as_if_each_rank_had_measured_it():
    def judged(value, **labels):
        found = judge_value(
            BUSBW, value, unit="GB/s", sku="H100 SXM", world_size=16, nnodes=2, labels=GB | labels, limits=LIMITS
        )
        return found.status, sorted(found.values), found.labels["transport"]

    ranks = list(range(16))
    assert judged(435.0) == ("passed", ranks, "NET/IB"), "what the limit expects has carried it"
    assert judged(300.0) == ("failed", ranks, "NET/IB")
    assert judged(435.0, transport="NET/Socket") == ("failed", ranks, "NET/Socket")


def test_a_label_the_loader_would_refuse_is_left_out_of_the_yaml(tmp_path):
    labels = {"size": "huge", "dtype": "a to b: {", "note": "\x1b[31m\nred"}
    by_rank = {rank: [bf16(730.0, labels=labels)] for rank in range(8)}
    verdict = hold(by_rank, sku=None, gpu_name="NVIDIA H300")
    resolved(verdict.text, "700", tmp_path)
    assert "\n" not in verdict.message
    assert "\x1b" not in verdict.message + verdict.text


# Scopes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def scoped(monkeypatch, tmp_path):
    monkeypatch.setattr(metrics, "_REGISTRY", dict(metrics.METRICS))
    for scope in ("node", "world"):
        metrics.register(Metric(name=f"site.{scope}", unit="s", better="lower", scope=scope, doc="x"))
    path = tmp_path / "site.yaml"
    path.write_text(
        "schema_version: 1\nskus:\n  H200:\n    limits:\n"
        "      site.node: {min: 1 s, max: 10 s, source: us}\n"
        "      site.world: {max: 0 s, source: us}\n"
    )
    return loader.load(path)


def test_a_metric_of_the_node_needs_one_value_per_node(scoped):
    one = [measurement("site.node", 5, unit="s")]
    arguments = {"size": 16, "sku": "H200", "limits": scoped}
    assert hold({0: one, 8: one}, **arguments).outcome == "passed"
    verdict = hold({0: one, 7: one}, **arguments)
    assert verdict.outcome == "error"
    assert in_order(verdict.message, "site.node 1 rank 8 gpu-01 GPU 0 GPU-1f2e")
    silent = hold({0: one}, **{**arguments, "size": 24})
    assert in_order(silent.message, "site.node node 1 gpu-01 and 1 more")


def test_with_both_bounds_the_value_nearest_to_missing_decides(scoped):
    values = {rank: [measurement("site.node", value, unit="s")] for rank, value in enumerate((5, 0.5, 9.9))}
    verdict = hold(values, size=3, sku="H200", limits=scoped)
    assert verdict.message == "site.node 0.5 s < 1 s on node 0"


def test_what_a_node_misses_names_the_node_and_none_of_its_gpus(scoped):
    late = {rank: [measurement("site.node", 5 + rank, unit="s")] for rank in (0, 8, 16)}
    verdict = hold(late, size=24, sku="H200", limits=scoped)
    assert verdict.message == "site.node 21 s > 10 s on node 2 and node 1"
    assert set(verdict.measurements[0].misses) == set(range(8, 24))
    verdict = hold(dict.fromkeys(late, late[16]), size=24, sku="H200", limits=scoped)
    assert in_order(verdict.message, "on all 3 nodes")


def test_a_metric_of_the_world_needs_one_value_and_a_bound_of_zero_can_be_met_and_missed(scoped):
    arguments = {"size": 16, "sku": "H200", "limits": scoped}
    assert hold({3: [measurement("site.world", 0, unit="s")]}, **arguments).outcome == "passed"
    verdict = hold({3: [measurement("site.world", 2, unit="s")]}, **arguments)
    assert verdict.message == "site.world 2 s > 0 s on rank 3 (gpu-00, GPU 3 GPU-1f2e)"


# The form that travels -------------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.integers(0, 9),
        st.lists(
            st.builds(
                Measurement,
                metric=st.just(BUSBW),
                unit=st.just("GB/s"),
                value=st.floats(),
                samples=st.lists(st.floats(), max_size=3).map(tuple),
                interval=st.none() | st.tuples(st.floats(), st.floats()),
                inconclusive=st.just("") | st.text(),
                labels=st.dictionaries(st.sampled_from(["size", "x", "transport"]), st.text(), max_size=2),
                record_only=st.booleans(),
            ),
            max_size=3,
        ),
    ),
    st.sampled_from([None, "H100 SXM", "H300", "cpu-rehearsal"]),
    st.one_of(st.none(), st.text()),
)
def test_whatever_was_measured_gives_one_line_and_strict_json(by_rank, sku, gpu_name):
    verdict = hold(by_rank, sku=sku, gpu_name=gpu_name)
    assert len(verdict.message) <= 200
    assert (verdict.message == "") == (verdict.outcome == "passed")
    assert verdict.message.isprintable()
    assert all(line.isprintable() for line in verdict.text.split("\n"))
    for judged in verdict.measurements:
        json.dumps(judged.to_json(), allow_nan=False)
        assert (judged.status == "passed") <= (judged.reason == "")
        if judged.status == "passed":
            assert set(judged.values) == set(range(8))
            assert all(value >= 0 for value in judged.values.values())
            assert judged.inconclusive == ""


def test_a_value_that_surely_misses_is_not_inconclusive_because_another_one_is():
    values = all_ranks(r3=312.4)
    values[5] = [replace(busbw(405.0), interval=(390.0, 420.0))]
    (judged,) = hold(values).measurements
    assert (judged.worst_rank, judged.inconclusive) == (3, "")
    del values[3]
    (judged,) = hold({**values, 3: [busbw(442.1)]}).measurements
    assert judged.worst_rank == 5
    assert judged.inconclusive
