"""The JUnit file that a CI system reads: one testcase per test, never one per rank, and the suite's properties.

With pytest's default family ``xunit2`` the file is valid against Jenkins' ``junit-10.xsd``, which does not allow
properties in a testcase: measurements are properties of the testsuite and ``[[PROPERTY|name=value]]`` lines in the
testcase's system-out. ``xunit1`` adds testcase properties, file and line. The testsuite's properties have the
verdict, what ran and was measured, where, and with which software.

The file is pessimistic: whatever the journal does not contain is an error, so the file of a killed run never looks
like a pass.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timezone

import junit_xml  # type: ignore[import-untyped]  # it has no type hints

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import CollectedTest, JUnitOptions, TestResult
from pytest_gpucluster.reports.summary import moment, run_seconds
from pytest_gpucluster.reports.tables import limit_text, rank_tables, result_pairs
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line, rank_ranges, visible


def suite_properties(journal: Journal, named: Iterable[tuple[str, TestResult]]) -> dict[str, str]:
    """Return the properties of the testsuite in their order.

    Args:
        journal: of the run.
        named: (CLASSNAME.NAME of its testcase, result) of every finished test.
    """
    run = journal.run
    properties = {
        "verdict": journal.verdict,
        "exit": str(journal.exit),
        "reason": journal.reason,
        "rehearsal": "true" if run.rehearsal else "false",
        "selection": "true" if run.selection else "false",
        "deviations": "; ".join(journal.deviations),
        "device": run.device,
        "world_size": str(run.world_size),
        "nnodes": str(run.nnodes),
        "launcher": run.launcher,
        "run_id": run.run_id,
        "version.pytest-gpucluster": run.plugin_version,
    }
    properties |= {f"version.{name}": version for name, version in run.versions.items()}
    properties |= cluster_facts(journal)
    for name, (value, origin) in run.options.items():
        if origin != "default":
            properties[f"option.{name}"] = f"{value} (from {origin})" if origin else value
    properties |= _workload_properties(journal)
    properties = {name: value for name, value in properties.items() if value}
    for name, value in journal.properties:
        _set(properties, name, value)
    for where, result in named:
        for name, text in result_pairs(result):
            _set(properties, f"{where}[{name}]", text)
        for judged in result.measurements:
            if judged.limit is not None:
                source = f"; {judged.limit.source}" if judged.limit.source else ""
                limit = f"{limit_text(judged)}; {judged.limit.origin or 'of unknown origin'}{source}"
                _set(properties, f"limit[{judged.metric}]", limit, unless_same=True)
    return properties


def _workload_properties(journal: Journal) -> dict[str, str]:
    """Return the workload, each value with its origin."""
    workload = journal.workload
    if workload is None:
        return {}
    properties = {"workload.profile": workload.profile, "workload.file": workload.file}
    for key, value in workload.values.items():
        origin = workload.origins.get(key, "")
        properties.setdefault(f"workload.{key}", f"{value} ({origin})" if origin else value)
    return properties


def cluster_facts(journal: Journal) -> dict[str, str]:
    """Return hosts, GPUs and versions; where ranks differ, each value with its ranks."""
    ranks = journal.cluster.ranks if journal.cluster else ()
    facts: dict[str, dict[str, list[int]]] = {}
    for place in ranks:
        known = {"host": place.host, "gpu": (place.gpu or {}).get("name", "")}
        known |= {f"version.{name}": version for name, version in place.versions.items()}
        for name, value in known.items():
            if value:
                facts.setdefault(name, {}).setdefault(value, []).append(place.rank)
    return {
        name: next(iter(values))
        if len(values) == 1
        else ", ".join(f"{value} ({rank_ranges(members)})" for value, members in values.items())
        for name, values in facts.items()
    }


def _set(properties: dict[str, str], name: str, value: str, *, unless_same: bool = False) -> None:
    """Add a property and never replace one: a second one of the same name gets a number."""
    free, number = name, 1
    while free in properties:
        if unless_same and properties[free] == value:
            return
        number += 1
        free = f"{name} ({number})"
    properties[free] = value


# GitLab reads at most 30 MB a file; the journal keeps what is left out here.
_TEXT_CHARACTERS = 256 * 1024

_KILLED = (
    "This is the state of the report while {}. If the run is over, it was killed here, "
    "or its machine went down, before anything else could be written."
)


@dataclass(kw_only=True)
class _Case:
    """One testcase. ``verdict`` is the element inside it: failure, error, skipped or none."""

    classname: str
    name: str
    verdict: str = ""
    kind: str = ""
    message: str = ""
    body: str = ""
    seconds: float = 0.0
    out: str = ""
    err: str = ""
    file: str = ""
    line: int | None = None
    properties: list[tuple[str, str]] = field(default_factory=list)


def render(journal: Journal, options: JUnitOptions | None = None) -> str:
    """Return the JUnit document of a journal, complete at any moment of the run.

    ``options`` default to the run's own.
    """
    options = options or journal.run.junit
    journal = replace(journal, is_live=False)  # if nothing follows, the run ended here
    cases = _unique(_cases(journal, options))
    built = []
    for case in cases:
        test_case = junit_xml.TestCase(
            visible(case.name),
            classname=visible(case.classname),
            stdout=visible(case.out) or None,
            stderr=visible(case.err) or None,
        )
        message, body = one_line(case.message, MESSAGE_CHARACTERS), visible(_bounded(case.body))
        if case.verdict == "failure":
            test_case.add_failure_info(message or "failed", body)
        elif case.verdict == "error":
            test_case.add_error_info(message or "error", body)
        elif case.verdict == "skipped":
            test_case.add_skipped_info(message or "skipped", body)
        built.append(test_case)
    cases_and_results = ((_empty_case(result, options), result) for result in journal.results)
    named = [(f"{case.classname}.{case.name}", result) for case, result in cases_and_results]
    suite = junit_xml.TestSuite(
        visible(options.suite_name),
        built,
        hostname=visible(journal.run.hostname) or None,
        timestamp=_timestamp(journal.run.started_at) or None,
        properties={visible(name): visible(value) for name, value in suite_properties(journal, named).items()},
        stdout=visible(_suite_note(journal)) or None,
    ).build_xml_doc()
    return _document(suite, cases, journal, options)


def _document(suite: ET.Element, cases: list[_Case], journal: Journal, options: JUnitOptions) -> str:
    """Make the builder's suite valid: no schema has `disabled`, and times have at most 3 decimals."""
    suite.attrib.pop("disabled", None)
    suite.set("time", _seconds(run_seconds(journal)))
    is_rich = options.family != "xunit2"
    for element, case in zip(suite.iter("testcase"), cases, strict=True):
        element.set("classname", visible(case.classname))
        element.set("time", _seconds(case.seconds))
        if case.kind:
            for verdict in element.iter(case.verdict):
                verdict.set("type", case.kind)
        if is_rich:
            if case.file:
                element.set("file", visible(case.file))
            if case.line is not None:
                element.set("line", str(case.line))
            if case.properties:
                properties = ET.Element("properties")
                for name, value in case.properties:
                    ET.SubElement(properties, "property", name=visible(name), value=visible(value))
                element.insert(0, properties)
    root = ET.Element("testsuites", name="pytest tests")
    for name in ("tests", "failures", "errors", "time"):
        root.set(name, suite.get(name, "0"))
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _cases(journal: Journal, options: JUnitOptions) -> list[_Case]:
    """Return every testcase: collected ones in their order, other results, then problems outside of tests."""
    results = {result.nodeid: result for result in journal.results}
    running = journal.running.nodeid if journal.running is not None else None
    collected = list(journal.collected or ())
    known = {test.nodeid for test in collected}
    extra = [nodeid for nodeid in (*results, running) if nodeid is not None and nodeid not in known]
    collected += [CollectedTest(nodeid=nodeid) for nodeid in dict.fromkeys(extra)]
    not_run = f"not run: {journal.ended_by or journal.verdict}"
    cases = []
    for test in collected:
        if test.nodeid == running:
            case = _empty_case(test, options)
            case.verdict, case.message = "error", f"the run ended here: {_cause(journal, test.nodeid)}"
            case.body = _ended_here(journal)
        elif test.nodeid in results:
            case = _case_of_result(results[test.nodeid], journal, options)
        else:
            case = _empty_case(test, options)
            case.verdict, case.kind, case.message = "skipped", "pytest.skip", not_run
        cases.append(case)
    cases += [
        _Case(
            classname=_prefixed("gpucluster", options),
            name=problem.name,
            verdict="failure" if problem.outcome == "failed" else "error",
            message=problem.message,
            body=problem.text,
        )
        for problem in journal.problems
    ]
    closing = _closing(journal, cases, options)
    return [*cases, closing] if closing is not None else cases


