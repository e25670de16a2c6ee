import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks import verify
from pytest_gpucluster.benchmarks.verify import (
    FACTOR,
    Comparison,
    Difference,
    Pattern,
    PatternWriter,
    bits_of,
    difference,
    difference_seen,
    signed,
)
from pytest_gpucluster.errors import WrongResult

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None)
@given(rows=st.integers(1, 17), columns=st.integers(1, 17), data=st.data())
def test_any_wrong_bits_are_found_counted_and_located(dtype, rows, columns, data):
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    expected = torch.randn(rows, columns, generator=generator).to(dtype)
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


CPU = torch.device("cpu")


@settings(deadline=None)
@given(start=st.integers(-(2**63), 2**63 - 1), words=st.integers(1, 300), first=st.integers(0, 300))
def test_the_total_of_any_range_is_known(start, words, first):
    pattern = Pattern(start=start)
    buffer = torch.empty(first + words, dtype=torch.int64)
    PatternWriter(CPU, 64).fill(buffer, pattern)
    assert int(buffer[first:].sum()) == pattern.total(first, words)
    assert buffer.tolist() == [pattern.word(index) for index in range(first + words)]


def test_the_total_of_a_buffer_beyond_32_bits_is_that_of_its_parts():
    pattern, words = Pattern(start=7), 4 * 10**9 + 3
    parts = [pattern.total(0, 10**9), pattern.total(10**9, 3 * 10**9), pattern.total(4 * 10**9, 3)]
    assert pattern.total(0, words) == signed(sum(parts))


def test_it_looks_random():
    words = [Pattern(start=0).word(index) % 2**64 for index in range(1, 10_000)]
    assert len(set(words)) == len(words)
    ones = sum(word.bit_count() for word in words) / len(words)
    changes = sum((word ^ after).bit_count() for word, after in pairwise(words)) / len(words)
    assert 31 < ones < 33
    assert 28 < changes < 40
    assert FACTOR % 2 == 1


@pytest.mark.parametrize("part", [7, 64, 10**6], ids=["many parts", "few parts", "one part"])
@settings(deadline=None)
@given(data=st.data())
def test_any_wrong_words_are_found_counted_and_located(part, data):
    words = 200
    writer = PatternWriter(CPU, min(part, words))
    buffer = torch.empty(words, dtype=torch.int64)
    writer.fill(buffer, Pattern(start=3))
    flips = data.draw(st.dictionaries(st.integers(0, words - 1), st.integers(0, 62), max_size=5))
    for offset, bit in flips.items():
        buffer[offset] ^= 1 << bit
    expected = Difference(count=len(flips), offset=min(flips)) if flips else None
    assert writer.compare(buffer, Pattern(start=3)) == expected


def test_a_buffer_of_another_pattern_is_wrong_everywhere():
    writer, buffer = PatternWriter(CPU, 100), torch.empty(100, dtype=torch.int64)
    writer.fill(buffer, Pattern(start=1))
    assert writer.compare(buffer, Pattern(start=2)) == Difference(count=100, offset=0)


def test_a_difference_that_vanishes_is_a_wrong_result(monkeypatch):
    writer, buffer = PatternWriter(CPU, 100), torch.empty(100, dtype=torch.int64)
    writer.fill(buffer, Pattern(start=1))
    monkeypatch.setattr(Comparison, "differ", lambda *_: torch.tensor(True))
    with pytest.raises(WrongResult, match="not any more"):
        writer.compare(buffer, Pattern(start=1))
