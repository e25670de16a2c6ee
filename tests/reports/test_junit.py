"""The JUnit file: valid for Jenkins, honest at every moment, small at any number of ranks."""

import re
import xml.etree.ElementTree as ET

import example_runs
from each import of_each
from journal_lines import COLLECTED, RUN, end, problem, result, start
from junit_files import require_junit

from pytest_gpucluster.journal.journal import JournalBuilder
from pytest_gpucluster.journal.records import JUnitOptions
from pytest_gpucluster.reports import junit
from pytest_gpucluster.reports.summary import outline

RUN = {**RUN, "device": "cuda", "world_size": 4}
CLUSTER = {
    "type": "cluster",
    "ranks": [
        {
            "rank": rank,
            "host": f"gpu-0{rank // 2 + 1}",
            "pid": 100 + rank,
            "gpu": {"index": rank % 2, "uuid": f"GPU-{rank}f2e3d4c-aaaa-bbbb", "pci_bus_id": "", "name": "H100"},
        }
        for rank in range(4)
    ],
}
END = end()


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


def journal(*lines, run=RUN):
    builder = JournalBuilder(keep_samples=False)
    for line in (run, *lines):
        builder.add(line)
    return builder.journal()


ALL = [
    CLUSTER,
    COLLECTED,
    *(line for name in "abc" for line in (start(name), result(name, measurements=[busbw()]))),
    END,
]
JOURNALS = {
    "only the first line": [],
    "running": [CLUSTER, COLLECTED, start("a")],
    "running what was not collected": [start("x[a::b/c.py]")],
    "between tests": [COLLECTED, start("a"), result("a")],
    "silent": [
        COLLECTED,
        start("a"),
        {"type": "silence", "message": "rank 0 does not answer, process state T", "text": "stack"},
    ],
    "failed": [
        CLUSTER,
        COLLECTED,
        result(
            "a",
            "failed",
            measurements=[busbw("failed", 380.0)],
            ranks=[{"rank": 3, "outcome": "failed", "message": "too slow"}],
            culprits=[3],
            released=[1],
        ),
        {**END, "verdict": "REJECTED", "exit": 1},
    ],
    "error": [result("a", "error", phase="setup", measurements=[busbw("error", "NaN", reason="NaN")])],
    "skipped": [result("a", "skipped"), {**END, "verdict": "INCOMPLETE", "exit": 10}],
    "xfailed": [result("a", "skipped", wasxfail="reason: known")],
    "problems": [
        problem("rank 1 died", name="rank lost"),
        problem("rank 2 died", name="rank lost"),
        problem("GPU 3: Xid 79", "failed", name="gpu"),
        {**END, "verdict": "BROKEN", "exit": 11},
    ],
}
EXAMPLES = [(name, example_runs.journal_of(name)) for name in example_runs.NAMES]


def suite(document):
    return ET.fromstring(document).find("testsuite")


def cases(document):
    return {case.get("name"): case for case in suite(document).iter("testcase")}


def properties(document):
    return {each.get("name"): each.get("value") for each in suite(document).find("properties")}


@of_each("named", [*((name, journal(*lines)) for name, lines in JOURNALS.items()), *EXAMPLES], name=lambda one: one[0])
def test_xunit2_is_valid_for_jenkins_and_its_counts_are_right(named):
    for logging in ("no", "all"):
        document = junit.render(named[1], JUnitOptions(logging=logging))
        require_junit(document)
        root = ET.fromstring(document)
        testcases = list(root.iter("testcase"))
        for element in (root, root.find("testsuite")):
            assert int(element.get("tests")) == len(testcases)
            for count, verdict in (("failures", "failure"), ("errors", "error")):
                assert int(element.get(count)) == sum(case.find(verdict) is not None for case in testcases)
        keys = [(case.get("classname"), case.get("name")) for case in testcases]
        assert len(keys) == len(set(keys)) >= len(outline(named[1]).rows)
        assert all(re.fullmatch(r"\d+\.\d{3}", case.get("time")) for case in testcases)


