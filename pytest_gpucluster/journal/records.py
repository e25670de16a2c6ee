"""The lines of a journal as typed values, and how each is read from its JSON object.

A field that is missing has its default, so that a journal of an earlier version is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.fields import Fields, JudgedMetric, read_judged
from pytest_gpucluster.judge.misses import most_throttled
from pytest_gpucluster.metrics.time_budget import PARTS

OUTCOMES = ("passed", "failed", "error", "skipped")


@dataclass(frozen=True, kw_only=True)
class JUnitOptions:
    """pytest's settings for the JUnit file, with pytest's own defaults and meanings."""

    path: str | None = None
    family: str = "xunit2"
    suite_name: str = "pytest"
    prefix: str = ""
    logging: str = "no"
    log_passing: bool = True
    duration_report: str = "total"


@dataclass(frozen=True, kw_only=True)
class MergedFrom:
    """One of the runs that a merged journal was made of."""

    journal: str = ""
    """Path of its journal."""
    sha256: str = ""
    run_id: str = ""
    started_at: str = ""
    verdict: str = ""
    exit: int = 11
    series: str = ""
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """The first line: options, host and versions."""

    run_id: str
    started_at: str
    argv: tuple[str, ...] = ()
    device: str = ""
    rehearsal: bool = False
    selection: bool = False
    hostname: str = ""
    launcher: str = ""
    world_size: int = 1
    nnodes: int = 1
    options: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Option name -> (value, origin)."""
    versions: Mapping[str, str] = field(default_factory=dict)
    plugin_version: str = ""
    junit: JUnitOptions = field(default_factory=JUnitOptions)
    merged_from: tuple[MergedFrom, ...] = ()
    """The runs that were merged, the oldest first; empty for a run of its own."""
    series: str = ""
    """Id of all runs of one report directory; empty where it is unknown."""
    number: int = 0
    """Its number in the series: a later run has a higher one, whatever its clock."""
    merged_despite: tuple[str, ...] = ()
    """Differences between the clusters of the merged runs."""

    @property
    def required(self) -> tuple[str, ...]:
        """Return the criteria that the operator required by name."""
        value, _ = self.options.get("require", ("None", ""))
        names = [] if value == "None" else [name.strip() for name in value.split(",")]
        return tuple(dict.fromkeys(filter(None, names)))


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    host: str = ""
    local_rank: int = 0
    node_rank: int = 0
    pid: int = 0
    gpu: Mapping[str, str] | None = None
    """index, uuid, pci_bus_id and name, as text; None on cpu."""
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Every rank that reported, and the problems that preflight found."""

    ranks: tuple[RankPlace, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LimitsInForce:
    """The limits that the values were compared with."""

    sku: str | None = None
    """None: no SKU of the files matches this GPU, so nothing could be judged."""
    gpu_name: str | None = None
    """As NVML names it; None on cpu."""
    files: tuple[tuple[str, str], ...] = ()
    """(path, SHA-256), later files overlaying earlier ones."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The first rank's system, and the environment variables that affect measurements."""

    host: str = ""
    system: str = ""
    cpus: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload: sizes, shapes and times, each with its origin."""

    profile: str = ""
    file: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CollectedTest:
    """A test that is to run."""

    nodeid: str
    classname: str = ""
    name: str = ""
    file: str = ""
    line: int | None = None
    criterion: str | None = None


@dataclass(frozen=True, kw_only=True)
class Started:
    """A test that has started."""

    nodeid: str
    at: str = ""
    deadline_seconds: float = math.inf


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """One rank's outcome, where it is more than a plain pass."""

    rank: int
    outcome: str = "error"
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class PartOfTime:
    """The time of one part of a test."""

    seconds: float = 0.0
    """Of the first rank, for which all parts together are the whole test."""
    most_seconds: float = 0.0
    most_rank: int = 0
    """The slowest rank."""


