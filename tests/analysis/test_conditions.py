"""What must be alike for two values to say something about each other, and which ranks correspond."""

import fnmatch
import re

from each import of_each

from pytest_gpucluster.analysis import run_view
from pytest_gpucluster.analysis.run_view import Conditions, match
from pytest_gpucluster.config.workload import SECTIONS
from pytest_gpucluster.journal.records import RankPlace
from pytest_gpucluster.metrics.measurement import METRICS

RUN = Conditions(sku="H100 SXM", gpu_name="H100", world_size=16, nnodes=2, workload={"training.batch": "8"})


def changed(**changes):
    return Conditions(**{**vars(RUN), **changes})


@of_each(
    "case",
    [
        ({"kind": "REHEARSAL"}, "REHEARSAL on cpu"),
        ({"kind": "SIMULATED"}, "SIMULATED cluster"),
        ({"sku": "H200 SXM"}, "SKU: H100 SXM before, H200 SXM"),
        ({"sku": None}, "SKU: H100 SXM before, unknown"),
        ({"gpu_name": "H100 NVL"}, "GPU: H100 before, H100 NVL"),
        ({"workload": None}, "run now"),
    ],
)
def test_what_is_of_another_kind_cannot_be_compared_at_all(case):
    changes, text = case
    [obstacle] = run_view.obstacles(RUN, changed(**changes))
    assert text in obstacle
    assert list(run_view.obstacles(changed(**changes), RUN)) != []
    assert list(run_view.obstacles(RUN, RUN)) == []


def test_on_another_number_of_ranks_only_what_one_gpu_does_is_compared():
    smaller = changed(world_size=8, nnodes=1)
    why_not = run_view.metric_obstacles(RUN, smaller)
    assert re.match("16 ranks on 2 nodes .* 8 ranks on 1 node", why_not("nccl.all_reduce.busbw"))
    assert why_not("matmul.bf16.tflops") == ""
    assert "another shape" in next(run_view.notes(RUN, smaller))
    assert list(run_view.notes(RUN, RUN)) == []


@of_each(
    "case",
    [
        ({"training.batch": "16"}, "training.tokens_per_second", False),
        ({"training.batch": "16"}, "matmul.bf16.tflops", True),
        ({}, "training.tokens_per_second", False),
        ({"training.batch": "8", "matmul.window": "1 s", "matmul.sizes": "8192"}, "matmul.bf16.tflops", True),
        ({"training.batch": "8", "brand.new": "1"}, "matmul.bf16.tflops", False),
        ({"training.batch": "8", "matmul.search.shapes": "1x1x1"}, "matmul.bf16.tflops", True),
        ({"training.batch": "8", "matmul.search.shapes": "1x1x1"}, "matmul.bf16.best_tflops", False),
        ({"training.batch": "8", "matmul.search.layouts": "nt"}, "matmul.fp8.best_tflops", False),
        ({"training.batch": "8", "matmul.search.look": "1 s"}, "matmul.fp8.best_tflops", True),
    ],
)
def test_what_was_measured_otherwise_is_not_comparable(case):
    now, metric, is_comparable = case
    why = run_view.metric_obstacles(RUN, changed(workload=now))(metric)
    assert (why == "") is is_comparable


def test_each_section_names_metrics_that_there_are():
    patterns = [pattern for section in SECTIONS for pattern in section.metrics]
    assert len(patterns) > 20
    assert [pattern for pattern in patterns if not fnmatch.filter(METRICS, pattern)] == []


def ranks(*places):
    return {
        rank: RankPlace(rank=rank, host=host, local_rank=local, gpu={"uuid": uuid} if uuid else None)
        for rank, (host, local, uuid) in enumerate(places)
    }


BEFORE = ranks(("a", 0, "G0"), ("a", 1, "G1"), ("b", 0, "G2"), ("b", 1, "G3"))


def matched(found):
    return {rank: (one.old, one.by, one.swapped) for rank, one in found.items()}


def test_on_other_hosts_the_number_decides_and_no_rank_is_taken_twice():
    now = ranks(("x", 0, "N0"), ("x", 1, "N1"), ("a", 0, "G0"), ("y", 1, "N3"), ("y", 2, "N4"))
    found = match(BEFORE, now)
    assert found[2].old == 0
    assert 0 not in found  # rank 0 of before is the GPU of rank 2 now
    assert matched(found)[3] == (3, "rank number", "G3")
    assert 4 not in found
    assert len({one.old for one in found.values()}) == len(found)


def test_on_cpu_and_for_nodes_the_slot_decides():
    cpu = ranks(("a", 0, ""), ("a", 1, ""))
    assert matched(match(cpu, ranks(("a", 1, ""), ("a", 0, "")))) == {0: (1, "slot", ""), 1: (0, "slot", "")}
    moved = ranks(("b", 0, "G0"), ("b", 1, "G1"), ("a", 0, "G2"), ("a", 1, "G3"))
    assert {rank: one.old for rank, one in match(BEFORE, moved, by_gpu=False).items()} == {0: 2, 1: 3, 2: 0, 3: 1}