def verdicts(document):
    found = {}
    for name, case in cases(document).items():
        [verdict] = [child for child in case if child.tag in ("failure", "error", "skipped")] or [None]
        found[name] = ("passed", "") if verdict is None else (verdict.tag, verdict.get("message"))
    return found


def tags(*lines):
    return {name: tag for name, (tag, _) in verdicts(junit.render(journal(*lines))).items()}


A, B, C = "test_a", "test_b", "test_c"
PESSIMISM = {
    "nothing collected": ([], {"run": "error"}),
    "in a test": ([COLLECTED, start("a"), result("a"), start("b")], {A: "passed", B: "error", C: "skipped"}),
    "between two tests": (
        [COLLECTED, start("a"), result("a")],
        {A: "passed", B: "skipped", C: "skipped", "run": "error"},
    ),
    "before the closing line": (ALL[:-1], {A: "passed", B: "passed", C: "passed", "run": "error"}),
    "in a test that began again": (
        [COLLECTED, start("a"), result("a"), start("a"), END],
        {A: "error", B: "skipped", C: "skipped"},
    ),
}


def test_wherever_a_run_ends_it_is_an_error_and_what_did_not_run_is_no_pass():
    assert {where: tags(*lines) for where, (lines, _) in PESSIMISM.items()} == {
        where: expected for where, (_, expected) in PESSIMISM.items()
    }


def test_the_reason_names_the_culprit_in_the_running_test():
    lost = problem("rank 1 (gpu-02, pid 7) died of signal 9", name="rank lost", text="its last words")
    document = junit.render(journal(COLLECTED, start("a"), lost))
    for name in ("test_a", "rank lost"):
        tag, message = verdicts(document)[name]
        assert (tag, message.endswith("rank 1 (gpu-02, pid 7) died of signal 9")) == ("error", True)
    assert "its last words" in cases(document)["test_a"].find("error").text


def test_a_verdict_that_no_testcase_shows_has_its_own():
    bad = {"BROKEN": "error", "REJECTED": "failure", "INCOMPLETE": "skipped", "UNHEARD OF": "error"}
    for verdict, tag in bad.items():
        found = verdicts(
            junit.render(journal(result("a"), {**END, "verdict": verdict, "exit": 11, "reason": "because"}))
        )
        assert found == {A: ("passed", ""), "run": (tag, f"{verdict}: because")}
    for verdict in ("ACCEPTED", "SELECTION PASSED", "REHEARSED"):
        assert tags(result("a"), {**END, "verdict": verdict}) == {A: "passed"}, verdict


def test_problems_outside_any_test_are_testcases():
    document = junit.render(journal(*JOURNALS["problems"]))
    assert verdicts(document) == {
        "rank lost": ("error", "rank 1 died"),
        "rank lost (2)": ("error", "rank 2 died"),
        "gpu": ("failure", "GPU 3: Xid 79"),
    }
    assert {case.get("classname") for case in cases(document).values()} == {"gpucluster"}


def test_neither_a_workload_nor_a_test_replaces_a_property_of_the_run():
    workload = {"type": "workload", "profile": "full", "file": "", "values": {"profile": "quick"}, "origins": {}}
    planted = {"type": "property", "name": "verdict", "value": "ACCEPTED"}
    found = properties(junit.render(journal(workload, planted, result("a", "failed"))))
    assert (found["workload.profile"], found["verdict"], found["verdict (2)"]) == ("full", "REJECTED", "ACCEPTED")


def test_xunit1_adds_properties_file_and_line():
    lines = [result("a", measurements=[busbw()], properties=[["k", "v"]])]
    for family in ("xunit1", "legacy"):
        case = cases(junit.render(journal(*lines), JUnitOptions(family=family)))["test_a"]
        assert (case.get("file"), case.get("line")) == ("t.py", "12")
        assert [each.get("name") for each in case.find("properties")] == ["nccl.all_reduce.busbw{size=1 GB}", "k"]
    case = cases(junit.render(journal(*lines)))["test_a"]
    assert (case.get("file"), case.get("line"), case.find("properties")) == (None, None, None)


