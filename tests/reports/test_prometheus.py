"""metrics.prom: promtool takes it, nothing that is not known to be good is 1, and it stays small."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import example_runs
import pytest
from browser import require_program
from prometheus_client.parser import text_string_to_metric_families

from pytest_gpucluster import metrics
from pytest_gpucluster.journal import Journal, JournalBuilder, encode
from pytest_gpucluster.reports import prometheus

RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z", "device": "cuda"}
END = {"type": "end", "verdict": "ACCEPTED", "exit": 0, "at": "2026-01-02T03:05:05Z", "by": "rank 0"}
Samples = dict[tuple[tuple[str, str], ...], float]


def read(*lines: dict[str, Any]) -> Journal:
    builder = JournalBuilder(keep_samples=False)
    for line in lines:
        builder.add(json.loads(encode(line)))
    return builder.journal()


def measured(metric: str = "hbm.copy.bandwidth", unit: str = "TB/s", **more: Any) -> dict[str, Any]:
    return {"metric": metric, "unit": unit, "status": "passed", "value": 3.0, **more}


def result(*measurements: dict[str, Any], nodeid: str = "t.py::a", outcome: str = "passed") -> dict[str, Any]:
    return {"type": "test", "nodeid": nodeid, "outcome": outcome, "measurements": list(measurements)}


def samples(found: Journal | str, name: str) -> Samples:
    """The samples of a metric by their labels, without those that are empty."""
    text = found if isinstance(found, str) else prometheus.render(found)
    told = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"gpucluster_{name}":
                labels = tuple(sorted((key, value) for key, value in sample.labels.items() if value))
                assert labels not in told
                told[labels] = sample.value
    return told


def one(found: Journal | str, name: str) -> float:
    [value] = samples(found, name).values()
    return value


def promtool(text: str) -> None:
    done = subprocess.run(
        [require_program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("name", example_runs.NAMES)
def test_promtool_finds_nothing_to_say_about_an_example(name: str) -> None:
    promtool(prometheus.render(read(*example_runs.lines(name))))


def test_promtool_finds_nothing_to_say_about_any_metric_of_the_suite() -> None:
    limit = {"min": 1.0, "max": 5.0}
    every = [
        measured(metric.name, metric.unit, limit=limit, margin=0.5, median=3.0, values={"0": 3.0, "1": 3.1})
        for metric in metrics.METRICS.values()
    ]
    text = prometheus.render(read(RUN, result(*every)))
    promtool(text)
    assert one(text, "run_left_out_measurements") == 0


def test_promtool_does_speak_up() -> None:
    with pytest.raises(AssertionError, match=r"\(3, "):
        promtool("# HELP gpucluster_a_ms b\n# TYPE gpucluster_a_ms gauge\ngpucluster_a_ms 1\n")


@pytest.mark.parametrize(
    ("name", "accepted", "verdict"),
    [
        ("accepted", 1, "ACCEPTED"),
        ("cluster", 0, "REJECTED"),
        ("rehearsal", 0, "REHEARSED"),
        ("broken", 0, "BROKEN"),
        ("hostile", 0, "REJECTED"),
    ],
)
def test_only_an_accepted_run_is_accepted(name: str, accepted: float, verdict: str) -> None:
    text = prometheus.render(read(*example_runs.lines(name)))
    assert one(text, "run_accepted") == accepted
    told = samples(text, "run_verdict")
    assert [dict(labels)["verdict"] for labels, value in told.items() if value] == [verdict]
    assert len(told) == len(prometheus.WORDS)


def test_a_run_that_was_cut_off_is_not_accepted_however_well_it_went() -> None:
    found = read(RUN, result(measured()))
    assert one(found, "run_accepted") == 0
    assert one(found, "run_exit_code") == 11
    assert samples(found, "run_end_timestamp_seconds") == {}


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped"])
def test_only_what_has_passed_is_passed(outcome: str) -> None:
    collected = {"type": "collected", "tests": [{"nodeid": f"t.py::{name}"} for name in "abcd"]}
    start = {"type": "start", "nodeid": "t.py::c"}
    lines = [RUN, collected, result(nodeid="t.py::a"), result(nodeid="t.py::b", outcome=outcome), start]
    told = {dict(labels)["test"]: value for labels, value in samples(read(*lines), "criterion_passed").items()}
    assert told == {"t.py::a": 1, "t.py::b": 0, "t.py::c": 0, "t.py::d": 0}
    rehearsed = {**RUN, "rehearsal": True, "device": "cpu"}
    assert set(samples(read(rehearsed, *lines[1:]), "criterion_passed").values()) == {0}


@pytest.mark.parametrize(
    ("metric", "unit", "value", "name", "expected"),
    [
        ("hbm.copy.bandwidth", "TB/s", 3.02, "hbm_copy_bandwidth_bytes_per_second", 3.02e12),
        ("fabric.port_rate", "Gb/s", 400.0, "fabric_port_rate_bytes_per_second", 50e9),
        ("nccl.all_reduce.latency", "us", 20.0, "nccl_all_reduce_latency_seconds", 20e-6),
        ("matmul.bf16.tflops", "TFLOPS", 731.0, "matmul_bf16_flops", 731e12),
        ("gpu.memory.total", "GB", 85.0, "gpu_memory_total_bytes", 85e9),
        ("gpu.memory.free", "%", 98.0, "gpu_memory_free_ratio", 0.98),
        ("burn_in.temperature", "degC", 71.0, "burn_in_temperature_celsius", 71.0),
        ("burn_in.power", "W", 698.0, "burn_in_power_watts", 698.0),
        ("training.tokens_per_second", "tokens/s", 8573.0, "training_tokens_per_second", 8573.0),
        ("gpu.findings", "findings", 0.0, "gpu_findings", 0.0),
        ("lora.final_loss", "nats", 0.39, "lora_final_loss_nats", 0.39),
        ("site.scratch", "furlongs/fortnight", 1.0, "site_scratch_furlongs_fortnight", 1.0),
        ("Größe", "", 1.0, "gr_e", 1.0),
        ("🐍", "", 1.0, "metric", 1.0),
    ],
)
def test_values_are_in_base_units(metric: str, unit: str, value: float, name: str, expected: float) -> None:
    text = prometheus.render(read(RUN, result(measured(metric, unit, value=value))))
    assert one(text, name) == pytest.approx(expected)
    promtool(text)


def test_a_value_stands_with_its_limit_its_median_and_where_the_worst_one_was_measured() -> None:
    text = prometheus.render(read(*example_runs.lines("cluster")))
    [worst] = [key for key in samples(text, "matmul_bf16_flops") if ("best_of", "4096, 8192, 16384") in key]
    assert dict(worst)["host"] == "gpu-02"
    assert dict(worst)["gpu_uuid"].startswith("GPU-")
    assert dict(worst)["sku"] == "H100 SXM"
    assert dict(worst)["criterion"] == "matmul"
    assert min(samples(text, "matmul_bf16_limit_min_flops").values()) == 700e12
    assert max(samples(text, "matmul_bf16_median_flops").values()) > 700e12
    assert samples(text, "matmul_bf16_margin_ratio")[worst] < 0


def test_the_gpu_that_is_to_blame_can_be_found() -> None:
    text = prometheus.render(read(*example_runs.lines("cluster")))
    told = {dict(key)["rank"]: value for key, value in samples(text, "gpu_culprit_tests").items()}
    assert len(told) == 16
    assert max(told, key=lambda rank: told[rank]) == str(example_runs.HOT_RANK)
    assert set(samples(prometheus.render(read(*example_runs.lines("accepted"))), "gpu_culprit_tests").values()) == {0}


def test_nan_stays_nan_and_a_value_that_is_missing_is_counted_as_left_out() -> None:
    bad = measured(status="error", value=math.nan)
    none = measured("hbm.read.bandwidth", status="error", value=None)
    found = read(RUN, result(bad, none, outcome="error"))
    assert math.isnan(one(found, "hbm_copy_bandwidth_bytes_per_second"))
    assert samples(found, "hbm_read_bandwidth_bytes_per_second") == {}
    assert one(found, "run_left_out_measurements") == 1


def test_the_number_of_series_is_bounded_and_what_failed_is_kept() -> None:
    many = [measured(labels={"size": str(size)}) for size in range(2 * prometheus.MOST_MEASUREMENTS)]
    failed = measured(status="failed", value=1.0, labels={"size": "last"})
    found = read(RUN, result(*many, failed, outcome="failed"))
    told = samples(found, "hbm_copy_bandwidth_bytes_per_second")
    assert len(told) == prometheus.MOST_MEASUREMENTS
    assert 1e12 in told.values()
    assert one(found, "run_left_out_measurements") == prometheus.MOST_MEASUREMENTS + 1


def test_two_measurements_of_the_same_labels_are_one_series_and_one_left_out() -> None:
    found = read(RUN, result(measured(), measured(value=2.0, status="failed"), outcome="failed"))
    assert one(found, "hbm_copy_bandwidth_bytes_per_second") == 2e12
    assert one(found, "run_left_out_measurements") == 1


def test_labels_of_any_name_become_labels_and_none_takes_the_place_of_another() -> None:
    labels = {"host": "mine", "a b": "1", "a-b": "2", "__name__": "x", "7": "y", "": "z", "Größe": "w"}
    text = prometheus.render(read(RUN, result(measured(labels=labels))))
    promtool(text)
    [told] = samples(text, "hbm_copy_bandwidth_bytes_per_second")
    assert {value for _, value in told} >= set(labels.values())
    assert dict(told)["label_host"] == "mine"


def test_a_flood_of_labels_and_a_long_one_stay_bounded_and_apart() -> None:
    flood = {f"k{number}": "v" for number in range(100)}
    long = [measured(labels={"size": "x" * 10_000 + end, **flood}) for end in "ab"]
    text = prometheus.render(read(RUN, result(*long)))
    promtool(text)
    told = samples(text, "hbm_copy_bandwidth_bytes_per_second")
    assert len(told) == 2
    assert max(len(value) for key in told for _, value in key) <= 128
    assert max(map(len, told)) < 25


@pytest.mark.parametrize("metric", ["run.ranks", "hbm.copy.bandwidth.median", "run.left_out_measurements", "gpu.info"])
def test_no_metric_of_a_site_takes_the_name_of_another(metric: str) -> None:
    mine = measured(metric, "ranks" if metric == "run.ranks" else "TB/s" if "hbm" in metric else "", value=7.0)
    other = measured(median=1.0, values={"0": 1.0, "1": 2.0})
    text = prometheus.render(read(RUN, result(other, mine)))
    promtool(text)
    values = [sample.value for family in text_string_to_metric_families(text) for sample in family.samples]
    assert (7.0 in values) or (7e12 in values)
    assert one(text, "run_ranks") == 1


def test_nothing_acts_on_a_terminal() -> None:
    text = prometheus.render(read(*example_runs.lines("hostile")))
    assert [line for line in text.splitlines() if not line.isprintable()] == []


def test_no_sample_has_a_time_stamp_which_the_collector_refuses() -> None:
    for family in text_string_to_metric_families(prometheus.render(read(*example_runs.lines("cluster")))):
        assert family.type == "gauge"
        assert {sample.timestamp for sample in family.samples} <= {None}


def test_when_it_began_and_ended_are_metrics() -> None:
    found = read(RUN, END)
    assert one(found, "run_start_timestamp_seconds") == 1767323045
    assert one(found, "run_end_timestamp_seconds") == 1767323105
    assert one(found, "run_duration_seconds") == 60


def test_the_page_names_every_metric_that_is_always_there() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    told = {name for name in re.findall(r"`(gpucluster_[a-z_]+)[`{]", page) if "_nccl_" not in name}
    cluster = {"type": "cluster", "ranks": [{"rank": 0, "host": "a", "gpu": {"uuid": "GPU-1"}}]}
    held = measured("site.scratch", "B/s", limit={"min": 1.0}, margin=2.0)
    families = text_string_to_metric_families(prometheus.render(read(RUN, cluster, result(held), END)))
    assert told == {family.name for family in families if not family.name.startswith("gpucluster_site_")}
