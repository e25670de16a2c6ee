"""Failures by the place of their culprit, and the map of nodes and GPUs."""

from dataclasses import replace

from each import of_each
from example_runs import NAMES, journal_of

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Cluster, RankOutcome, RankPlace, Run, TestResult
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.reports import junit
from pytest_gpucluster.reports.failures import (
    cluster_map,
    failures_by_place,
    failures_elsewhere,
    merged_nodes,
    places_text,
)
from pytest_gpucluster.reports.summary import outline
from pytest_gpucluster.reports.terminal import render
from pytest_gpucluster.text import columns

PER_NODE = 8


def cluster(*results, nodes=3):
    places = [
        RankPlace(rank=rank, host=f"gpu-{node:02}", node_rank=node, gpu={"index": str(index)})
        for node in range(nodes)
        for index in range(PER_NODE)
        for rank in (node * PER_NODE + index,)
    ]
    run = Run(run_id="1", started_at="", device="cuda", world_size=len(places), nnodes=nodes)
    return replace(Journal(run=run), cluster=Cluster(ranks=tuple(places)), results=results)


def ended(name, *culprits, outcome="failed"):
    return TestResult(nodeid=f"t.py::test_{name}", outcome=outcome, message=name, culprits=culprits)


MEASURED = (JudgedMetric(metric="hbm.copy.bandwidth", unit="B/s", status="passed", value=1.0),)
BEHIND = JudgedMetric(metric="hbm.copy.bandwidth", unit="TB/s", status="failed", value=2.0, worst_rank=5)
FINE = replace(ended("fine", outcome="passed"), criterion="hbm", measurements=MEASURED)
DEPLOYED = replace(FINE, criterion="connectivity")
MAPS = {
    "all is well": ((FINE,), "........ ........ ........"),
    "a GPU": ((FINE, ended("slow", 11)), "........ ...F.... ........"),
    "a lost rank": ((FINE, ended("lost", 2, outcome="error")), "..E..... ........ ........"),
    "a failure outweighs a loss": (
        (ended("lost", 2, outcome="error"), FINE, ended("slow", 2)),
        "..F..... ........ ........",
    ),
    "a node": ((FINE, ended("node", *range(8, 16))), "........ FFFFFFFF ........"),
    "what a culprit takes part in counts with it": (
        (FINE, ended("slow", 11), ended("node", *range(8, 16)), ended("world", *range(24))),
        "........ ...F.... ........",
    ),
    "no culprit": ((FINE, ended("world")), "~~~~~~~~ ~~~~~~~~ ~~~~~~~~"),
    "all ranks": ((FINE, ended("world", *range(24))), "~~~~~~~~ ~~~~~~~~ ~~~~~~~~"),
    "a culprit beside it": ((FINE, ended("world"), ended("slow", 0)), "F~~~~~~~ ~~~~~~~~ ~~~~~~~~"),
    "nothing passed": ((), "???????? ???????? ????????"),
    "nothing was measured": ((ended("site", outcome="passed"),), "???????? ???????? ????????"),
    "the deployment alone": ((DEPLOYED, ended("slow", 11)), "???????? ???F???? ????????"),
}  # fmt: skip


@of_each("case", list(MAPS))
def test_the_map_marks_culprits_and_shows_nothing_as_healthy_that_is_unknown(case):
    results, expected = MAPS[case]
    journal = cluster(*results)
    nodes = cluster_map(journal, outline(journal))
    assert " ".join("".join(gpu.mark for gpu in node.gpus) for node in nodes) == expected


def test_a_gpu_has_its_failures_the_worst_place_first():
    journal = cluster(FINE, ended("world", *range(24)), ended("slow", 11))
    gpu = cluster_map(journal, outline(journal))[1].gpus[3]
    assert [row.name for row in gpu.rows] == ["test_slow", "test_world"]
    assert [len(rows) for rows in failures_by_place(journal, outline(journal)).values()] == [2]


