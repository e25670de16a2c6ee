from pytest_gpucluster.isolation.finding import Outcome
from pytest_gpucluster.isolation.inference import below_floor, judge_probes


def pair(first, busbw, **more):
    return Outcome(members=(first, first + 1), busbw=busbw, **more)


def no_floor(units):
    return None


def verdicts(outcomes, floor=None, **more):
    return [one.verdict for one in judge_probes([outcomes], floor=lambda units: floor, **more)]


def reasons(outcomes, floor=None):
    return [one.reason for one in judge_probes([outcomes], floor=lambda units: floor)]


def test_a_group_far_behind_others_of_its_size_has_failed():
    outcomes = [pair(0, 380), pair(2, 377), pair(4, 200)]
    assert verdicts(outcomes) == ["passed", "passed", "failed"]
    assert reasons(outcomes)[2] == "200 GB/s; usual for 2 units is 380 GB/s"
    assert verdicts([pair(0, 380), pair(2, 324), pair(4, 322)]) == ["passed", "passed", "failed"]
    assert verdicts(outcomes, min_ratio=0.5) == ["passed"] * 3


def test_groups_of_another_size_are_not_compared():
    alone = Outcome(members=(9,), busbw=450.0)
    whole = Outcome(members=tuple(range(8)), busbw=100.0)
    probes = judge_probes([[alone, whole], [pair(0, 380), pair(2, 380)]], floor=no_floor)
    assert [one.verdict for one in probes] == ["unjudged", "unjudged", "passed", "passed"]
    assert probes[1].reason.startswith("100 GB/s; ")


def test_earlier_rounds_count_and_a_later_one_can_change_a_verdict():
    first, later = [pair(0, 200), pair(2, 200)], [pair(4, 380)]
    assert [one.verdict for one in judge_probes([first], floor=no_floor)] == ["passed", "passed"]
    assert [one.verdict for one in judge_probes([first, later], floor=no_floor)] == ["failed", "failed", "passed"]
    assert [one.number for one in judge_probes([first, later], floor=no_floor)] == [1, 1, 2]


def test_the_floor_decides_also_where_there_is_no_other_group():
    assert verdicts([pair(0, 380)], 390) == ["failed"]
    assert reasons([pair(0, 380)], 390) == ["380 GB/s; the limit for 2 units is 390 GB/s"]
    assert verdicts([pair(0, 390)], 390) == ["passed"]


def test_a_value_with_nothing_to_compare_is_neither_good_nor_bad():
    [one] = judge_probes([[pair(0, 380)]], floor=no_floor)
    assert (one.verdict, one.failed, one.passed) == ("unjudged", False, False)
    slow, dead = judge_probes([[pair(2, 1), pair(4, None, failure="x"), pair(6, 380)]], floor=no_floor)[:2]
    assert (one.clears(slow), one.clears(dead)) == (False, True)


def test_the_same_group_twice_is_no_other_group():
    assert [one.verdict for one in judge_probes([[pair(0, 380)], [pair(0, 200)]], floor=no_floor)] == ["unjudged"] * 2


def test_a_floor_that_none_of_many_reaches_fails_none_of_them():
    slow_fleet = [pair(2 * index, 300 + index) for index in range(4)]
    assert verdicts(slow_fleet, 400) == ["passed"] * 4
    assert verdicts([*slow_fleet, pair(8, 100)], 400) == ["passed"] * 4 + ["failed"]
    assert below_floor([slow_fleet], floor=lambda units: 400.0) == {2: (303, 400.0)}
    assert below_floor([slow_fleet[:3]], floor=lambda units: 400.0) == {}
    assert verdicts(slow_fleet[:3], 400) == ["failed"] * 3
    assert verdicts([*slow_fleet, pair(8, 401)], 400) == ["failed"] * 4 + ["passed"]


def test_many_groups_show_how_far_healthy_ones_scatter():
    steady = [pair(2 * index, 400.0 + index % 3) for index in range(20)]
    assert verdicts([*steady, pair(40, 330)])[-1] == "failed"
    wild = [pair(2 * index, 400.0 + 25 * (index % 3 - 1)) for index in range(20)]
    assert verdicts([*wild, pair(40, 330)])[-1] == "passed"
    assert verdicts([*wild, pair(40, 150)])[-1] == "failed"


def test_most_groups_may_be_bad_where_there_are_few_units():
    """Of four nodes two are bad: of six pairs one is good."""
    outcomes = [pair(0, 200), pair(2, 200), pair(4, 200), pair(6, 200), pair(8, 200), pair(10, 380)]
    assert verdicts(outcomes) == ["failed"] * 5 + ["passed"]


def test_one_gpu_alone_has_no_figure_and_is_not_judged():
    one, other = judge_probes([[Outcome(members=(0,), busbw=None), Outcome(members=(1,), busbw=400.0)]], floor=no_floor)
    assert (one.verdict, other.verdict) == ("unjudged", "unjudged")
