"""The JUnit file: valid for Jenkins, honest at every moment, small at any number of ranks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import junitparser
import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.journal import JournalBuilder, JUnitOptions
from pytest_gpucluster.reports import junit, tables
from pytest_gpucluster.wording import visible

SCHEMA = xmlschema.XMLSchema(str(Path(__file__).parent.parent / "data" / "junit-10.xsd"))

RUN = {
    "type": "run",
    "schema_version": 1,
    "run_id": "20260102-r1",
    "started_at": "2026-01-02T03:04:05.678Z",
    "device": "cuda",
    "hostname": "gpu-01",
    "launcher": "torchrun",
    "world_size": 4,
    "nnodes": 2,
    "options": {"deadline": {"value": "300", "origin": "ini"}},
    "versions": {"python": "3.11.7", "torch": "2.13"},
    "plugin_version": "0.1.0",
}
NAMES = ("test_a", "test_b[1 GB]", "test_c")
COLLECTED = {
    "type": "collected",
    "tests": [
        {
            "nodeid": f"acceptance/t.py::{name}",
            "classname": "acceptance.t",
            "name": name,
            "file": "acceptance/t.py",
        }
        for name in NAMES
    ],
}
CLUSTER = {
    "type": "cluster",
    "ranks": [
        {
            "rank": rank,
            "host": f"gpu-0{rank // 2 + 1}",
            "pid": 100 + rank,
            "gpu": {
                "index": rank % 2,
                "uuid": f"GPU-{rank}f2e3d4c-aaaa-bbbb",
                "pci_bus_id": "",
                "name": "H100",
            },
        }
        for rank in range(4)
    ],
}
END = {
    "type": "end",
    "verdict": "ACCEPTED",
    "exit": 0,
    "reason": "all criteria passed",
    "at": "2026-01-02T03:05:05.678Z",
    "by": "rank 0",
}
HOSTILE = "\x1b[31mred\x00\x07\ud800 ]]> <&> \x9b \ufffe\uffff é 漢 \U0001f600 ]]"


def start(name):
    return {"type": "start", "nodeid": f"acceptance/t.py::{name}", "at": "2026-01-02T03:04:10Z"}


def result(name, outcome="passed", **more):
    return {
        "type": "test",
        "nodeid": f"acceptance/t.py::{name}",
        "classname": "acceptance.t",
        "name": name,
        "file": "acceptance/t.py",
        "line": 12,
        "outcome": outcome,
        "phase": "call",
        "message": "" if outcome == "passed" else f"{name} is {outcome}",
        "text": "",
        "started_at": "2026-01-02T03:04:10Z",
        "duration_seconds": 1.23456,
        "call_seconds": 1.0,
        **more,
    }


def busbw(status="passed", value=442.1, **more):
    return {
        "metric": "nccl.all_reduce.busbw",
        "unit": "GB/s",
        "labels": {"size": "1 GB"},
        "status": status,
        "value": value,
        "worst_rank": 3,
        "limit": {"min": 400.0, "max": None, "source": "vendor", "origin": "thresholds.yaml:14:7"},
        "margin": None if isinstance(value, str) else (value - 400) / 400,
        "values": {"0": 450.0, "1": 450.0, "2": 450.0, "3": value},
        "samples": {},
        "reason": "",
        **more,
    }


SEEN = {
    "seconds": 3.1,
    "samples": 31,
    "sm_clock_mhz": [1740, 1755, 1980],
    "power_watts": [698, 698, 698],
    "temperature_celsius": [67, 67, 67],
    "throttle": ["sw_power_cap"],
    "not_available": {},
}
WORKLOAD = {
    "type": "workload",
    "profile": "full",
    "file": "acceptance/workloads.yaml",
    "values": {"matmul.sizes": "4096, 8192", "hbm.window": "3 s", "nccl.all_reduce.sizes": ""},
    "origins": {"matmul.sizes": "--gpucluster-workload", "hbm.window": "acceptance/workloads.yaml:14:7"},
}


def sure(**more):
    """A measurement as a version writes it that knows intervals and telemetry."""
    limit = {"min": 400.0, "max": None, "source": "vendor", "origin": "thresholds.yaml:14:7"}
    limit |= {"min_ratio_to_median": 0.75, "expect_transport": ["NET/IB"]}
    told = {"interval": [440.2, 443.9], "intervals": {"3": [440.2, 443.9]}, "telemetry": {"3": SEEN}, "limit": limit}
    return busbw(**{**told, "peak_ratio": 0.98, "ratio_to_median": 0.9825, "mean": 448.0, **more})


def problem(name, message, outcome="error", text="details"):
    return {"type": "problem", "name": name, "outcome": outcome, "message": message, "text": text}


def journal(*lines, run=RUN):
    builder = JournalBuilder(keep_samples=False)
    for line in (run, *lines):
        builder.add(line)
    return builder.journal()


ALL = [
    CLUSTER,
    COLLECTED,
    *(line for name in NAMES for line in (start(name), result(name, measurements=[busbw()]))),
    END,
]
JOURNALS = {
    "only the first line": [],
    "collected": [CLUSTER, COLLECTED],
    "running": [CLUSTER, COLLECTED, start(NAMES[0])],
    "running what was not collected": [start("test_x[a::b/c.py]")],
    "between tests": [COLLECTED, start(NAMES[0]), result(NAMES[0])],
    "silent": [
        COLLECTED,
        start(NAMES[0]),
        {"type": "silence", "message": "rank 0 does not answer, process state T", "text": "stack"},
    ],
    "all passed": ALL,
    "failed": [
        CLUSTER,
        COLLECTED,
        result(
            NAMES[0],
            "failed",
            measurements=[busbw("failed", 380.0)],
            ranks=[{"rank": 3, "outcome": "failed", "message": "too slow"}],
            culprits=[3],
            released=[1],
        ),
        {**END, "verdict": "REJECTED", "exit": 1},
    ],
    "error": [result(NAMES[0], "error", phase="setup", measurements=[busbw("error", "NaN", reason="NaN")])],
    "skipped": [result(NAMES[0], "skipped"), {**END, "verdict": "INCOMPLETE", "exit": 10}],
    "xfailed": [result(NAMES[0], "skipped", wasxfail="reason: known")],
    "sure": [
        CLUSTER,
        COLLECTED,
        WORKLOAD,
        result(NAMES[0], measurements=[sure()]),
        result(NAMES[1], "failed", measurements=[sure(status="failed", inconclusive="12 % wide")]),
    ],
    "problems": [
        problem("rank lost", "rank 1 died"),
        problem("rank lost", "rank 2 died"),
        problem("gpu", "GPU 3: Xid 79", "failed"),
        {**END, "verdict": "BROKEN", "exit": 11},
    ],
    "hostile": [
        {
            "type": "collected",
            "tests": [{"nodeid": HOSTILE, "classname": HOSTILE, "name": HOSTILE, "file": HOSTILE, "line": 1}],
        },
        {"type": "property", "name": HOSTILE, "value": HOSTILE},
        start(HOSTILE),
        {
            **result(HOSTILE, "failed", message=HOSTILE, text=HOSTILE, properties=[[HOSTILE, HOSTILE]]),
            "nodeid": HOSTILE,
            "classname": HOSTILE,
            "file": HOSTILE,
            "sections": [["Captured stdout call", HOSTILE], ["Captured stderr call", HOSTILE]],
            "measurements": [busbw(labels={HOSTILE: HOSTILE})],
            "ranks": [{"rank": 1, "outcome": "failed", "message": HOSTILE}],
        },
        problem(HOSTILE, HOSTILE, text=HOSTILE),
        {**WORKLOAD, "profile": HOSTILE, "values": {HOSTILE: HOSTILE}, "origins": {HOSTILE: HOSTILE}},
        result(
            NAMES[0],
            "failed",
            measurements=[
                sure(
                    status="failed",
                    inconclusive=HOSTILE,
                    telemetry={"3": {"throttle": [HOSTILE], "not_available": {HOSTILE: HOSTILE}}},
                    limit={"min": 1.0, "source": HOSTILE, "origin": HOSTILE, "expect_transport": [HOSTILE]},
                )
            ],
        ),
        {**END, "reason": HOSTILE},
    ],
}


def suite(document):
    return ET.fromstring(document).find("testsuite")


def cases(document):
    return {case.get("name"): case for case in suite(document).iter("testcase")}


def properties(document):
    return {each.get("name"): each.get("value") for each in suite(document).find("properties")}


# ---- validity


@pytest.mark.parametrize("logging", ["no", "all"])
@pytest.mark.parametrize("lines", JOURNALS.values(), ids=JOURNALS.keys())
def test_xunit2_is_valid_for_jenkins_and_its_counts_are_right(lines, logging):
    document = junit.render(journal(*lines), JUnitOptions(logging=logging))
    SCHEMA.validate(document)
    root = ET.fromstring(document)
    testcases = list(root.iter("testcase"))
    for element in (root, root.find("testsuite")):
        assert int(element.get("tests")) == len(testcases)
        for count, verdict in (("failures", "failure"), ("errors", "error")):
            assert int(element.get(count)) == sum(case.find(verdict) is not None for case in testcases)
    keys = [(case.get("classname"), case.get("name")) for case in testcases]
    assert len(keys) == len(set(keys))
    assert all(re.fullmatch(r"\d+\.\d{3}", case.get("time")) for case in testcases)


@pytest.mark.parametrize("family", ["xunit1", "xunit2", "legacy"])
@pytest.mark.parametrize("lines", JOURNALS.values(), ids=JOURNALS.keys())
def test_the_file_is_read_back_by_junitparser(tmp_path, lines, family):
    path = tmp_path / "report.xml"
    path.write_text(junit.render(journal(*lines), JUnitOptions(family=family)), encoding="utf-8")
    [read] = junitparser.JUnitXml.fromfile(str(path))
    root = ET.parse(path).getroot()
    assert root.get("name") == "pytest tests"
    assert (read.name, read.tests) == ("pytest", len(list(root.iter("testcase"))))


@given(text=st.text(st.characters()))
@settings(max_examples=200, deadline=None)
def test_any_text_makes_a_well_formed_file_and_is_all_there(text):
    line = result("test_x", "failed", message=text, text=f"<{text}>", properties=[["k", text]])
    line |= {"classname": text, "sections": [["Captured stdout call", f"<{text}>"]]}
    run = {**RUN, "hostname": text, "run_id": text}
    for family in ("xunit1", "xunit2"):
        document = junit.render(
            journal(line, {**END, "reason": text}, run=run), JUnitOptions(family=family, logging="all")
        )
        assert f"<{visible(text)}>" in cases(document)["test_x"].find("failure").text
        assert f"<{visible(text)}>" in cases(document)["test_x"].find("system-out").text
        document.encode("utf-8")


def test_control_characters_in_a_message_are_shown_too():
    document = junit.render(journal(result("test_a", "failed", message="a\x1c\x1fb\nc")))
    assert cases(document)["test_a"].find("failure").get("message") == "a#x1C#x1Fb c"


# ---- pessimism


def verdicts(document):
    found = {}
    for name, case in cases(document).items():
        [verdict] = [child for child in case if child.tag in ("failure", "error", "skipped")] or [None]
        found[name] = "passed" if verdict is None else f"{verdict.tag}: {verdict.get('message')}"
    return found


def test_before_anything_is_collected_there_is_one_error():
    assert verdicts(junit.render(journal())) == {"run": "error: the run ended before the first test"}


def test_the_running_test_is_an_error_and_the_rest_did_not_run():
    assert verdicts(junit.render(journal(COLLECTED, start("test_a"), result("test_a"), start("test_b[1 GB]")))) == {
        "test_a": "passed",
        "test_b[1 GB]": "error: the run ended here: acceptance/t.py::test_b[1 GB]",
        "test_c": "skipped: not run: the run ended during acceptance/t.py::test_b[1 GB]",
    }


def test_between_two_tests_the_run_itself_is_the_error():
    assert verdicts(junit.render(journal(COLLECTED, start("test_a"), result("test_a")))) == {
        "test_a": "passed",
        "test_b[1 GB]": "skipped: not run: the run ended between two tests, after acceptance/t.py::test_a",
        "test_c": "skipped: not run: the run ended between two tests, after acceptance/t.py::test_a",
        "run": "error: the run ended between two tests, after acceptance/t.py::test_a",
    }


def test_without_a_closing_line_even_a_run_in_which_all_passed_is_an_error():
    document = junit.render(journal(*ALL[:-1]))
    assert suite(document).get("errors") == "1"
    assert "before its verdict" in verdicts(document)["run"]


def test_a_test_that_began_again_and_never_ended_is_no_pass():
    document = junit.render(journal(COLLECTED, start("test_a"), result("test_a"), start("test_a"), END))
    assert verdicts(document)["test_a"].startswith("error: the run ended here")


def test_the_reason_told_names_the_culprit_in_the_running_test():
    lost = problem("rank lost", "rank 1 (gpu-02, pid 7) died of signal 9", text="its last words")
    document = junit.render(journal(COLLECTED, start("test_a"), lost))
    found = verdicts(document)
    assert found["test_a"] == "error: the run ended here: rank 1 (gpu-02, pid 7) died of signal 9"
    assert found["rank lost"] == "error: rank 1 (gpu-02, pid 7) died of signal 9"
    assert "its last words" in cases(document)["test_a"].find("error").text


@pytest.mark.parametrize(
    ("verdict", "tag"),
    [("BROKEN", "error"), ("REJECTED", "failure"), ("INCOMPLETE", "skipped"), ("UNHEARD OF", "error")],
)
def test_a_verdict_that_no_testcase_shows_has_its_own(verdict, tag):
    document = junit.render(journal(result("test_a"), {**END, "verdict": verdict, "exit": 11, "reason": "because"}))
    assert verdicts(document) == {"test_a": "passed", "run": f"{tag}: {verdict}: because"}


@pytest.mark.parametrize("verdict", ["ACCEPTED", "SELECTION PASSED", "REHEARSED"])
def test_a_good_verdict_adds_no_testcase(verdict):
    assert verdicts(junit.render(journal(result("test_a"), {**END, "verdict": verdict}))) == {"test_a": "passed"}


def test_problems_outside_any_test_are_testcases():
    document = junit.render(journal(*JOURNALS["problems"]))
    assert verdicts(document) == {
        "rank lost": "error: rank 1 died",
        "rank lost (2)": "error: rank 2 died",
        "gpu": "failure: GPU 3: Xid 79",
    }
    assert {case.get("classname") for case in cases(document).values()} == {"gpucluster"}


# ---- content


def test_the_suite_says_what_was_decided_where_and_with_what():
    document = junit.render(journal(*ALL))
    found = properties(document)
    expected = {
        "verdict": "ACCEPTED",
        "exit": "0",
        "reason": "all criteria passed",
        "rehearsal": "false",
        "device": "cuda",
        "world_size": "4",
        "nnodes": "2",
        "run_id": "20260102-r1",
        "version.torch": "2.13",
        "option.deadline": "300 (from ini)",
        "limit[nccl.all_reduce.busbw]": ">= 400 GB/s; thresholds.yaml:14:7; vendor",
        "acceptance.t.test_b[1 GB][nccl.all_reduce.busbw{size=1 GB}]": (
            "442.1 GB/s (limit >= 400 GB/s, margin +10.5 %, worst rank 3)"
        ),
    }
    assert {name: found.get(name) for name in expected} == expected
    attributes = suite(document).attrib
    assert attributes["timestamp"] == "2026-01-02T03:04:05+00:00"
    assert (attributes["hostname"], attributes["time"]) == ("gpu-01", "60.000")


def test_a_limit_that_decides_about_several_values_is_told_once():
    small, other = busbw(labels={"size": "2 GB"}), busbw(labels={"size": "4 GB"})
    other["limit"] = {**other["limit"], "min": 410.0, "origin": "mine.yaml:6:11"}
    found = properties(junit.render(journal(result("test_a", measurements=[busbw(), small, other]))))
    assert {name: text for name, text in found.items() if name.startswith("limit[")} == {
        "limit[nccl.all_reduce.busbw]": ">= 400 GB/s; thresholds.yaml:14:7; vendor",
        "limit[nccl.all_reduce.busbw] (2)": ">= 410 GB/s; mine.yaml:6:11; vendor",
    }


def test_the_suite_says_what_was_run_and_where_that_was_set():
    found = properties(junit.render(journal(WORKLOAD, result("test_a"), END)))
    assert {name: value for name, value in found.items() if name.startswith("workload.")} == {
        "workload.profile": "full",
        "workload.file": "acceptance/workloads.yaml",
        "workload.matmul.sizes": "4096, 8192 (--gpucluster-workload)",
        "workload.hbm.window": "3 s (acceptance/workloads.yaml:14:7)",
    }


def test_a_workload_of_a_test_suite_never_hides_the_runs_own():
    line = {**WORKLOAD, "values": {"profile": "quick"}, "origins": {}}
    assert properties(junit.render(journal(line, result("test_a"))))["workload.profile"] == "full"


def test_a_value_is_told_with_how_sure_it_is_and_what_its_gpu_did():
    document = junit.render(journal(result("test_a", measurements=[sure()])))
    told = {
        "nccl.all_reduce.busbw{size=1 GB}": (
            "442.1 GB/s, 95 % interval 440.2 to 443.9 (limit >= 400 GB/s, each rank >= 75 % of the others' median, "
            "over NET/IB, margin +10.5 %, 98 % of peak, lowest rank 98.25 % of the others' median, worst rank 3)"
        ),
        "nccl.all_reduce.busbw{size=1 GB}.telemetry": (
            "rank 3: sm clock 1755 MHz (1740 to 1980), 698 W, 67 degC, throttle: sw_power_cap"
        ),
    }
    found = properties(document)
    assert {name: found[f"acceptance.t.test_a[{name}]"] for name in told} == told
    assert found["limit[nccl.all_reduce.busbw]"] == (
        ">= 400 GB/s, each rank >= 75 % of the others' median, over NET/IB; thresholds.yaml:14:7; vendor"
    )
    lines = cases(document)["test_a"].find("system-out").text.splitlines()
    assert lines == [f"[[PROPERTY|{name}={value}]]" for name, value in told.items()]


def test_a_failure_shows_the_telemetry_of_its_worst_rank():
    document = junit.render(journal(result("test_a", "failed", measurements=[sure(status="failed")])))
    lines = cases(document)["test_a"].find("failure").text.splitlines()
    assert "  telemetry of rank 3: sm clock 1755 MHz (1740 to 1980), 698 W, 67 degC, throttle: sw_power_cap" in lines
    assert any(line.startswith("  rank 3: ") and line.endswith("throttle: sw_power_cap") for line in lines)


def test_a_rehearsal_says_so():
    document = junit.render(journal(*ALL, run={**RUN, "rehearsal": True, "device": "cpu"}))
    SCHEMA.validate(document)
    assert properties(document)["rehearsal"] == "true"
    assert suite(document).find("system-out").text.startswith("REHEARSAL on cpu")
    assert suite(junit.render(journal(*ALL))).find("system-out") is None


def test_measurements_stand_in_the_testcase_as_property_lines():
    document = junit.render(journal(result("test_a", measurements=[busbw()], properties=[["k", "a ]]] b\nc]"]])))
    assert cases(document)["test_a"].find("system-out").text.splitlines() == [
        "[[PROPERTY|nccl.all_reduce.busbw{size=1 GB}=442.1 GB/s (limit >= 400 GB/s, margin +10.5 %, worst rank 3)]]",
        "[[PROPERTY|k=a ] ] ] b c] ]]",
    ]


def test_xunit1_adds_properties_file_and_line():
    lines = [result("test_a", measurements=[busbw()], properties=[["k", "v"]])]
    case = cases(junit.render(journal(*lines), JUnitOptions(family="xunit1")))["test_a"]
    assert (case.get("file"), case.get("line")) == ("acceptance/t.py", "12")
    assert [each.get("name") for each in case.find("properties")] == ["nccl.all_reduce.busbw{size=1 GB}", "k"]
    case = cases(junit.render(journal(*lines)))["test_a"]
    assert (case.get("file"), case.get("line"), case.find("properties")) == (None, None, None)


def test_suite_properties_of_the_tests_never_replace_the_runs_own():
    document = junit.render(
        journal({"type": "property", "name": "verdict", "value": "ACCEPTED"}, result("test_a", "failed"))
    )
    assert properties(document)["verdict"] == "REJECTED"
    assert properties(document)["verdict (2)"] == "ACCEPTED"


def test_a_message_is_one_line_of_at_most_200_characters():
    document = junit.render(journal(result("test_a", "failed", message="a\nb " + "x" * 500)))
    message = cases(document)["test_a"].find("failure").get("message")
    assert message.startswith("a b xxx")
    assert len(message) == 200


def test_a_failure_without_a_message_is_still_a_failure():
    assert suite(junit.render(journal(result("test_a", "failed", message="")))).get("failures") == "1"


@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_the_phase_of_a_failure_is_named(phase):
    document = junit.render(journal(result("test_a", "error", phase=phase, message="no GPU"), END))
    assert verdicts(document)["test_a"] == f"error: in {phase}: no GPU"


def test_xfail_and_skip_are_written_as_pytest_does():
    document = junit.render(
        journal(
            result("test_a", "skipped", wasxfail="reason: known"),
            result("test_c", "skipped", message="needs 2 nodes", text="t.py:3: needs 2 nodes"),
        )
    )
    [xfail], [skip] = cases(document)["test_a"], cases(document)["test_c"]
    assert (xfail.get("type"), xfail.get("message")) == ("pytest.xfail", "known")
    assert (skip.get("type"), skip.get("message"), skip.text) == (
        "pytest.skip",
        "needs 2 nodes",
        "t.py:3: needs 2 nodes",
    )


SECTIONS = [
    ["Captured stdout setup", "OUT1\n"],
    ["Captured stdout call", "OUT2\n"],
    ["Captured stderr call", "ERR\n"],
    ["Captured log call", "LOG\n"],
]


@pytest.mark.parametrize(
    ("logging", "out", "err"),
    [
        ("no", "", ""),
        ("log", "LOG", ""),
        ("system-out", "OUT1 OUT2", ""),
        ("system-err", "", "ERR"),
        ("out-err", "OUT1 OUT2", "ERR"),
        ("all", "LOG OUT1 OUT2", "ERR"),
    ],
)
def test_junit_logging_means_what_it_means_in_pytest(logging, out, err):
    def words(tag, document):
        text = cases(document)["test_a"].findtext(tag) or ""
        return " ".join(re.findall("OUT1|OUT2|ERR|LOG", text))

    lines = [result("test_a", "failed", sections=SECTIONS), result("test_c", sections=SECTIONS)]
    document = junit.render(journal(*lines), JUnitOptions(logging=logging))
    assert (words("system-out", document), words("system-err", document)) == (out, err)
    quiet = junit.render(journal(*lines), JUnitOptions(logging=logging, log_passing=False))
    assert (words("system-out", quiet), words("system-err", quiet)) == (out, err)
    assert cases(quiet)["test_c"].find("system-out") is None
    assert cases(quiet)["test_c"].find("system-err") is None


def test_prefix_suite_name_and_duration_report_mean_what_they_mean_in_pytest():
    options = JUnitOptions(prefix="site.a", suite_name="acceptance", duration_report="call")
    document = junit.render(journal(result("test_a")), options)
    assert suite(document).get("name") == "acceptance"
    case = cases(document)["test_a"]
    assert (case.get("classname"), case.get("time")) == ("site.a.acceptance.t", "1.000")
    assert cases(junit.render(journal(result("test_a"))))["test_a"].get("time") == "1.235"


def test_the_options_default_to_the_runs_own():
    run = {**RUN, "junit": {"family": "xunit1", "suite_name": "mine", "prefix": "p"}}
    document = junit.render(journal(result("test_a"), run=run))
    assert suite(document).get("name") == "mine"
    assert cases(document)["test_a"].get("line") == "12"


def test_a_text_beyond_all_bounds_keeps_its_ends_and_says_so():
    document = junit.render(journal(result("test_a", "failed", text="BEGIN" + "x" * 10_000_000 + "END")))
    text = cases(document)["test_a"].find("failure").text
    assert text.startswith("BEGIN")
    assert text.endswith("END")
    assert "characters left out; the journal has them" in text
    assert len(document) < 500_000


# ---- the table of ranks


def test_a_failing_measurement_shows_each_rank_worst_first_and_folds_the_equal_ones():
    body = cases(junit.render(journal(*JOURNALS["failed"])))["test_a"].find("failure").text
    assert body.splitlines() == [
        "Ranks:",
        "  rank 3 (gpu-02, GPU 1 GPU-3f2e3d4c): failed (culprit): too slow",
        "  rank 1 (gpu-01, GPU 1 GPU-1f2e3d4c): released",
        "  ranks 0, 2: passed",
        "nccl.all_reduce.busbw{size=1 GB}: 380 GB/s (FAILED, limit >= 400 GB/s, margin -5.0 %, worst rank 3):",
        "  limit from thresholds.yaml:14:7 (vendor)",
        "  rank 3 (gpu-02, GPU 1 GPU-3f2e3d4c): 380 GB/s, margin -5.0 %",
        "  ranks 0-2: 450 GB/s, margin +12.5 %",
    ]


def test_a_failure_on_1024_ranks_stays_small():
    ranks = [{"rank": rank, "outcome": "failed", "message": f"rank {rank}: " + "x" * 300} for rank in range(1024)]
    values = {str(rank): 300.0 + rank / 7 for rank in range(1024)}
    lines = [
        result(
            "test_a",
            "failed",
            ranks=ranks,
            culprits=[1000],
            measurements=[busbw("failed", 300.0, labels={"size": str(i)}, values=values) for i in range(60)],
        )
    ]
    document = junit.render(journal(*lines, run={**RUN, "world_size": 1024}))
    SCHEMA.validate(document)
    body = cases(document)["test_a"].find("failure").text
    assert len(body) < 32_000
    assert body.splitlines()[1].startswith("  rank 1000: failed (culprit)")
    assert "1008 more: ranks 15-999, 1001-1023; the journal has them all" in body
    assert "  1008 more ranks: 302.3 GB/s to 446.1 GB/s" in body


@pytest.mark.parametrize(
    ("value", "beside", "text"),
    [
        (442.123, None, "442.1 GB/s"),
        (400.0, 400.0, "400 GB/s"),
        (399.98, 400.0, "399.98 GB/s"),
        (399.999999, 400.0, "399.999999 GB/s"),
        (1234567.8, None, "1234568 GB/s"),
        (float("nan"), None, "NaN GB/s"),
        (float("-inf"), None, "-Infinity GB/s"),
        (None, None, "no value"),
    ],
)
def test_a_value_has_the_digits_that_tell_it_from_its_limit(value, beside, text):
    assert tables.quantity(value, "GB/s", beside=beside) == text


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "442.1 GB/s (limit >= 400 GB/s, margin +10.5 %, worst rank 3)"),
        (
            {"status": "failed", "margin": -0.0001},
            "442.1 GB/s (FAILED, limit >= 400 GB/s, margin -0.0 %, worst rank 3)",
        ),
        ({"status": "recorded", "limit": None, "margin": None}, "442.1 GB/s (recorded only, worst rank 3)"),
        (
            {
                "status": "error",
                "value": None,
                "limit": None,
                "margin": None,
                "worst_rank": None,
                "reason": "rank 2: none",
            },
            "no value (ERROR, rank 2: none)",
        ),
        (
            {"limit": {"min": 1.0, "max": 500.0}, "margin": 0.1},
            "442.1 GB/s (limit 1 to 500 GB/s, margin +10.0 %, worst rank 3)",
        ),
        (
            {"limit": {"min": None, "max": 500.0}, "margin": 0.1},
            "442.1 GB/s (limit <= 500 GB/s, margin +10.0 %, worst rank 3)",
        ),
    ],
)
def test_a_measurement_is_one_short_text(more, text):
    [judged] = journal(result("test_a", measurements=[{**busbw(), **more}])).results[0].measurements
    assert tables.measurement_text(judged) == text


def test_rendering_does_not_change_the_journal():
    read = journal(*ALL)
    assert junit.render(read) == junit.render(replace(read))
