import itertools

import pytest

from pytest_gpucluster.isolation.finding import Outcome
from pytest_gpucluster.isolation.inference import Evidence, judge_probes
from pytest_gpucluster.isolation.planner import pairing


def play(units, rounds, good):
    """The groups of some rounds of pairs, each planned from the outcomes of those before."""
    played = []
    outcomes = []
    for number in range(rounds):
        found = Evidence(tuple(range(units)), judge_probes(outcomes, floor=lambda size: None))
        groups = pairing(found, number)
        played.append(groups)
        outcomes.append(
            [
                Outcome(members=members, busbw=400.0 if good(members) else None, failure="" if good(members) else "x")
                for members in groups
            ]
        )
    return played


def always(members):
    return True


@pytest.mark.parametrize("units", [2, 3, 4, 5, 6, 7, 16])
def test_while_all_pass_every_unit_meets_every_other_one(units):
    pairs = [members for groups in play(units, units - 1 + units % 2, always) for members in groups]
    assert sorted(pairs) == list(itertools.combinations(range(units), 2))


@pytest.mark.parametrize("units", [2, 5, 8])
def test_neighbours_meet_first(units):
    [groups] = play(units, 1, always)
    assert groups == [(unit, unit + 1) for unit in range(0, units - 1, 2)]


def test_a_suspect_gets_a_new_partner_each_time():
    rounds = play(8, 3, lambda members: 0 not in members)
    assert len({max(members) for groups in rounds for members in groups if 0 in members}) == 3


def test_a_pair_that_failed_is_probed_again_once_both_have_passed_with_others():
    [(one, other), *_] = play(8, 1, always)[0]
    rounds = play(8, 7, lambda members: members != (one, other))
    assert [(one, other) in groups for groups in rounds] == [True, False, True, False, True, False, True]


def test_a_unit_that_failed_alone_is_probed_alone_again():
    outcomes = [[Outcome(members=(unit,), busbw=100.0 if unit == 2 else 400.0) for unit in range(5)]]
    found = Evidence(tuple(range(5)), judge_probes(outcomes, floor=lambda size: None))
    groups = pairing(found, 0)
    assert (2,) in groups
    assert sum(len(members) == 2 for members in groups) == 2


def test_a_culprit_is_in_no_pair_any_more():
    *_, last = play(8, 5, lambda members: 0 not in members)
    assert all(0 not in members for members in last)
