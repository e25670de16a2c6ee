from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks import verify
from pytest_gpucluster.benchmarks.verify import Comparison, Difference, bits_of, difference, difference_seen
from pytest_gpucluster.errors import WrongResult

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64]


def random_matrix(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(rows=st.integers(1, 17), columns=st.integers(1, 17), data=st.data())
def test_any_wrong_bits_are_found_counted_and_located(dtype, rows, columns, data):
    expected = random_matrix(rows, columns, dtype)
    found = expected.clone()
    width = 8 * found.itemsize
    flips = data.draw(st.dictionaries(st.integers(0, rows * columns - 1), st.integers(0, width - 1), max_size=9))
    for offset, bit in flips.items():
        bits_of(found)[offset] ^= 1 << bit if bit < width - 1 else -(1 << (width - 1))
    assert bool(Comparison(expected).differ(found, expected)) == bool(flips)
    assert difference(found, expected) == (Difference(count=len(flips), offset=min(flips)) if flips else None)


def test_bits_are_compared_and_not_numbers():
    assert difference(torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) == Difference(count=1, offset=0)


def test_differences_are_counted_through_all_parts(monkeypatch):
    monkeypatch.setattr(verify, "_PART_ELEMENTS", 10)
    expected = torch.zeros(95, dtype=torch.int64)
    found = expected.clone()
    found[[37, 38, 94]] = 5
    assert difference(found, expected) == Difference(count=3, offset=37)


def test_a_difference_that_vanishes_is_a_wrong_result_too():
    same = torch.zeros(4)
    with pytest.raises(WrongResult, match=r"cuda:3: data differed.* and then"):
        difference_seen(same, same.clone(), "cuda:3")
