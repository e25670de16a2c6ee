"""Published measurements: how they are read, how they are put into the suite's own labels, and what the shipped limits
make of all of them."""

import json
from functools import cache

import pytest
from complaints import in_order
from each import of_each
from verdicts import SHIPPED, bf16, busbw, hold
from written_runs import MATMUL, case, read

from pytest_gpucluster.cli import main
from pytest_gpucluster.errors import GpuClusterError
from pytest_gpucluster.judge import evidence, loader
from pytest_gpucluster.judge.judge import judge_value
from pytest_gpucluster.reports.html import page
from pytest_gpucluster.reports.tables import measurement_text

HEADER = "\t".join(evidence.COLUMNS)
GOOD = "H100 SXM\tmatmul.bf16.tflops\t700 TFLOPS\t8\t1\tn=8192; eager\thealthy\ttorch\towner/repository"


def table(tmp_path, *lines):
    path = tmp_path / "table.tsv"
    path.write_text("\n".join(("# a remark", HEADER, *lines)) + "\n", encoding="utf-8")
    return path


def test_a_row_is_read_in_the_metric_s_unit_with_its_labels(tmp_path):
    (row,) = evidence.read(table(tmp_path, GOOD.replace("700 TFLOPS", "0.7 PFLOPS")))
    assert (row.sku, row.world_size, row.nodes, row.kind, row.line) == ("H100 SXM", 8, 1, "healthy", 3)
    assert row.value == pytest.approx(700)
    assert dict(row.labels) == {"n": "8192", "eager": ""}


def test_every_row_of_the_shipped_table_is_whole_and_says_where_it_is_from():
    lines = [line for line in evidence.PATH.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    assert lines[0] == HEADER
    assert len(evidence.published()) == len(lines) - 1
    for row, line in zip(evidence.published(), lines[1:], strict=True):
        assert row.kind in ("healthy", "faulty", "floor", "expected"), line
        assert row.sku.strip(), line
        assert row.source.strip(), line
        assert min(row.value, row.world_size, row.nodes) > 0, line
        keys = [label.partition("=")[0].strip() for label in line.split("\t")[5].split(";") if label.strip()]
        assert keys == list(row.labels), line


def test_a_row_of_another_form_is_refused(tmp_path):
    for wrong in (GOOD.rpartition("\t")[0], GOOD.replace("bf16", "bf61"), GOOD.replace("TFLOPS", "GB/s")):
        with pytest.raises((GpuClusterError, ValueError)):
            evidence.read(table(tmp_path, wrong))


@pytest.mark.parametrize(
    ("metric", "labels", "found"),
    [
        ("matmul.bf16.tflops", {"best": "1"}, {"best_of": "4096, 8192, 16384"}),
        ("matmul.bf16.tflops", {"n": "8192"}, {"n": "8192"}),
        ("nccl.all_reduce.busbw", {}, {"size": "1 GB"}),
        ("nccl.all_reduce.busbw", {"size": "large", "transport": "EFA"}, {"transport": "NET/AWS Libfabric"}),
        ("nccl.all_reduce.busbw", {"size": "8 GiB", "nics": "4 x HDR"}, {"size": "8 GiB", "nics": "4"}),
        ("nccl.all_reduce.busbw", {"transport": "NET/IB (RoCE 8 x 400G)"}, {"transport": "NET/IB"}),
        ("nccl.all_reduce.busbw", {"nics": "2 x HDR"}, {"transport": "NET/IB", "nics": "2"}),
        ("nccl.all_reduce.busbw", {"within": "NVLink rack"}, {"transport": "P2P"}),
        ("host_link.h2d.bandwidth", {}, {"mode": "alone"}),
        ("training.mfu", {"model": "MPT-7b"}, {"model": "large"}),
    ],
)
def test_conditions_are_put_into_the_labels_of_a_measurement(metric, labels, found):
    assert found.items() <= evidence.as_measured(metric, labels).items()


# All rows, through the judge -------------------------------------------------------------------------------------


def status(row):
    judged = judge_value(
        row.metric,
        row.value,
        unit=SHIPPED_UNIT[row.metric],
        sku=row.sku,
        world_size=row.world_size,
        nnodes=row.nodes,
        labels=evidence.as_measured(row.metric, row.labels),
        limits=SHIPPED,
    )
    return judged.status if judged.limit is not None else "not judged"


SHIPPED_UNIT = {limit.metric: limit.unit for limit in SHIPPED.limits}
COMPARABLE = [row for row in evidence.published() if row.comparable]
HEALTHY = [row for row in COMPARABLE if row.kind == "healthy"]
FAULTY = [row for row in COMPARABLE if row.kind == "faulty"]


@of_each("row", HEALTHY, lambda row: f"line {row.line}")
def test_no_comparable_healthy_value_fails(row):
    assert status(row) in ("passed", "not judged"), row


def test_every_faulty_value_fails_that_is_judged():
    assert [row for row in FAULTY if status(row) not in ("failed", "not judged")] == []
    assert sum(status(row) == "failed" for row in FAULTY) >= 36


def test_most_of_the_healthy_values_are_judged():
    assert sum(status(row) == "passed" for row in HEALTHY) >= 270


# The lint over the shipped limits --------------------------------------------------------------------------------


def test_no_shipped_floor_is_too_near_to_a_healthy_value():
    assert evidence.too_high(SHIPPED) == []


def limits_with(tmp_path, entry):
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema_version: 1\nskus: {{H100 SXM: {{limits: {{matmul.fp32.tflops: {entry}}}}}}}\n")
    return loader.load(loader.shipped_path(), path)


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("{min: 48 TFLOPS, source: we}", 0),
        ("{min: 48.2 TFLOPS, source: we}", 1),  # 49.61 less 3 % is 48.12
        ("{min: 49 TFLOPS, source: 'acceptance of 2 x 8 H100 SXM: > 49'}", 0),
        ("{min: 49.7 TFLOPS, source: 'acceptance of 2 x 8 H100 SXM: > 49'}", 1),
        ("{min: 60 TFLOPS, source: we}", 5),  # the best of shapes is below it as well
    ],
)
def test_a_floor_that_leaves_a_healthy_gpu_no_room_is_named(tmp_path, entry, wrong):
    found = evidence.too_high(limits_with(tmp_path, entry))
    assert len(found) == wrong
    assert all("mine.yaml:2:" in line and "evidence.tsv:" in line for line in found)


