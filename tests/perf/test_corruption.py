"""docs/corruption.md: made by perf/corruption.py with the shipped checks and workloads, and true of them."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from random import Random

import pytest
import torch

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package: they import each other by name
try:
    import corruption
    import corruption_trials
finally:
    sys.path.remove(str(PERF))

SHIPPED = corruption.PAGE.read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([a-z].*?) \| (\d+) \| (\d+) \| ([\d.]+)", re.MULTILINE)


def test_the_page_has_the_rates_that_follow_from_its_shares_and_the_shipped_workloads() -> None:
    assert SHIPPED.startswith(corruption.header(corruption.TRIALS_EACH))
    found = {
        name: corruption.Found(count=round(float(share) * int(flips) / 100), planted=int(flips), operations=int(of))
        for name, flips, of, share in ROW.findall(SHIPPED)
    }
    assert set(found) == set(corruption_trials.TRIALS)
    assert "\n".join(corruption.rates_section(found)) in SHIPPED


@pytest.mark.parametrize("parts", [[(100, 1.0)], [(9521.8, 0.94), (2, 0.5)], [(3, 0.9), (0, 0.0), (7, 0.3)]], ids=str)
def test_at_the_least_rate_a_run_without_a_finding_has_a_chance_of_5_percent(parts: list[tuple[float, float]]) -> None:
    rate = corruption.least_rate(parts)
    assert math.prod((1 - rate * share) ** count for count, share in parts) == pytest.approx(0.05)


def test_what_is_never_seen_surely_has_no_rate() -> None:
    assert corruption.least_rate([(1000, 0.0)]) == corruption.least_rate([(2, 0.5)]) == math.inf
    assert corruption.least_rate([(1, 1.0)]) <= 1


def test_one_bit_of_one_element_flips_in_the_operation_whose_turn_it_is() -> None:
    struck = set()
    for seed in range(300):
        flip, words = corruption_trials.Flip(Random(seed), at=1), torch.zeros(3, dtype=torch.int16)
        assert [flip(words), flip(words), flip(words)] == [False, True, False]
        [(place, word)] = ((place, word) for place, word in enumerate(words.tolist()) if word)
        struck.add((place, (word % 2**16).bit_length() - 1))
        assert (word % 2**16).bit_count() == 1
    assert len(struck) == 3 * 16, "each bit of each element has its turn"


def test_a_check_that_sees_nothing_is_not_reported_as_one_that_finds_all() -> None:
    assert corruption_trials.measured("products bf16", 3).share == 1
    assert corruption_trials.measured("write", 3).share < 1
