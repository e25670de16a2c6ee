import pytest

from pytest_gpucluster.isolation.finding import Outcome
from pytest_gpucluster.isolation.inference import Evidence, judge_probes


def evidence(units, *rounds, floor=None):
    """Rounds of groups, each with whether it was good."""
    outcomes = [
        [
            Outcome(members=members, busbw=400.0 if good else None, failure="" if good else "not done after 60 s")
            for members, good in probed
        ]
        for probed in rounds
    ]
    return Evidence(tuple(range(units)), judge_probes(outcomes, floor=lambda size: floor))


def accused(found):
    return [culprit.units for culprit in found.culprits]


BAD_0 = (
    [((0, 1), False), ((2, 3), True), ((4, 5), True)],
    [((0, 2), False), ((1, 3), True), ((4, 5), True)],
    [((0, 3), False), ((1, 2), True), ((4, 5), True)],
)


def test_a_unit_that_fails_with_three_that_pass_without_it_is_the_culprit():
    found = evidence(6, *BAD_0)
    assert accused(found) == [(0,)]
    [culprit] = found.culprits
    assert (culprit.kind, culprit.failed, culprit.probes, culprit.intermittent) == ("unit", 3, 3, False)
    assert culprit.evidence == (
        "round 1, with 1: not done after 60 s",
        "round 2, with 2: not done after 60 s",
        "round 3, with 3: not done after 60 s",
        "passed without it: 1, 2, 3",
    )
    assert (found.suspects, found.undecided, found.unexplained) == (frozenset(), frozenset(), [])


@pytest.mark.parametrize("rounds", [1, 2])
def test_no_unit_is_accused_before_it_was_confirmed_twice(rounds):
    found = evidence(6, *BAD_0[:rounds])
    assert accused(found) == []
    assert 0 in found.suspects
    assert {0, 1} <= found.undecided
    assert found.reproduced


def test_a_partner_that_never_passed_implicates_no_unit():
    """0 fails with 1, 2 and 3, but those are not known to be good."""
    found = evidence(4, *([((0, other), False)] for other in (1, 2, 3)))
    assert accused(found) == []
    assert found.undecided == {0, 1, 2, 3}


def test_a_partner_that_fails_with_others_too_implicates_no_unit():
    found = evidence(8, *BAD_0, [((1, 6), False), ((4, 5), True)], [((6, 7), True), ((4, 5), True)])
    # The failure with 1 may be caused by 1, which has failed with 6, and 6 is good.
    assert accused(found) == []


def test_a_failure_with_a_culprit_in_it_counts_for_no_other_unit():
    found = evidence(6, *BAD_0, [((0, 4), False)], [((0, 1, 2, 3, 4, 5), False)])
    assert accused(found) == [(0,)]
    assert found.undecided == frozenset()
    [culprit] = found.culprits
    assert (culprit.failed, culprit.probes) == (4, 4)


def test_an_accusation_is_withdrawn_when_a_later_probe_contradicts_it():
    """A probe that fails without 0 shows that its partners fail on their own."""
    assert accused(evidence(6, *BAD_0)) == [(0,)]
    later = evidence(6, *BAD_0, [((1, 2), False)], [((1, 3), False)], [((2, 3), False)])
    assert (0,) not in accused(later)


def test_where_there_are_three_units_two_partners_are_enough():
    rounds = [[((0, 1), False)], [((0, 2), False)], [((1, 2), True)]]
    assert accused(evidence(3, *rounds)) == []
    assert accused(evidence(3, *rounds, [((0, 1), False)])) == [(0,)]


def test_a_unit_that_fails_alone_three_times_needs_no_partner():
    rounds = [[((0,), False), ((1,), True)]] * 3
    assert accused(evidence(2, *rounds[:2])) == []
    assert accused(evidence(2, *rounds)) == [(0,)]


def test_a_unit_that_is_good_alone_and_bad_with_others_is_bad_each_time_with_others():
    found = evidence(6, [((unit,), True) for unit in range(6)], *BAD_0)
    [culprit] = found.culprits
    assert (culprit.failed, culprit.probes) == (3, 3)


def rounds_of_a_link(times, *, passes=0):
    """0 and 1 together fail so often, then pass so often; each passes with others in between."""
    rounds = []
    for index in range(times + passes):
        rounds.append([((0, 1), index >= times), ((2, 3), True)])
        rounds.append([((0, 2), True), ((1, 3), True)])
    return rounds


def test_a_pair_that_fails_each_time_while_each_of_it_passes_with_others_is_a_bad_link():
    found = evidence(4, *rounds_of_a_link(8))
    assert accused(found) == [(0, 1)]
    [culprit] = found.culprits
    assert (culprit.kind, culprit.failed, culprit.probes) == ("link", 8, 8)
    assert culprit.evidence[-2:] == ("0 passed 8 pairs with others", "1 passed 8 pairs with others")
    assert found.undecided == frozenset()
    assert accused(evidence(4, *rounds_of_a_link(3))) == []  # a unit that fails now and then would do that too often