def test_the_losses_of_a_floor_are_those_of_its_evidence(tmp_path):
    limits = limits_with(tmp_path, "{min: 40 TFLOPS, min_ratio_to_median: 90 %, source: we}")
    limit = limits.limit("matmul.fp32.tflops", sku="H100 SXM", world_size=1, nnodes=1, labels={})
    support = evidence.support_of(limit, limits)
    assert (len(support.healthy), support.healthy[0], support.typical) == (4, 49.61, pytest.approx(50.995))
    assert support.uniform_loss(limit) == pytest.approx(1 - 40 / 50.995)
    assert "78 % of typical for H100 SXM, 4 published" in evidence.compare(40.0, limit, limits)


# Shown -----------------------------------------------------------------------------------------------------------


def test_a_value_shows_its_share_of_the_typical_one_where_it_is_judged():
    missed = hold({rank: [bf16(500.0)] for rank in range(8)}, limits=SHIPPED)
    share = "71 % of typical for H100 SXM, 8 published"
    assert missed.measurements[0].evidence == share
    assert share in missed.text
    [line] = [json.loads(json.dumps(one.to_json())) for one in missed.measurements]
    run = read(case(MATMUL, "failed", line))
    assert share in measurement_text(run.results[0].measurements[0])
    assert share in str(page.render(run))
    assert hold({0: [busbw(1.0)]}, size=1).measurements[0].evidence == "", "recorded only"


