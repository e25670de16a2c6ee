"""Our collective measurements compared with those of nccl-tests, size by size, and the result as text.

Wrong data are always a finding. A figure that is missing on either side is never agreement. Busbw is in GB/s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_gpucluster.analysis.nccl_tests import DTYPES, IN_PLACE, OUT_OF_PLACE, PROGRAMS, Output, Row, short_name
from pytest_gpucluster.analysis.output import Block, Rows
from pytest_gpucluster.analysis.run_view import key_of
from pytest_gpucluster.errors import JournalError, UnitError
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import KIND_NAMES
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.metrics import units
from pytest_gpucluster.reports.tables import percent, quantity
from pytest_gpucluster.text import heads, plural, some_of

AVERAGE, SLOWEST = "average_busbw", "busbw"
"""By the mean of all ranks' times, as nccl-tests prints it with a process for each GPU; or by the slowest rank's, as a
process with several GPUs sees it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One collective in one dtype at one size, by one number of ranks on one number of nodes.

    Attributes:
        size: as in the journal, such as ``1 GB``.
        size_bytes: the same in bytes.
        values: ``SLOWEST`` and ``AVERAGE`` -> rank -> busbw in GB/s.
        inconclusive: why the samples give no conclusion; empty where they do.
    """

    collective: str
    dtype: str
    size: str
    size_bytes: int
    world_size: int
    nnodes: int
    values: Mapping[str, Mapping[int, float]]
    inconclusive: str = ""

    def busbw(self, kind: str, ranks: Iterable[int] | None) -> float | None:
        """Return the lowest of these ranks, in GB/s (None: of all ranks); None where one of them has no value."""
        values = self.values[kind]
        found = [values.get(rank, math.nan) for rank in (values if ranks is None else ranks)]
        return min(found) if found and all(map(math.isfinite, found)) else None

    def __str__(self) -> str:
        shape = f"{plural(self.world_size, 'rank')} on {plural(self.nnodes, 'node')}"
        return f"{self.collective} {self.dtype} by {shape}"


@dataclass(frozen=True, kw_only=True)
class RunCollectives:
    """The collectives of one run.

    Attributes:
        points: all of them.
        ranks_of: short name of a host -> its ranks.
        nccl: version that torch used, or an empty text.
        why_not: why it cannot be compared with nccl-tests; empty where it can.
    """

    points: tuple[Point, ...]
    ranks_of: Mapping[str, Sequence[int]]
    nccl: str
    why_not: str


def collectives_of(journal: Journal) -> RunCollectives:
    """Return the collectives of a journal.

    Raises:
        JournalError: a measurement has labels that this project does not write.
    """
    by_host: dict[str, list[int]] = {}
    for place in journal.ranks:
        by_host.setdefault(short_name(place.host), []).append(place.rank)
    nccl = {place.versions.get("nccl", "") for place in journal.ranks} | {journal.run.versions.get("nccl", "")}
    points = tuple(_points(journal))
    why_not = "" if points else "no busbw of a collective was measured in this run"
    if journal.run.kind or journal.run.device != "cuda":
        what = KIND_NAMES[journal.run.kind] if journal.run.kind else "run on an unknown device"
        why_not = f"the journal is of a {what}, where gloo replaces NCCL"
    return RunCollectives(points=points, ranks_of=by_host, nccl=", ".join(sorted(filter(None, nccl))), why_not=why_not)


def _points(journal: Journal) -> Iterator[Point]:
    for result in journal.results:
        by_key = {key_of(judged): judged for judged in result.measurements}
        for (metric, key), judged in by_key.items():
            collective, _, kind = metric.removeprefix("nccl.").partition(".")
            if collective not in PROGRAMS or kind != SLOWEST:
                continue
            average = by_key.get((f"nccl.{collective}.{AVERAGE}", key))
            labels = judged.labels
            try:
                yield Point(
                    collective=collective,
                    dtype=labels["dtype"],
                    size=labels["size"],
                    size_bytes=round(units.parse(labels["size"], like="B").to("B")),
                    world_size=int(labels["world_size"]),
                    nnodes=int(labels["nnodes"]),
                    values={SLOWEST: _values(judged), AVERAGE: _values(average)},
                    inconclusive=judged.inconclusive,
                )
            except (KeyError, ValueError, UnitError) as error:
                raise JournalError(
                    f"{result.nodeid}: {metric} has labels that this project does not write: {error}"
                ) from None


def _values(judged: JudgedMetric | None) -> dict[int, float]:
    if judged is None:
        return {}
    return {rank: units.convert(value, judged.unit, "GB/s") for rank, value in judged.values.items()}


BEYOND_RATIO = 0.05
"""Two programs that call NCCL alike on the same GPUs differ by less; a choice, as are the 3 % of a comparison of runs:
figures of nccl-tests itself scatter by a percent or two from run to run."""

DIFFERS, WRONG, MISSING, NOT_COMPARABLE, AGREES = "differs", "wrong data", "missing", "not comparable", "agrees"
KINDS = (WRONG, DIFFERS, NOT_COMPARABLE, MISSING, AGREES)
"""The worst first."""

AGREEMENT, FINDING, UNDECIDED, NOTHING = "agreement", "finding", "undecided", "nothing compared"

_ROUNDING_BYTES = 16
"""Parts of ranks are rounded down to whole 16 bytes. Source: nccl-tests, src/all_gather.cu."""


@dataclass(frozen=True, kw_only=True)
class SizeComparison:
    """One size: busbw of both, and ours over theirs, less 1."""

    point: Point
    kind: str
    ours_gb_per_second: float | None = None
    nccl_tests_gb_per_second: float | None = None
    difference_ratio: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Crosscheck:
    """The comparison at all sizes.

    Attributes:
        beyond: the ratio beyond which a difference is a finding.
        rows: the sizes, in the journal's order.
        wrong: outputs with wrong data, one text each.
        unmatched: outputs without a counterpart in the journal, one text each.
        notes: remarks that decide nothing.
        partial: sizes that nccl-tests has not measured decide nothing.
    """

    beyond: float
    rows: tuple[SizeComparison, ...]
    wrong: tuple[str, ...]
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]
    partial: bool

    @property
    def counts(self) -> dict[str, int]:
        """Return kind -> number of sizes."""
        kinds = [row.kind for row in self.rows]
        return {kind: kinds.count(kind) for kind in KINDS if kind in kinds}

    @property
    def answer(self) -> str:
        """Return ``FINDING`` before ``NOTHING``, that before ``UNDECIDED``, and only then ``AGREEMENT``."""
        kinds = self.counts.keys()
        if self.wrong or kinds & {WRONG, DIFFERS}:
            return FINDING
        if AGREES not in kinds:
            return NOTHING
        if NOT_COMPARABLE in kinds or (not self.partial and (MISSING in kinds or self.unmatched)):
            return UNDECIDED
        return AGREEMENT


def compare_outputs(
    run: RunCollectives,
    outputs: Sequence[Output],
    *,
    beyond: float = BEYOND_RATIO,
    partial: bool = False,
    other_hosts: bool = False,
) -> Crosscheck:
    """Compare a run's collectives with outputs of nccl-tests.

    Args:
        run: its collectives.
        outputs: of nccl-tests, each with its collective.
        beyond: the ratio beyond which a difference is a finding.
        partial: sizes of one side only do not make the answer undecided.
        other_hosts: the hosts have other names in the journal, such as those of pods.
    """
    rows: list[SizeComparison] = []
    for point in run.points:
        matching = [output for output in outputs if _matches(point, output)]
        sizes = [(output, row) for output in matching for row in output.rows if _is_size(point, row)]
        if sizes:
            nearest = max(row.size_bytes for _, row in sizes)
            # Of the same size several times, as with `-N`, the worst decides.
            found = [
                _compare(point, *each, run, beyond, other_hosts) for each in sizes if each[1].size_bytes == nearest
            ]
            rows.append(min(found, key=lambda each: KINDS.index(each.kind)))
        elif matching:
            rows.append(SizeComparison(point=point, kind=MISSING, why="nccl-tests has not measured this size"))
    wrong = [
        f"{output.collective or 'an unknown collective'}: {output.wrong:g} wrong elements ({output.origin})"
        for output in outputs
        if output.wrong
    ]
    unmatched = [
        f"{output.origin}: {output.collective or 'an unknown collective'} in "
        f"{', '.join(dict.fromkeys(row.dtype for row in output.rows)) or 'no dtype at all'} by "
        f"{plural(output.ranks, 'rank')} on {plural(len(output.hosts), 'node')}: no counterpart in the journal"
        for output in outputs
        if not any(_matches(point, output) for point in run.points)
    ]
    return Crosscheck(
        beyond=beyond,
        rows=tuple(rows),
        wrong=tuple(wrong),
        unmatched=tuple(unmatched),
        notes=tuple(dict.fromkeys(_notes(run, outputs, rows, other_hosts))),
        partial=partial,
    )


def _matches(point: Point, output: Output) -> bool:
    same = (output.collective, output.ranks, len(output.hosts)) == (point.collective, point.world_size, point.nnodes)
    return same and any(row.dtype == DTYPES.get(point.dtype, point.dtype) for row in output.rows)


def _is_size(point: Point, row: Row) -> bool:
    """Return whether a line is of this size, or a little less, where ranks' parts were rounded down."""
    short = point.size_bytes - row.size_bytes
    return row.dtype == DTYPES.get(point.dtype, point.dtype) and 0 <= short < point.world_size * _ROUNDING_BYTES


