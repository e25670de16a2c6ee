"""The criteria of burn-in, memory patterns and determinism themselves, on the CPU: what they accept, how a fault fails
them, and what is left of a burn-in that is cut short."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun
from sessions import Left, Project

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"
DEADLINE_SECONDS = 120.0
RANK_1 = "rank 1 (node-a)"

# What rank 1's device does wrong, by the id of the test.
FAULTS = """
import os, time
import pytest
import torch
from pytest_gpucluster.benchmarks import burn_in_course, gpu_fingerprint, matmul, memory_patterns

FAULTS = dict(pair.split("=") for pair in os.environ.get("FAULTS", "").split())
FAULT, POINTS, SINCE, MADE = None, 0, 0.0, 0
WRITTEN = []

def pytest_runtest_setup(item):
    global FAULT, POINTS, SINCE, MADE
    name = item.callspec.id if hasattr(item, "callspec") else item.originalname
    FAULT, POINTS, SINCE, MADE = FAULTS.get(name), 0, time.monotonic(), 0

add = burn_in_course.Course.add

def counted(course, point):
    global POINTS
    POINTS += 1
    add(course, point)

def mm(a, b, out):
    torch.mm(a, b, out=out)
    if FAULT == "bit" and POINTS == 1:
        out.view(-1).view(torch.uint8)[5] ^= 16
    if FAULT == "fades" and time.monotonic() - SINCE > 0.3:
        time.sleep(0.02)

class Cells(memory_patterns.Cells):
    def write(self, target, words):
        super().write(target, words)
        if FAULT == "stuck":
            target[1000] |= 1 << 40
        if FAULT in ("full-at-once", "full-later"):
            WRITTEN.append(target)
            if len(WRITTEN) > {"full-at-once": 0, "full-later": 20}[FAULT]:
                raise torch.OutOfMemoryError("planted")

honest = gpu_fingerprint._softmax

def softmax(a, b):
    global MADE
    MADE += 1
    result = honest(a, b)
    if FAULT == "deviates" or FAULT == "unsteady" and MADE == 2:
        result[1, 2] *= 2
    return result

if os.environ.get("RANK", "1") == "1":
    matmul._mm, memory_patterns.Cells, gpu_fingerprint._softmax = mm, Cells, softmax
    burn_in_course.Course.add = counted

if "DEADLINE" in os.environ:
    def pytest_itemcollected(item):
        item.add_marker(pytest.mark.deadline(float(os.environ["DEADLINE"])))
"""

# A rate that no CPU misses by itself: half of its bursts may wait for another process.
LIMITS = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      burn_in.retention: {min: 20 %, source: a test}
"""
CASES = {
    "wrong": (
        "test_burn_in=bit walking_ones=stuck random=stuck test_gpu_repeats_its_bits=unsteady test_gpus_agree=deviates",
    ),
    "fades": ("test_burn_in=fades", "-m=soak", "--gpucluster-thresholds=limits.yaml"),
}


def files() -> dict[str, str]:
    names = ("test_burn_in.py", "workloads.yaml")
    return {
        **{name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in names},
        "conftest.py": FAULTS,
        "limits.yaml": LIMITS,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torchrun.Run]:
    def run(case: str) -> torchrun.Run:
        faults, *options = CASES[case]
        return torchrun.torchrun(
            tmp_path_factory.mktemp(case), files(), *options, environment={"FAULTS": faults}, deadline=60
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


def result(run: torchrun.Run, name: str):
    [found] = [each for each in run.journal.results if each.nodeid.endswith(f"::{name}")]
    return found


def artifacts(run: torchrun.Run, name: str) -> dict[str, str]:
    [folder] = (run.directory / "reports" / "latest" / "artifacts").glob(f"*{name}")
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("test", "told"),
    [
        (
            "test_burn_in",
            r"WrongResult: cpu: burn-in bf16 n=128: product \d+ is wrong in 1 of 16384 elements, first at row 0,"
            " column 2",
        ),
        (
            "test_gpu_repeats_its_bits",
            "WrongResult: rank 1, node-a: the same computation gave other bits than the first time: softmax in 1 of"
            " 2 repeats",
        ),
    ],
)
def test_a_device_that_computes_wrongly_is_rejected_and_named(
    runs: dict[str, torchrun.Run], test: str, told: str
) -> None:
    run = runs["wrong"]
    assert re.match(f"failure: {re.escape(RANK_1)}: {told}", run.verdicts[test]), run.verdicts[test]
    assert list(result(run, test).culprits) == [1]
    assert run.end[:2] == ("REJECTED", 1)


