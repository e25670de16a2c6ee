import math
import statistics

import pytest
from each import of_each
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.judge.misses import straggler_ratios

VALUES = st.dictionaries(st.integers(0, 63), st.floats(0, 1e12), min_size=2, max_size=24)
SIDES = st.sampled_from(["higher", "lower"])


@pytest.mark.parametrize(
    ("values", "ratios"),
    [
        pytest.param([100, 60], [100 / 60, 0.6], id="two ranks"),
        pytest.param([100, 100, 60], [100 / 80, 100 / 80, 0.6], id="three ranks"),
        pytest.param([100, 100, 60, 60], [100 / 60, 100 / 60, 0.6, 0.6], id="half of them slow"),
        pytest.param([100] * 15 + [62], [1.0] * 15 + [0.62], id="one of sixteen"),
        pytest.param([50, 50, 50, 100], [1.0, 1.0, 1.0, 2.0], id="most of them slow alike: not seen"),
        pytest.param([0, 0, 0], [0.0, 0.0, 0.0], id="nothing reached by anyone"),
        pytest.param([0, 5], [0.0, math.inf], id="nothing reached by one"),
    ],
)
def test_a_rank_is_compared_with_the_median_of_the_others(values, ratios):
    found = straggler_ratios(dict(enumerate(values)), "higher")
    assert list(found.values()) == pytest.approx(ratios)


def test_where_less_is_better_the_largest_value_is_behind():
    found = straggler_ratios({0: 20.0, 1: 20.0, 2: 40.0, 3: 0.0}, "lower")
    assert found == {0: 1.0, 1: 1.0, 2: 0.5, 3: math.inf}
    assert straggler_ratios({0: 0.0, 1: 0.0}, "lower") == {0: 1.0, 1: 1.0}


@given(VALUES, SIDES)
def test_the_ratio_is_that_of_the_median_of_a_list_without_the_rank(values, better):
    found = straggler_ratios(values, better)
    for rank, value in values.items():
        others = statistics.median([other for key, other in values.items() if key != rank])
        if value > 0 and others > 0:
            assert found[rank] == pytest.approx(value / others if better == "higher" else others / value)


@given(VALUES, SIDES)
def test_the_worst_value_has_the_lowest_ratio(values, better):
    found = straggler_ratios(values, better)
    worst = min(values, key=values.__getitem__) if better == "higher" else max(values, key=values.__getitem__)
    assert found[worst] == min(found.values())


@of_each(
    "case",
    [
        ({}, "higher", "two values or more"),
        ({0: 1.0}, "higher", "two values or more"),
        ({0: 1.0, 1: math.nan}, "higher", "finite"),
        ({0: 1.0, 1: math.inf}, "lower", "finite"),
        ({0: 1.0, 1: -1.0}, "lower", "negative"),
        ({0: 1.0, 1: 1.0}, "none", "none"),
    ],
)
def test_what_cannot_be_compared_is_refused(case):
    values, better, why = case
    with pytest.raises(ValueError, match=why):
        straggler_ratios(values, better)
