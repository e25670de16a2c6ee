import json
import re

import pytest
from _pytest import junitxml
from each import of_each

from pytest_gpucluster.agreement.exchange import Merged
from pytest_gpucluster.journal.records import CollectedTest
from pytest_gpucluster.journal.test_record import TestRecord, unique

NODE_IDS = (
    "tests/test_a.py::test_it",
    "test_a.py::test_it",
    "test_a.py::TestA::TestB::test_it",
    "test_a.py::TestA::test_it[a::b]",
    "test_a.py::test_it[/dev/nvme0]",
    "test_a.py::test_it[x.py::y]",
    "test_a.py::test_it[a[0]]",
    "test_a.py::test_it[a]b]",
    "test_a.py::test_it[]",
    "test_a.py::test_it[a\n::b]",
    "tests/größe/test_ä.py::test_✓[日本]",
    "tests.py/test_a.py::test_it",
    "tests[1]/test_a.py::test_it[2]",
    "v1.2/test_a.py::test_it",
    "docs/guide.rst::guide.rst",
)


def named(nodeid):
    return CollectedTest.of(nodeid, (nodeid.partition("::")[0], 11, "x"))


@of_each("nodeid", NODE_IDS)
def test_a_test_is_called_as_in_pytests_own_junit(nodeid):
    if "[" in nodeid.partition("::")[0] and not hasattr(junitxml, "NodeId"):
        return  # this pytest takes a bracket in a directory for a parameter
    *classes, name = junitxml.mangle_test_address(nodeid)
    found = named(nodeid)
    assert (found.classname, found.name) == (".".join(classes), name)


def test_what_is_no_test_of_a_file_is_called_after_the_file():
    found = named("tests/test_a.py")
    assert (found.classname, found.name) == ("tests.test_a", "tests.test_a")


@of_each("lines", [(11, 12), (0, 1), (None, 1)])
def test_lines_count_from_one(lines):
    found = CollectedTest.of("a.py::test", ("a.py", lines[0], "test"), "matmul")
    assert (found.file, found.line, found.criterion) == ("a.py", lines[1], "matmul")


# ---- the phases of a test ------------------------------------------------------------------------------------------


def made(*phases, merged=None):
    test = TestRecord(test=named("a.py::test"))
    for when, outcome, message in phases:
        agreed = Merged(outcome="passed") if (when, outcome) == ("call", "passed") else None
        add(test, when, outcome, message, (merged or {}).get(when, agreed))
    return test


def add(test, when, outcome, message="", merged=None, **more):
    text = f"text of {message}" if message else ""
    test.add(when, outcome=outcome, message=message, text=text, seconds=0.5, merged=merged, **more)


UNDECIDED = TestRecord(test=named("a.py::test")).message
SETUP, CALL, TEARDOWN = ("setup", "passed", ""), ("call", "passed", ""), ("teardown", "passed", "")
FAILED, SKIPPED, BROKEN = ("call", "failed", "c"), ("call", "skipped", "c"), ("teardown", "failed", "t")


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        pytest.param([SETUP, CALL, TEARDOWN], ("passed", "call", ""), id="all passed"),
        pytest.param([SETUP, TEARDOWN], ("error", "call", UNDECIDED), id="without a call nothing has passed"),
        pytest.param([SETUP, BROKEN], ("error", "teardown", "t"), id="nor with a broken teardown"),
        pytest.param([SETUP, FAILED, TEARDOWN], ("failed", "call", "c"), id="the call failed"),
        pytest.param([("setup", "failed", "s"), TEARDOWN], ("error", "setup", "s"), id="the setup broke"),
        pytest.param([SETUP, CALL, BROKEN], ("error", "teardown", "t"), id="the teardown broke"),
        pytest.param([SETUP, FAILED, BROKEN], ("failed", "call", "c"), id="the first decides"),
        pytest.param([("setup", "skipped", "s"), TEARDOWN], ("skipped", "setup", "s"), id="skipped in the setup"),
        pytest.param([SETUP, SKIPPED, TEARDOWN], ("skipped", "call", "c"), id="skipped in the call"),
        pytest.param([SETUP, SKIPPED, BROKEN], ("error", "teardown", "t"), id="a skip hides no broken teardown"),
        pytest.param([SETUP, FAILED, ("teardown", "skipped", "t")], ("failed", "call", "c"), id="nor a failure"),
    ],
)
def test_the_phases_make_one_outcome(phases, expected):
    line = made(*phases).line()
    assert (line["outcome"], line["phase"], line["message"]) == expected


