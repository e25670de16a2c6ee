"""The criteria of scaling themselves, run by torchrun over gloo: what they accept, and how each fault fails them."""

import planted_runs
import pytest
from planted.planted_clock import REGION_SECONDS, SLOW_SECONDS
from planted_runs import assert_failed

LOST = REGION_SECONDS / (REGION_SECONDS + SLOW_SECONDS)
"""What is left of a rate where something is slow."""
TESTS = ("test_stragglers", "test_scaling[node]", "test_scaling[fabric]", "test_scaling[total]", "test_busbw_retention")
SHARDED = tuple(f"test_sharded_scaling[{kind}]" for kind in ("node", "fabric", "total"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two nodes with two ranks each."""
    return planted_runs.four_ranks(tmp_path_factory)


def result(run, fault, test):
    return planted_runs.result(run, f"scaling::{test}", fault)


def measured(run, fault, test, metric="scaling.efficiency"):
    [found] = [one for one in result(run, fault, test).measurements if one.metric == metric]
    return found


def test_two_healthy_nodes_are_accepted(run):
    assert {test: result(run, "none", test).outcome for test in TESTS} == dict.fromkeys(TESTS, "passed")


@pytest.mark.parametrize(("kind", "sizes"), [("node", ("2", "1")), ("fabric", ("4", "2")), ("total", ("4", "1"))])
def test_each_ratio_says_what_stands_over_what(run, kind, sizes):
    one = measured(run, "none", f"test_scaling[{kind}]")
    assert (one.labels["kind"], one.labels["group_size"], one.labels["over"]) == (kind, *sizes)
    assert (one.labels["batch"], one.labels["tokens_per_gpu_and_step"]) == ("4", "128")
    assert one.values == dict.fromkeys(range(4), pytest.approx(1.0)), "every rank has come to the same ratio"
    assert all(low <= one.value <= high for low, high in one.intervals.values())


@pytest.mark.parametrize("kind", ["node", "fabric", "total"])
def test_the_ratios_of_fsdp_are_recorded_beside_those_of_ddp_and_judged_by_none(run, kind):
    for fault, left in (("none", 1.0), ("rank", LOST)):
        found = result(run, fault, f"test_sharded_scaling[{kind}]")
        assert (found.outcome, found.criterion) == ("passed", None)
        one = measured(run, fault, f"test_sharded_scaling[{kind}]")
        assert (one.status, one.labels["strategy"], one.value) == ("recorded", "fsdp", pytest.approx(left))
    assert measured(run, "none", f"test_scaling[{kind}]").labels["strategy"] == "ddp"


def test_the_ratios_are_of_the_rates_that_were_measured(run):
    def recorded(test, size):
        return next(
            one.values
            for one in result(run, "rank", test).measurements
            if one.metric == "scaling.tokens_per_second" and one.labels["group_size"] == size
        )

    alone, world = recorded("test_stragglers", "1"), recorded("test_scaling[total]", "4")
    assert recorded("test_scaling[node]", "1") == alone, "one pass serves several ratios"
    middle = sum(sorted(alone.values())[1:3]) / 2
    assert measured(run, "rank", "test_scaling[total]").value == pytest.approx(min(world.values()) / middle)


def test_a_slow_rank_is_named_as_a_straggler_and_lowers_the_ratios(run):
    found = result(run, "rank", "test_stragglers")
    assert (found.outcome, found.culprits) == ("failed", (3,))
    one = measured(run, "rank", "test_stragglers", "scaling.tokens_per_second")
    assert one.worst_rank == 3
    assert min(one.values, key=one.values.get) == 3
    assert len(one.values) == 4
    for kind in ("node", "total"):
        assert result(run, "rank", f"test_scaling[{kind}]").outcome == "failed"
        assert measured(run, "rank", f"test_scaling[{kind}]").value == pytest.approx(LOST)


def test_a_slow_network_between_nodes_lowers_what_goes_over_it_only(run):
    outcomes = {test: result(run, "fabric", test).outcome for test in TESTS}
    assert outcomes == dict.fromkeys(TESTS, "failed") | dict.fromkeys(TESTS[:2], "passed")
    values = {kind: measured(run, "fabric", f"test_scaling[{kind}]").value for kind in ("node", "fabric", "total")}
    assert values == pytest.approx(
        {"node": 1.0, "fabric": LOST, "total": LOST}, rel=0.6
    )  # DDP may wait twice in a step
    assert result(run, "fabric", "test_scaling[fabric]").message.startswith("scaling.efficiency 0.")


def test_a_ratio_that_is_too_good_is_not_accepted(run):
    assert result(run, "alone", "test_scaling[node]").outcome == "failed"
    assert measured(run, "alone", "test_scaling[node]").value == pytest.approx(1 / LOST)


@pytest.mark.parametrize("test", ["test_stragglers", "test_scaling[total]"])
def test_a_training_that_goes_wrong_has_no_ratio(run, test):
    found = result(run, "nan", test)
    assert 3 in found.culprits
    assert_failed(found, found.culprits, "rank 3", "loss of nan")


def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(run):
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
    assert planted_runs.others(run) == []
    assert result(run, "nan", "test_busbw_retention").outcome == "passed"


def test_with_one_rank_a_node_the_ratio_of_a_node_is_not_run_and_says_why(tmp_path_factory):
    run = planted_runs.one_rank_a_node(tmp_path_factory)
    skipped = {
        planted_runs.nodeid(f"{file}::{test}", "none"): ("skipped", "needs 2 ranks on each node, and there is 1")
        for file, test in (
            *(
                ("scaling", test)
                for test in ("test_scaling[node]", "test_sharded_scaling[node]", "test_busbw_retention")
            ),
            ("failure_propagation", "test_failure_propagation"),
        )
    }
    passed = {planted_runs.nodeid(f"scaling::{test}", "none"): ("passed", "") for test in (*TESTS, *SHARDED)}
    assert {one.nodeid: (one.outcome, one.message) for one in run.journal.results} == passed | skipped
    assert run.end[:2] == ("REHEARSED", 0)
    assert run.left_over == []


def test_on_one_node_and_with_a_model_that_fits_nowhere_nothing_is_run_and_says_why(tmp_path_factory):
    run = planted_runs.two_ranks(tmp_path_factory)
    for test in TESTS:
        found = result(run, "huge", test)
        assert found.outcome == "skipped"
        fields = ("128 tokens", "GB on each rank", "--gpucluster-workload scaling.batch=4")
        for field in fields if test in TESTS[:2] else ("needs 2 nodes, and there is 1",):
            assert field in found.message


def test_memory_that_somebody_else_holds_is_found_before_any_rank_trains(tmp_path_factory):
    found = result(planted_runs.two_ranks(tmp_path_factory), "full", "test_stragglers")
    assert (found.outcome, found.culprits) == ("error", (1,))
    for field in ("rank 1", "GB are free", "--gpucluster-workload scaling.batch=4"):
        assert field in found.text
    assert found.measurements == ()