def _compare(
    point: Point, output: Output, row: Row, run: RunCollectives, beyond: float, other_hosts: bool
) -> SizeComparison:
    wrong = max(figure.wrong or 0 for figure in row.figures.values())
    if wrong:
        return SizeComparison(point=point, kind=WRONG, why=f"{wrong:g} wrong elements")
    unknown = [host for host in output.hosts if host not in run.ranks_of]
    if unknown and not other_hosts:
        known = some_of(list(run.ranks_of), 4) or "none"
        why = f"it ran on {some_of(unknown, 4)}; the journal's hosts are {known}"
        return SizeComparison(point=point, kind=NOT_COMPARABLE, why=why)
    ranks = None if unknown else [rank for host in output.hosts for rank in run.ranks_of[host]]
    ours = point.busbw(AVERAGE if output.ranks == output.processes else SLOWEST, ranks)
    # As we measure: all-reduce in place, all others out of place.
    figure = row.figures[IN_PLACE if point.collective == "all_reduce" else OUT_OF_PLACE]
    theirs = figure.busbw if math.isfinite(figure.busbw) else None
    found = SizeComparison(point=point, kind=NOT_COMPARABLE, ours_gb_per_second=ours, nccl_tests_gb_per_second=theirs)
    if point.inconclusive:
        return replace(found, why=f"ours is inconclusive: {point.inconclusive}")
    if ours is None or ours <= 0:
        return replace(found, why="ours has no value on these ranks")
    if theirs is None or theirs <= 0:
        return replace(found, why=f"nccl-tests reports {figure.busbw:g} GB/s")
    if figure.resolution > beyond * theirs:
        return replace(found, why=f"{theirs:g} GB/s is printed with too few digits")
    if figure.wrong is None:
        return replace(found, why="nccl-tests has not checked the data; run it without -c 0")
    difference = ours / theirs - 1
    why = "ours is lower" if difference < -beyond else "ours is higher" if difference > beyond else ""
    return replace(found, kind=DIFFERS if why else AGREES, difference_ratio=difference, why=why)


