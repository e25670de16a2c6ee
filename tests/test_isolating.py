"""The search for who is to blame, in real sessions: torchrun over gloo, with faults in the fabric of some ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ROOT = Path(__file__).parent.parent
NODES = ("node-a", "node-b", "node-c", "node-d")
SMALL = (
    "nccl.all_reduce.longest=0.3s",
    "nccl.all_reduce.window=0.1s",
    "isolation.probe=3s",
    "isolation.window=0.05s",
    "isolation.longest=0.2s",
)
# fault, hosts, ranks of each, more options
CASES = {
    "slow node": ("slow:node-c", NODES, 1, ()),
    "dropped rank": ("drop:node-b", NODES, 1, ()),
    "wrong data": ("wrong:1", ("node-a",), 4, ()),
    "slow link": ("slow:node-a+node-d", NODES, 1, ()),
    "two nodes": ("slow:node-b", NODES[:2], 2, ()),
    "no time": ("slow:1", ("node-a",), 2, ("--gpucluster-workload=isolation.budget=0s",)),
}


def files():
    workloads = (ROOT / "acceptance" / "workloads.yaml").read_text(encoding="utf-8")
    return {**torchrun.suite("blame"), "workloads.yaml": workloads}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    def run(case):
        fault, hosts, ranks, more = CASES[case]
        options = [*(f"--gpucluster-workload={change}" for change in SMALL), *more]
        directory = tmp_path_factory.mktemp(case.replace(" ", "-"))
        environment = {"FAULT": fault}
        return torchrun.torchrun(
            directory, files(), *options, hosts=hosts, ranks=ranks, deadline=6.0, environment=environment
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


def isolation(run):
    [result] = [result for result in run.journal.results if result.name == "test_fabric"]
    return result.isolation


def exclude(run):
    return (run.directory / "reports" / "latest" / "exclude.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("case", "who"),
    [("slow node", "node-c"), ("dropped rank", "node-b"), ("wrong data", "rank 1 (node-a)")],
    ids=["slow", "dropped", "wrong"],
)
def test_the_culprit_is_named_first_and_alone(runs, case, who):
    run = runs[case]
    assert run.verdicts["test_fabric"].startswith(f"failure: isolated: {who}; "), run.output
    told = isolation(run)
    assert [told["names"][str(unit)] for culprit in told["culprits"] for unit in culprit["units"]] == [who]
    assert (len(told["cleared"]), told["undecided"]) == (3, [])


def test_a_link_is_told_from_the_nodes_at_its_ends(runs):
    found = runs["slow link"].verdicts["test_fabric"]
    assert found.startswith("failure: isolated: the link between node-a and node-d; "), found


def test_one_of_two_nodes_is_found_where_it_is_slow_by_itself(runs):
    assert runs["two nodes"].verdicts["test_fabric"].startswith("failure: isolated: node-b; ")


def test_a_hang_becomes_a_rejection_once_it_is_known_who_causes_it(runs):
    run = runs["dropped rank"]
    assert run.end[:2] == ("REJECTED", 1)
    assert "FAILED test_blame.py::test_fabric - isolated: node-b; " in run.output


@pytest.mark.parametrize("case", [case for case in CASES if case != "no time"])
def test_the_next_test_runs_on_new_groups(runs, case):
    assert runs[case].verdicts["test_next"] == "passed"
    assert runs[case].end[:2] == ("REJECTED", 1)


def test_the_report_says_what_was_tried_and_calls_ranks_by_their_numbers_in_the_run(runs):
    body = runs["wrong data"].body("test_fabric")
    assert "Search for who is to blame, " in body
    assert "  round 1: rank 2 (node-a), rank 3 (node-a): 0." in body
    later = [line for line in body.splitlines() if "rank 1 (node-a), rank 3 (node-a)" in line]
    assert later, body
    assert all("rank 1 (node-a): rank 1: all_reduce of " in line for line in later), "rank 1 has the wrong sum"


def test_the_terminal_tells_of_the_search_before_the_result(runs):
    lines = [line for line in runs["slow node"].output.splitlines() if line.startswith("gpucluster: ")]
    told = [line.removeprefix("gpucluster: ") for line in lines]
    assert "searching for who is to blame, for 60 s at most" in told
    assert any(line.startswith("isolated: node-c; leave out of the next jobs: ") for line in told), told


@pytest.mark.parametrize(
    ("case", "hosts"),
    [("slow node", "node-c"), ("slow link", "node-a"), ("wrong data", "node-a")],
    ids=["node", "link", "GPU"],
)
def test_the_nodes_to_leave_out_are_written_for_both_schedulers(runs, case, hosts):
    lines = exclude(runs[case]).splitlines()
    assert lines[lines.index("[slurm]") + 1] == hosts
    assert lines[lines.index("[kubernetes]") + 1] == hosts
    assert f"# kubectl cordon {hosts}" in lines


def test_where_nobody_is_found_to_blame_nobody_is_to_be_left_out(runs):
    assert not (runs["no time"].directory / "reports" / "latest" / "exclude.txt").exists()


def test_without_time_there_is_no_search_and_the_report_says_so(runs):
    run = runs["no time"]
    assert isolation(run) == {}
    [result] = [result for result in run.journal.results if result.name == "test_fabric"]
    assert dict(result.properties)["isolation"] == "no search: the time for it is spent (isolation.budget, 0 s)"
    assert "searching" not in run.output
    assert run.verdicts["test_fabric"].startswith("failure: nccl.all_reduce.busbw 0.0")
