"""Published measurements: how they are read, how they are put into the suite's own labels, and what the shipped limits
make of all of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from complaints import in_order

from pytest_gpucluster import evidence
from pytest_gpucluster.errors import ThresholdsError

HEADER = "\t".join(evidence.COLUMNS)
GOOD = "H100 SXM\tmatmul.bf16.tflops\t700 TFLOPS\t8\t1\tn=8192; eager\thealthy\ttorch\towner/repository"


def table(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "table.tsv"
    path.write_text("\n".join(("# a remark", HEADER, *lines)) + "\n", encoding="utf-8")
    return path


def test_the_shipped_table_has_every_kind_of_row_and_says_where_each_is_from() -> None:
    rows = evidence.published()
    counted = Counter(row.kind for row in rows)
    assert set(counted) == set(evidence.CLASSES)
    assert len(rows) >= 519
    assert counted["healthy"] >= 377
    assert counted["faulty"] >= 38
    assert all(row.source and row.value > 0 for row in rows)
    assert {row.comparable for row in rows} == {row.best for row in rows} == {True, False}


def test_a_row_is_read_in_the_metric_s_unit_with_its_labels(tmp_path: Path) -> None:
    (row,) = evidence.read(table(tmp_path, GOOD.replace("700 TFLOPS", "0.7 PFLOPS")))
    assert (row.sku, row.world_size, row.nodes, row.kind, row.line) == ("H100 SXM", 8, 1, "healthy", 3)
    assert row.value == pytest.approx(700)
    assert dict(row.labels) == {"n": "8192", "eager": ""}


def test_every_wrong_line_is_named(tmp_path: Path) -> None:
    wrong = {
        "columns": GOOD.rpartition("\t")[0],
        "unknown metric": GOOD.replace("matmul.bf16", "matmul.bf61"),
        "TFLOPS": GOOD.replace("700 TFLOPS", "700 GB/s"),
        "above zero": GOOD.replace("700 TFLOPS", "0 TFLOPS"),
        "world_size": GOOD.replace("\t8\t", "\t0\t"),
        "nodes": GOOD.replace("\t1\t", "\tone\t"),
        "class": GOOD.replace("healthy", "good"),
        "twice": GOOD.replace("eager", "n=4096"),
        "source is empty": GOOD.replace("owner/repository", ""),
    }
    with pytest.raises(ThresholdsError) as error:
        evidence.read(table(tmp_path, GOOD, *wrong.values()))
    lines = str(error.value).splitlines()
    assert len(lines) == len(wrong)
    for number, (line, words) in enumerate(zip(lines, wrong, strict=True), start=4):
        assert in_order(line, f"table.tsv:{number}: {words}")


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.tsv"
    for text, words in (("# nothing\n", "missing"), (f"{HEADER}\tmore\n", "columns")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ThresholdsError, match=words):
            evidence.read(path)


@pytest.mark.parametrize(
    ("metric", "labels", "found"),
    [
        ("matmul.bf16.tflops", {"best": "1"}, {"best_of": "4096, 8192, 16384"}),
        ("matmul.bf16.tflops", {"n": "8192"}, {"n": "8192"}),
        ("nccl.all_reduce.busbw", {}, {"size": "1 GB"}),
        ("nccl.all_reduce.busbw", {"size": "large", "transport": "EFA"}, {"transport": "NET/AWS Libfabric"}),
        ("nccl.all_reduce.busbw", {"size": "8 GiB", "nics": "4 x HDR"}, {"size": "8 GiB", "nics": "4"}),
        ("nccl.all_reduce.busbw", {"transport": "NET/IB (RoCE 8 x 400G)"}, {"transport": "NET/IB"}),
        ("nccl.all_reduce.busbw", {"within": "NVLink rack"}, {"transport": "P2P"}),
        ("host_link.h2d.bandwidth", {}, {"mode": "alone"}),
        ("training.mfu", {"model": "MPT-7b"}, {"model": "large"}),
    ],
)
def test_conditions_are_put_into_the_labels_of_a_measurement(
    metric: str, labels: dict[str, str], found: dict[str, str]
) -> None:
    assert found.items() <= evidence.as_measured(metric, labels).items()
