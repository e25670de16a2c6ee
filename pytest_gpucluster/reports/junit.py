"""The JUnit file that a CI system reads: one testcase per test, never one per rank, and the suite's properties.

With pytest's default family ``xunit2`` the file is valid against Jenkins' ``junit-10.xsd``, which does not allow
properties in a testcase: its measurements are ``[[PROPERTY|name=value]]`` lines in its system-out. ``xunit1`` adds
testcase properties, file and line. The testsuite's properties have the verdict, what ran, where, with which software,
and the limits.

The file is pessimistic: whatever the journal does not contain is an error, so the file of a killed run never looks
like a pass.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timezone

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import KIND_NAMES, SIMULATED, CollectedTest, JUnitOptions, TestResult
from pytest_gpucluster.journal.verdict import ACCEPTED, INCOMPLETE, PASSED_WITH_DEVIATIONS, REHEARSED, SELECTION_PASSED
from pytest_gpucluster.reports.facts import run_properties
from pytest_gpucluster.reports.failures import failures_elsewhere
from pytest_gpucluster.reports.summary import moment, outline, run_seconds
from pytest_gpucluster.reports.tables import limit_text, rank_tables, result_pairs
from pytest_gpucluster.text import MESSAGE_CHARACTERS, clip, one_line, visible

# GitLab reads at most 30 MB a file; the journal keeps what is left out here.
_TEXT_CHARACTERS = 256 * 1024
_SKIP = "pytest.skip"
_KILLED = (
    "This is the state of the report while {}. If the run is over, it was killed here, "
    "or its machine went down, before anything else could be written."
)


def render(journal: Journal, options: JUnitOptions | None = None) -> str:
    """Return the JUnit document of a journal, complete at any moment of the run.

    ``options`` default to the run's own.
    """
    options = options or journal.run.junit
    journal = replace(journal, is_live=False)  # if nothing follows, the run ended here
    cases = _cases(journal, options)
    counts = Counter(child.tag for case in cases for child in case)
    began, seconds = moment(journal.run.started_at), _seconds(run_seconds(journal))
    suite = _element(
        "testsuite",
        errors=str(counts["error"]),
        failures=str(counts["failure"]),
        name=options.suite_name,
        skipped=str(counts["skipped"]),
        tests=str(len(cases)),
        time=seconds,
        hostname=journal.run.hostname,
        timestamp="" if began is None else began.astimezone(timezone.utc).isoformat(timespec="seconds"),
    )
    suite.append(_properties(_suite_properties(journal).items()))
    if journal.run.kind:
        note = f"{KIND_NAMES[journal.run.kind]}: no statement about the acceptance of a cluster."
        suite.append(_element("system-out", note))
    suite.extend(cases)
    root = ET.Element("testsuites", name="pytest tests")
    for name in ("tests", "failures", "errors", "time"):
        root.set(name, suite.get(name, "0"))
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _element(tag: str, text: str = "", /, **attributes: str) -> ET.Element:
    """Return an element without its empty attributes, every character being one that XML can carry."""
    element = ET.Element(tag, {key: visible(value) for key, value in attributes.items() if value})
    element.text = visible(text) or None
    return element


def _properties(pairs: Iterable[tuple[str, str]]) -> ET.Element:
    element = ET.Element("properties")
    for name, value in pairs:
        ET.SubElement(element, "property", name=visible(name), value=visible(value))
    return element


def _suite_properties(journal: Journal) -> Mapping[str, str]:
    """Return the properties of the testsuite in their order. None replaces another: a second one gets a number."""
    properties = run_properties(journal)

    def add(name: str, value: str, *, unless_same: bool = False) -> None:
        free, number = name, 1
        while free in properties:
            if unless_same and properties[free] == value:
                return
            number += 1
            free = f"{name} ({number})"
        properties[free] = value

    for name, value in journal.properties:
        add(name, value)
    for result in journal.results:
        for judged in result.measurements:
            if judged.limit is not None:
                source = f"; {judged.limit.source}" if judged.limit.source else ""
                limit = f"{limit_text(judged)}; {judged.limit.origin or 'of unknown origin'}{source}"
                add(f"limit[{judged.metric}]", limit, unless_same=True)
    return properties


def _cases(journal: Journal, options: JUnitOptions) -> list[ET.Element]:
    """Return every testcase: collected ones in their order, other results, then problems outside of tests."""
    results = {result.nodeid: result for result in journal.results}
    running = journal.running.nodeid if journal.running is not None else None
    collected, elsewhere = list(journal.collected or ()), failures_elsewhere(journal, outline(journal))
    known = {test.nodeid for test in collected}
    extra = [nodeid for nodeid in (*results, running) if nodeid is not None and nodeid not in known]
    collected += [CollectedTest(nodeid=nodeid) for nodeid in dict.fromkeys(extra)]
    cases = []
    for test in collected:
        case = _case(_address(test, options), test, options)
        if test.nodeid == running:
            is_known = journal.end is not None or journal.recent_problem is not None or journal.silence is not None
            message = f"the run ended here: {(is_known and journal.ended_by) or test.nodeid}"
            _decide(case, "error", message, _ended_here(journal))
        elif test.nodeid in results:
            result = results[test.nodeid]
            case = _case(_address(result, options), result, options)
            _fill(case, result, journal, options, elsewhere.get(test.nodeid, ""))
        else:
            _decide(case, "skipped", f"not run: {journal.ended_by or journal.verdict}", kind=_SKIP)
        cases.append(case)
    for problem in journal.problems:
        case = _case((_prefixed("gpucluster", options), problem.name))
        _decide(case, "failure" if problem.outcome == "failed" else "error", problem.message, problem.text)
        cases.append(case)
    cases += _closing(journal, cases, options)
    # Of two testcases with one name a reader takes the later for a retry, or ignores it.
    counts: Counter[tuple[str | None, str | None]] = Counter()
    for case in cases:
        key = case.get("classname"), case.get("name")
        counts[key] += 1
        if counts[key] > 1:
            case.set("name", f"{key[1]} ({counts[key]})")
    return cases


def _case(
    address: tuple[str, str], test: CollectedTest | None = None, options: JUnitOptions | None = None
) -> ET.Element:
    case = ET.Element("testcase", name=visible(address[1]), classname=visible(address[0]), time="0.000")
    if test is not None and options is not None and options.family != "xunit2":
        if test.file:
            case.set("file", visible(test.file))
        if test.line is not None:
            case.set("line", str(test.line))
    return case


def _decide(case: ET.Element, verdict: str, message: str, body: str = "", *, kind: str = "") -> None:
    message = one_line(message, MESSAGE_CHARACTERS) or {"failure": "failed"}.get(verdict, verdict)
    case.append(_element(verdict, clip(body, _TEXT_CHARACTERS), type=kind or verdict, message=message))


def _closing(journal: Journal, cases: Iterable[ET.Element], options: JUnitOptions) -> list[ET.Element]:
    """Return the testcase that keeps a file from looking better than its run, where no other does."""
    verdicts = {child.tag for case in cases for child in case}
    case = _case((_prefixed("gpucluster", options), "run"))
    message = f"{journal.verdict}: {journal.reason}"
    if journal.end is None:
        _decide(case, "error", journal.reason, _ended_here(journal))
        return [case] if journal.running is None else []
    if journal.verdict in (ACCEPTED, SELECTION_PASSED, REHEARSED, SIMULATED, PASSED_WITH_DEVIATIONS):
        return []
    if journal.verdict == INCOMPLETE:
        _decide(case, "skipped", message, kind=_SKIP)
        return [] if "skipped" in verdicts else [case]
    _decide(case, "failure" if journal.verdict == "REJECTED" else "error", message)
    return [] if verdicts & {"failure", "error"} else [case]


def _ended_here(journal: Journal) -> str:
    parts = []
    if journal.running is not None and journal.running.at:
        parts.append(f"{journal.running.nodeid} was started at {journal.running.at}.")
    if journal.silence is not None:
        parts.append(journal.silence.text)
    if journal.recent_problem is not None:
        parts.append(journal.recent_problem.text)
    if journal.end is None:
        parts.append(_KILLED.format("the run went on" if journal.running is None else "this test was running"))
    return "\n\n".join(part for part in parts if part)


def _fill(case: ET.Element, result: TestResult, journal: Journal, options: JUnitOptions, elsewhere: str) -> None:
    case.set("time", _seconds(result.call_seconds if options.duration_report == "call" else result.duration_seconds))
    properties = [*result_pairs(result), *result.properties]
    if properties and options.family != "xunit2":
        case.append(_properties(properties))
    if result.outcome == "skipped" and result.wasxfail is not None:
        _decide(case, "skipped", result.wasxfail.removeprefix("reason: "), result.text, kind="pytest.xfail")
    elif result.outcome == "skipped":
        _decide(case, "skipped", result.message, result.text, kind=_SKIP)
    elif result.outcome in ("failed", "error"):
        is_named = result.phase == "call" or result.phase in result.message
        message = result.message if is_named else f"in {result.phase}: {result.message}"
        if elsewhere:
            taking_part = one_line(f"; with {elsewhere}", MESSAGE_CHARACTERS // 2)
            message = one_line(message, MESSAGE_CHARACTERS - len(taking_part)) + taking_part
        # The table comes first, because readers cut off the end of a long text.
        body = "\n\n".join(part for part in (rank_tables(result, journal), result.text) if part)
        _decide(case, "failure" if result.outcome == "failed" else "error", message, body)
    lines = [f"[[PROPERTY|{_in_brackets(name)}={_in_brackets(value)}]]" for name, value in properties]
    out, err = _captured(result, options)
    for tag, text in (("system-out", "\n".join([*lines, *([out] if out else [])])), ("system-err", err)):
        if text:
            case.append(_element(tag, text))


def _address(test: CollectedTest, options: JUnitOptions) -> tuple[str, str]:
    """Return class name and name of a test, by its node id if it has no description."""
    if not test.name:
        test = CollectedTest.of(test.nodeid, ("", None, ""))
    return _prefixed(test.classname, options), test.name


def _prefixed(classname: str, options: JUnitOptions) -> str:
    return ".".join(part for part in (options.prefix, classname) if part)


def _captured(result: TestResult, options: JUnitOptions) -> tuple[str, str]:
    if options.logging == "no" or (result.outcome == "passed" and not options.log_passing):
        return "", ""

    def section(beginning: str, header: str) -> str:
        content = "".join(text for title, text in result.sections if title.startswith(beginning))
        return "\n".join([header.center(80, "-"), clip(content, _TEXT_CHARACTERS), ""]) if content else ""

    out, err = "", ""
    if options.logging in ("log", "all"):
        out += section("Captured log", " Captured Log ")
    if options.logging in ("system-out", "out-err", "all"):
        out += section("Captured stdout", " Captured Out ")
    if options.logging in ("system-err", "out-err", "all"):
        err = section("Captured stderr", " Captured Err ")
    return out, err


def _seconds(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) and value > 0 else "0.000"


def _in_brackets(text: str) -> str:
    # A line of this form ends at the first "]]".
    return re.sub(r"\](?=\]|$)", "] ", " ".join(visible(text).split()))
