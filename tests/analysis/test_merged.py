"""Several runs become one journal with one verdict."""

import re

import pytest
from each import of_each
from written_runs import HBM, MATMUL, case, measured, place, write

from pytest_gpucluster.analysis.merge import merge_journals
from pytest_gpucluster.analysis.merge_sources import load_source
from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.journal import journal

FIRST, SECOND, THIRD = (f"2026-01-02T0{hour}:00:00+00:00" for hour in (3, 4, 5))
DIMM = f"{MATMUL}[dimm]"


def good(nodeid=MATMUL, values=(730, 731), **more):
    return case(nodeid, "passed", measured(list(values)), **more)


def bad(nodeid=MATMUL, outcome="failed", **more):
    return case(nodeid, outcome, measured([730, 600], status="failed"), message="too slow", **more)


@pytest.fixture
def merged(tmp_path):
    """Merge runs that are given as (tests, more): return the journal as every reader finds it, and the verdict."""

    def do(*runs):
        sources = []
        for number, (tests, more) in enumerate(runs):
            more = {"run_id": f"r{number}", "started_at": (FIRST, SECOND, THIRD)[number], **more}
            sources.append(load_source(write(tmp_path / f"{number}", *tests, **more)))
        found = merge_journals(sources)
        path = tmp_path / "merged.jsonl"
        path.write_bytes(b"".join(journal.encode(line) for line in found.lines()))
        read = journal.read(path)
        assert (read.verdict, read.exit, read.reason) == (found.verdict.word, found.verdict.exit, found.verdict.reason)
        return read

    return do


def outcomes(read):
    return {result.nodeid: result.outcome for result in read.results}


BROKE = {"verdict": "BROKEN", "exit": 11, "reason": "rank 1 is lost"}
PROBLEM = {"type": "problem", "name": "rank lost", "outcome": "error", "message": "rank 1 is lost"}


def test_a_failure_that_passes_when_run_again_passes_and_says_so(merged):
    read = merged(([bad(), good(HBM)], {}), ([good()], {"selection": True}))
    assert (read.verdict, read.exit) == ("ACCEPTED", 0)
    assert "run again: matmul" in read.reason
    [result] = [result for result in read.results if result.nodeid == MATMUL]
    assert (result.outcome, result.attempts) == ("passed", 2)
    assert result.properties == (
        ("attempt 1", f"run r0 of {FIRST}: failed: too slow"),
        ("attempt 2", f"run r1 of {SECOND}, which counts: passed"),
    )
    assert result.measurements[0].values == {0: 730, 1: 731}
    assert result.measurements[0].intervals != {}


ANSWERS = {
    ("passed", "failed"): ("REJECTED", "failed"),
    ("passed", "error"): ("BROKEN", "error"),
    ("passed", "skipped"): ("ACCEPTED", "passed"),
    ("failed", "error"): ("REJECTED", "failed"),
    ("failed", "skipped"): ("REJECTED", "failed"),
    ("failed", "failed"): ("REJECTED", "failed"),
    ("error", "passed"): ("ACCEPTED", "passed"),
    ("error", "failed"): ("REJECTED", "failed"),
    ("error", "skipped"): ("BROKEN", "error"),
    ("skipped", "passed"): ("ACCEPTED", "passed"),
    ("skipped", "skipped"): ("INCOMPLETE", "skipped"),
}


@of_each("outcome", list(ANSWERS))
def test_the_newest_answer_counts_and_a_skip_is_none(merged, outcome):
    closed = {"end": {"verdict": "INCOMPLETE", "exit": 10}}
    first, second = (case(MATMUL, each, measured([7, 7])) for each in outcome)
    read = merged(([first, good(HBM)], closed), ([second], closed))
    assert (read.verdict, outcomes(read)[MATMUL]) == ANSWERS[outcome]


def test_clocks_must_agree_with_the_order_given(merged):
    first, second = ([good()], {"started_at": SECOND}), ([bad()], {"started_at": FIRST})
    with pytest.raises(OptionError, match=r"0/journal\.jsonl"):
        merged(first, second)
    read = merged(second, first)
    assert read.verdict == "ACCEPTED"
    assert "clocks" in read.reason


