"""Patterns on the CPU's memory: every kind of fault that is planted in its cells is found, and told with its place."""

import math
import re
from unittest.mock import patch

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks import memory_patterns
from pytest_gpucluster.benchmarks import memory_patterns as memory_survey
from pytest_gpucluster.benchmarks.memory_patterns import (
    PATTERNS,
    PLACES_LISTED,
    WORD_BITS,
    Fault,
    Survey,
    Words,
    comparison_bytes,
    run_pattern,
)
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
PART, BUFFER, WORDS = 64, 160, 400
"""Three buffers of 160, 160 and 80 words, each of parts of 64 words and what is left."""


honest_write = memory_patterns.write_part


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(memory_patterns, "PART_WORDS", PART)
    monkeypatch.setattr(memory_patterns, "BUFFER_WORDS", BUFFER)


class Faulty:
    """Does something after each write, knowing which buffer and which word a part begins with."""

    def __init__(self, after):
        self._after = after
        self.buffers = {}
        self.parts = {}
        self.writes = 0

    def __call__(self, target, words):
        honest_write(target, words)
        storage = target.untyped_storage().data_ptr()
        buffer = self.buffers.setdefault(storage, len(self.buffers))
        self.parts[buffer, target.storage_offset()] = target
        self.writes += 1
        self._after(self, buffer, target.storage_offset(), target)


def stuck(bit, *, high):
    """Word 70 of buffer 1, which is word 6 of its second part, has a bit that cannot be changed."""

    def after(cells, buffer, first, part):
        if (buffer, first) == (1, PART):
            mask = torch.tensor(1 << bit if bit < 63 else -(2**63))
            part[6] = part[6] | mask if high else part[6] & ~mask

    return after


def survey_of(pattern, cells=None, **more):
    survey = Survey(pattern=pattern)
    with patch.object(memory_patterns, "write_part", cells or honest_write):
        run_pattern(CPU, survey, **({"share": 0.5, "most_bytes": 8 * WORDS} | more))
    return survey


@of_each("pattern", PATTERNS)
def test_good_memory_is_gone_through_to_its_end_and_found_right(pattern):
    survey = survey_of(pattern, rounds=2)
    assert survey.buffer_bytes == [8 * 160, 8 * 160, 8 * 80]
    assert (survey.wrong_words, survey.faults) == (0, {})
    assert survey.passes == survey.passes_wanted > 3
    assert survey.is_complete
    assert 0 < survey.share < 1
    survey.require_right()


@of_each("pattern", PATTERNS)
@of_each("high", [True, False])
@of_each("bit", [0, 37, 63])
def test_a_stuck_bit_is_found_by_each_pattern_with_buffer_and_byte(pattern, high, bit):
    survey = survey_of(pattern, Faulty(stuck(bit, high=high)))
    [(place, fault)] = survey.faults.items()
    assert place == (1, 70 * 8)
    assert fault.xor == 1 << bit
    assert bool(fault.found >> bit & 1) == high
    assert survey.is_complete
    with pytest.raises(WrongResult, match=rf"buffer 1, byte 0x230: .* \(bit {bit}\)"):
        survey.require_right()


@of_each("pattern", PATTERNS)
def test_a_write_that_disturbs_a_cell_elsewhere_is_found(pattern):
    # Word 1 of the very first part changes when the last buffer is written, long after it was written itself.
    def after(cells, buffer, first, part):
        if buffer == 2 and first == 0:
            cells.parts[0, 0][1] ^= 1 << 9

    survey = survey_of(pattern, Faulty(after))
    assert {*survey.faults} == {(0, 8)}
    assert survey.faults[0, 8].xor == 1 << 9


def test_two_addresses_that_are_one_cell_are_found_by_random_words():
    # What is written to buffer 1 lands in buffer 0 too: patterns that repeat themselves cannot see it.
    def after(cells, buffer, first, part):
        if (buffer, first) == (1, 0):
            cells.parts[0, 0].copy_(part)

    survey = survey_of("random", Faulty(after))
    assert survey.wrong_words >= PART
    assert {buffer for buffer, _ in survey.faults} == {0}


def test_words_that_are_not_written_are_found_however_many():
    survey = survey_of("walking_zeros", lambda target, words: None)
    assert survey.wrong_words >= 64 * (WORDS - 64)
    assert len(survey.faults) == memory_survey.PLACES_LISTED


