from __future__ import annotations

import pytest
from simulated_fabric import measured, places, surveyed

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.isolation.link_matrix import Reading
from pytest_gpucluster.isolation.link_survey import Survey, require_measured, require_sound
from pytest_gpucluster.isolation.round_robin import Pair, within_node

NODE = places(1, 4)
ROUNDS = within_node(NODE, 0)


def survey(readings: list[Reading], left_out: tuple[Pair, ...] = ()) -> Survey:
    return surveyed(readings, NODE, seconds=99.0, left_out=left_out)


def blamed(found: Survey) -> dict[int, str]:
    said = {}
    for rank in range(4):
        try:
            require_sound(found, rank)
        except HardwareFault as error:
            said[rank] = f"{type(error).__name__}: {error}".splitlines()[0]
    return said


def test_nobody_is_to_blame_where_all_is_well() -> None:
    found = survey(measured(ROUNDS))
    assert blamed(found) == {}
    require_measured(found)


def test_only_the_slow_gpu_s_rank_fails() -> None:
    said = blamed(survey(measured(ROUNDS, lambda s, r: 0.3 if 2 in (s, r) else 1.0)))
    assert list(said) == [2]
    assert said[2].startswith("HardwareFault: the GPU of rank 2 (node-000, GPU 2): all its 3 links")


def test_both_ends_of_a_slow_link_fail_with_the_same_words() -> None:
    said = blamed(survey(measured(ROUNDS, lambda s, r: 0.3 if {s, r} == {0, 3} else 1.0)))
    assert list(said) == [0, 3]
    assert len(set(said.values())) == 1


def test_wrong_data_matter_more_than_slowness() -> None:
    slow_and_wrong = measured(ROUNDS, lambda s, r: 0.3 if 2 in (s, r) else 1.0, wrong=[(0, 2)])
    said = blamed(survey(slow_and_wrong))
    assert set(said) == {0, 2}
    assert all(text.startswith("WrongResult: ") and "between rank 0" in text for text in said.values())


def test_a_gpu_whose_data_are_mostly_wrong_is_named_without_its_partners() -> None:
    said = blamed(survey(measured(ROUNDS, wrong=[(1, 0), (1, 2), (1, 3)])))
    assert list(said) == [1]
    assert said[1].startswith("WrongResult: the GPU of rank 1 ")
    assert "all its 3 links: 1 of" in said[1]


def test_each_rank_is_told_of_itself_first() -> None:
    two = measured(ROUNDS, lambda s, r: 0.3 if {s, r} in ({0, 1}, {2, 3}) else 1.0)
    said = blamed(survey(two))
    assert "between rank 0" in said[0]
    assert "between rank 2" in said[3]


def test_pairs_that_were_not_measured_are_an_error_that_says_why_and_what_to_do() -> None:
    found = survey(measured(ROUNDS[:2]), left_out=ROUNDS[2])
    with pytest.raises(EnvironmentBroken, match=r"2 of 6 pairs.*99 s .*1\.5 s planned"):
        require_measured(found)
    with pytest.raises(EnvironmentBroken, match=r"rank \d .node-000, GPU \d. with rank.*links\.size=64MiB"):
        require_measured(found)
