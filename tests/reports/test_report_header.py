"""The header: which cluster, which limits, which settings, as far as they are known."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_runs import write

from pytest_gpucluster.journal import Cluster, Journal, LimitsInForce, RankPlace, Run, read
from pytest_gpucluster.reports.header import cluster_text, header_lines, limits_text
from pytest_gpucluster.reports.layout import columns

H100 = {"index": "0", "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3"}
VERSIONS = {"torch": "2.5.1", "cuda": "12.4", "nccl": "2.21.5", "driver": "550.54.15", "python": "3.11.7"}


def journal(*ranks: RankPlace, rehearsal: bool = False, sku: str | None = "H100 SXM") -> Journal:
    return Journal(
        run=Run(run_id="1", started_at="", rehearsal=rehearsal, world_size=len(ranks)),
        cluster=Cluster(ranks=ranks),
        limits=LimitsInForce(
            sku=sku, gpu_name="NVIDIA H100 80GB HBM3", files=(("thresholds.yaml", "a" * 64), ("my.yaml", ""))
        ),
    )


def ranks(nodes: int, each: int, **changes: object) -> list[RankPlace]:
    return [
        RankPlace(rank=number, host=f"gpu-{number // each}", node_rank=number // each, gpu=H100, versions=VERSIONS)
        for number in range(nodes * each)
    ]


def test_the_cluster_is_told_with_its_software() -> None:
    assert cluster_text(journal(*ranks(2, 8))) == (
        "2 nodes x 8 NVIDIA H100 80GB HBM3 (H100 SXM), driver 550.54.15, CUDA 12.4, NCCL 2.21.5, torch 2.5.1"
    )


def test_nodes_and_gpus_that_differ_are_counted() -> None:
    odd = RankPlace(rank=4, host="gpu-9", node_rank=2, gpu={**H100, "name": "NVIDIA A100"}, versions={"torch": "2.4.0"})
    assert cluster_text(journal(*ranks(2, 2), odd)) == (
        "3 nodes, 5 ranks: 4 NVIDIA H100 80GB HBM3 and 1 NVIDIA A100 (H100 SXM), driver 550.54.15, CUDA 12.4,"
        " NCCL 2.21.5, torch 2.5.1 and 2.4.0"
    )


def test_a_rehearsal_has_no_gpu() -> None:
    told = [RankPlace(rank=rank, host="laptop", versions={"torch": "2.5.1"}) for rank in range(2)]
    assert cluster_text(journal(*told, rehearsal=True, sku="cpu-rehearsal")) == "1 node x 2 CPU ranks, torch 2.5.1"


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (None, ""),
        (LimitsInForce(sku="H100 SXM", files=(("thresholds.yaml", ""),)), "H100 SXM, of thresholds.yaml"),
        (
            LimitsInForce(sku="H100 SXM", files=(("thresholds.yaml", ""), ("my.yaml", ""))),
            "H100 SXM, of thresholds.yaml, overlaid by my.yaml",
        ),
        (
            LimitsInForce(gpu_name="NVIDIA X", files=(("thresholds.yaml", ""),)),
            "none: the GPU 'NVIDIA X' is no SKU of thresholds.yaml, so nothing can be judged",
        ),
        (LimitsInForce(), "none: this GPU is no SKU of no file, so nothing can be judged"),
    ],
)
def test_the_limits_in_force_are_told_with_their_files(limits: LimitsInForce | None, text: str) -> None:
    assert limits_text(Journal(run=Run(run_id="", started_at=""), limits=limits)) == text


@pytest.mark.parametrize("name", ["cluster", "accepted", "rehearsal", "broken", "hostile"])
@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_header_of_each_example_fits(name: str, width: int, tmp_path: Path) -> None:
    lines = header_lines(read(write(tmp_path, name) / "journal.jsonl"), width=width)
    assert max(map(columns, lines)) <= width
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("gpucluster: ")
    assert any("REHEARSAL" in line for line in lines) == (name in ("rehearsal", "broken"))


def test_what_is_not_known_is_left_out() -> None:
    lines = header_lines(Journal(run=Run(run_id="", started_at="")), width=80)
    assert lines == ["gpucluster: 1 rank on 1 node (unknown), device unknown"]