# None: the ranks have not agreed, as in a process that was forked for the test.
@of_each("merged", [None, Merged(outcome="error")])
def test_a_call_that_pytest_calls_passed_is_none_without_the_agreement_of_the_ranks(merged):
    test = made(SETUP)
    add(test, "call", "passed", merged=merged)
    add(test, "teardown", "passed")
    assert test.line()["outcome"] == "error"


@pytest.mark.parametrize(
    ("when", "agreed", "outcome"),
    [
        pytest.param("call", "error", "error", id="a call that broke is no verdict about hardware"),
        pytest.param("setup", "failed", "failed", id="a GPU that died in the setup is one"),
        pytest.param("teardown", "failed", "failed", id="or in the teardown"),
        pytest.param("call", "passed", "failed", id="pytest's own failure of a call that the ranks passed"),
        pytest.param("teardown", "passed", "error", id="pytest's own failure of a teardown"),
    ],
)
def test_what_the_ranks_agreed_on_refines_pytests_outcome(when, agreed, outcome):
    test = made((when, "failed", "m"), merged={when: Merged(outcome=agreed)})
    assert test.outcome == outcome


def test_a_verdict_about_hardware_outweighs_a_broken_phase_before_it_and_both_texts_are_kept():
    test = made(
        ("call", "failed", "c"),
        ("teardown", "failed", "t"),
        merged={"call": Merged(outcome="error"), "teardown": Merged(outcome="failed")},
    )
    assert (test.outcome, test.phase, test.message) == ("failed", "call", "c")
    assert re.fullmatch(".* c\n\nteardown: .* t", test.text)


def test_culprits_and_released_ranks_of_all_phases_are_recorded_and_each_rank_once():
    rows = [{"rank": 3, "outcome": "failed", "message": "boom"}, {"rank": 1, "outcome": "released", "message": "m"}]
    later = [{"rank": 3, "outcome": "error", "message": "again"}, {"rank": 0, "outcome": "error", "message": "x"}]
    line = made(
        ("call", "failed", "c"),
        ("teardown", "failed", "t"),
        merged={
            "call": Merged(outcome="failed", culprits=[3], released=[1], ranks=rows),
            "teardown": Merged(outcome="error", culprits=[0, 3], released=[2], ranks=later),
        },
    ).line()
    assert (line["culprits"], line["released"]) == ([0, 3], [1, 2])
    assert line["ranks"] == [*rows, later[1]]


def test_an_expected_failure_is_a_skip_and_an_unexpected_pass_passes_with_its_reason():
    for outcome, wasxfail in (("skipped", "reason: known"), ("passed", "")):
        test = made(SETUP)
        add(test, "call", outcome, merged=Merged(outcome=outcome), wasxfail=wasxfail)
        assert (test.line()["outcome"], test.line()["wasxfail"]) == (outcome, wasxfail)


def test_another_attempt_starts_clean_and_the_message_of_the_first_one_stays():
    test = made(SETUP, ("call", "failed", "boom"))
    test.measurements = [{"metric": "x"}]
    test.sections = [("Captured stdout call", "x")]
    test.telemetry = {0: {"lost": "gone"}}
    test.start_attempt("ignored")
    add(test, "setup", "passed")
    assert test.line()["outcome"] == "error"  # the attempt has come to no end yet
    add(test, "call", "passed", merged=Merged(outcome="passed"))
    line = test.line()
    assert (line["outcome"], line["message"], line["text"]) == ("passed", "", "")
    assert (line["measurements"], line["sections"]) == ([], [])
    assert "telemetry" not in line
    assert (line["attempts"], line["properties"]) == (2, [["attempt 1", "failed: boom"]])
    test.start_attempt("")
    add(test, "call", "failed", "three")
    line = test.line()
    assert (line["outcome"], line["message"], line["attempts"]) == ("failed", "three", 3)
    assert [name for name, _ in line["properties"]] == ["attempt 1", "attempt 2"]


def test_what_the_gpus_did_is_recorded_by_rank_where_there_are_any():
    test = made(SETUP)
    test.telemetry = {1: {"throttle": []}, 0: {"throttle": ["hw_thermal"]}}
    line = test.line()
    assert line["telemetry"] == {"0": {"throttle": ["hw_thermal"]}, "1": {"throttle": []}}
    assert json.loads(json.dumps(line)) == line


def test_a_message_of_many_lines_is_recorded_as_one():
    assert made(("call", "failed", "first\nsecond")).line()["message"] == "first"
    assert made(("call", "skipped", "x" * 300)).line()["message"].endswith("…")


def test_properties_of_three_reports_come_once_and_as_text():
    assert unique([("a", 1), ("b", None), ("a", 1), ("a", 2)]) == [("a", "1"), ("b", "None"), ("a", "2")]
