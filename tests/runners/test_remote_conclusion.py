"""One exit code for a run over many nodes: a pass is what all of them say, and the record too."""

import itertools

import pytest

from pytest_gpucluster.runners.run_result import RunResult
from pytest_gpucluster.runners.ssh_job import NodeResult, conclude


def ends(*codes):
    problem = {None: "lost"}
    return [
        NodeResult(name=f"gpu-{number}", exit=code, problem=problem.get(code, "")) for number, code in enumerate(codes)
    ]


def record(word="ACCEPTED", exit=0, nnodes=2, reason="42 passed", kind=""):
    return RunResult(
        verdict=word, exit=exit, reason=reason, kind=kind, nnodes=nnodes, world_size=8 * nnodes, ended=True
    )


REJECTED = record("REJECTED", 1, reason="hbm failed")
BROKEN = record("BROKEN", 11, reason="rank 3 is gone")
INCOMPLETE = record("INCOMPLETE", 10, reason="did not run: qwen2_lora")
DEVIATING = record("PASSED WITH DEVIATIONS", 12, reason="links: not judged")

LATE = [NodeResult(name="gpu-0", exit=0, stop_reason="late"), *ends(0)]

CASES = {
    "all well": (ends(0, 0), record(), {}, "ACCEPTED, exit code 0: 42 passed"),
    "rehearsed": (
        ends(0, 0),
        record("REHEARSED", kind="REHEARSAL"),
        {},
        "REHEARSAL, REHEARSED, exit code 0: 42 passed",
    ),
    "rejected by the record only": (ends(0, 0), REJECTED, {}, "REJECTED, exit code 1: hbm failed"),
    "rejected by one node only": (ends(0, 1), record(), {}, "REJECTED, exit code 1: "),
    "rejected, and a node lost": (ends(1, None), REJECTED, {}, "REJECTED, exit code 1: hbm failed"),
    "rejected, without a record": (ends(11, 1), None, {}, "REJECTED, exit code 1: gpu-1 ended with exit code 1"),
    "stopped from here, although it ended with 0": (LATE, record(), {}, "BROKEN, exit code 11: gpu-0: late"),
    "rejected, and interrupted": (ends(1, 1), REJECTED, {"interrupted": "SIGINT"}, "REJECTED, exit code 1"),
    "interrupted": (ends(2, 2), BROKEN, {"interrupted": "SIGINT"}, "BROKEN, exit code 2: interrupted (SIGINT)"),
    "interrupted when all was over": (ends(0, 0), record(), {"interrupted": "SIGINT"}, "BROKEN, exit code 2"),
    "rank 0's node lost": (ends(None, 11), None, {}, "BROKEN, exit code 11: gpu-0: lost"),
    "a node lost": (ends(2, None), record("BROKEN", 2), {}, "BROKEN, exit code 11: gpu-1: lost"),
    "another node crashed": (ends(0, 11), record(), {}, "BROKEN, exit code 11: its journal states ACCEPTED, but"),
    "with deviations, and another node crashed": (
        ends(12, 11),
        DEVIATING,
        {},
        "BROKEN, exit code 11: its journal states PASSED WITH DEVIATIONS, exit code 12, but gpu-1 ended with 11",
    ),
    "incomplete, and another node's pytest failed": (ends(10, 3), INCOMPLETE, {}, "BROKEN, exit code 11: "),
    "with deviations, and another node incomplete": (ends(12, 10), DEVIATING, {}, "BROKEN, exit code 11: "),
    "with deviations": (ends(12, 12), DEVIATING, {}, "PASSED WITH DEVIATIONS, exit code 12: links: not judged"),
    "broken": (ends(11, 11), BROKEN, {}, "BROKEN, exit code 11: rank 3 is gone"),
    "incomplete": (ends(10, 10), INCOMPLETE, {}, "INCOMPLETE, exit code 10: did not run: qwen2_lora"),
    "no record": (ends(0, 0), None, {"problem": "disk full"}, "BROKEN, exit code 11: ended with exit code 0 and no"),
    "a record of fewer nodes": (ends(0, 0), record(nnodes=1), {}, "BROKEN, exit code 11: its journal is of 8 ranks"),
    "a record that says otherwise": (ends(0, 0), INCOMPLETE, {}, "BROKEN, exit code 11: its journal states INCOMPLETE"),
}


@pytest.mark.parametrize(("ends", "record", "more", "line"), CASES.values(), ids=CASES)
def test_what_a_run_comes_to(ends, record, more, line):
    found = conclude(ends, record, **more)
    assert found.line.startswith(line)
    assert f"exit code {found.exit}" in found.line


def test_only_a_run_that_is_good_in_every_respect_is_0():
    codes = (None, 0, 1, 2, 3, 4, 5, 10, 11, 255, -9)
    records = (None, record(), record(nnodes=1), REJECTED, BROKEN, INCOMPLETE, record("REHEARSED", kind="REHEARSAL"))
    good = set()
    cases = itertools.product(codes, codes, records, ("", "SIGINT"))
    for first, second, kept, interrupted in cases:
        found = conclude(ends(first, second), kept, interrupted=interrupted)
        assert found.exit is not None
        if found.exit == 0:
            good.add((first, second, kept.verdict, interrupted))
    assert good == {(0, 0, "ACCEPTED", ""), (0, 0, "REHEARSED", "")}
