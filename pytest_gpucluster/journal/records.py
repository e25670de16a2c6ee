"""The lines of a journal as typed values. The names of the fields are the keys of the JSON objects."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.judge.misses import most_throttled
from pytest_gpucluster.metrics.codec import AnyText, converter, read
from pytest_gpucluster.metrics.time_budget import PARTS

_PARAMETERS = re.compile(r"\[.*$", re.DOTALL)
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


def _convert_options(value: object) -> Mapping[str, tuple[str, str]]:
    options = converter(Mapping[str, Any])(value)
    pairs = {name: each if isinstance(each, dict) else {"value": each} for name, each in options.items()}
    return {name: (str(pair.get("value")), str(pair.get("origin", ""))) for name, pair in pairs.items()}


REHEARSAL, SIMULATED = "REHEARSAL", "SIMULATED"
KINDS = {"cuda": "", "cpu": REHEARSAL, "simulated": SIMULATED}
"""Device -> kind of run: what stands before its verdict wherever that is shown; "" where it is about hardware."""
KIND_NAMES = {"": "run on GPUs", REHEARSAL: "REHEARSAL on cpu", SIMULATED: "SIMULATED cluster"}
"""Kind of run -> its name, to follow "a"."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The first line: options, host and versions."""

    run_id: str = ""
    started_at: str = ""
    argv: tuple[str, ...] = ()
    device: str = ""
    rehearsal: bool = False
    selection: bool = False
    hostname: str = ""
    launcher: str = ""
    world_size: int = 1
    nnodes: int = 1
    options: Annotated[Mapping[str, tuple[str, str]], _convert_options] = field(default_factory=dict)
    """Option name -> (value, origin)."""
    versions: Mapping[str, AnyText] = field(default_factory=dict)
    plugin_version: str = ""
    junit: JUnitOptions = field(default_factory=JUnitOptions)
    merged_from: tuple[MergedFrom, ...] = ()
    """The runs that were merged, the oldest first; empty for a run of its own."""

    def option(self, name: str) -> str:
        """Return the value of an option; "" where it was not given."""
        value, _ = self.options.get(name, ("None", ""))
        return "" if value == "None" else value

    @property
    def kind(self) -> str:
        """Return "REHEARSAL" or "SIMULATED", or "" for a run on GPUs (``KINDS``)."""
        return REHEARSAL if self.rehearsal else KINDS.get(self.device, "")

    @property
    def required(self) -> tuple[str, ...]:
        """Return the criteria that the operator required by name."""
        names = [name.strip() for name in self.option("require").split(",")]
        return tuple(dict.fromkeys(filter(None, names)))

    @property
    def title(self) -> str:
        """Return the run's name in messages: its id and start time."""
        return f"run {self.run_id or 'without a name'} of {self.started_at}"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one rank runs."""

    rank: int
    host: str = ""
    local_rank: int = 0
    node_rank: int = 0
    pid: int = 0
    gpu: Mapping[str, AnyText] | None = None
    """index, uuid, pci_bus_id and name, as text; None on cpu."""
    versions: Mapping[str, AnyText] = field(default_factory=dict)

    @property
    def uuid(self) -> str:
        """Return the UUID of the GPU; "" where it is unknown."""
        return (self.gpu or {}).get("uuid", "")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Every rank that reported, and the problems that preflight found."""

    ranks: tuple[RankPlace, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LimitFile:
    """A file of limits, and the SHA-256 of its content; empty where it could not be read again."""

    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class LimitsInForce:
    """The limits that the values were compared with."""

    sku: str | None = None
    """None: no SKU of the files matches this GPU, so nothing could be judged."""
    gpu_name: str | None = None
    """As NVML names it; None on cpu."""
    files: tuple[LimitFile, ...] = ()
    """Later ones overlay earlier ones."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The first rank's system, and the environment variables that affect measurements."""

    host: str = ""
    system: str = ""
    cpus: int | None = None
    variables: Mapping[str, AnyText] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CollectedTest:
    """A test that is to run. Its names are the same at every world size."""

    nodeid: str
    classname: str = ""
    name: str = ""
    file: str = ""
    line: int | None = None
    criterion: str | None = None

    @classmethod
    def of(cls, nodeid: str, location: tuple[str, int | None, str], criterion: str | None = None) -> CollectedTest:
        """Return a test with class name and function name as in pytest's own JUnit file."""
        path, _, rest = nodeid.partition("::")
        parameters = "".join(_PARAMETERS.findall(rest)[:1])
        *classes, function = _PARAMETERS.sub("", rest).split("::")
        module = re.sub(r"\.py$", "", path).replace("/", ".")
        return cls(
            nodeid=nodeid,
            classname=".".join([module, *classes]),
            name=f"{function}{parameters}" if function else module,
            file=location[0],
            line=(location[1] or 0) + 1,
            criterion=criterion,
        )


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The tests that are to run."""

    tests: tuple[CollectedTest, ...] = ()
    manifest: bool = False
    """A criteria.txt next to them lists what an acceptance needs; absent criteria are among the results."""


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


def _convert_spent(value: object) -> Mapping[str, PartOfTime]:
    """Return the known parts: a later version may have others, in another form."""
    known = {part: each for part, each in value.items() if part in PARTS} if isinstance(value, dict) else value
    spent: Mapping[str, PartOfTime] = converter(Mapping[str, PartOfTime])(known)
    return spent


@dataclass(frozen=True, kw_only=True)
class TestResult(CollectedTest):
    """A finished test, merged over all ranks."""

    __test__ = False  # pytest must not take it for a test class

    outcome: Annotated[str, OUTCOMES]
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
    sections: tuple[tuple[AnyText, AnyText], ...] = ()
    properties: tuple[tuple[AnyText, AnyText], ...] = ()
    attempts: int = 1
    telemetry: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> GPU telemetry during the call phase, and the increments of its counters."""
    spent: Annotated[Mapping[str, PartOfTime], _convert_spent] = field(default_factory=dict)
    """Part of ``time_budget.PARTS`` -> its time; empty where it is not recorded, as in older journals."""
    isolation: Mapping[str, Any] = field(default_factory=dict)
    """The result of the search for the culprit; empty where there was none."""
    applicable: bool = True
    """False where the declared topology has too few ranks or nodes for it."""
    unjudged: str = ""
    """Why no limit judged its values, or its hardware rates, although the test requested it."""
    too_slow: bool = False
    """Skipped in a rehearsal because this machine is too slow for it."""


def failed_before(properties: Sequence[tuple[str, str]]) -> bool:
    """Return, from a test's properties, whether an earlier attempt missed a limit or found a wrong result."""
    return any(name.startswith("attempt ") and value.startswith("failed") for name, value in properties)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A fault outside any test."""

    name: str = "problem"
    outcome: Annotated[str, ("error", "failed")] = "error"
    message: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Where limits or workload demanded less than the shipped ones."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Property:
    """A property of the whole run."""

    name: str
    value: AnyText = ""


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


MOST_TELEMETRY = 128
"""Ranks with their telemetry over the whole run in the page: 16 nodes of 8. There may be thousands."""


def read_test_result(line: Mapping[str, Any], where: str, *, keep_samples: bool) -> TestResult:
    """Read a test's line.

    Without ``keep_samples`` only what reports show is kept: of values that passed or are recorded only, and of tests
    that passed on more than ``MOST_TELEMETRY`` ranks, the telemetry of one, the worst or the most throttled.

    Raises:
        JournalError: as of ``codec.read``.
    """
    if keep_samples:
        return read(TestResult, line, where)
    result = read(TestResult, without_samples(line), where)
    measurements = tuple(map(_without_other_ranks, result.measurements))
    telemetry = result.telemetry
    if result.outcome == "passed" and len(telemetry) > MOST_TELEMETRY:
        rank = most_throttled(telemetry)
        telemetry = {} if rank is None else {rank: telemetry[rank]}
    return replace(result, measurements=measurements, telemetry=telemetry)


def _without_other_ranks(judged: JudgedMetric) -> JudgedMetric:
    if judged.status not in ("passed", "recorded"):
        return judged
    telemetry = {rank: values for rank, values in judged.telemetry.items() if rank == judged.worst_rank}
    return replace(judged, intervals={}, telemetry=telemetry)


def without_samples(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line without the samples behind its values."""
    measurements = line.get("measurements")
    if not isinstance(measurements, (list, tuple)):
        return dict(line)
    slim = [{**judged, "samples": {}} if isinstance(judged, Mapping) else judged for judged in measurements]
    return {**line, "measurements": slim}
