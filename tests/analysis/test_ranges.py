"""Sizes as ranges that nccl-tests can be asked for."""

from __future__ import annotations

import hypothesis
from each import of_each
from hypothesis import strategies

from pytest_gpucluster.analysis.nccl_programs import ranges

MIB = 2**20


@of_each(
    "case",
    [
        ([10**6, 10**7, 10**8, 10**9], ["-b 1000000 -e 1000000000 -f 10"]),
        ([512 * MIB, 1024 * MIB, 2048 * MIB], ["-b 536870912 -e 2147483648 -f 2"]),
        ([10**6, 2**29, 10**9, 2**30], ["-b 1000000 -e 1000000000 -f 1000", "-b 536870912 -e 1073741824 -f 2"]),
        ([10**6], ["-b 1000000 -e 1000000"]),
    ],
)  # fmt: skip
def test_as_few_starts_as_a_factor_allows(case):
    sizes, expected = case
    assert [str(each) for each in ranges(sizes)] == expected


@hypothesis.given(strategies.lists(strategies.integers(1, 5000), max_size=12))
def test_every_size_is_asked_for_once_and_no_other(sizes):
    asked = [size for each in ranges(sizes) for size in each.sizes]
    assert sorted(asked) == sorted(set(sizes))