def test_what_a_killed_run_has_left_open_is_taken_from_the_rerun(merged):
    killed = ([good()], {"collected": [MATMUL, HBM, DIMM], "then": [{"type": "start", "nodeid": HBM}], "closed": False})
    read = merged(killed, ([good(HBM), good(DIMM)], {"selection": True}))
    assert (read.verdict, outcomes(read)) == ("ACCEPTED", {MATMUL: "passed", HBM: "passed", DIMM: "passed"})
    [result] = [result for result in read.results if result.nodeid == HBM]
    name, text = result.properties[0]
    assert (name, text.startswith(f"run r0 of {FIRST}: error: "), HBM in text) == ("attempt 1", True, True)
    read = merged(killed, ([good(DIMM)], {"selection": True}))
    assert (read.verdict, outcomes(read)[HBM]) == ("BROKEN", "error")


def test_what_no_run_has_run_is_incomplete(merged):
    read = merged(([good()], {"collected": [MATMUL, HBM, DIMM]}), ([good(HBM)], {"selection": True}))
    assert (read.verdict, read.exit) == ("INCOMPLETE", 10)
    assert [test.nodeid for test in read.not_run] == [DIMM]
    assert DIMM in read.reason


def test_runs_that_broke_are_answered_only_by_a_later_one_that_did_not(merged):
    broken = ([good()], {"collected": [MATMUL, HBM], "then": [PROBLEM], "end": BROKE})
    assert merged(broken, ([good(HBM)], {})).verdict == "ACCEPTED"
    read = merged(([good(), good(HBM)], {}), ([good(HBM)], {"then": [PROBLEM], "end": BROKE}))
    assert (read.verdict, read.exit) == ("BROKEN", 11)
    assert [problem.message for problem in read.problems] == ["rank 1 is lost"]
    read = merged(([bad()], {}), ([good(HBM)], {"then": [PROBLEM], "end": BROKE}))
    assert read.verdict == "REJECTED", "a failure outweighs a broken run"


def test_hardware_that_was_rejected_outside_of_a_test_stays_rejected(merged):
    died = {**PROBLEM, "outcome": "failed", "message": "the GPU of rank 1 no longer works"}
    closed = {"verdict": "REJECTED", "exit": 1, "reason": "a GPU died"}
    read = merged(([good()], {"then": [died], "end": closed}), ([good()], {}))
    assert (read.verdict, read.exit) == ("REJECTED", 1)
    read = merged(([good()], {"end": closed}), ([good()], {}))
    assert (read.verdict, "a GPU died" in read.reason) == ("REJECTED", True)


def test_selections_alone_are_no_acceptance_and_what_was_less_than_the_suite_is_stated(merged):
    less = {"options": {"sku": {"value": "H100 SXM", "origin": "ini"}, "thresholds": {"value": "low.yaml"}}}
    held = {"options": {"baseline": {"value": "old/journal.jsonl", "origin": "command line"}}}
    reason = merged(([good()], less), ([good()], less)).reason
    assert [each for each in ("low.yaml", "H100 SXM (--gpucluster-sku)") if each not in reason] == []
    assert re.search(r"1 of 2 .*\(old/journal.jsonl\)", merged(([bad(), good(HBM)], held), ([good()], {})).reason)
    read = merged(([good()], {"selection": True}), ([good(HBM)], {"selection": True}))
    assert read.verdict == "SELECTION PASSED"
    partly = {"type": "problem", "name": "collection", "outcome": "error", "message": "cannot collect"}
    read = merged(([good()], {"then": [partly], "end": {**BROKE, "exit": 2}}), ([good(HBM)], {"selection": True}))
    assert read.verdict == "SELECTION PASSED", "the content of the suite is unknown"


def test_a_rehearsal_stays_one_and_what_is_required_stays_required(merged):
    cpu = {"rehearsal": True, "ranks": [place(0, uuid="")], "sku": "cpu-rehearsal"}
    asked = {"options": {"require": {"value": "hbm, matmul", "origin": "ini"}}}
    read = merged(([good(values=[1])], {**cpu, **asked}), ([good(values=[2])], cpu))
    assert (read.verdict, "hbm (required" in read.reason) == ("INCOMPLETE", True)
    assert read.run.kind == "REHEARSAL"
    assert merged(([good(values=[1])], cpu), ([good(values=[2])], cpu)).verdict == "REHEARSED"


def test_what_does_not_apply_and_what_was_not_judged_keep_their_meaning(merged):
    away = case(HBM, "skipped", message="too few nodes", applicable=False)
    assert merged(([good(), away], {}), ([good()], {})).verdict == "ACCEPTED"
    unjudged = good(HBM, unjudged="recorded only: no limit yet")
    read = merged(([good(), unjudged], {}), ([good()], {}))
    assert (read.verdict, "not judged" in read.reason) == ("INCOMPLETE", True)


