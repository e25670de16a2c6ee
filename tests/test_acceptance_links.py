"""The criterion links itself, run by torchrun over gloo: what it accepts, and how each fault fails it."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# What happens to the data between some ranks: "slow=1-3", or "wrong=1>0" for one direction.
FAULTS = """
import os, time
import pytest
from pytest_gpucluster.benchmarks import links

RANK, honest = int(os.environ["RANK"]), links._exchange
FAULTS = dict(pair.split("=") for pair in os.environ.get("FAULTS", "").split())
FAULT = ""

def pytest_runtest_setup(item):
    global FAULT
    FAULT = FAULTS.get(item.name, "")

def faulty(group, outgoing, incoming, peer):
    honest(group, outgoing, incoming, peer)
    kind, _, who = FAULT.partition(":")
    if kind == "slow" and {RANK, peer} == set(map(int, who.split("-"))):
        time.sleep(0.4)
    if kind == "slow-node" and int(who) in (RANK, peer):
        time.sleep(0.4)
    if kind == "wrong" and incoming is not None and outgoing is None and [peer, RANK] == list(map(int, who.split(">"))):
        incoming[17] ^= 1

links._exchange = faulty
"""

# A busy host stalls a healthy pair for tens of milliseconds; a faulty one takes 0.4 s for each exchange.
LIMITS = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      link.ratio_to_median: {min: 0.5 %, source: far from what a busy host does to a pair}
"""

WITHIN, ACROSS = "test_links_within_node", "test_links_across_nodes"
CASES = {
    # 2 nodes with 2 ranks each: ranks 0 and 1, 2 and 3; across nodes 0 and 2 on rail 0, 1 and 3 on rail 1.
    "healthy": ("", 2, ("node-a", "node-b")),
    "links": (f"{WITHIN}=slow:2-3 {ACROSS}=wrong:3>1", 2, ("node-a", "node-b")),
    "rails": (f"{WITHIN}=wrong:1>0 {ACROSS}=slow:1-3", 2, ("node-a", "node-b")),
    # 3 nodes with one rank each, an odd number.
    "node": (f"{ACROSS}=slow-node:2", 1, ("node-a", "node-b", "node-c")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torchrun.Run]:
    """One run with two faults each, some at once: the ranks mostly wait."""
    files = {name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in ("test_links.py", "workloads.yaml")}

    def run(case: str) -> torchrun.Run:
        faults, ranks, hosts = CASES[case]
        return torchrun.torchrun(
            tmp_path_factory.mktemp(case),
            files | {"conftest.py": FAULTS, "limits.yaml": LIMITS},
            "--gpucluster-thresholds=limits.yaml",
            "--gpucluster-workload=links.size=16kB",
            "--gpucluster-workload=links.round=0.05s",
            ranks=ranks,
            hosts=hosts,
            environment={"FAULTS": faults},
            deadline=30.0,  # of the phases beside the body, which has its own
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


def measured(run: torchrun.Run, name: str):
    [result] = [result for result in run.journal.results if result.nodeid.endswith(f"::{name}")]
    return result


def artifact(run: torchrun.Run, name: str) -> str:
    [path] = (run.directory / "reports" / "latest" / "artifacts").glob(f"*/{name}")
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "scope", "world_size", "nnodes"), [(WITHIN, "node", "2", "1"), (ACROSS, "world", "4", "2")]
)
def test_every_rank_has_a_bandwidth_and_a_ratio(
    runs: dict[str, torchrun.Run], name: str, scope: str, world_size: str, nnodes: str
) -> None:
    assert runs["healthy"].verdicts[name] == "passed", runs["healthy"].output
    judged = {one.metric: one for one in measured(runs["healthy"], name).measurements}
    assert set(judged) == {"link.bandwidth", "link.ratio_to_median"}
    for one in judged.values():
        assert len(one.values) == 4
        assert {key: one.labels[key] for key in ("scope", "world_size", "nnodes", "size", "transport")} == {
            "scope": scope,
            "world_size": world_size,
            "nnodes": nnodes,
            "size": "16kB",
            "transport": "gloo",
        }
        assert one.status == "passed"