def test_what_is_wrong_at_one_look_and_right_at_the_next_is_told_so(monkeypatch):
    honest, lies = torch.ne, iter([True])

    def lying(part, expected, *, out):
        honest(part, expected, out=out)
        if next(lies, False):
            out[5] = True
        return out

    monkeypatch.setattr(torch, "ne", lying)
    survey = survey_of("random")
    assert survey.wrong_words == 1
    assert "byte 0x28: expected 0x" in survey.report()
    assert re.search(r"read wrong", survey.report())


def test_what_was_seen_before_an_interruption_is_kept(monkeypatch):
    def after(cells, buffer, first, part):
        stuck(3, high=True)(cells, buffer, first, part)
        if cells.writes == 40:
            raise KeyboardInterrupt

    survey = Survey(pattern="walking_ones")
    monkeypatch.setattr(memory_patterns, "write_part", Faulty(after))
    with pytest.raises(KeyboardInterrupt):
        run_pattern(CPU, survey, share=0.5, most_bytes=8 * WORDS)
    assert not survey.is_complete
    assert survey.passes == 4
    assert survey.wrong_words > 0
    assert survey.progress_text == "after 4 of 65 passes over 3.2e-06 GB"


def test_the_progress_of_the_passes_is_shown_once_somebody_has_waited(monkeypatch):
    survey_of("random", progress=lambda step, of, **figures: pytest.fail("nobody has waited"))
    monkeypatch.setattr(memory_patterns, "PROGRESS_SECONDS", 0.0)
    shown = []
    survey_of("random", progress=lambda step, of, **figures: shown.append((step, of, figures)))
    assert shown == [(step, 3, {"wrong_words": 0}) for step in (1, 2, 3)]


def test_a_share_of_what_is_free_is_taken_less_what_comparing_needs(monkeypatch):
    free = 10 * comparison_bytes(PART)
    monkeypatch.setattr(Cpu, "free_bytes", lambda device: free)
    monkeypatch.setattr(Cpu, "total_bytes", lambda device: 2 * free)
    survey = survey_of("random", most_bytes=10**9, share=0.9)
    assert survey.tested_bytes == pytest.approx(0.8 * free, abs=8)
    assert survey.share == pytest.approx(0.4, rel=0.01)


@pytest.mark.parametrize(
    ("free", "said"),
    [(None, "the free memory is unknown"), (1000, "are too little to test")],
    ids=["unknown", "too little"],
)
def test_without_free_memory_nothing_is_said_of_it(monkeypatch, free, said):
    monkeypatch.setattr(Cpu, "free_bytes", lambda device: free)
    with pytest.raises(EnvironmentBroken, match=said):
        survey_of("random")


def test_memory_that_somebody_else_takes_meanwhile_is_no_fault_of_the_memory(monkeypatch):
    def full(target, words):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory_patterns, "write_part", full)
    survey = Survey(pattern="random")
    with pytest.raises(EnvironmentBroken, match=r"memory during the test"):
        run_pattern(CPU, survey, share=0.5, most_bytes=8 * WORDS)
    assert not survey.is_complete


def test_an_unknown_pattern_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ValueError, match="not 'walking_one'; did you mean 'walking_ones'"):
        survey_of("walking_one")


COUNT = 130
PARTS = 3
ALL_BITS = 2**64 - 1


def words_of(make, part=0):
    return [word % 2**64 for word in make(Words(CPU, COUNT), part, COUNT).tolist()]


@of_each("pattern", PATTERNS)
@of_each("rounds", [1, 3])
def test_each_pass_reads_what_the_one_before_has_written_and_the_last_one_leaves_nothing_unread(pattern, rounds):
    written = None
    for step in PATTERNS[pattern](rounds, 7):
        if step.expects is not None:
            assert [words_of(step.expects, part) for part in range(PARTS)] == [
                words_of(written, part) for part in range(PARTS)
            ]
            written = None
        assert written is None, "words are written over that nobody has read"
        written = step.writes
    assert written is None


@of_each("pattern", PATTERNS)
def test_every_bit_of_every_word_is_written_both_ways(pattern):
    ones, zeros = [0] * COUNT, [0] * COUNT
    for step in PATTERNS[pattern](1, 7):
        if step.writes is not None:
            for index, word in enumerate(words_of(step.writes)):
                ones[index] |= word
                zeros[index] |= ALL_BITS ^ word
    assert set(ones) == set(zeros) == {ALL_BITS}


