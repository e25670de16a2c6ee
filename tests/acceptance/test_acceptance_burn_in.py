"""The criteria of burn-in and memory patterns without torchrun: local workers, one process, and what is left of a
burn-in that is cut short. How torchrun's ranks fare: test_acceptance_devices.py."""

import json
import os
import re
import signal
import sys
import time

import fork_server
import pytest
import torch
from planted_runs import TESTS, acceptance_file, measured
from sessions import CPU, DEADLINE_SECONDS, PLUGINS, Left, environment

from pytest_gpucluster.benchmarks import memory_patterns

WORKERS = {
    "test_burn_in": {"test_burn_in": "", "test_gpu_repeats_its_bits": "deviates"},
    "test_matmul_search": {"test_matmul_search[bf16]": ""},
}


def put(project, plan, more=""):
    """Write the planned files of acceptance/, and what plants the faults."""
    planted = (TESTS / "planted" / "on_devices.py").read_text(encoding="utf-8")
    files = {"conftest.py": planted + more, "planted.py": (TESTS / "planted" / "planted.py").read_text("utf-8")}
    for name in (*(f"{stem}.py" for stem in plan), "workloads.yaml"):
        files[name] = acceptance_file(name)
    for name, content in files.items():
        (project.path / name).write_text(content, encoding="utf-8")


def result(left, name):
    [found] = [each for each in left.journal.results if each.nodeid.endswith(f"::{name}")]
    return found


def test_local_workers_burn_in_each_its_own_gpu_compare_their_bits_and_leave_the_search_out(project):
    put(project, WORKERS)
    arguments = ("-n", "3", "--dist", "each", "--max-worker-restart=0")
    left = project.run_apart(*arguments, more={"PLANTED": json.dumps(WORKERS)})
    assert (left.exit, left.end) == (1, ("REJECTED", 1)), left.output

    assert left.verdicts["test_burn_in"] == "passed"
    folder = project.path / "gpucluster-report" / "latest" / "artifacts"
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.csv"))
    assert found == [f"rank-{rank}/test_burn_in.py_test_burn_in/burn-in-rank-0.csv" for rank in range(3)]

    assert left.verdicts["test_matmul_search[bf16]"].startswith("skipped: local workers ")

    compared = result(left, "test_gpu_repeats_its_bits")
    assert list(compared.culprits) == [1]
    judged = measured(compared)
    assert judged["gpu.determinism.repeated"].values == {0: 100.0, 1: 100.0, 2: 100.0}
    agreed = judged["gpu.determinism.agreed"].values
    assert (agreed[0], agreed[2]) == (100.0, 100.0)
    assert agreed[1] < 100
    assert re.search(r"rank 1, \S+: .*softmax gives \w+, and 2 of 3 ", left.body("test_gpu_repeats_its_bits"))


@pytest.mark.parametrize(("buffers", "values"), [(0, []), (20, [(0.0, "recorded")])], ids=["at once", "later"])
def test_memory_that_was_not_gone_through_is_not_without_wrong_words(project, monkeypatch, buffers, values):
    written = []

    def write_part(target, words):
        written.append(target.copy_(words))
        if len(written) > buffers:
            raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(memory_patterns, "write_part", write_part)
    # Under another name: in this process a test module of that name is loaded already.
    for name, source in (("test_the_criterion.py", "test_burn_in.py"), ("workloads.yaml", "workloads.yaml")):
        (project.path / name).write_text(acceptance_file(source), encoding="utf-8")
    left = project.run("-k", "walking_ones")
    assert left.exit == 11, left.output
    [found] = left.journal.results
    assert found.outcome == "error"
    assert [(one.value, one.status) for one in found.measurements] == values


# ---- a burn-in that is cut short -------------------------------------------------------------------------------------

STOPS = {
    "Ctrl-C": (signal.SIGINT, 2, "error: interrupted (Ctrl-C) on rank 0 ("),
    "SIGTERM": (signal.SIGTERM, 2, "error: ended by SIGTERM"),
    "deadline": (None, 10, "skipped: too slow to rehearse "),
}
DEADLINE = """

def pytest_itemcollected(item):
    item.add_marker(pytest.mark.deadline(3.0))
"""


@pytest.mark.parametrize("stop", STOPS)
def test_a_burn_in_that_is_cut_short_keeps_what_it_measured_and_is_no_pass(project, stop):
    number, code, told = STOPS[stop]
    slow = number is None  # of a rehearsal, while it computes
    put(project, {"test_burn_in": {}}, DEADLINE if slow else "")
    left = stopped(project, number)
    assert (left.exit, left.end) == (code, ("INCOMPLETE" if slow else "BROKEN", code)), left.output
    assert left.verdicts["test_burn_in"].startswith(told)
    reached = re.search(r" \S+ s of 600 s, and \d+ products, \S+ TFLOPS", left.body("test_burn_in"))
    assert slow or reached, left.body("test_burn_in")
    found = result(left, "test_burn_in")
    assert found.outcome == ("skipped" if slow else "error")
    kept = measured(found)
    assert 0 < kept["burn_in.completed"].value < 100
    assert {one.status for one in kept.values()} == {"recorded"}
    assert {"matmul.bf16.tflops", "burn_in.retention"} <= set(kept)
    assert dict(found.properties)["burn_in"].startswith("after ")
    assert points(project.path) >= 3
    workload = left.journal.workload
    assert workload.values["burn_in.duration"] == "10min"
    assert workload.origins["burn_in.duration"] == "command line: --gpucluster-workload burn_in.duration=10min"


def stopped(project, number):
    """Begin a burn-in of ten minutes, and stop it once there are some points of its course."""
    environ = environment({"PLANTED": json.dumps({"test_burn_in": {"test_burn_in": ""}})})
    command = [sys.executable, "-m", "pytest", *PLUGINS, CPU, "--junitxml=report.xml"]
    command += ["-m", "soak", "--gpucluster-workload=burn_in.duration=10min"]
    server = fork_server.server_for(environ)
    assert server is not None
    output, begin = project.path / "output.txt", time.monotonic()
    with output.open("wb") as file:
        session = server.start(
            command, cwd=project.path, env=environ, output=file.fileno(), errors=file.fileno(), token="burn-in"
        )
    try:
        while number is not None and points(project.path) < 3:
            assert time.monotonic() - begin < DEADLINE_SECONDS, output.read_text()
            assert session.poll() is None, output.read_text()
            time.sleep(0.05)
        if number is not None:
            os.kill(session.pid, number)
        code = session.wait(DEADLINE_SECONDS)
    finally:
        session.kill()
    return Left(directory=project.path, exit=code, stdout=output.read_text(), stderr="")


def points(directory):
    """Return how many points of its course a burn-in has written."""
    found = list((directory / "gpucluster-report").rglob("burn-in-rank-0.csv"))
    return max(0, len(found[0].read_text().splitlines()) - 1) if found else 0