def test_a_wrong_product_says_when_it_was_and_what_came_before_it_is_kept(runs: dict[str, torchrun.Run]) -> None:
    run = runs["wrong"]
    assert re.search(r"; after \S+ s of 0\.5 s, and \d+ products", run.body("test_burn_in"))
    kept = artifacts(run, "test_burn_in")
    assert set(kept) == {"burn-in-rank-0.csv", "burn-in-rank-1.csv"}
    assert all(text.startswith("seconds,products,busy_seconds,tflops\n") for text in kept.values())
    assert len(kept["burn-in-rank-0.csv"].splitlines()) > 5
    completed = {one.metric: one for one in result(run, "test_burn_in").measurements}["burn_in.completed"]
    assert completed.values[0] == 100
    assert completed.values[1] < 100


@pytest.mark.parametrize("pattern", ["walking_ones", "random"])
def test_a_stuck_bit_is_rejected_with_its_place_in_the_report_and_in_a_file(
    runs: dict[str, torchrun.Run], pattern: str
) -> None:
    run, name = runs["wrong"], f"test_memory_patterns[{pattern}]"
    assert re.match(
        rf"failure: {re.escape(RANK_1)}: WrongResult: cpu: memory pattern {pattern}: words were read wrong \d+ times?,"
        " at 1 place, after ",
        run.verdicts[name],
    )
    judged = {one.metric: one for one in result(run, name).measurements}["gpu.memory_patterns.wrong_words"]
    assert (judged.status, judged.worst_rank, judged.values[0]) == ("failed", 1, 0)
    assert re.search(
        r"buffer 0, byte 0x1f40: expected 0x\w{16}, found 0x\w{16}, xor 0x0000010000000000 \(bit 40\)", run.body(name)
    )
    kept = artifacts(run, f"test_memory_patterns_{pattern}")
    assert list(kept) == [f"memory-{pattern}-rank-1.txt"]
    assert "buffers and their bytes: 0: 2097152" in kept[f"memory-{pattern}-rank-1.txt"]
    assert list(result(run, name).culprits) == [1]


@pytest.mark.parametrize("pattern", ["walking_zeros", "moving_inversions"])
def test_memory_that_holds_passes_and_its_share_is_judged(runs: dict[str, torchrun.Run], pattern: str) -> None:
    run, name = runs["wrong"], f"test_memory_patterns[{pattern}]"
    assert run.verdicts[name] == "passed"
    assert [(one.metric, one.status, len(one.values)) for one in result(run, name).measurements] == [
        ("gpu.memory_patterns.wrong_words", "passed", 2),
        ("gpu.memory_patterns.share", "passed", 2),
    ]


def test_of_two_devices_that_differ_both_are_named_and_that_it_is_one_of_them(runs: dict[str, torchrun.Run]) -> None:
    run = runs["wrong"]
    assert re.match(
        r"failure: rank 0 \(node-a\): WrongResult: rank 0, node-a: the same computation gives other bits here: softmax",
        run.verdicts["test_gpus_agree"],
    )
    body = run.body("test_gpus_agree")
    assert "softmax gives " in body
    assert "one of the two is wrong, and which one only a third of their kind can tell" in body
    assert list(result(run, "test_gpus_agree").culprits) == [0, 1]


def test_a_rate_that_falls_misses_the_limit_and_names_the_rank(runs: dict[str, torchrun.Run]) -> None:
    run = runs["fades"]
    found = run.verdicts["test_burn_in"]
    assert found.startswith("failure: burn_in.retention "), found
    assert " < 20 %" in found
    assert RANK_1 in found
    judged = {one.metric: one for one in result(run, "test_burn_in").measurements}
    assert judged["burn_in.retention"].worst_rank == 1
    assert judged["matmul.bf16.tflops"].labels["load"] == "burn-in"
    assert judged["burn_in.completed"].values == {0: 100, 1: 100}


# ---- without torchrun -----------------------------------------------------------------------------------------------


def put(project: Project) -> None:
    for name, content in files().items():
        (project.path / name).write_text(content, encoding="utf-8")


def test_local_workers_burn_in_each_its_own_gpu_and_keep_their_files_apart(project: Project) -> None:
    put(project)
    left = project.run_apart("-n", "2", "--dist", "each", "--max-worker-restart=0", "-m", "single_gpu")
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    assert set(left.verdicts.values()) == {"passed"}
    assert len(left.verdicts) == 6
    assert "test_gpus_agree" not in left.verdicts
    folder = project.path / "gpucluster-report" / "latest" / "artifacts"
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.csv"))
    assert found == [f"rank-{rank}/test_burn_in.py_test_burn_in/burn-in-rank-0.csv" for rank in (0, 1)]


