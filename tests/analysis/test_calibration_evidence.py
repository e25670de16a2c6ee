"""Floors are made of accepted runs that measured the same, and of rates only."""

import math
import re

from accepted_runs import BUSBW, lines, measured, of_lines, source
from each import of_each

from pytest_gpucluster.analysis.calibration import series, source_problems


def line_of(found, kind):
    return next(line for line in found if line["type"] == kind)


REFUSED = {
    "rehearsal": (lambda found: found[0].update(rehearsal=True), "run-2/journal.jsonl: .*REHEARSAL"),
    "selection": (lambda found: found[0].update(selection=True), "selection"),
    "rejected": (lambda found: line_of(found, "end").update(verdict="REJECTED", exit=1), "REJECTED"),
    "not closed": (lambda found: found.pop(), "closing line"),
    "the same run": (lambda found: found[0].update(run_id="run-1"), "run-1/journal.jsonl.* once"),
    "merged of it": (
        lambda found: found[0].update(merged_from=[{"run_id": "run-0"}, {"run_id": "run-1"}]),
        "run-1/journal.jsonl.* once",
    ),
    "another SKU": (lambda found: line_of(found, "limits").update(sku="H200 SXM"), "H200 SXM.* run-1/journal.jsonl"),
    "no SKU": (lambda found: line_of(found, "limits").update(sku=None), "SKU"),
    "another workload": (
        lambda found: line_of(found, "workload")["values"].update({"matmul.size": "8192"}),
        r"run-1/journal.jsonl: matmul.size \(8192",
    ),
}


@of_each("name", list(REFUSED))
def test_what_is_no_basis_is_refused_and_named(name):
    assert source_problems([source(number=1), source(number=2)]) == []
    change, why = REFUSED[name]
    found = lines(number=2)
    change(found)
    refused = source_problems([source(number=1), of_lines(found, number=2)])
    assert any(re.search(why, one) for one in refused), refused


def test_values_of_all_ranks_and_runs_come_together():
    one, two = source(measured([1.0, 2.0]), number=1), source(measured([3.0]), number=2)
    [found] = series([one, two])
    assert [(each.value, each.run) for each in found.numbers] == [(1.0, 1), (2.0, 1), (3.0, 2)]
    assert [each.place for each in found.numbers] == ["rank 0 (gpu-01)", "rank 1 (gpu-01)", "rank 0 (gpu-01)"]
    assert (found.labels, found.topology, len(found.limits)) == ({"n": "16384"}, {}, 2)


def test_the_low_end_of_an_interval_is_what_counts():
    [found] = series([source(measured([720.0, 730.0], intervals={"0": [700.0, 740.0], "1": ["NaN", 1.0]}))])
    assert found.numbers[0].value == 700.0
    assert math.isnan(found.numbers[1].value)


def test_what_is_no_rate_or_not_known_or_in_another_unit_has_no_floor():
    units = {"gpu.findings": "findings", "nccl.all_reduce.latency": "us", "training.mfu": "%", "site.metric": "GB/s"}
    for metric, unit in units.items():
        assert series([source(measured([1.0] * 8, metric, unit=unit))]) == [], metric
    assert series([source(measured([1.0] * 8, unit="GB/s"))]) == []


@of_each(
    "case",
    [
        ("matmul.bf16.tflops", "TFLOPS", {"n": "1"}, {}),
        ("host_link.h2d.bandwidth", "GB/s", {"mode": "both"}, {"local_world_size": "8"}),
        (BUSBW, "GB/s", {"size": "1 GB"}, {"world_size": "16", "nnodes": "2"}),
        (BUSBW, "GB/s", {"size": "1 GB", "world_size": "8", "nnodes": "1"}, {}),
        ("training.tokens_per_second", "tokens/s", {}, {"world_size": "16", "nnodes": "2"}),
    ],
)
def test_a_floor_holds_for_the_topology_it_was_measured_on(case):
    metric, unit, labels, topology = case
    [found] = series([source(measured([1.0], metric, unit=unit, labels=labels))])
    assert (found.labels, found.topology) == (labels, topology)


def test_other_labels_are_another_measurement_but_what_carried_it_is_not():
    labels = {"size": "1 GB", "world_size": "8", "nnodes": "1"}
    one = measured([1.0], BUSBW, unit="GB/s", labels={**labels, "transport": "NVLS"})
    two = measured([2.0], BUSBW, unit="GB/s", labels={**labels, "transport": "P2P"})
    three = measured([3.0], BUSBW, unit="GB/s", labels={**labels, "size": "8 GB"})
    found = series([source(one, three, number=1), source(two, number=2)])
    assert [(each.labels["size"], len(each.numbers)) for each in found] == [("1 GB", 2), ("8 GB", 1)]
    assert all("transport" not in each.labels for each in found)