# gpucluster thresholds judge -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def shipped_once():
    """Read the shipped file once for all commands of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "load", cache(loader.load))
        yield


FP32 = "matmul.fp32.tflops"
BUSBW = "nccl.all_reduce.busbw"
TWO_NODES = ("--world-size", "16", "--nodes", "2")


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        (("H100 SXM", f"{FP32}=51.5 TFLOPS"), 0, "PASSED >= 47.5 TFLOPS margin typical published"),
        (("H100 SXM", f"{FP32}=40 TFLOPS"), 1, "MISSED >= 47.5 TFLOPS"),
        (("MI300X", "matmul.bf16.tflops=600 TFLOPS"), 10, "NOT JUDGED"),
        (("H100 SXM", "lora.mfu=40 %", f"{FP32}=40 TFLOPS"), 1, "NOT JUDGED MISSED"),
        (("H100 SXM", "lora.mfu=40 %", f"{FP32}=51 TFLOPS"), 10, "NOT JUDGED PASSED"),
        (("H100 SXM", "matmul.bf16.tflops=690 TFLOPS"), 0, "PASSED"),
        (("H100 SXM", "--label", "best=1", "matmul.bf16.tflops=690 TFLOPS"), 1, "MISSED >= 700 TFLOPS"),
        (("H100 SXM", "matmul.bf16.tflops=1100 TFLOPS"), 1, "MISSED too fast to be true"),
        (("B200", "--world-size", "8", "--label", "size=8 GiB", f"{BUSBW}=682.2 GB/s"), 1, "MISSED"),
        (("B200", "--world-size", "8", "--label", "size=large", f"{BUSBW}=682.2 GB/s"), 1, "MISSED"),
        (("H100 SXM", *TWO_NODES, "--label", "transport=TCP", f"{BUSBW}=450 GB/s"), 1, "MISSED over NET/IB"),
        (("H100 SXM", *TWO_NODES, "--label", "size=100 MB", f"{BUSBW}=300 GB/s"), 10, "NOT JUDGED"),
        (("GB300", "--world-size", "8", "--nodes", "2", f"{BUSBW}=895 GB/s"), 0, "PASSED"),
    ],
)
def test_values_of_others_are_judged(words, code, output, capsys):
    assert main.main(["thresholds", "judge", "--sku", *words]) == code
    assert in_order(" ".join(capsys.readouterr().out.split()), output)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--sku", "H101", f"{FP32}=51.5 TFLOPS"), "no such SKU"),
        (("--sku", "H100 SXM", f"{FP32}=51.5"), "has no unit"),
        (("--sku", "H100 SXM", f"{FP32}=0 TFLOPS"), "above zero"),
        (("--sku", "H100 SXM", f"{FP32}=51.5 GB/s"), "GB/s"),
        (("--sku", "H100 SXM", "matmul.fp3.tflops=51.5 TFLOPS"), "unknown metric"),
        (("--sku", "H100 SXM", "--nodes", "2", f"{FP32}=51.5 TFLOPS"), "fewer GPUs than nodes"),
        (("--sku", "H100 SXM", "--label", "=3", f"{FP32}=51.5 TFLOPS"), "KEY=VALUE"),
        (("--sku", "H100 SXM", "--world-size", "0", f"{FP32}=51.5 TFLOPS"), "--world-size"),
        (("--sku", "H100 SXM", "--no-such", f"{FP32}=51.5 TFLOPS"), "--no-such"),
        (("--sku", "H100 SXM", FP32), "is not KEY=VALUE"),
        ((f"{FP32}=51.5 TFLOPS",), "--sku"),
    ],
)
def test_wrong_usage_of_judge_is_exit_code_2(words, error, capsys):
    try:
        code = main.main(["thresholds", "judge", *words])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert error in capsys.readouterr().err


def test_a_label_that_no_limit_looks_at_is_noted(capsys):
    labels = ("--label", "vm=p5", "--label", "size=8 GiB")
    assert (
        main.main(["thresholds", "judge", "--sku", "H100 SXM", "--world-size", "8", *labels, f"{BUSBW}=480 GB/s"]) == 0
    )
    err = capsys.readouterr().err
    assert "vm" in err
    assert "size" not in err