def test_a_pair_that_also_passes_is_no_link_before_chance_is_ruled_out():
    assert accused(evidence(4, *rounds_of_a_link(5, passes=3))) == []
    assert accused(evidence(4, *rounds_of_a_link(12, passes=2))) == [(0, 1)]


def test_a_pair_of_which_one_fails_elsewhere_is_no_link():
    assert accused(evidence(5, *rounds_of_a_link(6), [((0, 4), False)])) == []


def test_a_fault_of_larger_groups_is_the_unit_without_which_all_pass():
    def large(out):
        return [(tuple(unit for unit in range(4) if unit != out), out == 2)]

    pairs = [((0, 1), True), ((2, 3), True)]
    whole = [((0, 1, 2, 3), False)]
    assert accused(evidence(4, pairs, whole, *map(large, (0, 1, 3, 2)))) == []
    found = evidence(4, pairs, whole, *map(large, (0, 1, 3, 2, 2, 2)))
    assert accused(found) == [(2,)]
    assert (found.culprits[0].failed, found.culprits[0].probes) == (4, 4)
    # One failure without it, and any intermittent unit may be the cause.
    assert accused(evidence(4, pairs, whole, *map(large, (0, 1, 3, 2, 2, 2)), [((0, 1, 3), False)])) == []


def test_a_unit_of_large_groups_is_not_accused_while_another_one_in_all_of_them_may_fail_now_and_then():
    def large(*out):
        return [(tuple(unit for unit in range(5) if unit not in out), 2 in out)]

    pairs = [((0, 1), True), ((2, 3), True), ((0, 4), True)]
    failed = [large(0), large(1), large(0, 1), large(0), large(1)]  # 3 and 4 are in all of them
    assert accused(evidence(5, pairs, *failed, *8 * [large(2)])) == []
    assert accused(evidence(5, pairs, *failed, *9 * [large(2)])) == [(2,)]


def test_both_ends_of_a_link_are_in_each_large_group_that_fails_and_neither_is_accused():
    found = evidence(
        6,
        [((0, 1, 2), True), ((3, 4, 5), True)],
        *([(members, False)] for members in ((0, 1, 3), (0, 2, 3), (0, 3, 4))),
        *([((1, 2, 4), True)] for _ in range(3)),
    )
    assert accused(found) == []


def now_and_then(others_too):
    """Thirty rounds, in which 0 fails with a new partner each tenth time; so do all others, or none."""
    rounds = []
    for index in range(30):
        partner = 1 + index % 11
        rest = [unit for unit in range(1, 32) if unit != partner]
        probed = [((0, partner), index % 10 != 0)]
        for at, pair in enumerate(zip(rest[::2], rest[1::2], strict=True)):
            probed.append((pair, not others_too or (index + at) % 10 != 5))
        rounds.append(probed)
    return rounds


def test_failures_as_frequent_as_those_of_all_others_accuse_no_unit():
    assert accused(evidence(32, *now_and_then(others_too=True))) == []


def test_the_same_failures_accuse_where_no_other_unit_fails():
    [culprit] = evidence(32, *now_and_then(others_too=False)).culprits
    assert (culprit.units, culprit.failed, culprit.probes, culprit.intermittent) == ((0,), 3, 30, True)


def test_what_was_never_probed_with_others_is_not_cleared():
    found = evidence(4, [((0, 1), True), ((2,), True)], floor=300.0)
    assert found.undecided == {2, 3}


def test_a_rate_that_cannot_be_judged_clears_no_unit():
    assert evidence(2, [((0, 1), True)]).undecided == {0, 1}
    assert evidence(2, [((0, 1), True)], floor=300.0).undecided == frozenset()


def test_units_that_pass_among_themselves_only_are_an_island():
    rounds = [
        [((0, 1), True), ((2, 3), True), ((4, 5), True)],
        [((0, 2), False), ((1, 3), False), ((4, 5), True)],
        [((2, 4), True), ((3, 5), True), ((0, 1), True)],
        [((0, 4), False), ((1, 5), False)],
    ]
    assert evidence(6, *rounds[:1]).islands() == []  # nothing was tried between them
    assert evidence(6, *rounds).islands() == [[0, 1]]
    assert evidence(6, *rounds, [((0, 3), True)]).islands() == []
    # Large groups that fail with a bad link in them are no attempt to pass with others.
    linked = [[((0, 1, 2, 3, 4, 5), False)]] * 3 + [[((2, 3), False)]]
    assert evidence(6, rounds[0][:1] + rounds[2][:2], *linked).islands() == []