@pytest.mark.parametrize(("fault", "measured"), [("full-at-once", []), ("full-later", [(0.0, "recorded")])])
def test_memory_that_was_not_gone_through_to_the_end_is_no_memory_without_wrong_words(
    project: Project, fault: str, measured: list[tuple[float, str]]
) -> None:
    put(project)
    left = project.run_apart("-k", "walking_ones", more={"FAULTS": f"walking_ones={fault}"})
    assert left.exit == 11, left.output
    [found] = left.journal.results
    assert found.outcome == "error"
    assert [(one.value, one.status) for one in found.measurements] == measured


def test_local_workers_compare_their_bits_and_the_deviant_is_named(project: Project) -> None:
    put(project)
    (project.path / "conftest.py").write_text(
        FAULTS.replace('os.environ.get("RANK", "1") == "1"', 'os.environ.get("PYTEST_XDIST_WORKER") == "gw1"'),
        encoding="utf-8",
    )
    arguments = ("-n", "3", "--dist", "each", "--max-worker-restart=0", "-k", "test_gpu_repeats_its_bits")
    left = project.run_apart(*arguments, more={"FAULTS": "test_gpu_repeats_its_bits=deviates"})
    assert (left.exit, left.end) == (1, ("REJECTED", 1)), left.output
    [found] = left.journal.results
    assert list(found.culprits) == [1]
    judged = {one.metric: one for one in found.measurements}
    assert judged["gpu.determinism.repeated"].values == {0: 100.0, 1: 100.0, 2: 100.0}
    agreed = judged["gpu.determinism.agreed"].values
    assert (agreed[0], agreed[2]) == (100.0, 100.0)
    assert agreed[1] < 100
    body = left.body("test_gpu_repeats_its_bits")
    assert re.search(
        r"rank 1, \S+: the same computation gives other bits here: softmax gives \w+, and 2 of 3 alike", body
    )


STOPS = {
    "Ctrl-C": (signal.SIGINT, {}, 2, "error: interrupted (Ctrl-C) on rank 0 ("),
    "SIGTERM": (signal.SIGTERM, {}, 2, "error: ended by SIGTERM"),
    "deadline": (None, {"DEADLINE": "5"}, 10, "skipped: too slow to rehearse here: "),
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_burn_in_that_is_cut_short_keeps_what_it_measured_and_is_no_pass(project: Project, stop: str) -> None:
    number, environment, code, told = STOPS[stop]
    put(project)
    left, points = stopped(project, number, environment)
    slow = stop == "deadline"  # of a rehearsal, while it computes
    assert (left.exit, left.end) == (code, ("INCOMPLETE" if slow else "BROKEN", code)), left.output
    assert left.verdicts["test_burn_in"].startswith(told)
    said = re.search(r"burn-in stopped after \S+ s of 600 s, and \d+ products, \S+ TFLOPS", left.body("test_burn_in"))
    assert slow or said
    [found] = [each for each in left.journal.results if each.nodeid.endswith("::test_burn_in")]
    assert found.outcome == ("skipped" if slow else "error")
    kept = {one.metric: one for one in found.measurements}
    assert 0 < kept["burn_in.completed"].value < 100
    assert {one.status for one in kept.values()} == {"recorded"}
    assert {"matmul.bf16.tflops", "burn_in.retention"} <= set(kept)
    assert dict(found.properties)["burn_in"].startswith("after ")
    assert points >= 3
    workload = left.journal.workload
    assert workload is not None
    assert workload.values["burn_in.duration"] == "10min"
    assert workload.origins["burn_in.duration"] == "command line: --gpucluster-soak 10min"


def stopped(project: Project, number: int | None, environment: dict[str, str]) -> tuple[Left, int]:
    """Begin a burn-in of ten minutes, and stop it once there are some points of its course; return how many."""
    arguments = ("-m", "soak", "--gpucluster-soak=10min")
    with project.spawn(*arguments, more=environment) as process:
        until = time.monotonic() + DEADLINE_SECONDS
        while number is not None and lines(project) < 4:
            assert time.monotonic() < until, process.output
            assert process.popen.poll() is None, process.output
            time.sleep(0.05)
        if number is not None:
            os.kill(process.popen.pid, number)
        left = process.wait()
    return left, lines(project) - 1


def lines(project: Project) -> int:
    found = list((project.path / "gpucluster-report").rglob("burn-in-rank-0.csv"))
    return len(found[0].read_text().splitlines()) if found else 0