def _notes(
    run: RunCollectives, outputs: Sequence[Output], rows: Sequence[SizeComparison], other_hosts: bool
) -> Iterator[str]:
    for version in sorted({output.nccl for output in outputs} - {"", run.nccl}):
        mine = f"torch's is {run.nccl}" if run.nccl else "torch's is not in the journal"
        yield f"nccl-tests used NCCL {version}; {mine}: another version may be faster or slower"
    for output in outputs if other_hosts else ():
        unknown = [host for host in output.hosts if host not in run.ranks_of]
        if unknown:
            yield f"{some_of(unknown, 4)}: no such host in the journal; compared with the worst rank of all"
    compared = {str(row.point) for row in rows}
    others = [kind for kind in dict.fromkeys(map(str, run.points)) if kind not in compared]
    if others:  # one node's result states nothing about several
        yield f"the journal has more, which is not compared: {some_of(others, 6, '; ')}"


def program_commands(points: Iterable[Point]) -> list[str]:
    """Return the commands of nccl-tests that measure these points, each for a file; with ``-c 1`` all data are checked.

    On one node a process has all GPUs; on several the program is built with MPI, and has a process for each GPU.
    """
    commands: dict[str, None] = {}
    for point in points:
        ranks, size = point.world_size, point.size_bytes
        launcher, gpus = ("", ranks) if point.nnodes == 1 else (f"mpirun -np {ranks} ", 1)
        options = f"-b {size} -e {size} -g {gpus} -d {DTYPES.get(point.dtype, point.dtype)} -c 1"
        file = f"{point.collective}-{point.dtype}-{ranks}-{point.size.replace(' ', '')}.txt"
        commands[f"{launcher}{PROGRAMS[point.collective]} {options} > {file}"] = None
    return list(commands)


_HEADS = heads(
    "collective, dtype, size, ranks, ours, nccl-tests, difference, ", right="ranks, ours, nccl-tests, difference"
)


def crosscheck_blocks(found: Crosscheck) -> Iterator[Block]:
    """Yield the answer, the notes, and a row for each size; busbw is in GB/s."""
    counts = ", ".join(f"{number} {'agree' if kind == AGREES else kind}" for kind, number in found.counts.items())
    beyond = f"{100 * found.beyond:g} %"
    answers = {
        FINDING: f"busbw differs by more than {beyond}" if DIFFERS in found.counts else "nccl-tests found wrong data",
        NOTHING: "no size has a figure on both sides",
        AGREEMENT: f"busbw differs by no more than {beyond} at any size",
        UNDECIDED: f"nothing differs by more than {beyond}, but not everything was compared",
    }
    yield f"{found.answer.upper()}: {answers[found.answer]} ({counts or 'no size compared'})"
    for mark, texts in (("wrong data", found.wrong), ("not compared", found.unmatched), ("note", found.notes)):
        yield from (f"{mark}: {text}" for text in texts)
    rows = sorted(found.rows, key=lambda row: KINDS.index(row.kind))
    if rows:
        yield ""
        cells = [(_cells(row), [row.why] if row.why else []) for row in rows]
        yield Rows(caption="Sizes, the worst first", heads=_HEADS, rows=cells)


def _cells(row: SizeComparison) -> tuple[str, ...]:
    point = row.point
    busbw = (
        "" if each is None else quantity(each, "") for each in (row.ours_gb_per_second, row.nccl_tests_gb_per_second)
    )
    difference = "" if row.difference_ratio is None else percent(row.difference_ratio)
    return (point.collective, point.dtype, point.size, str(point.world_size), *busbw, difference, row.kind)
