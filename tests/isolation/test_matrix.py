import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.isolation.link_matrix import Matrix, Reading


def matrix_of(rates, wrong=(), unit_of=lambda rank: rank):
    readings = [
        Reading(
            sender=sender,
            receiver=receiver,
            bytes_per_second=rate,
            low=rate,
            high=rate,
            payload_bytes=4000,
            defect=(2, 12, 0xDEAD, 0xBEEF) if (sender, receiver) in wrong else (0, 0, 0, 0),
        )
        for (sender, receiver), rate in rates.items()
    ]
    return Matrix(readings, unit_of)


HEALTHY = {(one, other): 100.0 for one in range(4) for other in range(4) if one != other}

LINKS = [(one, other) for one in range(5) for other in range(5) if one != other]


@given(st.dictionaries(st.sampled_from(LINKS), st.sampled_from([0.0, 1.0, 2.0, 5.0, 50.0, 100.0]), min_size=1))
def test_a_reading_is_compared_with_the_median_without_the_rank_that_lowers_it_most(rates):
    matrix = matrix_of(rates)
    ranks = {rank for link in rates for rank in link}
    without = [[value for link, value in rates.items() if rank not in link] for rank in ranks]
    medians = [statistics.median(values) for values in without if values]
    for (sender, receiver), rate in rates.items():
        found = matrix.ratio(matrix.readings[sender, receiver])
        if not medians:
            assert found is None
        elif max(medians) == 0:
            assert found == float("inf")
        else:
            assert found == pytest.approx(rate / max(medians))


def test_of_three_gpus_the_slow_one_is_not_in_the_reference_rate():
    slow = {link: 30.0 for link in HEALTHY if 2 in link and 3 not in link}
    three = matrix_of({link: 100.0 for link in HEALTHY if 3 not in link} | slow)
    assert three.median == 30.0
    assert three.reference_rate((0, 1)) == 100.0
    assert three.slow(0.75) == [(0, 2), (1, 2)]


def test_of_two_nodes_each_pair_is_compared_with_the_other_rails():
    rates = {(0, 4): 100.0, (4, 0): 100.0, (1, 5): 10.0, (5, 1): 90.0, (2, 6): 80.0, (6, 2): 80.0}
    matrix = matrix_of(rates, unit_of=lambda rank: rank // 4)
    assert matrix.reference_rate((1, 5)) == 90.0
    assert matrix.slow(0.75) == [(1, 5)]
    assert matrix_of({(0, 4): 1.0, (4, 0): 2.0}, unit_of=lambda rank: rank // 4).reference_rate((0, 4)) is None


def test_of_three_nodes_a_slow_one_is_left_out_with_all_its_rails():
    rates = {(s, r): 30.0 if 2 in (s // 2, r // 2) else 100.0 for s in range(6) for r in range(6) if s % 2 == r % 2}
    rates = {link: rate for link, rate in rates.items() if link[0] != link[1]}
    found = matrix_of(rates, unit_of=lambda rank: rank // 2).slow(0.75)
    assert sorted(found) == [(0, 4), (1, 5), (2, 4), (3, 5)]


def test_the_slower_direction_represents_a_pair():
    matrix = matrix_of(HEALTHY | {(2, 1): 30.0, (0, 3): 20.0})
    assert matrix.slow(0.75) == [(0, 3), (1, 2)]
    assert matrix.worst((1, 2)).sender == 2
    assert matrix.slow(0.1) == []


def test_a_single_pair_has_nothing_to_compare_with():
    matrix = matrix_of({(0, 1): 1.0, (1, 0): 100.0})
    assert matrix.ratio(matrix.readings[0, 1]) is None
    assert matrix.slow(0.75) == []


def test_wrong_data_make_a_bad_pair_and_have_their_place():
    matrix = matrix_of(HEALTHY, wrong=((3, 1),))
    assert matrix.wrong() == [(1, 3)]
    assert matrix.readings[3, 1].wrong.startswith("2 of 500 words from rank 3 to rank 1 ")
    assert "byte 12: found 0x000000000000dead, expected 0x000000000000beef" in matrix.readings[3, 1].wrong
    assert matrix.readings[1, 3].wrong == ""


def test_a_rank_is_represented_by_its_slowest_link_without_those_of_other_culprits():
    matrix = matrix_of(HEALTHY | {(0, 3): 10.0, (1, 0): 60.0})
    assert matrix.of_rank(0).bytes_per_second == 10.0
    assert matrix.of_rank(0, without=[(0, 3)]).bytes_per_second == 60.0
    assert matrix.of_rank(3, without=[(0, 3)]).bytes_per_second == 100.0
    # Where all are left out, they are all that there is.
    assert matrix.of_rank(3, without=[(0, 3), (1, 3), (2, 3)]).bytes_per_second == 10.0


def test_a_rank_without_a_reading_is_an_error_and_so_is_the_median_of_nothing():
    with pytest.raises(KeyError):
        matrix_of(HEALTHY).of_rank(7)
    with pytest.raises(ValueError, match="no samples"):
        assert Matrix(()).median