def test_the_matrix_lies_in_the_tests_folder_and_in_the_journal(runs: dict[str, torchrun.Run]) -> None:
    body = json.loads(artifact(runs["healthy"], "links-node.json"))
    assert {tuple(row[:2]) for row in body["readings"]} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert body["culprits"] == []
    assert "node-b, GB/s, from row to column" in artifact(runs["healthy"], "links-node.txt")
    across = json.loads(dict(measured(runs["healthy"], ACROSS).properties)["links.matrix"])
    assert {tuple(row[:2]) for row in across["readings"]} == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_of_all_ranks_the_first_alone_shows_how_far_it_is(runs: dict[str, torchrun.Run]) -> None:
    lines = [line for line in runs["healthy"].output.splitlines() if line.startswith(f"{ACROSS}: step ")]
    assert len([line for line in lines if re.search(r"step (\d+) of \1$", line)]) == 1, lines


def test_a_run_without_a_fault_is_rehearsed(runs: dict[str, torchrun.Run]) -> None:
    assert runs["healthy"].end[:2] == ("REHEARSED", 0)


def test_a_slow_link_in_a_node_rejects_both_ends_and_nobody_else(runs: dict[str, torchrun.Run]) -> None:
    run = runs["links"]
    assert run.verdicts[WITHIN].startswith(
        "failure: ranks 2-3: HardwareFault: the link between rank 2 (node-b) and rank 3 (node-b): 0.000"
    )
    result = measured(run, WITHIN)
    assert list(result.culprits) == [2, 3]
    ratio = {one.metric: one for one in result.measurements}["link.ratio_to_median"]
    assert ratio.status == "failed"
    assert ratio.values[2] < 0.02 < ratio.values[0]
    assert "so it is slow by itself" in run.body(WITHIN)
    assert "  rank 2 (node-b) to rank 3 (node-b): 0.000" in run.body(WITHIN)
    assert run.end[:2] == ("REJECTED", 1)


def test_wrong_data_across_nodes_reject_and_tell_who_sent_what_to_whom(runs: dict[str, torchrun.Run]) -> None:
    run = runs["links"]
    assert run.verdicts[ACROSS].startswith(
        "failure: ranks 1, 3: WrongResult: the link between rank 1 (node-a) and rank 3 (node-b): wrong data: 1 of "
    )
    assert " words from rank 3 to rank 1 are wrong, the first at byte 68: found 0x" in run.body(ACROSS)
    assert list(measured(run, ACROSS).culprits) == [1, 3]


def test_a_slow_rail_between_two_nodes_is_told_apart_from_the_other_one(runs: dict[str, torchrun.Run]) -> None:
    run = runs["rails"]
    assert run.verdicts[ACROSS].startswith("failure: ranks 1, 3: HardwareFault: the link between rank 1 (node-a) and")
    assert list(measured(run, ACROSS).culprits) == [1, 3]
    table = artifact(run, "links-world.txt")
    assert "rail 1, GB/s" in table
    body = json.loads(artifact(run, "links-world.json"))
    # Both rails were measured once more, one after the other.
    assert {tuple(row[:2]) for row in body["alone"]} == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_one_wrong_word_in_a_node_rejects_although_all_links_are_fast(runs: dict[str, torchrun.Run]) -> None:
    run = runs["rails"]
    assert run.verdicts[WITHIN].startswith("failure: ranks 0-1: WrongResult: the link between rank 0 (node-a) and rank")
    assert {one.status for one in measured(run, WITHIN).measurements} == {"passed"}


def test_of_three_nodes_the_slow_one_is_named_and_not_those_that_wait_for_it(runs: dict[str, torchrun.Run]) -> None:
    run = runs["node"]
    assert run.verdicts[ACROSS].startswith("failure: rank 2 (node-c): HardwareFault: the node node-c: all its 2 links,")
    result = measured(run, ACROSS)
    assert list(result.culprits) == [2]
    ratio = {one.metric: one for one in result.measurements}["link.ratio_to_median"]
    assert ratio.worst_rank == 2
    assert min(ratio.values[0], ratio.values[1]) > 0.005 > ratio.values[2]
    assert run.verdicts[WITHIN].startswith("skipped: needs 2 ranks on each node")


def test_all_launchers_end_and_nothing_is_left_over(runs: dict[str, torchrun.Run]) -> None:
    assert {case: run.left_over for case, run in runs.items()} == {case: [] for case in CASES}
