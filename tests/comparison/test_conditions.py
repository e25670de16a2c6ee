"""What must be alike for two values to say something about each other."""

from __future__ import annotations

import pytest

from pytest_gpucluster.comparison import conditions
from pytest_gpucluster.comparison.side import Facts
from pytest_gpucluster.metrics import METRICS
from pytest_gpucluster.workloads import KEYS

RUN = Facts(sku="H100 SXM", gpu_name="H100", world_size=16, nnodes=2, workload={"training.batch": "8"})


def changed(**changes: object) -> Facts:
    return Facts(**{**vars(RUN), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rehearsal": True}, "a run on GPUs before, a REHEARSAL on cpu now"),
        ({"sku": "H200 SXM"}, "another SKU: H100 SXM before, H200 SXM now"),
        ({"sku": None}, "another SKU: H100 SXM before, unknown now"),
        ({"gpu_name": "H100 NVL"}, "another GPU: H100 before, H100 NVL now"),
        ({"workload": None}, "what was run now is not on record"),
    ],
)
def test_what_is_of_another_kind_cannot_be_compared_at_all(changes, told):
    assert conditions.obstacles(RUN, changed(**changes)) == (told,)
    assert conditions.obstacles(changed(**changes), RUN) != ()
    assert conditions.obstacles(RUN, RUN) == ()


def test_on_another_number_of_ranks_only_what_one_gpu_does_is_compared():
    smaller = changed(world_size=8, nnodes=1)
    why_not = conditions.why_not_of(RUN, smaller)
    assert why_not("nccl.all_reduce.busbw") == "16 ranks on 2 nodes before, 8 ranks on 1 node now"
    assert why_not("matmul.bf16.tflops") == ""
    assert "another shape" in conditions.notes(RUN, smaller)[0]
    assert conditions.notes(RUN, RUN) == ()


@pytest.mark.parametrize(
    ("now", "metric", "is_comparable"),
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
    ids=[
        *("other batch", "not of this metric", "not set", "times and sizes", "a key that nobody knows"),
        *("another search, beside it", "another search", "other layouts", "a longer look"),
    ],
)
def test_what_was_measured_otherwise_is_not_comparable(now, metric, is_comparable):
    why = conditions.why_not_of(RUN, changed(workload=now))(metric)
    assert (why == "") is is_comparable
    assert is_comparable or "measured otherwise: " in why


def test_every_section_of_the_workload_and_every_state_is_known():
    assert {key.partition(".")[0] for key in KEYS} <= set(conditions.METRICS_OF)
    assert set(METRICS) >= conditions.STATES
    prefixes = {prefix for several in conditions.METRICS_OF.values() for prefix in several}
    assert all(any(name.startswith(prefix) for name in METRICS) for prefix in prefixes)