def _closing(journal: Journal, cases: Iterable[_Case], options: JUnitOptions) -> _Case | None:
    """Return the testcase that keeps a file from looking better than its run, where no other does."""
    verdicts = {case.verdict for case in cases}
    case = _Case(classname=_prefixed("gpucluster", options), name="run", message=journal.reason)
    if journal.end is None:
        if journal.running is not None:
            return None
        case.verdict, case.body = "error", _ended_here(journal)
        return case
    case.message = f"{journal.verdict}: {journal.reason}"
    if journal.verdict in ("ACCEPTED", "SELECTION PASSED", "REHEARSED", "PASSED WITH DEVIATIONS"):
        return None
    if journal.verdict == "INCOMPLETE":
        case.verdict, case.kind = "skipped", "pytest.skip"
        return None if "skipped" in verdicts else case
    case.verdict = "failure" if journal.verdict == "REJECTED" else "error"
    return None if verdicts & {"failure", "error"} else case


def _cause(journal: Journal, nodeid: str) -> str:
    if journal.end is None and journal.recent_problem is None and journal.silence is None:
        return nodeid
    return journal.ended_by or nodeid


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


def _case_of_result(result: TestResult, journal: Journal, options: JUnitOptions) -> _Case:
    case = _empty_case(result, options)
    case.seconds = result.call_seconds if options.duration_report == "call" else result.duration_seconds
    case.message = result.message
    if result.outcome == "skipped":
        case.verdict, case.kind, case.body = "skipped", "pytest.skip", result.text
        if result.wasxfail is not None:
            case.kind, case.message = "pytest.xfail", result.wasxfail.removeprefix("reason: ")
    elif result.outcome in ("failed", "error"):
        case.verdict = "failure" if result.outcome == "failed" else "error"
        if result.phase != "call" and result.phase not in result.message:
            case.message = f"in {result.phase}: {result.message}"
        # The table comes first, because readers cut off the end of a long text.
        tables = rank_tables(result, journal)
        case.body = "\n\n".join(part for part in (tables, result.text) if part)
    case.properties = [*result_pairs(result), *result.properties]
    lines = [f"[[PROPERTY|{_in_brackets(name)}={_in_brackets(value)}]]" for name, value in case.properties]
    out, err = _captured(result, options)
    case.out = "\n".join([*lines, *([out] if out else [])])
    case.err = err
    return case


