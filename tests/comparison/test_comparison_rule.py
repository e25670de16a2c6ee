"""When a value counts as worse: beyond noise, and by more than is allowed."""

from __future__ import annotations

import math
import random

import pytest

from pytest_gpucluster.comparison.allowance import allowance
from pytest_gpucluster.comparison.rule import Known, known, weigh
from pytest_gpucluster.errors import OptionError


def about(value: float, width: float = 0.01) -> Known:
    return known(value, (value * (1 - width / 2), value * (1 + width / 2)))


def bare(value: float) -> Known:
    return known(value, None)


@pytest.mark.parametrize(
    ("old", "new", "higher", "kind", "change"),
    [
        pytest.param(about(100), about(90), True, "regressed", -0.10, id="surely worse by more than is allowed"),
        pytest.param(about(100), about(98), True, "worse", -0.02, id="surely worse, and allowed"),
        pytest.param(about(100), about(99.5), True, "within noise", -0.005, id="within noise"),
        pytest.param(about(100, 0.3), about(90), True, "unsure", -0.10, id="the noise before is as large"),
        pytest.param(about(100), about(90, 0.3), True, "unsure", -0.10, id="the noise now is as large"),
        pytest.param(about(100), about(104), True, "better", 0.04, id="better"),
        pytest.param(about(100), about(100), True, "same", 0.0, id="the same"),
        pytest.param(about(20), about(25), False, "regressed", -0.25, id="less is better: surely worse"),
        pytest.param(about(20), about(15), False, "better", 0.25, id="less is better: better"),
        pytest.param(bare(100), bare(97), True, "worse", -0.03, id="exactly what is allowed"),
        pytest.param(bare(100), bare(96.9), True, "regressed", -0.031, id="no samples excuse nothing"),
        pytest.param(bare(0), bare(3), False, "regressed", -math.inf, id="from nothing to something bad"),
        pytest.param(bare(0), bare(3), True, "better", math.inf, id="from nothing to something good"),
        pytest.param(bare(100), bare(0), True, "regressed", -1.0, id="nothing any more"),
    ],
)
def test_a_value_is_weighed_against_an_earlier_one(old, new, higher, kind, change):
    found = weigh(old, new, higher=higher, allowed=0.03)
    assert (found.kind, pytest.approx(found.change)) == (kind, change)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_what_is_no_value_is_not_comparable_and_never_fine(bad):
    for old, new in ((bare(bad), bare(1.0)), (bare(1.0), bare(bad))):
        found = weigh(old, new, higher=True, allowed=0.03)
        assert found.kind == "not comparable"
        assert "the value" in found.why


def test_of_a_value_without_samples_the_limit_says_what_is_much():
    tiny, more = bare(1e-9), bare(3e-9)
    assert weigh(tiny, more, higher=False, allowed=0.03, limit_max=1e-5).kind == "worse"
    assert weigh(tiny, more, higher=False, allowed=0.03).kind == "regressed"
    assert weigh(tiny, bare(1e-6), higher=False, allowed=0.03, limit_max=1e-5).kind == "regressed"
    # With samples on both sides it is known how sure the values are, and nothing is excused.
    assert weigh(about(1e-9), about(3e-9), higher=False, allowed=0.03, limit_max=1e-5).kind == "regressed"
    # Nothing wrong is allowed: there is no yardstick for one wrong word.
    assert weigh(bare(0), bare(1), higher=False, allowed=0.03, limit_max=0.0).kind == "regressed"


@pytest.mark.parametrize(
    ("interval", "samples", "expected"),
    [
        ((9.0, 11.0), (1.0, 2.0), (9.0, 11.0, True)),
        (None, (9.0, 10.0, 11.0), (9.0, 11.0, True)),
        (None, tuple(map(float, range(1, 20))), (5.0, 15.0, True)),
        (None, (), (10.0, 10.0, False)),
        ((11.0, 12.0), (), (10.0, 10.0, False)),
        (None, (100.0, 200.0), (10.0, 10.0, False)),
        (None, (math.nan, 10.0), (10.0, 10.0, False)),
        ((-math.inf, math.inf), (), (10.0, 10.0, False)),
        ((math.nan, math.nan), (), (10.0, 10.0, False)),
    ],
    ids=["its interval", "few samples", "many samples", "nothing", "foreign interval", "foreign samples", "NaN",
         "endless", "NaN interval"],
)  # fmt: skip
def test_the_noise_of_a_value_is_its_own_or_none(interval, samples, expected):
    if len(samples) == 19:
        samples = tuple(random.Random(1).sample(samples, len(samples)))
    found = known(10.0, interval, samples)
    low, high, sampled = expected
    assert (found.low <= 10.0 <= found.high, found.sampled) == (True, sampled)
    if len(samples) != 19:
        assert (found.low, found.high) == (low, high)
    else:
        assert 1.0 < found.low < 10.0 < found.high < 19.0


@pytest.mark.parametrize("count", [8, 20, 60])
@pytest.mark.parametrize("noise", ["normal", "spikes"])
def test_false_alarms_are_rare_and_losses_are_found(count, noise):
    """The product's own rule, on samples whose medians are known."""
    draws = random.Random(f"{count} {noise}")

    def samples(median: float) -> tuple[float, ...]:
        slow = 0.9 if noise == "spikes" else 1.0
        return tuple(median * draws.gauss(1, 0.01) * (slow if draws.random() < 0.05 else 1) for _ in range(count))

    def told(median: float) -> Known:
        taken = samples(median)
        return known(sorted(taken)[count // 2], None, taken)

    trials = 1000
    apart = sum(weigh(told(100), told(100), higher=True, allowed=0.0).kind in ("regressed", "better")
                for _ in range(trials))  # fmt: skip
    assert apart / trials <= 0.01
    kinds = [weigh(told(100), told(93), higher=True, allowed=0.03).kind for _ in range(trials)]
    assert sum(kind in ("regressed", "unsure") for kind in kinds) / trials >= 0.99, "a loss is never taken for fine"
    if count > 8 or noise == "normal":  # of 8 samples one that is wild is an end of the interval
        assert kinds.count("regressed") / trials >= 0.95


@pytest.mark.parametrize(("text", "ratio"), [("3%", 0.03), (" 0.5 % ", 0.005), ("3", 0.03), ("0", 0.0)])
def test_a_percentage_is_read(text, ratio):
    assert allowance(text) == ratio


@pytest.mark.parametrize("text", ["", "three", "-3%", "100%", "nan", "1e1%", "3%%", "\u0663%", "3 GB"])
def test_anything_else_is_no_percentage(text):
    with pytest.raises(OptionError, match="no percentage"):
        allowance(text)
