import math

import pytest

from pytest_gpucluster.isolation.finding import Outcome


@pytest.mark.parametrize(
    ("outcome", "broken"),
    [
        (Outcome(members=(0, 1), busbw=380.0), False),
        (Outcome(members=(0, 1), busbw=0.0), False),
        (Outcome(members=(0, 1), busbw=None, failure="timeout"), True),
        (Outcome(members=(0, 1), busbw=380.0, failure="lost afterwards"), True),
        (Outcome(members=(0, 1), busbw=380.0, wrong="rank 3"), True),
        (Outcome(members=(0, 1), busbw=None), True),
        (Outcome(members=(0,), busbw=None), False),
        (Outcome(members=(0,), busbw=None, failure="timeout"), True),
        (Outcome(members=(0, 1), busbw=math.nan), True),
        (Outcome(members=(0, 1), busbw=math.inf), True),
        (Outcome(members=(0, 1), busbw=-1.0), True),
    ],
    ids=[
        *("good", "zero", "timeout", "value and failure", "wrong data", "no reason", "one GPU has no figure"),
        *("one GPU that fails", "nan", "inf", "negative"),
    ],
)
def test_outcomes_that_are_broken_at_any_speed(outcome, broken):
    assert outcome.broken is broken


@pytest.mark.parametrize("members", [(), (1, 0), (2, 2)], ids=["none", "not ascending", "twice"])
def test_a_group_has_units_in_order(members):
    with pytest.raises(ValueError, match="ascending"):
        Outcome(members=members, busbw=1.0)
