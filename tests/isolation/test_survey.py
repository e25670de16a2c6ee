import pytest
from simulated_fabric import GB, measured, places, surveyed

from pytest_gpucluster.isolation.link_survey import readings_of
from pytest_gpucluster.isolation.round_robin import within_node

NODE = places(1, 4)


def survey(readings, **more):
    return surveyed(readings, NODE, **more)


def slow_gpu(left=0.2):
    return measured(within_node(NODE, 0), lambda sender, receiver: left if 3 in (sender, receiver) else 1.0, noise=0)


def test_the_partners_of_a_slow_gpu_are_represented_by_their_links_among_themselves():
    found = survey(slow_gpu())
    assert found.of_rank(3).bytes_per_second == pytest.approx(0.2 * 48 * GB)
    for rank in range(3):
        assert found.of_rank(rank).bytes_per_second == pytest.approx(48 * GB)
        assert found.matrix.ratio(found.of_rank(rank)) == pytest.approx(1.0)
    assert found.matrix.ratio(found.of_rank(3)) == pytest.approx(0.2)


def test_a_slow_link_represents_both_its_ends():
    fault = measured(within_node(NODE, 0), lambda s, r: 0.2 if {s, r} == {1, 2} else 1.0, noise=0)
    found = survey(fault)
    assert [found.matrix.ratio(found.of_rank(rank)) for rank in range(4)] == pytest.approx([1.0, 0.2, 0.2, 1.0])
    assert found.slow == ((1, 2),)


def test_without_a_limit_no_link_is_slow_and_every_rank_is_represented_by_its_slowest():
    found = survey(slow_gpu(), below=None)
    assert found.slow == ()
    assert found.culprits("slow") == ()
    assert {found.of_rank(rank).bytes_per_second for rank in range(4)} == {found.of_rank(3).bytes_per_second}


def test_data_that_arrive_wrong_only_alone_are_wrong():
    [again] = [one for one in measured([((0, 1),)], wrong=[(1, 0)]) if one.wrong]
    [found] = survey(slow_gpu(), alone=[again]).culprits("wrong")
    assert (found.kind, found.ranks) == ("link", (0, 1))


def test_the_readings_of_pairs_come_slowest_first_and_unmeasured_pairs_have_none():
    matrix = survey(slow_gpu()).matrix
    found = readings_of([(0, 1), (0, 3), (7, 8)], matrix)
    assert [one.pair for one in found] == [(0, 3), (0, 3), (0, 1), (0, 1)]
