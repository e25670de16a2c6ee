from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.isolation import inference
from pytest_gpucluster.isolation import planner as planner_module
from pytest_gpucluster.isolation.finding import Outcome
from pytest_gpucluster.isolation.planner import MAX_ROUNDS, Planner

GOOD = 400.0


def probe(members, fault):
    """What a fault does to a group: "" nothing, "slow", "wrong", or "dead"."""
    what = fault(members)
    return Outcome(
        members=tuple(members),
        busbw=None if what == "dead" else GOOD / 4 if what == "slow" else GOOD,
        wrong="rank 5 at byte 4096" if what == "wrong" else "",
        failure="not done after 60 s" if what == "dead" else "",
    )


def search(units, fault, *, floor=300.0, repeats=True, **more):
    """With ``repeats=False`` it ends where pairs are only repeated."""
    numbers = range(units) if isinstance(units, int) else units
    planner = Planner(numbers, floor=lambda size: floor, **more)
    while (groups := planner.next_round()) is not None and (repeats or not planner.repeats):
        planner.take([probe(members, fault) for members in groups])
    return planner.finding()


def bad(*units, what="slow", smallest=2):
    """Units that are bad in groups of ``smallest`` units or more."""
    return lambda members: what if len(members) >= smallest and set(units) & set(members) else ""


def bad_link(one, other, what="slow"):
    return lambda members: what if {one, other} <= set(members) else ""


def units_of(found):
    return [culprit.units for culprit in found.culprits]


def fine(members):
    return ""


# Units that are found -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["slow", "dead", "wrong"])
@pytest.mark.parametrize("units", [3, 4, 5, 6, 7, 8, 16])
def test_a_bad_unit_is_found_confirmed_and_the_others_are_cleared(units, what):
    for culprit in range(units):
        found = search(units, bad(culprit, what=what))
        assert units_of(found) == [(culprit,)]
        assert found.cleared == tuple(unit for unit in range(units) if unit != culprit)
        assert (found.undecided, found.reproduced) == ((), True)
        assert found.why_undecided.startswith("not excluded: ")
        [named] = found.culprits
        assert named.failed == named.probes >= 3
        # The rest at once is the proof that no unit is missing from the list.
        assert (probe(found.cleared, fine),) in found.rounds


def test_two_of_four_are_found():
    for one, other in ((0, 1), (0, 2), (1, 2), (2, 3)):
        found = search(4, bad(one, other, what="dead"))
        assert units_of(found) == [(one,), (other,)]
        assert len(found.cleared) == 2


def test_units_may_have_any_numbers():
    found = search([7, 3, 12, 40, 5], bad(12))
    assert units_of(found) == [(12,)]
    assert found.cleared == (3, 5, 7, 40)


def test_a_unit_that_is_slow_by_itself_needs_no_partner():
    found = search(2, lambda members: "slow" if list(members) == [1] else "")
    [culprit] = found.culprits
    assert (culprit.units, culprit.failed, culprit.probes) == ((1,), 3, 3)
    assert culprit.evidence[0].startswith("round 1, alone: 100 GB/s; ")
    assert culprit.evidence[0].endswith(" 300 GB/s")


def test_a_bad_link_is_distinguished_from_its_ends():
    for one, other in ((0, 1), (2, 5), (0, 7)):
        found = search(8, bad_link(one, other, "wrong"))
        assert units_of(found) == [(one, other)]
        [culprit] = found.culprits
        assert (culprit.kind, culprit.intermittent) == ("link", False)
        assert found.undecided == ()
        assert set(found.cleared) == set(range(8)) - {one, other}


def test_a_link_that_shows_in_no_first_pair_is_found_by_halving():
    found = search(64, bad_link(5, 40, "dead"), repeats=False)
    assert units_of(found) == [(5, 40)]
    assert any(outcome.members == tuple(range(64)) and outcome.failure for outcome in found.rounds[2])
    assert len(found.rounds) < 30


@pytest.mark.parametrize("smallest", [3, 4, 8, 9, 12, 15])
def test_a_unit_that_is_bad_in_larger_groups_only_is_found_among_them(smallest):
    for culprit in (0, 6, 15):
        found = search(16, bad(culprit, what="dead", smallest=smallest))
        assert units_of(found) == [(culprit,)], (smallest, culprit)
        assert found.cleared == tuple(unit for unit in range(16) if unit != culprit)


