"""A run as plain text: the header, the summary, and that no line is too wide."""

import re
from dataclasses import replace

from each import of_each
from example_runs import NAMES, journal_of

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import (
    Cluster,
    CollectedTest,
    LimitFile,
    LimitsInForce,
    RankPlace,
    Run,
    Started,
    TestResult,
)
from pytest_gpucluster.reports.facts import cluster_text, limits_text
from pytest_gpucluster.reports.terminal import render
from pytest_gpucluster.text import columns


@of_each("name", NAMES)
def test_no_line_is_wider_and_none_acts_on_a_terminal(name):
    for width in (80, 132, 200):
        for verbosity in (-1, 0, 1):
            for line in render(journal_of(name), width=width, verbosity=verbosity).splitlines():
                assert columns(line) <= width or line.startswith("JUnit"), (width, verbosity)
                assert line.isprintable(), (width, verbosity)
                assert line == line.rstrip(), (width, verbosity)


def test_quiet_is_what_failed_where_the_reports_lie_and_the_verdict():
    reports = [("journal", "run/journal.jsonl"), ("JUnit", "r.xml")]
    text = render(journal_of("cluster"), verbosity=-1, reports=reports)
    assert not re.search(" OK |skipped +1|gpucluster: ", text)
    assert re.search(r"^gpu-02 GPU 3 \(rank 11\): ", text)
    assert re.search(r"\n\njournal: run/journal.jsonl\nJUnit:   r.xml\n\nREJECTED, exit code 1: .*\n$", text)
    assert render(journal_of("accepted"), verbosity=-1).splitlines()[-1].startswith("ACCEPTED, exit code 0")
    for name in ("rehearsal", "broken"):
        assert "REHEARSAL" in render(journal_of(name), verbosity=-1).split("\n\n")[-1]


def test_what_many_places_miss_is_bounded():
    failed = [
        TestResult(nodeid=f"t.py::test_{rank}", outcome="failed", message="x", culprits=(rank,)) for rank in range(9)
    ]
    text = render(run_of(*failed))
    assert "and 5 more places" in text
    assert len(text.splitlines()) < 24
    assert "FAILED  8" in render(run_of(*failed), verbosity=1)


def run_of(*results, **changes):
    return replace(Journal(run=Run(run_id="1", started_at="")), results=results, **changes)


def passed(number, **changes):
    return TestResult(nodeid=f"t.py::test_{number}", outcome="passed", **changes)


def test_what_makes_a_run_incomplete_stands_out():
    def skipped(name, **changes):
        return TestResult(nodeid=f"t.py::test_{name}", outcome="skipped", message=f"no {name}", **changes)

    journal = run_of(
        passed(0, criterion="hbm"),
        skipped("plain"),
        skipped("room", criterion="fabric", applicable=False),
        skipped("disk", criterion="checkpoint"),
        skipped("dns", criterion="dns", applicable=False),
        skipped("hbm_too", criterion="hbm", applicable=False),
        passed(1, criterion="speed", unjudged="no limit"),
    )
    demanded = replace(journal.run, options={"require": ("dns, hbm, lora", "command line")})
    text = render(replace(journal, run=demanded))
    required = re.findall(r"^required +(\d+): (.*?)(?: \((.*)\))?$", text, re.MULTILINE)
    assert required == [
        ("1", "no disk", "disk"),
        ("1", "no dns", "dns"),
        ("1", "not judged: no limit", "1"),
        ("1", "this run has no test for it", "lora"),
    ]
    assert "\nskipped     1: no plain (plain)\n" in text
    assert "required" not in render(run_of(skipped("plain")))


def test_a_reason_is_shown_once_and_never_cut():
    why = "give the weights and the data: " + "a " * 60 + "last."
    tests = [
        TestResult(nodeid=f"t.py::test_{name}", outcome="skipped", message=why, criterion=name, applicable=name == "a")
        for name in "ab"
    ]
    text = render(run_of(*tests))
    assert text.count("last.") == 1
    assert re.search(
        r"^required +1: give .*? last\. \(a\)\nskipped +1: the same \(b\)$", text, re.DOTALL | re.MULTILINE
    )


def test_nothing_measured_and_nothing_collected_is_still_a_verdict():
    assert render(run_of()).splitlines()[-1].startswith("BROKEN, exit code 11: ")
    cut = run_of(running=Started(nodeid="t.py::test_b"), collected=(CollectedTest(nodeid="t.py::test_c"),))
    text = render(cut)
    assert "1 BROKEN: b\n" in text
    assert re.search(r"^not run +1: .* \(c\)$", text, re.MULTILINE)


H100 = {"index": "0", "uuid": "GPU-1", "name": "NVIDIA H100 80GB HBM3"}
VERSIONS = {"torch": "2.5.1", "cuda": "12.4", "nccl": "2.21.5", "driver": "550.54.15", "python": "3.11.7"}


def ranks(nodes, each):
    return [
        RankPlace(rank=number, host=f"gpu-{number // each}", node_rank=number // each, gpu=H100, versions=VERSIONS)
        for number in range(nodes * each)
    ]


def test_nodes_and_gpus_that_differ_are_counted():
    odd = RankPlace(rank=4, host="gpu-9", node_rank=2, gpu={**H100, "name": "NVIDIA A100"}, versions={"torch": "2.4.0"})
    limits, run = LimitsInForce(sku="H100 SXM"), Run(run_id="1", started_at="", world_size=5)
    assert cluster_text(Journal(run=run, cluster=Cluster(ranks=(*ranks(2, 2), odd)), limits=limits)) == (
        "3 nodes, 5 ranks: 4 NVIDIA H100 80GB HBM3 and 1 NVIDIA A100 (H100 SXM), driver 550.54.15, CUDA 12.4,"
        " NCCL 2.21.5, torch 2.5.1 and 2.4.0"
    )


def test_the_limits_in_force_are_shown_with_their_files():
    def text(limits):
        return limits_text(Journal(run=Run(run_id="", started_at=""), limits=limits))

    assert text(None) == ""
    both = (LimitFile(path="thresholds.yaml"), LimitFile(path="my.yaml"))
    assert text(LimitsInForce(sku="H100 SXM", files=both)).startswith("H100 SXM, from thresholds.yaml, ")
    unknown = text(LimitsInForce(gpu_name="NVIDIA X", files=both[:1]))
    assert unknown.startswith("none: ")
    assert "'NVIDIA X'" in unknown
    assert "thresholds.yaml" in unknown
    assert text(LimitsInForce()).startswith("none: ")
