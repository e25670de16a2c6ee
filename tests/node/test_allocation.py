"""A job that is bound to what it was given passes; what is missing or open to others is named with both numbers."""

from __future__ import annotations

import os
from typing import Any

from complaints import in_order
from each import of_each

from pytest_gpucluster.metrics.finding import Finding
from pytest_gpucluster.node.allocation import Allocation, allocation, allocation_findings, place_of
from pytest_gpucluster.node.host import Cgroup

GIB = 2**30
GIVEN = Allocation(gpus=4, cpus=16, memory_bytes=64 * GIB)


@of_each(
    "case",
    [
        ({}, Allocation()),
        ({"SLURM_STEP_GPUS": "0,1,5-7", "SLURM_GPUS_ON_NODE": "2"}, Allocation(gpus=5)),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_GPUS": "0"}, Allocation(gpus=8)),
        ({"SLURM_JOB_GPUS": "0-3"}, Allocation(gpus=4)),
        ({"SLURM_JOB_GPUS": "gpu:4"}, Allocation()),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_NODE": "65536"}, Allocation(cpus=16, memory_bytes=64 * GIB)),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_CPU": "4096"}, Allocation(cpus=16, memory_bytes=64 * GIB)),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_MEM_PER_GPU": "1024"}, Allocation(gpus=2, memory_bytes=2 * GIB)),
        ({"SLURM_MEM_PER_NODE": "0"}, Allocation()),
        ({"SLURM_CPUS_ON_NODE": "many"}, Allocation()),
    ],
)
def test_what_slurm_s_variables_give(case: tuple[Any, ...]) -> None:
    environ, given = case
    assert allocation(environ) == given


def test_a_rank_reports_its_cpus_and_visible_devices() -> None:
    place = place_of(3, {"CUDA_VISIBLE_DEVICES": "1"})
    assert place == {"rank": 3, "cpus": sorted(os.sched_getaffinity(0)), "visible_devices": "1"}
    assert place_of(3, {})["visible_devices"] is None


def ranks(count: int = 4, *, visible: int = 4, uuids: int = 4) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "gpu": {"uuid": f"GPU-{rank % uuids}", "index": rank}, "visible_gpus": visible}
        for rank in range(count)
    ]


def places(count: int = 4, cpus: int = 16, *, devices: str | None = "0,1,2,3") -> list[dict[str, Any]]:
    each = max(1, cpus // count)
    return [
        {"rank": rank, "cpus": [(rank * each + i) % cpus for i in range(each)], "visible_devices": devices}
        for rank in range(count)
    ]


def found(
    given: Allocation = GIVEN,
    places_: list[dict[str, Any]] | None = None,
    who: list[dict[str, Any]] | None = None,
    limit: int | None = 64 * GIB,
    *,
    versions: tuple[int, ...] = (2,),
    on_cpu: bool = False,
) -> list[Finding]:
    return allocation_findings(
        "node-a",
        given,
        places() if places_ is None else places_,
        ranks() if who is None else who,
        Cgroup(versions=versions, memory_bytes=limit),
        on_cpu=on_cpu,
    )


def test_a_job_that_is_bound_as_it_was_given_has_no_findings() -> None:
    assert found() == []
    assert found(who=ranks(visible=1)) == [], "each rank sees its own GPU only"
    assert found(limit=62 * GIB) == found(limit=66 * GIB) == [], "nearly the same"
    assert found(Allocation(cpus=16), who=[{"rank": 0, "gpu": None, "visible_gpus": 0}], on_cpu=True) == []


THREE = {"who": ranks(visible=3, uuids=3), "places_": places(devices=None)}


@of_each(
    "case",
    [
        ({"who": ranks(visible=8)}, "environment", "slurm.gpus 8 GPUs (CUDA_VISIBLE_DEVICES: 0,1,2,3); 4"),
        (THREE, "environment", "slurm.gpus 3 GPUs CUDA_VISIBLE_DEVICES: 4"),
        ({"who": ranks(2), "places_": places(2)}, "note", "2 of 4 GPUs"),
        ({"given": Allocation(cpus=16)}, "environment", "Slurm GPUs"),
        ({"places_": places(cpus=32)}, "environment", "slurm.cpus 32 CPUs (0-31); 16"),
        ({"places_": places(cpus=12)}, "note", "12 CPUs (0-11) 16"),
        ({"given": Allocation(gpus=4)}, "environment", "Slurm CPUs"),
        ({"limit": 32 * GIB}, "environment", "32 GiB"),
        ({"limit": None}, "note", "memory"),
        ({"limit": 96 * GIB}, "note", "96 GiB"),
        ({"limit": None, "versions": ()}, "note", "control group"),
    ],
)
def test_what_is_bound_otherwise_is_named(case: tuple[Any, ...]) -> None:
    arguments, kind, words = case
    [finding] = found(**arguments)
    assert finding.kind == kind
    assert in_order(str(finding), words)


def test_ranks_that_share_one_cpu_are_an_error_that_points_to_srun() -> None:
    one_cpu = [{"rank": rank, "cpus": [0], "visible_devices": None} for rank in range(4)]
    shared, fewer = found(places_=one_cpu)
    assert shared.kind == "environment"
    assert "4 ranks share 1 CPUs (0)" in str(shared)
    assert "srun --cpus-per-task" in shared.remedy
    assert fewer.kind == "note"