def test_a_fault_of_all_at_once_accuses_no_unit():
    found = search(8, lambda members: "slow" if len(members) == 8 else "")
    assert (found.culprits, found.cleared) == ((), ())
    assert found.undecided == tuple(range(8))
    assert "not confirmed: 0, 1, 2, 3 and 4 more failed" in found.why_undecided
    assert "its parts pass" in found.why_undecided


def test_a_unit_that_fails_now_and_then_is_reported_as_intermittent():
    probes = 0

    def each_third(members):
        nonlocal probes
        if len(members) < 2 or 3 not in members:
            return ""
        probes += 1
        return "dead" if probes % 3 == 0 else ""

    found = search(16, each_third)
    [culprit] = found.culprits
    assert culprit.units == (3,)
    assert culprit.intermittent
    assert 3 <= culprit.failed < culprit.probes
    assert culprit.summary().endswith("intermittent")


# Units that are not accused ------------------------------------------------------------------------------------------


def test_a_fault_that_does_not_occur_again_is_reported_as_not_reproduced():
    found = search(8, fine)
    assert (found.culprits, found.reproduced, found.undecided) == ((), False, ())
    assert f"again in {len(found.rounds)} rounds" in found.why_undecided


def test_a_failure_that_comes_once_is_not_confirmed_and_its_units_are_not_cleared():
    left = ["dead"]
    found = search(8, lambda members: left.pop() if left and set(members) == {2, 5} else "")
    assert found.culprits == ()
    assert found.undecided == (2, 5)
    assert found.why_undecided.startswith("not confirmed: 2, 5 failed 1 of ")
    assert "not done after 60 s" in found.why_undecided


def test_of_two_units_neither_is_accused():
    found = search(2, lambda members: "dead" if len(members) == 2 else "")
    assert (found.culprits, found.undecided, found.reproduced) == ((), (0, 1), True)
    assert "with two units" in found.why_undecided
    assert len(found.rounds) < 8


@pytest.mark.parametrize("units", [3, 4, 8])
def test_where_no_pair_passes_no_unit_is_accused(units):
    found = search(units, lambda members: "dead" if len(members) > 1 else "")
    assert (found.culprits, found.undecided) == ((), tuple(range(units)))
    assert "passed with another" in found.why_undecided
    assert len(found.rounds) < 10


def test_where_all_fail_alone_no_unit_is_accused():
    found = search(4, lambda members: "dead")
    assert (found.culprits, found.undecided) == ((), (0, 1, 2, 3))
    assert "share the cause" in found.why_undecided


def test_one_unit_alone_is_not_accused():
    found = search(1, lambda members: "dead")
    assert (found.culprits, found.undecided, len(found.rounds)) == ((), (0,), 3)
    assert "only one" in found.why_undecided


def test_a_fleet_that_is_slow_throughout_is_no_single_unit():
    found = search(8, fine, floor=GOOD + 1)
    assert found.culprits == ()
    assert found.undecided == tuple(range(8))
    assert "limit of 401 GB/s" in found.why_undecided
    assert "what all share" in found.why_undecided
    assert len(found.rounds) < 6


def test_in_a_slow_fleet_the_one_that_is_far_behind_is_found_all_the_same():
    found = search(8, bad(3), floor=GOOD + 1)
    assert units_of(found) == [(3,)]
    assert "reaches the limit" in found.why_undecided
    assert found.cleared == ()


@pytest.mark.parametrize("leaf", [{0, 1, 2, 3}, {0, 3, 4, 7}], ids=["seen to pass among themselves", "or not"])
def test_units_that_a_bad_switch_cuts_off_are_reported_as_such(leaf):
    found = search(16, lambda members: "dead" if 0 < len(set(members) & leaf) < len(members) else "")
    assert set(found.cleared) & leaf == set()
    assert {unit for units in units_of(found) for unit in units} <= leaf
    together = any(
        len(outcome.members) > 1 and set(outcome.members) <= leaf for each in found.rounds for outcome in each
    )
    assert ("pass among themselves" in found.why_undecided) == together
    assert together == (1 in leaf)
    assert len(found.rounds) < 30


def test_without_a_limit_the_rate_of_all_at_once_is_reported_as_not_judged():
    found = search(8, fine, floor=None)
    assert not found.reproduced
    assert "8 at once reached 400 GB/s; " in found.why_undecided


