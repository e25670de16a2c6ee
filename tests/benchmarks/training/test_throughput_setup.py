"""What is trained, and how much memory that takes."""

from __future__ import annotations

import pytest

from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup

BILLION = Geometry(layers=16, width=2048, heads=16, vocab=50304, sequence=2048)
SEVEN = Geometry(layers=28, width=3584, heads=28, key_heads=4, inner=18944, vocab=152064, sequence=4096)


def setup(geometry=BILLION, **more):
    given = {"strategy": "ddp", "batch": 4, "compiled": False, "recompute": False, "workers": 0, "prefetch": 1}
    return Setup(geometry=geometry, **given | more)


def gigabytes(ranks, **more):
    return setup(**more).needed_bytes(ranks) / 1e9


def test_the_large_model_fits_on_a_gpu_of_48_gb_and_the_7b_one_on_four_of_80():
    assert gigabytes(1) < gigabytes(8) < 48
    shared = {"geometry": SEVEN, "strategy": "fsdp", "batch": 2, "recompute": True}
    assert gigabytes(4, **shared) < 80 < gigabytes(2, **shared)
    # 16 bytes for each weight and nothing else would be 122 GB.
    assert gigabytes(1, **shared) > 122


def test_more_ranks_take_less_with_fsdp_and_recomputing_takes_less():
    assert gigabytes(2, strategy="fsdp") < gigabytes(1, strategy="fsdp")
    assert gigabytes(1, recompute=True) < gigabytes(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategy": "zero"}, "strategy is one of ddp, fsdp, not 'zero'"),
        ({"batch": 0}, "batch must be at least 1, not 0"),
        ({"workers": -1}, "workers must be at least 0, not -1"),
        ({"prefetch": 0}, "prefetch must be at least 1, not 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        setup(**wrong)