@dataclass(frozen=True, kw_only=True)
class TestResult:
    """A finished test, merged over all ranks."""

    __test__ = False  # pytest must not take it for a test class

    nodeid: str
    outcome: str
    classname: str = ""
    name: str = ""
    file: str = ""
    line: int | None = None
    criterion: str | None = None
    phase: str = "call"
    message: str = ""
    text: str = ""
    wasxfail: str | None = None
    started_at: str = ""
    duration_seconds: float = 0.0
    call_seconds: float = 0.0
    measurements: tuple[JudgedMetric, ...] = ()
    ranks: tuple[RankOutcome, ...] = ()
    culprits: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    sections: tuple[tuple[str, str], ...] = ()
    properties: tuple[tuple[str, str], ...] = ()
    attempts: int = 1
    telemetry: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> GPU telemetry during the call phase, and the increments of its counters."""
    spent: Mapping[str, PartOfTime] = field(default_factory=dict)
    """Part of ``time_budget.PARTS`` -> its time; empty where it is not recorded, as in older journals."""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    """The result of the search for the culprit; empty where there was none."""
    applicable: bool = True
    """False where the declared topology has too few ranks or nodes for it."""
    unjudged: str = ""
    """Why no limit judged its values, or its hardware rates, although the test requested it."""
    too_slow: bool = False
    """Skipped in a rehearsal because this machine is too slow for it."""

    @property
    def for_verdict(self) -> verdict.TestResult:
        """Return the fields that the verdict depends on."""
        return verdict.TestResult(
            nodeid=self.nodeid,
            criterion=self.criterion,
            outcome=self.outcome,
            message=self.message,
            applicable=self.applicable,
            unjudged=self.unjudged,
            too_slow=self.too_slow,
            values=len(self.measurements),
            judged=sum(judged.status == "passed" for judged in self.measurements),
            attempts=self.attempts,
            failed_before=failed_before(self.properties),
        )


def failed_before(properties: Sequence[tuple[str, str]]) -> bool:
    """Return, from a test's properties, whether an earlier attempt missed a limit or found a wrong result."""
    return any(name.startswith("attempt ") and value.startswith("failed") for name, value in properties)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that went wrong outside any test."""

    name: str
    outcome: str = "error"
    message: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """The recorder's note that rank 0 does not answer. The next line of rank 0 ends it."""

    at: str = ""
    message: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class End:
    """The closing line."""

    verdict: str
    exit: int
    at: str = ""
    reason: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    ended_by: str = ""
    """What ended the run before its last test; the verdict may rest on something else."""
    by: str = ""


def read_run(line: Fields) -> Run:
    junit = line.inner("junit")
    defaults = JUnitOptions()
    options = {}
    for name, value in line.mapping("options").items():
        option = value if isinstance(value, dict) else {"value": value}
        options[name] = (str(option.get("value")), str(option.get("origin", "")))
    return Run(
        run_id=line.text("run_id", ""),
        started_at=line.text("started_at", ""),
        argv=tuple(str(word) for word in line.items("argv")),
        device=line.text("device", ""),
        rehearsal=line.flag("rehearsal", False),
        selection=line.flag("selection", False),
        hostname=line.text("hostname", ""),
        launcher=line.text("launcher", ""),
        world_size=line.integer("world_size", 1),
        nnodes=line.integer("nnodes", 1),
        options=options,
        versions=line.texts("versions"),
        plugin_version=line.text("plugin_version", ""),
        junit=JUnitOptions(
            path=junit.optional_text("path"),
            family=junit.text("family", defaults.family),
            suite_name=junit.text("suite_name", defaults.suite_name),
            prefix=junit.text("prefix", defaults.prefix),
            logging=junit.text("logging", defaults.logging),
            log_passing=junit.flag("log_passing", defaults.log_passing),
            duration_report=junit.text("duration_report", defaults.duration_report),
        ),
        merged_from=tuple(
            MergedFrom(
                journal=each.text("journal", ""),
                sha256=each.text("sha256", ""),
                run_id=each.text("run_id", ""),
                started_at=each.text("started_at", ""),
                verdict=each.text("verdict", ""),
                exit=each.integer("exit", 11),
                series=each.text("series", ""),
                number=each.integer("number", 0),
            )
            for each in line.each("merged_from")
        ),
        series=line.text("series", ""),
        number=line.integer("number", 0),
        merged_despite=tuple(str(text) for text in line.items("merged_despite")),
    )


def read_cluster(line: Fields) -> Cluster:
    return Cluster(
        ranks=tuple(
            RankPlace(
                rank=rank.integer("rank", -1),
                host=rank.text("host", ""),
                local_rank=rank.integer("local_rank", 0),
                node_rank=rank.integer("node_rank", 0),
                pid=rank.integer("pid", 0),
                gpu=rank.texts("gpu") or None,
                versions=rank.texts("versions"),
            )
            for rank in line.each("ranks")
        ),
        problems=tuple(str(problem) for problem in line.items("problems")),
    )