def test_without_a_limit_a_slow_unit_is_still_found_by_comparison():
    assert units_of(search(8, bad(6), floor=None)) == [(6,)]


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.3, 0.7]))
def test_any_outcomes_end_the_search_with_disjoint_groups(units, seed, share):
    random = Random(seed)

    def now_and_then(members):
        return random.choice(["slow", "dead", "wrong"]) if random.random() < share else ""

    planner = Planner(range(units), floor=lambda size: 300.0)
    while (groups := planner.next_round()) is not None:
        busy = [unit for members in groups for unit in members]
        assert busy
        assert len(busy) == len(set(busy))
        assert set(busy) <= set(range(units))
        planner.take([probe(members, now_and_then) for members in groups])
        found = planner.finding()
        named = {unit for culprit in found.culprits for unit in culprit.units}
        assert named | set(found.cleared) | set(found.undecided) == set(range(units))
        assert not named & set(found.cleared)
        assert not set(found.cleared) & set(found.undecided)
    assert len(planner.finding().rounds) <= MAX_ROUNDS


# Faults that show now and then ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("units", [4, 8, 9])
def test_what_looks_fine_is_repeated_and_what_is_not_excluded_is_said(units):
    found = search(units, fine)
    probes = min(sum(unit in one.members for each in found.rounds for one in each) for unit in range(units))
    assert probes >= 72
    assert "not excluded: a unit that is bad less often than in one probe of 31 (each was in 7" in found.why_undecided
    again = search(units, bad(1))
    assert units_of(again) == [(1,)]
    assert "less often than in one probe of 10 (each was in 2" in again.why_undecided


def test_a_search_that_ends_early_excludes_less(monkeypatch):
    monkeypatch.setattr(planner_module, "MAX_ROUNDS", 12)
    why = search(8, fine).why_undecided
    assert "a unit that is bad less often than in one probe of 3 (each was in" in why
    assert "or a link that is bad now and then (1 or more probes)" in why


# How it is used --------------------------------------------------------------------------------------------------


def test_a_budget_ends_the_search_and_the_rest_is_reported_as_undecided(monkeypatch):
    monkeypatch.setattr(planner_module, "MAX_ROUNDS", 3)
    found = search(8, bad(2))
    assert len(found.rounds) == 3
    assert found.culprits == ()
    assert 2 in found.undecided
    assert found.why_undecided.startswith("the search ended after 3 rounds, ")


def test_nothing_probed_is_nothing_cleared():
    found = Planner(range(4)).finding()
    assert (found.cleared, found.undecided, found.why_undecided) == ((), (0, 1, 2, 3), "nothing was probed")


@pytest.mark.parametrize("what", ["slow", "dead"])
@pytest.mark.parametrize("units", [2, 3, 4, 7])
def test_single_gpus_are_never_probed_alone(units, what):
    """One GPU has no link: its rate would be that of nothing."""
    for fault in (bad(1, what=what), bad(1, what=what, smallest=3), bad_link(0, 1, what), fine):
        found = search(units, fault, alone=False)
        assert all(len(outcome.members) > 1 for outcomes in found.rounds for outcome in outcomes)


@pytest.mark.parametrize("units", [[], [1, 1]], ids=["none", "twice"])
def test_units_are_different_and_some(units):
    with pytest.raises(ValueError, match="different numbers"):
        Planner(units)


def test_each_round_is_taken_once_and_whole():
    planner = Planner(range(4))
    with pytest.raises(RuntimeError, match="next_round"):
        planner.take([])
    groups = planner.next_round()
    with pytest.raises(RuntimeError, match="take"):
        planner.next_round()
    with pytest.raises(ValueError, match="one outcome"):
        planner.take([probe(members, fine) for members in groups[1:]])
    with pytest.raises(ValueError, match="one outcome"):
        planner.take([probe(members, fine) for members in (*groups, groups[0])])
    planner.take([probe(members, fine) for members in reversed(groups)])
    assert planner.next_round() is not None


def test_the_page_has_the_numbers_of_the_code():
    page = " ".join((Path(__file__).parents[2] / "docs" / "isolation.md").read_text(encoding="utf-8").split())
    for text in (
        f"`isolation.min_ratio` ({100 * inference.MIN_RATIO:g} %)",
        f"fewer than {inference._LARGE_SAMPLE}",
        f"for {planner_module._QUIET_ROUNDS} rounds of pairs",
        f"{planner_module._NAMED_PROBES} probes, or {planner_module._SHOWN_PROBES} where a culprit is known",
        f"after {MAX_ROUNDS} rounds",
    ):
        assert text in page
    assert (planner_module._TOURNAMENT_UNITS, inference.CONFIRMED) == (6, 3)
    assert "Up to six units" in page
    assert "three probes" in page
