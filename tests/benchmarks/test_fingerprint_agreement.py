from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.fingerprint import Fingerprint, FingerprintAgreement
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult


def agreement(bits: Sequence[str], kinds: Sequence[str] = ()) -> FingerprintAgreement:
    """One GPU for each text: the letter at place i is its digest of stage i."""
    return FingerprintAgreement(
        [
            Fingerprint(
                kind=kinds[rank] if kinds else "H100",
                digests={f"stage {index}": letter * 4 for index, letter in enumerate(text)},
                repeats=1,
                changed={},
            )
            for rank, text in enumerate(bits)
        ]
    )


def names(count: int) -> dict[int, str]:
    return {rank: f"rank {rank}" for rank in range(count)}


def blamed(found: FingerprintAgreement, count: int) -> dict[int, str]:
    told = {}
    for rank in range(count):
        try:
            found.require(rank, names(count))
        except WrongResult as error:
            told[rank] = str(error)
    return told


def test_equal_bits_agree() -> None:
    found = agreement(["ab"] * 8)
    assert found.disagreements == ()
    assert [found.agreement_ratio(rank) for rank in range(8)] == [1.0] * 8
    assert blamed(found, 8) == {}


@of_each("count", [3, 4, 16])
def test_the_one_that_deviates_is_named_with_its_stage_and_no_other(count: int) -> None:
    found = agreement(["ab", "ax", *["ab"] * (count - 2)])
    assert blamed(found, count) == {
        1: "rank 1: the same computation gives other bits here: stage 1 gives xxxx, and"
        f" {count - 1} of {count} of this kind give bbbb"
    }
    assert [found.agreement_ratio(rank) for rank in range(3)] == [1.0, 0.5, 1.0]


def test_several_that_deviate_in_several_stages_are_all_named() -> None:
    found = agreement(["xb", "ay", "ab", "ab", "xb", "ab", "ab"])
    told = blamed(found, 7)
    assert set(told) == {0, 1, 4}
    assert "stage 0 gives xxxx, and 5 of 7 of this kind give aaaa" in told[0]
    assert "stage 1 gives yyyy, and 6 of 7 of this kind give bbbb" in told[1]


def test_of_two_that_differ_it_is_said_that_one_of_them_is_wrong() -> None:
    found = agreement(["ab", "xb"])
    told = blamed(found, 2)
    assert set(told) == {0, 1}
    for text in told.values():
        assert re.search(r"stage 0 gives aaaa.* 0; xxxx on rank 1: .*is wrong", text)
        assert re.search(r"their kind", text)
    assert [found.agreement_ratio(rank) for rank in range(2)] == [0.5, 0.5]


@of_each("bits", [["a", "a", "x", "x"], ["a", "x", "y"]])
def test_without_a_majority_nobody_is_cleared(bits: list[str]) -> None:
    told = blamed(agreement(bits), len(bits))
    assert set(told) == set(range(len(bits)))
    assert all(re.search(r"no majority", text) for text in told.values())


def test_each_kind_is_compared_with_its_like_only() -> None:
    found = agreement(["a", "b", "a", "b", "x", "b"], ["H100", "H200"] * 3)
    assert blamed(found, 6).keys() == {4}
    assert found.agreement_ratio(1) == 1.0


def test_one_that_is_alone_of_its_kind_is_no_pass() -> None:
    found = agreement(["a", "a", "b"], ["H100", "H100", "H200"])
    with pytest.raises(EnvironmentBroken, match=r"rank 2 .*compare its.* H200, the"):
        found.agreement_ratio(2)
    assert found.agreement_ratio(0) == 1.0


def test_a_stage_that_only_some_have_computed_is_a_dissent() -> None:
    found = agreement(["ab", "ab", "a"])
    assert blamed(found, 3).keys() == {2}
    assert "stage 1 gives nothing" in blamed(found, 3)[2]