def read_limits(line: Fields) -> LimitsInForce:
    return LimitsInForce(
        sku=line.optional_text("sku"),
        gpu_name=line.optional_text("gpu_name"),
        files=tuple((file.text("path", ""), file.text("sha256", "")) for file in line.each("files")),
    )


def read_environment(line: Fields) -> Environment:
    return Environment(
        host=line.text("host", ""),
        system=line.text("system", ""),
        cpus=line.optional_integer("cpus"),
        variables=line.texts("variables"),
    )


def read_test_result(line: Fields, keep_samples: bool) -> TestResult:
    return TestResult(
        nodeid=line.text("nodeid"),
        outcome=line.choice("outcome", OUTCOMES),
        classname=line.text("classname", ""),
        name=line.text("name", ""),
        file=line.text("file", ""),
        line=line.optional_integer("line"),
        criterion=line.optional_text("criterion"),
        phase=line.text("phase", "call"),
        message=line.text("message", ""),
        text=line.text("text", ""),
        wasxfail=line.optional_text("wasxfail"),
        started_at=line.text("started_at", ""),
        duration_seconds=line.number("duration_seconds", 0.0),
        call_seconds=line.number("call_seconds", 0.0),
        measurements=tuple(read_judged(each, keep_samples) for each in line.each("measurements")),
        ranks=tuple(
            RankOutcome(
                rank=rank.integer("rank", -1),
                outcome=rank.text("outcome", "error"),
                message=rank.text("message", ""),
            )
            for rank in line.each("ranks")
        ),
        culprits=line.integers("culprits"),
        released=line.integers("released"),
        sections=line.pairs("sections"),
        properties=line.pairs("properties"),
        attempts=line.integer("attempts", 1),
        telemetry=_telemetry(line, keep_samples),
        spent=_spent(line),
        isolation=line.mapping("isolation"),
        applicable=line.flag("applicable", True),
        unjudged=line.text("unjudged", ""),
        too_slow=line.flag("too_slow", False),
    )


def _telemetry(line: Fields, keep_samples: bool) -> Mapping[int, Mapping[str, Any]]:
    """Return telemetry by rank; for reports, of a test that passed, that of the most relevant rank alone."""
    telemetry = line.mapping_by_rank("telemetry")
    if keep_samples or line.text("outcome") != "passed":
        return telemetry
    rank = most_throttled(telemetry)
    return {} if rank is None else {rank: telemetry[rank]}


def _spent(line: Fields) -> Mapping[str, PartOfTime]:
    spent = line.inner("spent")
    return {name: _part(spent.inner(name)) for name in PARTS if spent.has(name)}


def _part(part: Fields) -> PartOfTime:
    return PartOfTime(
        seconds=part.number("seconds", 0.0),
        most_seconds=part.number("most_seconds", 0.0),
        most_rank=part.integer("most_rank", 0),
    )


def read_workload(line: Fields) -> Workload:
    return Workload(
        profile=line.text("profile", ""),
        file=line.text("file", ""),
        values=line.texts("values"),
        origins=line.texts("origins"),
    )


def read_collected(line: Fields) -> tuple[CollectedTest, ...]:
    return tuple(
        CollectedTest(
            nodeid=test.text("nodeid"),
            classname=test.text("classname", ""),
            name=test.text("name", ""),
            file=test.text("file", ""),
            line=test.optional_integer("line"),
            criterion=test.optional_text("criterion"),
        )
        for test in line.each("tests")
    )


def read_end(line: Fields) -> End:
    return End(
        verdict=line.text("verdict"),
        exit=line.integer("exit", 11),
        at=line.text("at", ""),
        reason=line.text("reason", ""),
        counts={name: int(count) for name, count in line.mapping("counts").items() if isinstance(count, int)},
        not_run=tuple(str(nodeid) for nodeid in line.items("not_run")),
        ended_by=line.text("ended_by", ""),
        by=line.text("by", ""),
    )


def read_started(line: Fields) -> Started:
    return Started(
        nodeid=line.text("nodeid"),
        at=line.text("at", ""),
        deadline_seconds=line.number("deadline_seconds", math.inf),
    )


def read_problem(line: Fields) -> Problem:
    return Problem(
        name=line.text("name", "problem"),
        outcome=line.choice("outcome", ("error", "failed"), "error"),
        message=line.text("message", ""),
        text=line.text("text", ""),
    )


def read_silence(line: Fields) -> Silence:
    return Silence(at=line.text("at", ""), message=line.text("message", ""), text=line.text("text", ""))
