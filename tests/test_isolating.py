"""The search for who is to blame, in real sessions: torchrun over gloo, with faults in the fabric of some ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed
import torchrun

from pytest_gpucluster import isolation_told, thresholds
from pytest_gpucluster.agreement.ending import Ending
from pytest_gpucluster.agreement.release.python import Released
from pytest_gpucluster.errors import CommunicationError, EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.isolating import Isolator, _kind
from pytest_gpucluster.isolation_plan import Plan

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
    "now and then": ("slow%60:node-c", NODES, 1, ()),
    "two nodes": ("slow:node-b", NODES[:2], 2, ()),
    "no time": ("slow:1", ("node-a",), 2, ("--gpucluster-workload=isolation.budget=0s",)),
    "rank dies": ("die:1", ("node-a",), 2, ()),
    "no memory": ("full:1", ("node-a",), 2, ()),
    "interrupt": ("interrupt:0", ("node-a",), 2, ()),
    "run again": ("slow:node-b", NODES[:2], 2, ("--reruns=1",)),
    "broken": ("break:0", ("node-a",), 2, ()),
}
WITH_A_RESULT = [case for case, (fault, *_) in CASES.items() if fault.startswith(("slow", "drop", "wrong"))]
WITH_A_RESULT.remove("no time")


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


def test_a_fault_that_comes_and_goes_is_said_to_do_so(runs):
    run = runs["now and then"]
    assert run.verdicts["test_fabric"].startswith("failure: isolated: node-c (intermittent: "), run.output
    [culprit] = isolation(run)["culprits"]
    assert culprit["intermittent"]
    assert culprit["failed"] < culprit["probes"]


def test_a_link_is_told_from_the_nodes_at_its_ends(runs):
    found = runs["slow link"].verdicts["test_fabric"]
    assert found.startswith("failure: isolated: the link between node-a and node-d; "), found


def test_one_of_two_nodes_is_found_where_it_is_slow_by_itself(runs):
    assert runs["two nodes"].verdicts["test_fabric"].startswith("failure: isolated: node-b; ")


def test_a_hang_becomes_a_rejection_once_it_is_known_who_causes_it(runs):
    run = runs["dropped rank"]
    assert run.end[:2] == ("REJECTED", 1)
    assert "FAILED test_blame.py::test_fabric - isolated: node-b; " in run.output


@pytest.mark.parametrize("case", [*WITH_A_RESULT, "no memory"])
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


def test_a_test_that_is_run_again_keeps_what_was_found_after_its_first_attempt(runs):
    run = runs["run again"]
    [result] = [result for result in run.journal.results if result.name == "test_fabric"]
    told = [value for name, value in result.properties if name == "isolation"]
    assert told[0] == "isolated: node-b", run.output
    assert told[1].startswith("no search: it was done after ")
    assert result.attempts == 2
    assert exclude(run)


def test_a_search_that_breaks_ends_the_run_with_the_failure_on_record(runs):
    run = runs["broken"]
    assert run.verdicts["test_fabric"].startswith("failure: nccl.all_reduce.busbw 0.0"), run.output
    assert run.end[:2] == ("BROKEN", 3)
    assert "the search after test_blame.py::test_fabric broke on rank 0 (node-a): ValueError: a planner" in run.output
    assert run.verdicts["test_next"].startswith("skipped: not run: ")
    assert run.left_over == []


@pytest.mark.parametrize(
    ("case", "why", "end"),
    [
        ("rank dies", "rank 1 (node-a) is lost during round 1 of the search after test_blame.py::test_fabric: ", 1),
        ("no memory", "rank 1 (node-a): CUDA out of memory.", 1),
        ("interrupt", "interrupted (Ctrl-C) on rank 0 (node-a) during ", 2),
    ],
    ids=["death", "memory", "Ctrl-C"],
)
def test_what_ends_the_search_is_told_beside_the_failure_and_accuses_nobody(runs, case, why, end):
    run = runs[case]
    assert run.verdicts["test_fabric"].startswith("failure: nccl.all_reduce.busbw 0.0"), run.output
    told = isolation(run)
    assert told["cut_short"].startswith(why), run.output
    assert (told["culprits"], told["rounds"]) == ([], [])
    assert "it has ended before it was through: " in run.body("test_fabric")
    assert run.end[1] == end
    assert not (run.directory / "reports" / "latest" / "exclude.txt").exists()
    assert run.left_over == []


# ---- rank 0's side, without processes


def plan(node_of, *, hosts=None, seconds=60.0, sku="H100 SXM", size="1 GB"):
    who = {rank: {"host": (hosts or {}).get(node, f"node-{node}")} for rank, node in node_of.items()}
    run = SimpleNamespace(
        node_of=lambda: node_of,
        workload=SimpleNamespace(isolation=SimpleNamespace(min_ratio=0.85, size=size)),
        joined=SimpleNamespace(who=who),
        names={rank: f"rank {rank}" for rank in node_of},
        watch=SimpleNamespace(ending=None),
        limits=thresholds.load(),
        gpu_name=lambda: "NVIDIA H100 80GB HBM3",
        sku=lambda gpu: sku,
    )
    return Plan(run, seconds=seconds)


def nodes(count, ranks=8):
    return {rank: rank // ranks for rank in range(count * ranks)}


def all_well(made, busbw=400.0):
    return {rank: {"busbw": busbw} for rank in made._run.names}


@pytest.mark.parametrize(
    ("node_of", "units", "floor"),
    [(nodes(4), 1, 400.0), (nodes(4), 2, 350.0), (nodes(4), 3, 300.0), (nodes(1), 8, 400.0), (nodes(1), 4, 315.0)],
    ids=["a node", "two nodes", "three", "GPUs of a node", "some of them"],
)
def test_the_floor_of_a_group_is_the_limit_for_as_many_nodes_and_ranks(node_of, units, floor):
    assert plan(node_of)._floor(units) == floor


@pytest.mark.parametrize("changed", [{"size": "1 MB"}, {"sku": None}], ids=["no limit for the size", "unknown GPU"])
def test_without_a_limit_a_group_has_no_floor(changed):
    assert plan(nodes(2), **changed)._floor(2) is None


def test_nodes_are_called_by_their_hosts_and_by_their_numbers_where_two_have_one_name():
    assert plan(nodes(2)).names == {0: "node-0", 1: "node-1"}
    assert plan(nodes(2), hosts={0: "gpu", 1: "gpu"}).names == {0: "gpu (node 0)", 1: "gpu (node 1)"}
    assert plan(nodes(1, ranks=2)).names == {0: "rank 0", 1: "rank 1"}


def test_a_thousand_ranks_take_a_verdict_and_a_record_of_a_size_that_travels():
    made = plan(nodes(128), seconds=600.0)
    verdict = made.decide({})
    assert verdict["groups"][-1] == list(range(1016, 1024))
    longest = len(json.dumps(verdict))
    while verdict["groups"]:
        verdict = made.decide(all_well(made))
        longest = max(longest, len(json.dumps(verdict)))
    assert longest < 16_384
    assert len(json.dumps(isolation_told.to_json(made.isolated(), made.names, seconds=1.0))) < 1_000_000


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([{"busbw": 300.0}, {"busbw": 200.0}], (200.0, "", "")),
        ([{"busbw": 300.0}, {}], (None, "", "some of its ranks have no value")),
        ([{"cut": "rank 0: closed"}, {"failure": "rank 1: late"}], (None, "", "rank 1: late")),
        ([{"wrong": "rank 0: 3 sums"}, {"busbw": 300.0}], (None, "rank 0: 3 sums", "")),
    ],
    ids=["slowest", "no value", "cause", "wrong"],
)
def test_a_probe_comes_to_what_its_worst_rank_has_seen(seen, expected):
    found = plan(nodes(1, ranks=2))._outcome((0, 1), dict(enumerate(seen)))
    assert (found.busbw, found.wrong, found.failure) == expected


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"o": "lost", "msg": "process 12 is gone"}, "rank 3: process 12 is gone"),
        ({"o": "hung", "msg": "cannot be released"}, "rank 3: cannot be released"),
        ({"unfit": "rank 3: too little memory"}, "rank 3: too little memory"),
    ],
    ids=["gone", "stuck", "unfit"],
)
def test_a_round_that_a_rank_could_not_take_part_in_counts_for_nothing(body, why):
    made = plan(nodes(2, ranks=2))
    made.decide({})
    bodies = {**all_well(made), 0: {"failure": "rank 0: connection closed by peer"}, 3: body}
    assert made.decide(bodies) == {"groups": []}
    assert made.cut_short == why
    assert made.isolated().rounds == ()


def test_a_round_that_the_end_of_the_run_has_cut_off_counts_for_nothing():
    made = plan(nodes(2, ranks=2))
    made.decide({})
    made._run.watch.ending = Ending(name="terminated", message="ended by SIGTERM", exit=2)
    assert made.decide({rank: {"failure": "released"} for rank in made._run.names}) == {"groups": []}
    assert (made.cut_short, made.isolated().rounds) == ("ended by SIGTERM", ())


def test_no_round_begins_when_the_time_is_up():
    made = plan(nodes(2, ranks=2), seconds=0.0)
    assert made.decide({}) == {"groups": []}
    assert made.cut_short == "the time for it is up (isolation.budget)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WrongResult("3 sums are wrong"), "wrong"),
        (CommunicationError("no nccl group could be made"), "failure"),
        (torch.distributed.DistBackendError("NCCL error: unhandled system error"), "failure"),
        (torch.distributed.DistBackendError("Last error:\nCuda failure 2 'out of memory'"), "unfit"),
        (RuntimeError("Connection closed by peer [10.0.0.1]:1234"), "cut"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "failure"),
        (torch.OutOfMemoryError("CUDA out of memory."), "unfit"),
        (EnvironmentBroken("needs 4 GiB of memory"), "unfit"),
        (InconclusiveMeasurement("the clock did not advance"), "failure"),
        (Released("not finished within 60 s"), "failure"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_only_what_gpus_nodes_or_links_may_have_done_counts_against_them(error, kind):
    assert _kind(error) == kind


def test_uneven_nodes_are_not_held_beside_each_other():
    run = SimpleNamespace(workload=object(), node_of=lambda: {0: 0, 1: 0, 2: 1})
    assert str(Isolator(run).why_not()).startswith("the nodes have different numbers of ranks")


# ---- what a rank does in a search, without processes


class Rank:
    """Rank 1 of two, and in what order it does what."""

    def __init__(self, verdicts):
        self.did = []
        asked = SimpleNamespace(budget_seconds=60.0, probe_seconds=3.0)
        self.run = SimpleNamespace(
            rank=1,
            names={0: "rank 0", 1: "rank 1"},
            workload=SimpleNamespace(isolation=asked),
            timeouts=SimpleNamespace(stuck=2.0),
            cluster=SimpleNamespace(among=lambda ranks, **more: SimpleNamespace(discard=self.discard)),
            watch=SimpleNamespace(enter=lambda *phase: 7, leave=self.leave, released=lambda number: None, ending=None),
            exchange=SimpleNamespace(run=self.exchange),
            config=SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: None)),
        )
        self.verdicts = iter(verdicts)

    def discard(self, epoch):
        self.did.append("discard")

    def leave(self):
        self.did.append("leave")

    def exchange(self, body, decide, *, deadline_seconds):
        self.did.append(("tell", *body))
        return next(self.verdicts)

    def search(self, measured):
        isolator = Isolator(self.run)
        isolator._measured = measured
        isolator.search(SimpleNamespace(nodeid="test_fabric"))
        return self.did


def wrong(cluster):
    raise WrongResult("3 sums are wrong")


def cut(cluster):
    raise RuntimeError("Connection closed by peer")


def full(cluster):
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("measured", "told"),
    [(lambda cluster: {"busbw": 300.0}, "busbw"), (wrong, "wrong")],
    ids=["well", "wrong data"],
)
def test_who_has_finished_a_probe_keeps_its_group_until_all_have_told(measured, told):
    did = Rank([{"groups": [[0, 1]]}, {"groups": []}]).search(measured)
    assert [one for one in did if one != "leave"] == [("tell",), ("tell", told), "discard"]


@pytest.mark.parametrize(("measured", "told"), [(cut, "cut"), (full, "unfit")], ids=["cut", "unfit"])
def test_who_has_failed_in_a_probe_lets_go_at_once_so_that_nobody_waits(measured, told):
    did = Rank([{"groups": [[0, 1]]}, {"groups": []}]).search(measured)
    assert [one for one in did if one != "leave"] == [("tell",), "discard", ("tell", told)]


def test_a_release_that_strikes_while_a_rank_leaves_a_probe_keeps_it_in_step():
    rank = Rank([{"groups": [[0, 1]]}, {"groups": []}])
    strikes = iter([False, True])

    def leave():
        rank.did.append("leave")
        if next(strikes, False):
            raise Released("not finished within 3 s")

    rank.run.watch.leave = leave
    did = rank.search(lambda cluster: {"busbw": 300.0})
    assert did == ["leave", ("tell",), "leave", "leave", "discard", ("tell", "failure")]


def test_an_interruption_in_a_probe_goes_on_and_leaves_no_group_behind():
    rank = Rank([{"groups": [[0, 1]]}])

    def interrupted(cluster):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rank.search(interrupted)
    assert rank.did[-1] == "discard"