def test_a_finding_of_a_gpu_comes_before_the_rates_that_it_misses():
    rate = replace(BEHIND, limit=JudgedLimit(min=2.5), margin=-0.2)
    journal = cluster(
        FINE, replace(ended("slow", 5), measurements=(rate,)), ended("health", 5), ended("lost", 5, outcome="error")
    )
    names = [[row.name for row in rows] for rows in failures_by_place(journal, outline(journal)).values()]
    assert names == [["test_health", "test_slow", "test_lost"]]


def test_two_gpus_that_are_slow_at_the_same_time_are_a_place_each_with_its_own_value():
    values = dict.fromkeys(range(24), 730.0) | {5: 437.0, 11: 584.0}
    limit = JudgedLimit(min=700.0)
    judged = JudgedMetric(
        metric="matmul.bf16.tflops",
        unit="TFLOPS",
        status="failed",
        value=437.0,
        worst_rank=5,
        values=values,
        limit=limit,
    )
    slow = replace(
        ended("slow", 5, 11),
        criterion="matmul",
        message="matmul.bf16.tflops 437 TFLOPS < 700 TFLOPS",
        measurements=(judged,),
    )
    journal = cluster(FINE, slow, ended("node", *range(8, 16)))
    assert [set(ranks) for ranks in failures_by_place(journal, outline(journal))] == [{5}, {11}]
    shown = render(journal)
    assert "gpu-00 GPU 5 (rank 5): slow: 437 < 700 TFLOPS" in shown
    assert "gpu-01 GPU 3 (rank 11): slow: 584 < 700 TFLOPS" in shown
    marks = ["".join(gpu.mark for gpu in node.gpus) for node in cluster_map(journal, outline(journal))]
    assert marks == [".....F..", "...F....", "........"]
    node = replace(
        cluster(slow), cluster=Cluster(ranks=tuple(replace(p, host=f"n{p.rank in (5, 11)}") for p in journal.ranks))
    )
    assert [set(ranks) for ranks in failures_by_place(node, outline(node))] == [{5, 11}]  # all GPUs of a host
    # What more ranks miss, and a link between two, stay one place.
    many = replace(judged, values={**values, **dict.fromkeys(range(12), 437.0)})
    link = replace(slow, nodeid="t.py::test_link", criterion="links")
    for row in (replace(slow, measurements=(many,), culprits=tuple(range(12))), link):
        assert len(failures_by_place(cluster(row), outline(cluster(row)))) == 1
    journal = cluster(FINE, ended("gpu", 11), link)  # the other end of its link is not accused
    assert [set(ranks) for ranks in failures_by_place(journal, outline(journal))] == [{11}]


def test_two_gpus_that_are_behind_the_others_have_each_their_own_ratio():
    values = dict.fromkeys(range(24), 3.0) | {5: 2.0, 11: 2.4}
    limit = JudgedLimit(min=1.0, min_ratio_to_median=0.9)
    judged = replace(BEHIND, limit=limit, margin=1.0, ratio_to_median=2 / 3, values=values)
    message = "hbm.copy.bandwidth 2 TB/s is 0.6667 of the median"
    behind = replace(ended("hbm", 5, 11), criterion="hbm", message=message, measurements=(judged,))
    shown = render(cluster(behind), width=120)
    assert "(rank 5): hbm: 66.67 % < 90 % of the others' median (2 TB/s), -25.9 %" in shown
    assert "(rank 11): hbm: 80 % < 90 % of the others' median (2.4 TB/s), -11.1 %" in shown


def test_a_failure_of_more_ranks_names_the_culprit_among_them():
    missed = (replace(BEHIND, metric="nccl.all_reduce.busbw"),)
    slow, other = ended("slow", 11), ended("other", *range(8))
    node = replace(ended("node", *range(8, 16)), measurements=missed)
    world = replace(ended("world", *range(24)), measurements=missed)
    journal = cluster(FINE, slow, node, other, world, ended("broken", *range(24)))
    found = failures_elsewhere(journal, outline(journal))
    assert found == dict.fromkeys((node.nodeid, world.nodeid), "gpu-01 GPU 3 (rank 11), which failed slow")
    assert "; with gpu-01 GPU 3 (rank 11), which failed slow" in junit.render(replace(journal, results=(slow, node)))
    seen = outline(journal)
    assert places_text(journal, seen, f"{slow.nodeid} failed") == "gpu-01 GPU 3 (rank 11); gpu-00, all 8 GPUs"
    assert places_text(journal, seen, "rank 3 is lost") == ""