def test_other_versions_and_variables_are_stated_in_the_verdict(merged):
    def on(driver, **more):
        variables = {"SLURM_JOB_ID": driver, "NCCL_DEBUG_FILE": driver, **more}
        ranks = [{**place(0), "versions": {"driver": driver}}]
        return {"ranks": ranks, "then": [{"type": "environment", "variables": variables}]}

    read = merged(([good(values=[1])], on("550", NCCL_ALGO="Ring")), ([good(HBM, values=[1])], on("560")))
    assert read.verdict == "ACCEPTED"
    assert re.search(
        f"run r0 of {re.escape(FIRST)} .*run r1 of {re.escape(SECOND)}: driver: 550, then 560", read.reason
    )
    assert "NCCL_ALGO: Ring" in read.reason
    assert not re.search("SLURM_JOB_ID|NCCL_DEBUG_FILE", read.reason), "each run has its own"


@of_each(
    "case",
    [
        ({"ranks": [place(0, host="b"), place(1, host="b")]}, "gpu-a and b"),
        ({"ranks": [place(0), place(1, uuid="GPU-new")]}, "other GPUs"),
        ({"ranks": [place(0)]}, "other GPUs"),
        ({"options": {"expect": {"value": "2x8xH100"}}}, "other expectations"),
        ({"rehearsal": True}, "REHEARSAL"),
        ({"device": "simulated"}, "SIMULATED cluster"),
        ({"sku": "H200 SXM"}, "H100 SXM and H200 SXM"),
        ({"digest": "e" * 64}, "other limits"),
        ({"workload": {"matmul.sizes": "64", "training.batch": "8"}}, "matmul.sizes=16384 and matmul.sizes=64"),
        ({"ranks": []}, "no description of their cluster"),
    ],
)
def test_what_is_not_alike_is_refused(merged, case):
    other, message = case
    with pytest.raises(OptionError, match=message):
        merged(([good(values=[1])], {}), ([good(HBM, values=[1])], other))


def test_ranks_have_the_numbers_of_the_newest_run_whatever_the_launcher_gave_them(merged):
    turned = [place(0, uuid="GPU-gpu-a-1", local_rank=1), place(1, uuid="GPU-gpu-a-0", local_rank=0)]
    slow = bad(
        culprits=[1], released=[0], ranks=[{"rank": 1, "outcome": "failed"}], telemetry={"1": {"power_watts": [1]}}
    )
    slow["measurements"][0]["baseline"] = {"kind": "regressed", "rank": 1, "old_rank": 1}
    measuring = {"seconds": 2.0, "most_seconds": 2.5, "most_rank": 1}
    slow["spent"] = {"measuring": measuring, "agreeing": None, "a part of a later version": 3.0}
    read = merged(([slow, good(HBM)], {}), ([good(HBM)], {"ranks": turned}))
    [result] = [result for result in read.results if result.nodeid == MATMUL]
    assert (result.culprits, result.released, result.ranks[0].rank, dict(result.telemetry)) == (
        (0,),
        (1,),
        0,
        {0: {"power_watts": [1]}},
    )
    assert (result.measurements[0].values, result.measurements[0].worst_rank) == ({0: 600, 1: 730}, 0)
    assert (result.spent["measuring"].most_seconds, result.spent["measuring"].most_rank) == (2.5, 0)
    assert result.measurements[0].baseline == {"kind": "regressed", "rank": 0, "old_rank": 1}, (
        "its own run keeps its own"
    )
    assert read.place(0).gpu["uuid"] == "GPU-gpu-a-1"
    assert f"run r0 of {FIRST}" in dict(result.properties)["ranks"]


def test_attempts_of_a_failure_are_counted_and_what_passes_twice_was_not_run_again_for_one(merged):
    assert merged(([bad(attempts=3)], {}), ([good(attempts=2)], {})).results[0].attempts == 5
    read = merged(([good(), good(HBM)], {}), ([good()], {"selection": True}))
    assert (read.verdict, read.results[0].attempts) == ("ACCEPTED", 1)
    assert "again" not in read.reason
    assert [name for name, _ in read.results[0].properties] == ["attempt 1", "attempt 2"]


def test_a_run_is_merged_once_and_a_merged_one_by_its_parts(tmp_path, merged):
    merged(([bad(), good(HBM)], {}), ([good()], {}))
    with pytest.raises(JournalError, match=r"1/journal\.jsonl; merge those"):
        load_source(tmp_path / "merged.jsonl")
    with pytest.raises(OptionError, match="same run"):
        merge_journals(
            [load_source(write(tmp_path / "a", good())), load_source(write(tmp_path / "b", good(), closed=False))]
        )
