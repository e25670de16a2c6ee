"""The search for who is to blame, in real sessions: torchrun over gloo, with faults in the fabric of some ranks."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed
import torchrun
from each import of_each

from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.agreement.release import Released
from pytest_gpucluster.errors import CommunicationError, EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.isolation.finding import excluded_hosts
from pytest_gpucluster.judge import loader
from pytest_gpucluster.session import isolation
from pytest_gpucluster.session.isolation import Isolator, Plan, _kind

ROOT = Path(__file__).parents[2]
NODES = ("node-a", "node-b", "node-c", "node-d")
WORKLOAD = ("nccl.all_reduce.window=0.1s", "isolation.probe=60s", "isolation.budget=1h", "isolation.window=0.02s")
# Session -> hosts, ranks of each, faults one after the other. What ends a session comes last.
SESSIONS = {
    "nodes": (NODES, 1, ("slow:node-c", "drop:node-b", "slow:node-a+node-d", "slow%60:node-c")),
    "gpus": (NODES[:1], 4, ("wrong:1", "die:1")),
    "pairs": (NODES[:2], 2, ("slow:node-b", "again:node-b", "interrupt:0")),
    "two": (NODES[:1], 2, ("untimed:1", "full:1", "break:0")),
}
LIMIT_MISSED = "failure: nccl.all_reduce.busbw 0.0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    files = {
        **torchrun.suite("blame"),
        "planted_clock.py": (ROOT / "tests" / "planted" / "planted_clock.py").read_text(encoding="utf-8"),
        "workloads.yaml": (ROOT / "acceptance" / "workloads.yaml").read_text(encoding="utf-8"),
    }
    directories = {name: tmp_path_factory.mktemp(name) for name in SESSIONS}

    def run(name):
        hosts, ranks, faults = SESSIONS[name]
        options = [f"--gpucluster-workload={change}" for change in WORKLOAD]
        environment = {"FAULTS": " ".join(faults)}
        settings = {"hosts": hosts, "ranks": ranks, "deadline": 20.0, "environment": environment}
        started = torchrun.start(directories[name], files, *options, timeouts="stuck=10", **settings)
        started.deadline = started.let_end = 900.0
        return started.wait()

    with ThreadPoolExecutor(max_workers=2) as pool:  # most of each is waiting
        return dict(zip(SESSIONS, pool.map(run, SESSIONS), strict=True))


class Search:
    """What is left of the search after one fault."""

    def __init__(self, run, fault):
        self.run = run
        self.next, self.headline = (run.verdicts.get(f"test_{name}[{fault}]") for name in ("next", "fabric"))
        [self.result] = [one for one in run.journal.results if one.name == f"test_fabric[{fault}]"]
        self.told = self.result.isolation
        self.properties = [value for name, value in self.result.properties if name == "isolation"]
        self.body = run.body(f"test_fabric[{fault}]")
        excluded = run.directory / "suite" / f"exclude-{fault}.txt"
        self.excluded = excluded.read_text(encoding="utf-8").splitlines() if excluded.exists() else []


@pytest.fixture
def search(runs):
    faults = {fault: name for name, (_, _, faults) in SESSIONS.items() for fault in faults}
    return lambda fault: Search(runs[faults[fault]], fault)


@pytest.mark.parametrize(
    ("fault", "who"),
    [("slow:node-c", "node-c"), ("drop:node-b", "node-b"), ("wrong:1", "rank 1 (node-a)")],
    ids=["slow", "dropped", "wrong"],
)
def test_the_culprit_is_named_first_and_alone(search, fault, who):
    found = search(fault)
    assert found.headline.startswith(f"failure: isolated: {who}; "), found.run.output
    told = found.told
    assert [told["names"][str(unit)] for culprit in told["culprits"] for unit in culprit["units"]] == [who]
    assert (len(told["cleared"]), told["undecided"]) == (3, [])


def test_a_fault_that_comes_and_goes_is_said_to_do_so(search):
    found = search("slow%60:node-c")
    assert found.headline.startswith("failure: isolated: node-c (intermittent: "), found.run.output
    [culprit] = found.told["culprits"]
    assert culprit["failed"] < culprit["probes"]


def test_a_link_is_told_from_the_nodes_at_its_ends(search):
    [culprit] = search("slow:node-a+node-d").told["culprits"]
    assert (culprit["kind"], culprit["units"]) == ("link", [0, 3])


def test_one_of_two_nodes_is_found_where_it_is_slow_by_itself(search):
    assert search("slow:node-b").headline.startswith("failure: isolated: node-b; ")


def test_a_hang_becomes_a_rejection_once_it_is_known_who_causes_it(search):
    found = search("drop:node-b")
    assert found.result.outcome == "failed"
    assert "FAILED test_blame.py::test_fabric[drop:node-b] - node-b (rank 1): isolated: node-b; " in found.run.output


def test_the_next_test_runs_on_new_groups(runs, search):
    for hosts, _, faults in SESSIONS.values():
        for fault in faults if hosts == NODES else faults[:-1]:
            assert search(fault).next == "passed", fault
    assert runs["nodes"].end[:2] == ("REJECTED", 1)


def test_the_report_says_what_was_tried_and_calls_ranks_by_their_numbers_in_the_run(search):
    body = search("wrong:1").body
    assert "  round 1: rank 2 (node-a), rank 3 (node-a): 0." in body
    later = [line for line in body.splitlines() if "rank 1 (node-a), rank 3 (node-a)" in line]
    assert later, body
    assert all("rank 1 (node-a): all_reduce of " in line for line in later), "rank 1 has the wrong sum"


def test_the_terminal_tells_of_the_search_before_the_result(runs):
    told = [line for line in runs["nodes"].output.splitlines() if line.startswith("gpucluster: ")]
    begins = next(at for at, line in enumerate(told) if line.endswith("for 3600 s at most"))
    ends = next(at for at, line in enumerate(told) if line.startswith("gpucluster: isolated: node-c; "))
    assert begins < ends


@pytest.mark.parametrize(
    ("fault", "hosts"),
    [("slow:node-c", "node-c"), ("slow:node-a+node-d", "node-a"), ("wrong:1", "node-a")],
    ids=["node", "link", "GPU"],
)
def test_the_nodes_to_leave_out_are_written_for_both_schedulers(search, fault, hosts):
    lines = search(fault).excluded
    assert lines[lines.index("[slurm]") + 1] == hosts
    assert lines[lines.index("[kubernetes]") + 1] == hosts
    assert f"# kubectl cordon {hosts}" in lines


def test_without_time_there_is_no_search_and_the_report_says_so(search):
    found = search("untimed:1")
    assert (found.told, found.excluded) == ({}, [])
    [why] = found.properties
    assert why.startswith("no search: ")
    assert "(isolation.budget, 0 s)" in why
    assert "for 0 s at most" not in found.run.output
    assert found.headline.startswith(LIMIT_MISSED)


def test_a_test_that_is_run_again_keeps_what_was_found_after_its_first_attempt(search):
    found = search("again:node-b")
    assert found.properties[0] == "isolated: node-b", found.run.output
    assert found.properties[1].startswith("no search: ")
    assert found.result.attempts == 2
    assert found.excluded


def test_a_search_that_breaks_ends_the_run_with_the_failure_on_record(search):
    found = search("break:0")
    assert found.headline.startswith(LIMIT_MISSED), found.run.output
    assert found.run.end[:2] == ("BROKEN", 3)
    assert "on rank 0 (node-a): ValueError: a planner" in found.run.output
    assert found.next.startswith("skipped: ")
    assert found.run.left_over == []


@pytest.mark.parametrize(
    ("fault", "why", "end"),
    [
        ("die:1", "rank 1 (node-a) is lost during round 1 ", 1),
        ("full:1", "rank 1 (node-a): CUDA out of memory.", None),
        ("interrupt:0", "interrupted (Ctrl-C) on rank 0 (node-a) ", 2),
    ],
    ids=["death", "memory", "Ctrl-C"],
)
def test_what_ends_the_search_is_told_beside_the_failure_and_accuses_nobody(search, fault, why, end):
    found = search(fault)
    assert found.headline.startswith(LIMIT_MISSED), found.run.output
    assert found.told["cut_short"].startswith(why), found.run.output
    assert (found.told["culprits"], found.told["rounds"], found.excluded) == ([], [], [])
    assert found.told["cut_short"] in found.body
    assert end is None or found.run.end[1] == end
    assert found.run.left_over == []


# ---- rank 0's side, without processes


def excluded(folder, culprits, *, nodes=4, ranks=2, outcome="failed", rows=(), text="", **more):
    """The hosts that are listed after a test with these culprits; None: there is no list."""
    who = {rank: {"host": f"node-{rank // ranks}"} for rank in range(nodes * ranks)}
    test = SimpleNamespace(nodeid="test_ddp.py::test_ddp")
    record = {"message": "wrong", "isolation": None, "properties": [], "between_attempts": False, "ranks": rows}
    record |= {"test": test, "culprits": set(culprits), "outcome": outcome, "text": text, **more}
    isolator = Isolator(SimpleNamespace(roll=SimpleNamespace(who=who), directory=folder))
    isolator.report(SimpleNamespace(**record), None)
    path = folder / "exclude.txt"
    return excluded_hosts(path.read_text(encoding="utf-8")) if path.exists() else None


@of_each("case", [((5,), 4, 2, ("node-2",)), ((2, 3, 5), 4, 2, ("node-1", "node-2")), ((1,), 1, 8, ("node-0",))])
def test_the_hosts_of_a_tests_culprits_are_left_out_without_a_search(tmp_path, case):
    culprits, nodes, ranks, hosts = case
    assert excluded(tmp_path, culprits, nodes=nodes, ranks=ranks) == hosts
    own = {"text": "E  - GPU 1: ecc (hardware): 3", "rows": [{"rank": 2, "message": "mine"}], "message": "at node-0"}
    assert excluded(tmp_path, (1, 2), nodes=2, **own) == ("node-0", "node-1")
    assert "# node-1: failed test_ddp.py::test_ddp: mine" in (tmp_path / "exclude.txt").read_text(encoding="utf-8")


@of_each(
    "case",
    [
        ((0, 1, 2, 3, 4), {}),
        ((), {}),
        ((0,), {"nodes": 1, "ranks": 1}),
        ((0, 1), {"nodes": 1, "ranks": 2}),
        ((5,), {"outcome": "error"}),
        ((5,), {"between_attempts": True}),
        ((5,), {"isolation": {"culprits": []}}),
        ((5,), {"properties": [("isolation", "no search: its time is up")]}),
        ((1, 2), {"nodes": 2}),  # such as the ends of a link
    ],
)
def test_what_most_nodes_or_ranks_have_or_a_search_has_not_confirmed_leaves_no_host_out(tmp_path, case):
    culprits, more = case
    assert excluded(tmp_path, culprits, **more) is None


def plan(node_of, *, hosts=None, seconds=60.0, sku="H100 SXM", size="1 GB"):
    who = {rank: {"host": (hosts or {}).get(node, f"node-{node}")} for rank, node in node_of.items()}
    run = SimpleNamespace(
        node_of=lambda: node_of,
        workload=SimpleNamespace(isolation=SimpleNamespace(min_ratio=0.85, size=size)),
        roll=SimpleNamespace(who=who),
        names={rank: f"rank {rank}" for rank in node_of},
        abort_reason=None,
        limits=loader.load(),
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
    [(nodes(4), 1, 400.0), (nodes(4), 2, 415.0), (nodes(4), 3, 308.0), (nodes(1), 8, 400.0), (nodes(1), 4, 345.0)],
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
    assert len(json.dumps(isolation.Search(plan=made, found=made.planner.finding(), seconds=1.0).to_json())) < 1_000_000


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
        ({"outcome": "lost", "message": "process 12 is gone"}, "rank 3: process 12 is gone"),
        ({"outcome": "hung", "message": "cannot be released"}, "rank 3: cannot be released"),
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
    assert made.planner.finding().rounds == ()


def test_a_round_that_the_end_of_the_run_has_cut_off_counts_for_nothing():
    made = plan(nodes(2, ranks=2))
    made.decide({})
    made._run.abort_reason = AbortReason(name="terminated", message="ended by SIGTERM", exit=2)
    assert made.decide({rank: {"failure": "released"} for rank in made._run.names}) == {"groups": []}
    assert (made.cut_short, made.planner.finding().rounds) == ("ended by SIGTERM", ())


def test_half_of_the_time_is_left_to_a_later_search_where_pairs_are_only_repeated():
    made = plan(nodes(4, ranks=2), seconds=3600.0)
    verdict = made.decide({})
    while not made.planner.repeats:
        assert verdict["groups"]
        made._repeat_until = 0.0  # it is past the half all the time, and only repeated pairs mind
        verdict = made.decide(all_well(made))
    assert (verdict, made.cut_short) == ({"groups": []}, "")


def test_no_round_begins_when_the_time_is_up():
    made = plan(nodes(2, ranks=2), seconds=0.0)
    assert made.decide({}) == {"groups": []}
    assert made.cut_short.endswith("(isolation.budget)")


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
    run = SimpleNamespace(loaded_workload=object(), node_of=lambda: {0: 0, 1: 0, 2: 1})
    assert "different numbers of ranks" in str(Isolator(run).why_not())


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
            watch=SimpleNamespace(enter=lambda *phase: 7, leave=self.leave, released=lambda number: None),
            abort_reason=None,
            agree=self.exchange,
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