def test_each_of_two_gpus_with_a_finding_has_its_own_text():
    values = dict.fromkeys(range(24), 0.0) | {5: 1.0, 11: 1.0}
    judged = replace(BEHIND, metric="gpu.findings", unit="findings", values=values, limit=JudgedLimit(max=0.0))
    found = {5: "HardwareFault: ecc on gpu-00", 11: "HardwareFault: nvlink_down on gpu-01"}
    bad = replace(
        ended("health", *found),
        criterion="gpu.health",
        message=f"rank 5 (gpu-00, GPU 5): {found[5]} (and rank 11 failing)",
        measurements=(judged,),
        ranks=tuple(RankOutcome(rank=rank, outcome="failed", message=text) for rank, text in found.items()),
    )
    shown = render(cluster(FINE, bad))
    assert "gpu-00 GPU 5 (rank 5): health: HardwareFault: ecc on gpu-00" in shown
    assert "gpu-01 GPU 3 (rank 11): health: HardwareFault: nvlink_down on gpu-01" in shown


def test_a_finding_of_more_ranks_is_a_place_of_its_own_also_on_all_nodes():
    text = "HardwareFault: port_state: gpu-01\n- gpu-01: port_state (hardware): it is down; allowed: up; what to do: x"
    gpu, port = ended("gpu", 11), replace(ended("port", *range(8, 16)), text=text)
    journal = cluster(FINE, gpu, port)
    assert list(failures_by_place(journal, outline(journal))) == [frozenset({11}), frozenset(range(8, 16))]
    for ports, mark in ((replace(port, culprits=tuple(range(24))), "F"), (ended("alike", *range(24)), "~")):
        journal = cluster(FINE, ports)
        marks = [each.mark for node in cluster_map(journal, outline(journal)) for each in node.gpus]
        assert marks == [mark] * 24


def test_a_message_that_was_cut_is_completed_from_the_traceback_without_its_marks():
    text = "    raise fault\nE   pytest_gpucluster.errors.HardwareFault: the GPU of rank 5 is slow by itself"
    failed = replace(ended("links", 5), message="HardwareFault: the GPU of rank 5 is slo\u2026", text=text)
    assert "gpu-00 GPU 5 (rank 5): links: HardwareFault: the GPU of rank 5 is slow by itself" in " ".join(
        render(cluster(FINE, failed)).split()
    )


def test_256_gpus_fit_a_screen_and_healthy_nodes_are_one_line():
    journal = cluster(FINE, ended("slow", 11), nodes=32)
    nodes = list(merged_nodes(cluster_map(journal, outline(journal))))
    assert [node.name for node in nodes] == ["gpu-[00,02-31]", "gpu-01"]
    lines = render(journal).splitlines()
    assert "gpu-[00,02-31]  8 x OK" in lines
    assert len(lines) <= 24
    everywhere = cluster(FINE, *(ended(f"slow{node}", node * PER_NODE) for node in range(32)), nodes=32)
    lines = render(everywhere).splitlines()
    assert len([line for line in lines if "  F......." in line]) == 6
    assert "and 26 more nodes with failures" in "\n".join(lines)
    assert max(map(columns, lines)) <= 80
    assert len(lines) <= 24


def test_a_host_that_no_host_list_can_hold_is_named_all_the_same():
    journal = cluster(FINE, nodes=1)
    places = tuple(replace(place, host="a[b") for place in journal.ranks)
    odd = replace(journal, cluster=Cluster(ranks=places))
    assert [node.name for node in merged_nodes(cluster_map(odd, outline(odd)))] == ["a[b"]


@of_each("name", NAMES)
def test_every_rank_of_a_run_is_in_its_map(name):
    journal = journal_of(name)
    found = [gpu.place.rank for node in cluster_map(journal, outline(journal)) for gpu in node.gpus]
    assert sorted(found) == sorted(place.rank for place in journal.ranks)
