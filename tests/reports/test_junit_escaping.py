"""Whatever text a test, a rank or a driver comes up with: the JUnit file is valid, and a reader finds the text."""

import junitparser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from junit_files import require_junit

from pytest_gpucluster.journal.journal import JournalBuilder
from pytest_gpucluster.journal.records import JUnitOptions
from pytest_gpucluster.reports import junit
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line, visible

# With control characters, lone surrogates and what XML forbids.
ANY = st.text(st.characters())
SOME = st.text(st.characters(), min_size=1)
# What is likely to break a format: its own brackets, entities, escapes and line ends.
NASTY = st.lists(
    st.sampled_from(["]]>", "]]", "[[PROPERTY|", "<!--", "-->", "<![CDATA[", "&amp;", "&#0;", "&", "<", '"', "'"])
    | st.sampled_from(["\r\n", "\r", "\n", "\t", "\x00", "\x1b[31m", "\x85", "\u2028", "\ud800", "\ufffe", "漢", "🚀"]),
    min_size=1,
).map("".join)
TEXT = SOME | NASTY
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read_back(*lines, family="xunit2", logging="no"):
    """Render, hold the file against Jenkins' schema where it claims to follow it, and read it as a CI system does."""
    builder = JournalBuilder(keep_samples=False)
    builder.add({"type": "run", "schema_version": 1, "run_id": "r1", "started_at": "2026-01-02T03:04:05Z"})
    for line in lines:
        builder.add(line)
    document = junit.render(builder.journal(), JUnitOptions(family=family, logging=logging))
    if family == "xunit2":
        require_junit(document)
    [suite] = junitparser.JUnitXml.fromstring(document.encode("utf-8"))
    return suite


def finished(name="test_a", outcome="passed", **more):
    return {"type": "test", "nodeid": f"t.py::{name}", "classname": "t", "name": name, "outcome": outcome, **more}


def properties(suite):
    return {each.name: each.value for each in suite.properties()}


def case_of(suite):
    return next(iter(suite))


@given(
    names=st.tuples(TEXT, TEXT, TEXT),
    kind=st.tuples(st.sampled_from(["failed", "error", "skipped"]), st.sampled_from(["xunit1", "xunit2"])),
    texts=st.tuples(*[ANY | NASTY] * 5),
)
@example(names=("]]>", "<&>\n\t\r", "k"), kind=("failed", "xunit2"), texts=("x" * 500, "]]>\x00\x1f", "", "", ""))
@QUICK
def test_all_that_a_testcase_says_is_read(names, kind, texts):
    (name, classname, key), (outcome, family), (message, text, out, err, value) = names, kind, texts
    more = {
        "classname": classname,
        "message": message,
        "text": f"<{text}>",
        "properties": [[key, value]],
        "sections": [["Captured stdout call", f"<{out}>"], ["Captured stderr call", f"<{err}>"]],
    }
    case = case_of(read_back(finished(name, outcome, **more), family=family, logging="all"))
    assert (case.name, case.classname) == (visible(name), visible(classname))
    [verdict] = case.result
    assert verdict.message == (one_line(message, MESSAGE_CHARACTERS) or outcome)
    assert len(verdict.message) <= MESSAGE_CHARACTERS
    assert verdict.text == f"<{visible(text)}>"
    assert f"<{visible(out)}>" in case.system_out
    assert f"<{visible(err)}>" in case.system_err
    if family == "xunit1":  # the one that has them
        found = case.child(junitparser.Properties)
        assert [(each.name, each.value) for each in found] == [(visible(key), visible(value))]


@given(key=TEXT, label=TEXT, why=TEXT, origin=TEXT, source=TEXT, transport=TEXT)
@QUICK
def test_a_measurement_is_one_line_whatever_its_labels_hold(key, label, why, origin, source, transport):
    judged = {
        "metric": "nccl.all_reduce.busbw",
        "unit": "GB/s",
        "labels": {key: label},
        "status": "failed",
        "value": 442.1,
        "worst_rank": 0,
        "interval": [440.2, 443.9],
        "inconclusive": why,
        "limit": {"min": 400.0, "source": source, "origin": origin, "expect_transport": [transport]},
        "telemetry": {"0": {"throttle": [why], "not_available": {key: why}}},
        "values": {"0": 442.1},
    }
    suite = read_back(finished(outcome="failed", measurements=[judged]))
    assert not any("test_a" in each for each in properties(suite))  # they are the testcase's own
    limit = properties(suite)["limit[nccl.all_reduce.busbw]"]
    assert visible(f"over {transport}; {origin}; {source}") in limit
    case = case_of(suite)
    # Split as CI systems do: at line feeds only.
    lines = case.system_out.split("\n")
    assert len(lines) == 2
    assert all(line.startswith("[[PROPERTY|nccl") and line.endswith("]]") for line in lines)
    assert all(line.index("]]") == len(line) - 2 for line in lines), "a reader stops at the first pair"
