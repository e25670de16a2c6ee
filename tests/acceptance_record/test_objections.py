"""Whatever is wrong with a run keeps it from being accepted, also where its closing line says ACCEPTED."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from made_records import Lines, journal_of, line_of, lines

from pytest_gpucluster.acceptance_record.objections import objections


def test_nothing_is_said_against_an_accepted_run():
    assert objections(journal_of(lines())) == ()


def _first_test(found: Lines) -> dict:
    return line_of(found, "test")


def _value(found: Lines) -> dict:
    """Return a value that was held against a limit, and not by its own test alone."""
    return next(
        judged
        for line in found
        if line["type"] == "test"
        for judged in line["measurements"]
        if judged["metric"] == "matmul.bf16.tflops" and judged["limit"]
    )


def _rank(found: Lines, **changed: object) -> dict:
    """Return another rank, like the first one but for its GPU."""
    first = line_of(found, "cluster")["ranks"][0]
    return {**first, "gpu": {**first["gpu"], "uuid": "GPU-another"}, **changed}


def _drop(kind: str) -> Callable[[Lines], None]:
    def drop(found: Lines) -> None:
        found[:] = [line for line in found if line["type"] != kind]

    return drop


CHANGES: dict[str, tuple[Callable[[Lines], object], str]] = {
    "no end": (_drop("end"), "nobody closed the journal"),
    "rehearsal": (lambda found: found[0].update(rehearsal=True), "a rehearsal on cpu"),
    "selection": (lambda found: found[0].update(selection=True), "only a selection"),
    "rejected": (lambda found: line_of(found, "end").update(verdict="REJECTED", exit=1), "verdict is REJECTED"),
    "selection passed": (
        lambda found: line_of(found, "end").update(verdict="SELECTION PASSED"),
        "verdict is SELECTION PASSED",
    ),
    "another exit code": (lambda found: line_of(found, "end").update(exit=10), "exit code 10"),
    "a failed test": (lambda found: _first_test(found).update(outcome="failed"), "(failed): did not pass"),
    "a broken test": (lambda found: _first_test(found).update(outcome="error"), "(error): did not pass"),
    "a missed value in a test that passed": (
        lambda found: _first_test(found)["measurements"][0].update(status="failed"),
        "passed with a value that did not",
    ),
    "a test that never ended": (
        lambda found: found.insert(-1, {"type": "start", "nodeid": "t.py::test_x"}),
        "t.py::test_x never ended",
    ),
    "a test that never ran": (
        lambda found: line_of(found, "collected")["tests"].append({"nodeid": "t.py::test_x"}),
        "t.py::test_x: never ran",
    ),
    "a problem": (
        lambda found: found.insert(-1, {"type": "problem", "name": "rank lost", "message": "m"}),
        "rank lost: went wrong outside the tests",
    ),
    "no criterion": (
        lambda found: [line.update(criterion=None) for line in found if line["type"] == "test"],
        "no criterion passed",
    ),
    "a problem before the first test": (
        lambda found: line_of(found, "cluster").update(problems=["driver differs"]),
        "driver differs: found before the first test",
    ),
    "no cluster": (_drop("cluster"), "does not say what the cluster is"),
    "a rank that nobody knows": (
        lambda found: line_of(found, "cluster")["ranks"].pop(5),
        "nothing is known of rank 5",
    ),
    "a GPU without a UUID": (
        lambda found: line_of(found, "cluster")["ranks"][3]["gpu"].update(uuid=None),
        "no UUID is known of the GPU of rank 3",
    ),
    "a rank without a GPU": (
        lambda found: line_of(found, "cluster")["ranks"][3].update(gpu=None),
        "no UUID is known of the GPU of rank 3",
    ),
    "a GPU twice": (
        lambda found: line_of(found, "cluster")["ranks"][3]["gpu"].update(
            uuid=line_of(found, "cluster")["ranks"][4]["gpu"]["uuid"]
        ),
        "is the UUID of more than one rank's GPU",
    ),
    "no list of tests": (_drop("collected"), "which tests were to run"),
    "a run without a name": (lambda found: found[0].update(run_id=""), "which run it is of"),
    "on cpu": (lambda found: found[0].update(device="cpu"), "it ran on cpu, not on cuda"),
    "merged of different clusters": (
        lambda found: found[0].update(merged_despite=["other GPUs: a and b"]),
        "it is merged of runs of different clusters: other GPUs: a and b",
    ),
    "a test that was taken out": (
        lambda found: (found.remove(_first_test(found)), line_of(found, "collected")["tests"].pop(0)),
        "counts other tests than it holds: 14 passed, and there are 13",
    ),
    "a test that did not run by the last line": (
        lambda found: line_of(found, "end").update(not_run=["t.py::test_x"]),
        "t.py::test_x: did not run, its last line says",
    ),
    "a required test that was skipped": (
        lambda found: _first_test(found).update(outcome="skipped"),
        "its last line says ACCEPTED, and its other lines make it INCOMPLETE",
    ),
    "a criterion that nothing judged": (
        lambda found: _first_test(found).update(unjudged="no limit"),
        "its other lines make it INCOMPLETE: not judged",
    ),
    "a criterion that was required and is not there": (
        lambda found: found[0]["options"].update(require={"value": "soak", "origin": "command line"}),
        "did not run: soak (required, but not in the suite that ran)",
    ),
    "a criterion that measured nothing": (
        lambda found: _first_test(found).update(measurements=[]),
        "passed, and has measured nothing",
    ),
    "no value that was judged": (
        lambda found: [
            judged.update(status="recorded", limit=None)
            for line in found
            if line["type"] == "test"
            for judged in line["measurements"]
        ],
        "no value was held against a limit",
    ),
    "a value below its limit": (
        lambda found: _value(found).update(value=1.0),
        "passed on record, and not by what stands beside it",
    ),
    "silence at the end": (lambda found: found.append({"type": "silence", "message": "gone"}), "ends in silence: gone"),
    "a rank too many": (
        lambda found: line_of(found, "cluster")["ranks"].append(_rank(found, rank=16)),
        "rank 16 is on record, and the run had 16",
    ),
    "a rank twice": (
        lambda found: line_of(found, "cluster")["ranks"].append(_rank(found, rank=3)),
        "rank 3 is on record more than once",
    ),
    "a node too few": (lambda found: found[0].update(nnodes=3), "its ranks are on 2 nodes, and the run had 3"),
    "a host without a name": (
        lambda found: line_of(found, "cluster")["ranks"][3].update(host=""),
        "no host is known of rank 3",
    ),
    "no UUID but words": (
        lambda found: line_of(found, "cluster")["ranks"][3]["gpu"].update(uuid="[Not Supported]"),
        "no UUID is known of the GPU of rank 3",
    ),
    "a GPU twice in other letters": (
        lambda found: line_of(found, "cluster")["ranks"][3]["gpu"].update(
            uuid=line_of(found, "cluster")["ranks"][4]["gpu"]["uuid"].upper()
        ),
        "is the UUID of more than one rank's GPU",
    ),
    "another GPU than was judged": (
        lambda found: line_of(found, "cluster")["ranks"][3]["gpu"].update(name="NVIDIA A100"),
        "NVIDIA A100: is a GPU of this run, and its limits are those of NVIDIA H100 80GB HBM3",
    ),
    "limits of a rehearsal": (
        lambda found: line_of(found, "limits").update(sku="cpu-rehearsal"),
        "it was judged by the limits of cpu-rehearsal",
    ),
    "half a digest": (
        lambda found: line_of(found, "limits")["files"][0].update(sha256="ab12"),
        "has no digest on record",
    ),
    "no limits": (_drop("limits"), "for which SKU"),
    "an unknown SKU": (lambda found: line_of(found, "limits").update(sku=None), "for which SKU"),
    "no files of limits": (lambda found: line_of(found, "limits").update(files=[]), "which files of limits"),
    "a file without a digest": (
        lambda found: line_of(found, "limits")["files"][0].update(sha256=""),
        "has no digest on record",
    ),
}


@pytest.mark.parametrize(("change", "why"), CHANGES.values(), ids=CHANGES)
def test_each_thing_that_is_wrong_is_an_objection_of_its_own(change, why):
    found = lines()
    change(found)
    assert any(why in objection for objection in objections(journal_of(found))), objections(journal_of(found))


def test_a_journal_that_is_cut_off_accepts_nothing():
    assert objections(replace(journal_of(lines()), cut=True)) == ("the journal's last line is cut off",)


@pytest.mark.parametrize("name", ["cluster", "rehearsal", "broken", "hostile"])
def test_no_other_run_is_accepted(name):
    assert objections(journal_of(lines(name)))


def test_many_of_a_kind_are_counted():
    found = lines()
    for line in found:
        if line["type"] == "test":
            line["outcome"] = "failed"
    assert any(" more: did not pass" in objection for objection in objections(journal_of(found)))
