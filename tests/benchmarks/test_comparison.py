from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks import comparison
from pytest_gpucluster.benchmarks.comparison import (
    Comparison,
    Difference,
    bits_of,
    bytes_to_compare,
    difference,
    difference_seen,
    shown,
    words_of,
)
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


def test_a_comparison_can_be_used_again():
    good, bad = torch.zeros(3, 3), torch.zeros(3, 3)
    bad[2, 2] = 1
    compare = Comparison(good)
    answers = [bool(compare.differ(found, good)) for found in (good, bad, good, bad)]
    assert answers == [False, True, False, True]


def test_bits_are_compared_and_not_numbers():
    assert difference(torch.tensor([math.nan]), torch.tensor([math.nan])) is None
    assert difference(torch.tensor([0.0]), torch.tensor([-0.0])) == Difference(count=1, offset=0)


def test_differences_are_counted_through_all_parts(monkeypatch):
    monkeypatch.setattr(comparison, "_PART_ELEMENTS", 10)
    expected = torch.zeros(95, dtype=torch.int64)
    found = expected.clone()
    found[[37, 38, 94]] = 5
    assert difference(found, expected) == Difference(count=3, offset=37)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((4, 4), torch.bfloat16, torch.int64),
        ((5, 5), torch.bfloat16, torch.int16),
        ((6, 3), torch.float32, torch.int64),
    ],
    ids=["whole words", "odd", "wide"],
)
def test_words_are_as_wide_as_the_size_allows(shape, dtype, words):
    tensor = torch.zeros(shape, dtype=dtype)
    assert words_of(tensor).dtype == words
    assert words_of(tensor).nbytes == tensor.nbytes
    assert bytes_to_compare(tensor.nbytes) >= Comparison(tensor)._mask.nbytes


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1.5, torch.bfloat16, "1.5 (0x3fc0)"),
        (-2.0, torch.float32, "-2 (0xc0000000)"),
        (math.nan, torch.float16, "nan (0x7e00)"),
    ],
    ids=["bf16", "fp32", "fp16"],
)
def test_an_element_is_shown_as_number_and_bits(value, dtype, text):
    assert shown(torch.tensor([[0.0, value]]).to(dtype), 1) == text


def test_a_difference_that_vanishes_is_a_wrong_result_too():
    same = torch.zeros(4)
    with pytest.raises(WrongResult, match=r"cuda:3: data were seen to differ .* and then not any more"):
        difference_seen(same, same.clone(), "cuda:3")
