"""The header: which cluster, which limits, which settings, as far as they are known."""

from __future__ import annotations

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Cluster, LimitsInForce, RankPlace, Run
from pytest_gpucluster.reports.terminal import cluster_text, limits_text

H100 = {"index": "0", "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3"}
VERSIONS = {"torch": "2.5.1", "cuda": "12.4", "nccl": "2.21.5", "driver": "550.54.15", "python": "3.11.7"}


def ranks(nodes: int, each: int) -> list[RankPlace]:
    return [
        RankPlace(rank=number, host=f"gpu-{number // each}", node_rank=number // each, gpu=H100, versions=VERSIONS)
        for number in range(nodes * each)
    ]


def test_nodes_and_gpus_that_differ_are_counted() -> None:
    odd = RankPlace(rank=4, host="gpu-9", node_rank=2, gpu={**H100, "name": "NVIDIA A100"}, versions={"torch": "2.4.0"})
    limits, run = LimitsInForce(sku="H100 SXM"), Run(run_id="1", started_at="", world_size=5)
    assert cluster_text(Journal(run=run, cluster=Cluster(ranks=(*ranks(2, 2), odd)), limits=limits)) == (
        "3 nodes, 5 ranks: 4 NVIDIA H100 80GB HBM3 and 1 NVIDIA A100 (H100 SXM), driver 550.54.15, CUDA 12.4,"
        " NCCL 2.21.5, torch 2.5.1 and 2.4.0"
    )


def test_the_limits_in_force_are_shown_with_their_files() -> None:
    def text(limits: LimitsInForce | None) -> str:
        return limits_text(Journal(run=Run(run_id="", started_at=""), limits=limits))

    assert text(None) == ""
    both = (("thresholds.yaml", ""), ("my.yaml", ""))
    assert text(LimitsInForce(sku="H100 SXM", files=both)).startswith("H100 SXM, from thresholds.yaml, ")
    unknown = text(LimitsInForce(gpu_name="NVIDIA X", files=both[:1]))
    assert unknown.startswith("none: ")
    assert "'NVIDIA X'" in unknown
    assert "thresholds.yaml" in unknown
    assert text(LimitsInForce()).startswith("none: ")