def _empty_case(test: CollectedTest | TestResult, options: JUnitOptions) -> _Case:
    classname, name = test.classname, test.name
    if not name:
        classname, name = _address(test.nodeid)
    return _Case(classname=_prefixed(classname, options), name=name, file=test.file, line=test.line)


def _address(nodeid: str) -> tuple[str, str]:
    """Return class name and function of a node id as pytest writes them, for a test without a description."""
    where, bracket, parameters = nodeid.partition("[")
    path, *names = where.split("::")
    parts = [path.removesuffix(".py").replace("/", "."), *names]
    parts[-1] += bracket + parameters
    return ".".join(parts[:-1]), parts[-1]


def _prefixed(classname: str, options: JUnitOptions) -> str:
    return ".".join(part for part in (options.prefix, classname) if part)


def _unique(cases: list[_Case]) -> list[_Case]:
    # Of two testcases with one name a reader takes the later for a retry, or ignores it.
    counts: dict[tuple[str, str], int] = {}
    for case in cases:
        key = (case.classname, case.name)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > 1:
            case.name = f"{case.name} ({counts[key]})"
    return cases


def _captured(result: TestResult, options: JUnitOptions) -> tuple[str, str]:
    """Return the texts of system-out and system-err by pytest's ``junit_logging``."""
    if options.logging == "no" or (result.outcome == "passed" and not options.log_passing):
        return "", ""

    def section(beginning: str, header: str) -> str:
        content = "".join(text for title, text in result.sections if title.startswith(beginning))
        return "\n".join([header.center(80, "-"), _bounded(content), ""]) if content else ""

    out, err = "", ""
    if options.logging in ("log", "all"):
        out += section("Captured log", " Captured Log ")
    if options.logging in ("system-out", "out-err", "all"):
        out += section("Captured stdout", " Captured Out ")
    if options.logging in ("system-err", "out-err", "all"):
        err = section("Captured stderr", " Captured Err ")
    return out, err


def _suite_note(journal: Journal) -> str:
    if not journal.run.rehearsal:
        return ""
    return f"REHEARSAL on {journal.run.device or 'cpu'}: no statement about the acceptance of a cluster."


def _timestamp(text: str) -> str:
    began = moment(text)
    return began.astimezone(timezone.utc).isoformat(timespec="seconds") if began is not None else ""


def _seconds(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) and value > 0 else "0.000"


def _bounded(text: str) -> str:
    if len(text) <= _TEXT_CHARACTERS:
        return text
    half = _TEXT_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out; see the journal ...]\n{text[-half:]}"


def _in_brackets(text: str) -> str:
    # A line of this form ends at the first "]]".
    return re.sub(r"\](?=\]|$)", "] ", " ".join(visible(text).split()))
