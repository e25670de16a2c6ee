from __future__ import annotations

import math
import re

import pytest

from pytest_gpucluster.benchmarks.memory_patterns import PLACES_LISTED, Fault, Survey
from pytest_gpucluster.errors import WrongResult


def fault(offset: int = 0x28, *, expected: int = 0, found: int = 1 << 17, during: str = "step 1 of 64") -> Fault:
    return Fault(buffer=3, offset_bytes=offset, expected=expected, found=found, during=during)


def survey(*faults: Fault) -> Survey:
    found = Survey(pattern="random", device="cuda:1", buffer_bytes=[4096, 1024], total_bytes=10240)
    found.passes, found.passes_wanted = 2, 3
    for one in faults:
        found.wrong_words += 1
        found.add(one)
    return found


def test_a_fault_says_where_it_is_and_which_bits_are_wrong() -> None:
    again = str(fault().repeated(fault(found=3, during="step 2 of 64")))
    assert again.startswith("buffer 3, byte 0x28: expected 0x0000000000000000, found 0x0000000000020000, xor 0x")
    assert again.endswith("20000 (bits 0, 1, 17), step 1 of 64, and 1 more times")
    assert "xor 0x00000000000200f0, step" in str(fault(expected=0xF0)), "too many bits to name"
    assert "(bit 17)" in str(fault())
    assert "found" not in str(fault(found=0)), "it was right when it was read again"


def test_wrong_words_are_told_by_place() -> None:
    with pytest.raises(WrongResult) as caught:
        survey(fault(), fault(), fault(64)).require_right()
    told = str(caught.value)
    assert re.search(
        r"cuda:1: memory pattern.* 3 times, at 2 places, after 2 of 3 passes over 5\.12e-06 GB: buffer 3, byte 0x28: ",
        told,
    )
    assert "and 1 more times; buffer 3, byte 0x40: " in told


def test_of_many_places_the_first_are_listed_and_all_are_counted() -> None:
    found = survey(*(fault(8 * number) for number in range(PLACES_LISTED + 10)))
    assert found.faults_text == f"words were read wrong {PLACES_LISTED + 10} times, at {PLACES_LISTED} or more places"
    lines = found.report().splitlines()
    assert lines[1] == "buffers and their bytes: 0: 4096, 1: 1024"
    assert len(lines) == 2 + PLACES_LISTED
    with pytest.raises(WrongResult) as caught:
        found.require_right()
    assert str(caught.value).count("buffer 3") == 4


def test_the_share_is_of_all_memory_and_nothing_where_that_is_unknown() -> None:
    assert survey().share == 0.5
    assert math.isnan(Survey(pattern="random", buffer_bytes=[1]).share)
    assert survey(fault()).is_complete is False
