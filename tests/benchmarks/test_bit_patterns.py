"""The patterns themselves: which words are written, that they differ, and that every one of them is read again."""

from __future__ import annotations

import torch
from each import of_each

from pytest_gpucluster.benchmarks.memory_patterns import PATTERNS, WORD_BITS, Make, Words

CPU = torch.device("cpu")
COUNT = 130
PARTS = 3
ALL_BITS = 2**64 - 1


def words_of(make: Make, part: int = 0) -> list[int]:
    return [word % 2**64 for word in make(Words(CPU, COUNT), part, COUNT).tolist()]


@of_each("pattern", PATTERNS)
@of_each("rounds", [1, 3])
def test_each_pass_reads_what_the_one_before_has_written_and_the_last_one_leaves_nothing_unread(
    pattern: str, rounds: int
) -> None:
    written: Make | None = None
    for step in PATTERNS[pattern](rounds, 7):
        if step.expects is not None:
            assert written is not None
            assert [words_of(step.expects, part) for part in range(PARTS)] == [
                words_of(written, part) for part in range(PARTS)
            ]
            written = None
        assert written is None, "words are written over that nobody has read"
        written = step.writes
    assert written is None


@of_each("pattern", PATTERNS)
def test_every_bit_of_every_word_is_written_both_ways(pattern: str) -> None:
    ones, zeros = [0] * COUNT, [0] * COUNT
    for step in PATTERNS[pattern](1, 7):
        if step.writes is not None:
            for index, word in enumerate(words_of(step.writes)):
                ones[index] |= word
                zeros[index] |= ALL_BITS ^ word
    assert set(ones) == set(zeros) == {ALL_BITS}


def test_walking_ones_have_one_bit_that_goes_through_all_of_a_word() -> None:
    steps = [step for step in PATTERNS["walking_ones"](1, 0) if step.writes is not None]
    assert len(steps) == WORD_BITS
    seen = [words_of(step.writes) for step in steps]  # type: ignore[arg-type]  # filtered above
    assert all(bin(word).count("1") == 1 for words in seen for word in words)
    assert [words[0] for words in seen] == [1 << bit for bit in range(WORD_BITS)]
    assert seen[0][1:3] == [2, 4], "neighbours differ"
    zeros = [step for step in PATTERNS["walking_zeros"](1, 0) if step.writes is not None]
    assert [words_of(step.writes) for step in zeros] == [[ALL_BITS ^ word for word in words] for words in seen]  # type: ignore[arg-type]


def test_random_words_differ_from_part_to_part_round_to_round_and_seed_to_seed() -> None:
    passes = list(PATTERNS["random"](3, 7))
    assert [step.what for step in passes[1:]] == [
        f"round {number}{inverted}" for number in (1, 2, 3) for inverted in ("", ", inverted")
    ]
    made = [words_of(step.writes, part) for step in passes if step.writes is not None for part in range(PARTS)]
    made += [words_of(next(iter(PATTERNS["random"](1, 8))).writes)]  # type: ignore[arg-type]  # the first pass writes
    drawn = [word for words in made for word in words]
    assert len(set(drawn)) == len(drawn) == COUNT * (6 * PARTS + 1)
    # As many bits set as clear, all of the 64 in use: the mean of some 150,000 bits is off by less than six sigma.
    assert abs(sum(bin(word).count("1") for word in drawn) / len(drawn) - 32) < 0.5


def test_moving_inversions_go_up_and_down_over_words_and_their_complements() -> None:
    passes = list(PATTERNS["moving_inversions"](1, 0))
    assert [step.downwards for step in passes] == [False, False, True, False] * 4
    up, down = passes[1], passes[2]
    assert up.expects is not None
    assert up.writes is not None
    assert words_of(up.writes) == [ALL_BITS ^ word for word in words_of(up.expects)]
    assert down.writes is not None
    assert words_of(down.writes) == words_of(up.expects)
