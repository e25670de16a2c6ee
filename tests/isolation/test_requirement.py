import pytest
from simulated_fabric import measured, places, surveyed

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.isolation.link_survey import require_healthy, require_measured
from pytest_gpucluster.isolation.round_robin import within_node

NODE = places(1, 4)
ROUNDS = within_node(NODE, 0)


def survey(readings, left_out=()):
    return surveyed(readings, NODE, seconds=99.0, left_out=left_out)


def failures(found):
    messages = {}
    for rank in range(4):
        try:
            require_healthy(found, rank)
        except HardwareFault as error:
            messages[rank] = f"{type(error).__name__}: {error}".splitlines()[0]
    return messages


def test_no_rank_fails_where_all_links_are_healthy():
    found = survey(measured(ROUNDS))
    assert failures(found) == {}
    require_measured(found)


def test_only_the_slow_gpu_s_rank_fails():
    messages = failures(survey(measured(ROUNDS, lambda s, r: 0.3 if 2 in (s, r) else 1.0)))
    assert list(messages) == [2]
    assert messages[2].startswith("HardwareFault: the GPU of rank 2 (node-000, GPU 2): all its 3 links")


def test_both_ends_of_a_slow_link_fail_with_the_same_message():
    messages = failures(survey(measured(ROUNDS, lambda s, r: 0.3 if {s, r} == {0, 3} else 1.0)))
    assert list(messages) == [0, 3]
    assert len(set(messages.values())) == 1


def test_wrong_data_matter_more_than_slowness():
    slow_and_wrong = measured(ROUNDS, lambda s, r: 0.3 if 2 in (s, r) else 1.0, wrong=[(0, 2)])
    messages = failures(survey(slow_and_wrong))
    assert set(messages) == {0, 2}
    assert all(text.startswith("WrongResult: ") and "between rank 0" in text for text in messages.values())


def test_a_gpu_whose_data_are_mostly_wrong_is_named_without_its_partners():
    messages = failures(survey(measured(ROUNDS, wrong=[(1, 0), (1, 2), (1, 3)])))
    assert list(messages) == [1]
    assert messages[1].startswith("WrongResult: the GPU of rank 1 ")
    assert "all its 3 links: 1 of" in messages[1]


def test_each_rank_gets_its_own_culprit_first():
    two = measured(ROUNDS, lambda s, r: 0.3 if {s, r} in ({0, 1}, {2, 3}) else 1.0)
    messages = failures(survey(two))
    assert "between rank 0" in messages[0]
    assert "between rank 2" in messages[3]


def test_pairs_that_were_not_measured_are_an_error_with_cause_and_remedy():
    found = survey(measured(ROUNDS[:2]), left_out=ROUNDS[2])
    with pytest.raises(EnvironmentBroken, match=r"2 of 6 pairs.*99 s .*1\.5 s planned"):
        require_measured(found)
    with pytest.raises(EnvironmentBroken, match=r"rank \d .node-000, GPU \d. with rank.*links\.size=64MiB"):
        require_measured(found)