def test_walking_ones_have_one_bit_that_goes_through_all_of_a_word():
    steps = [step for step in PATTERNS["walking_ones"](1, 0) if step.writes is not None]
    assert len(steps) == WORD_BITS
    seen = [words_of(step.writes) for step in steps]
    assert all(bin(word).count("1") == 1 for words in seen for word in words)
    assert [words[0] for words in seen] == [1 << bit for bit in range(WORD_BITS)]
    assert seen[0][1:3] == [2, 4], "neighbours differ"
    zeros = [step for step in PATTERNS["walking_zeros"](1, 0) if step.writes is not None]
    assert [words_of(step.writes) for step in zeros] == [[ALL_BITS ^ word for word in words] for words in seen]


def test_random_words_differ_from_part_to_part_round_to_round_and_seed_to_seed():
    passes = list(PATTERNS["random"](3, 7))
    assert [step.what for step in passes[1:]] == [
        f"round {number}{inverted}" for number in (1, 2, 3) for inverted in ("", ", inverted")
    ]
    made = [words_of(step.writes, part) for step in passes if step.writes is not None for part in range(PARTS)]
    made += [words_of(next(iter(PATTERNS["random"](1, 8))).writes)]
    drawn = [word for words in made for word in words]
    assert len(set(drawn)) == len(drawn) == COUNT * (6 * PARTS + 1)
    # As many bits set as clear, all of the 64 in use: the mean of some 150,000 bits is off by less than six sigma.
    assert abs(sum(bin(word).count("1") for word in drawn) / len(drawn) - 32) < 0.5


def test_moving_inversions_go_up_and_down_over_words_and_their_complements():
    passes = list(PATTERNS["moving_inversions"](1, 0))
    assert [step.downwards for step in passes] == [False, False, True, False] * 4
    up, down = passes[1], passes[2]
    assert words_of(up.writes) == [ALL_BITS ^ word for word in words_of(up.expects)]
    assert words_of(down.writes) == words_of(up.expects)


def fault(offset=0x28, *, expected=0, found=1 << 17, during="step 1 of 64"):
    return Fault(buffer=3, offset_bytes=offset, expected=expected, found=found, during=during)


def survey(*faults):
    found = Survey(pattern="random", device="cuda:1", buffer_bytes=[4096, 1024], total_bytes=10240)
    found.passes, found.passes_wanted = 2, 3
    for one in faults:
        found.wrong_words += 1
        found.add(one)
    return found


def test_a_fault_says_where_it_is_and_which_bits_are_wrong():
    again = str(fault().repeated(fault(found=3, during="step 2 of 64")))
    assert again.startswith("buffer 3, byte 0x28: expected 0x0000000000000000, found 0x0000000000020000, xor 0x")
    assert again.endswith("20000 (bits 0, 1, 17), step 1 of 64, and 1 more times")
    assert "xor 0x00000000000200f0, step" in str(fault(expected=0xF0)), "too many bits to name"
    assert "(bit 17)" in str(fault())
    assert "found" not in str(fault(found=0)), "it was right when it was read again"


def test_wrong_words_are_told_by_place():
    with pytest.raises(WrongResult) as caught:
        survey(fault(), fault(), fault(64)).require_right()
    told = str(caught.value)
    assert re.search(
        r"cuda:1: memory pattern.* 3 times, at 2 places, after 2 of 3 passes over 5\.12e-06 GB: buffer 3, byte 0x28: ",
        told,
    )
    assert "and 1 more times; buffer 3, byte 0x40: " in told


def test_of_many_places_the_first_are_listed_and_all_are_counted():
    found = survey(*(fault(8 * number) for number in range(PLACES_LISTED + 10)))
    assert found.faults_text == f"words were read wrong {PLACES_LISTED + 10} times, at {PLACES_LISTED} or more places"
    lines = found.report().splitlines()
    assert lines[1] == "buffers and their bytes: 0: 4096, 1: 1024"
    assert len(lines) == 2 + PLACES_LISTED
    with pytest.raises(WrongResult) as caught:
        found.require_right()
    assert str(caught.value).count("buffer 3") == 4


def test_the_share_is_of_all_memory_and_nothing_where_that_is_unknown():
    assert survey().share == 0.5
    assert math.isnan(Survey(pattern="random", buffer_bytes=[1]).share)
    assert survey(fault()).is_complete is False