def test_xfail_skip_and_the_phase_of_a_failure_are_written_as_pytest_does():
    document = junit.render(
        journal(
            result("a", "skipped", wasxfail="reason: known"),
            result("c", "skipped", message="needs 2 nodes", text="t.py:3: needs 2 nodes"),
        )
    )
    found = [(case.get("type"), case.get("message")) for [case] in cases(document).values()]
    assert found[:2] == [("pytest.xfail", "known"), ("pytest.skip", "needs 2 nodes")]
    document = junit.render(journal(result("a", "error", phase="teardown", message="no GPU"), END))
    assert verdicts(document)["test_a"] == ("error", "in teardown: no GPU")


LOGGING = {
    "no": ("", ""),
    "log": ("LOG", ""),
    "system-out": ("OUT1 OUT2", ""),
    "system-err": ("", "ERR"),
    "out-err": ("OUT1 OUT2", "ERR"),
    "all": ("LOG OUT1 OUT2", "ERR"),
}


@of_each("logging", list(LOGGING))
def test_junit_logging_means_what_it_means_in_pytest(logging):
    def words(document):
        texts = [cases(document)["test_a"].findtext(tag) or "" for tag in ("system-out", "system-err")]
        return tuple(" ".join(re.findall("OUT1|OUT2|ERR|LOG", text)) for text in texts)

    captured = {"stdout setup": "OUT1\n", "stdout call": "OUT2\n", "stderr call": "ERR\n", "log call": "LOG\n"}
    sections = [[f"Captured {where}", text] for where, text in captured.items()]
    lines = [result("a", "failed", sections=sections), result("c", sections=sections)]
    assert words(junit.render(journal(*lines), JUnitOptions(logging=logging))) == LOGGING[logging]
    quiet = junit.render(journal(*lines), JUnitOptions(logging=logging, log_passing=False))
    assert words(quiet) == LOGGING[logging]
    assert [child.tag for child in cases(quiet)["test_c"]] == []


def test_prefix_suite_name_and_duration_report_mean_what_they_mean_in_pytest():
    options = JUnitOptions(prefix="site.a", suite_name="acceptance", duration_report="call")
    document = junit.render(journal(result("a")), options)
    assert suite(document).get("name") == "acceptance"
    case = cases(document)["test_a"]
    assert (case.get("classname"), case.get("time")) == ("site.a.t", "1.000")
    assert cases(junit.render(journal(result("a"))))["test_a"].get("time") == "1.235"


def test_a_text_beyond_all_bounds_keeps_its_ends_and_says_so():
    document = junit.render(journal(result("a", "failed", text="BEGIN" + "x" * 10_000_000 + "END")))
    text = cases(document)["test_a"].find("failure").text
    assert text.startswith("BEGIN")
    assert text.endswith("END")
    assert re.search(r"\d characters left", text)
    assert len(document) < 500_000


def test_a_failure_on_1024_ranks_stays_small():
    ranks = [{"rank": rank, "outcome": "failed", "message": f"rank {rank}: " + "x" * 300} for rank in range(1024)]
    values = {str(rank): 300.0 + rank / 7 for rank in range(1024)}
    lines = [
        result(
            "a",
            "failed",
            ranks=ranks,
            culprits=[1000],
            measurements=[busbw("failed", 300.0, labels={"size": str(i)}, values=values) for i in range(60)],
        )
    ]
    document = junit.render(journal(*lines, run={**RUN, "world_size": 1024}))
    require_junit(document)
    body = cases(document)["test_a"].find("failure").text
    assert len(body) < 32_000
    assert body.splitlines()[1].startswith("  rank 1000: failed (culprit)")
    assert "1008 more: ranks 15-999, 1001-1023;" in body
    assert "1008 more ranks: 302.3 GB/s to 446.1 GB/s" in body
