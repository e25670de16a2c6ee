"""Our collective measurements compared with those of nccl-tests, size by size, and the result as text and JSON.

Wrong data are always a finding. A figure that is missing on either side is never agreement. Busbw is in GB/s;
docs/compare.md describes the keys of the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpucluster.analysis.nccl_tests import (
    DTYPES,
    IN_PLACE,
    OUT_OF_PLACE,
    PROGRAMS,
    Output,
    Row,
    ranges,
    short_name,
    size_arguments,
)
from pytest_gpucluster.analysis.output import json_document, table
from pytest_gpucluster.analysis.run_view import key_of
from pytest_gpucluster.errors import JournalError, UnitError
from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.metrics import units
from pytest_gpucluster.reports.tables import percent, quantity
from pytest_gpucluster.text import Column, paragraph, plural, some_of

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
    ranks: int
    nnodes: int
    values: Mapping[str, Mapping[int, float]]
    inconclusive: str = ""

    def busbw(self, kind: str, ranks: Iterable[int] | None) -> float | None:
        """Return the lowest of these ranks, in GB/s (None: of all ranks); None where one of them has no value."""
        values = self.values.get(kind, {})
        found = [values.get(rank, math.nan) for rank in (values if ranks is None else ranks)]
        return min(found) if found and all(map(math.isfinite, found)) else None


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
    ranks_of: Mapping[str, tuple[int, ...]]
    nccl: str = ""
    why_not: str = ""


def collectives_of(journal: Journal) -> RunCollectives:
    """Return the collectives of a journal.

    Raises:
        JournalError: a measurement has labels that this project does not write.
    """
    by_host: dict[str, list[int]] = {}
    for place in journal.ranks:
        by_host.setdefault(short_name(place.host), []).append(place.rank)
    nccl = {place.versions.get("nccl", "") for place in journal.ranks} | {journal.run.versions.get("nccl", "")}
    why_not = ""
    if journal.run.rehearsal or journal.run.device != "cuda":
        why_not = (
            f"the journal is of a rehearsal on {journal.run.device or 'an unknown device'}, where gloo replaces NCCL"
        )
    return RunCollectives(
        points=tuple(_points(journal)),
        ranks_of={host: tuple(ranks) for host, ranks in by_host.items()},
        nccl=", ".join(sorted(filter(None, nccl))),
        why_not=why_not,
    )


def _points(journal: Journal) -> Iterator[Point]:
    for result in journal.results:
        by_key = {key_of(judged): judged for judged in result.measurements}
        for (metric, labels), judged in by_key.items():
            collective, _, kind = metric.removeprefix("nccl.").partition(".")
            if collective in PROGRAMS and kind == SLOWEST:
                average = by_key.get((f"nccl.{collective}.{AVERAGE}", labels))
                yield _point(collective, judged, average, result.nodeid)


def _point(collective: str, judged: JudgedMetric, average: JudgedMetric | None, nodeid: str) -> Point:
    labels = judged.labels
    try:
        return Point(
            collective=collective,
            dtype=labels["dtype"],
            size=labels["size"],
            size_bytes=round(units.parse(labels["size"], like="B").to("B")),
            ranks=int(labels["world_size"]),
            nnodes=int(labels["nnodes"]),
            values={SLOWEST: _values(judged), AVERAGE: _values(average) if average is not None else {}},
            inconclusive=judged.inconclusive,
        )
    except (KeyError, ValueError, UnitError) as error:
        raise JournalError(f"{nodeid}: {judged.metric} has labels that this project does not write: {error}") from None


def _values(judged: JudgedMetric) -> dict[int, float]:
    return {rank: units.convert(value, judged.unit, "GB/s") for rank, value in judged.values.items()}


BEYOND_RATIO = 0.05
"""Two programs that call NCCL alike on the same GPUs differ by less; a choice, as are the 3 % of a comparison of runs:
figures of nccl-tests itself scatter by a percent or two from run to run."""

DIFFERS, WRONG, MISSING, NOT_COMPARABLE, AGREES = "differs", "wrong data", "missing", "not comparable", "agrees"
FINDINGS = (DIFFERS, WRONG)

AGREEMENT, FINDING, UNDECIDED, NOTHING = "agreement", "finding", "undecided", "nothing compared"

_ROUNDING_BYTES = 16
"""Parts of ranks are rounded down to whole 16 bytes. Source: nccl-tests, src/all_gather.cu."""


@dataclass(frozen=True, kw_only=True)
class SizeComparison:
    """One size. ``ours`` and ``theirs`` are busbw in GB/s; ``difference`` is ours over theirs, less 1."""

    point: Point
    kind: str
    ours: float | None = None
    theirs: float | None = None
    difference: float | None = None
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
    wrong: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False

    def of_kind(self, *kinds: str) -> tuple[SizeComparison, ...]:
        """Return the sizes of these kinds."""
        return tuple(row for row in self.rows if row.kind in kinds)

    @property
    def answer(self) -> str:
        """Return ``FINDING`` before ``NOTHING``, that before ``UNDECIDED``, and only then ``AGREEMENT``."""
        if self.wrong or self.of_kind(*FINDINGS):
            return FINDING
        if not self.of_kind(AGREES):
            return NOTHING
        if self.of_kind(NOT_COMPARABLE) or (not self.partial and (self.of_kind(MISSING) or self.unmatched)):
            return UNDECIDED
        return AGREEMENT


def compare_outputs(
    collectives: RunCollectives,
    outputs: Sequence[Output],
    *,
    beyond: float = BEYOND_RATIO,
    partial: bool = False,
    other_hosts: bool = False,
) -> Crosscheck:
    """Compare a run's collectives with outputs of nccl-tests.

    Args:
        collectives: of the run.
        outputs: of nccl-tests, each with its collective.
        beyond: the ratio beyond which a difference is a finding.
        partial: sizes of one side only do not make the answer undecided.
        other_hosts: the hosts have other names in the journal, such as those of pods.
    """
    rows = [
        _compared(point, matching, collectives, beyond, other_hosts)
        for point in collectives.points
        if (matching := [output for output in outputs if _matches(point, output)])
    ]
    return Crosscheck(
        beyond=beyond,
        rows=tuple(rows),
        wrong=tuple(filter(None, map(_wrong_text, outputs))),
        unmatched=tuple(_unmatched(collectives, outputs)),
        notes=tuple(dict.fromkeys([*_notes(collectives, outputs, other_hosts), *_left_out(collectives, rows)])),
        partial=partial,
    )


def _matches(point: Point, output: Output) -> bool:
    dtype = DTYPES.get(point.dtype, point.dtype)
    same = (output.collective, output.ranks, len(output.hosts)) == (point.collective, point.ranks, point.nnodes)
    return same and any(row.dtype == dtype for row in output.rows)


def _compared(
    point: Point, outputs: Sequence[Output], collectives: RunCollectives, beyond: float, other_hosts: bool
) -> SizeComparison:
    rows = [(output, row) for output in outputs for row in output.rows if _is_size(point, row)]
    if not rows:
        return SizeComparison(point=point, kind=MISSING, why="nccl-tests has not measured this size")
    nearest = max(row.size_bytes for _, row in rows)
    # Of the same size several times, as with `-N`, the worst decides.
    compared = [
        _compare(point, output, row, collectives, beyond, other_hosts)
        for output, row in rows
        if row.size_bytes == nearest
    ]
    return min(compared, key=lambda each: _ORDER.index(each.kind))


_ORDER = (WRONG, DIFFERS, NOT_COMPARABLE, MISSING, AGREES)


def _is_size(point: Point, row: Row) -> bool:
    """Return whether a line is of this size, or a little less, where ranks' parts were rounded down."""
    short = point.size_bytes - row.size_bytes
    return row.dtype == DTYPES.get(point.dtype, point.dtype) and 0 <= short < point.ranks * _ROUNDING_BYTES


def _compare(
    point: Point, output: Output, row: Row, collectives: RunCollectives, beyond: float, other_hosts: bool
) -> SizeComparison:
    wrong = max((figure.wrong or 0 for figure in row.figures.values()), default=0)
    if wrong:
        return SizeComparison(point=point, kind=WRONG, why=f"{wrong:g} wrong elements")
    # As we measure: all-reduce in place, all others out of place.
    half = IN_PLACE if point.collective == "all_reduce" else OUT_OF_PLACE
    figure = row.figures.get(half)
    kind = AVERAGE if output.ranks == output.processes else SLOWEST
    ranks, other_place = _ranks_of(output, collectives)
    if other_place and not other_hosts:
        return SizeComparison(point=point, kind=NOT_COMPARABLE, why=other_place)
    mine = point.busbw(kind, ranks)
    theirs = None if figure is None or not math.isfinite(figure.busbw) else figure.busbw
    found = SizeComparison(point=point, kind=NOT_COMPARABLE, ours=mine, theirs=theirs)
    why = ""
    if point.inconclusive:
        why = f"ours is inconclusive: {point.inconclusive}"
    elif mine is None or mine <= 0:
        why = "ours has no value on these ranks"
    elif figure is None:
        why = f"nccl-tests has no {half} figure"
    elif theirs is None or theirs <= 0:
        why = f"nccl-tests reports {figure.busbw:g} GB/s"
    elif figure.resolution > beyond * theirs:
        why = f"{theirs:g} GB/s is printed with too few digits"
    elif figure.wrong is None:
        why = "nccl-tests has not checked the data; run it without -c 0"
    else:
        difference = mine / theirs - 1
        why = "ours is lower" if difference < -beyond else "ours is higher" if difference > beyond else ""
        return replace(found, kind=DIFFERS if why else AGREES, difference=difference, why=why)
    return replace(found, why=why)


def _ranks_of(output: Output, collectives: RunCollectives) -> tuple[list[int] | None, str]:
    """Return our ranks on the output's hosts, or None for all, with why the hosts differ."""
    unknown = [host for host in output.hosts if host not in collectives.ranks_of]
    if unknown:
        known = ", ".join(list(collectives.ranks_of)[:4]) or "none"
        return None, f"it ran on {', '.join(unknown[:4])}; the journal's hosts are {known}"
    return sorted(rank for host in output.hosts for rank in collectives.ranks_of[host]), ""


def _wrong_text(output: Output) -> str:
    if not output.wrong:
        return ""
    what = f"{output.collective}: " if output.collective else ""
    return f"{what}{output.wrong:g} wrong elements ({output.origin})"


def _notes(collectives: RunCollectives, outputs: Sequence[Output], other_hosts: bool) -> list[str]:
    notes = []
    theirs = {output.nccl for output in outputs if output.nccl}
    for version in sorted(theirs - {collectives.nccl}):
        mine = f"torch's is {collectives.nccl}" if collectives.nccl else "torch's is not in the journal"
        notes.append(f"nccl-tests used NCCL {version}; {mine}: another version may be faster or slower")
    for output in outputs:
        if other_hosts and any(host not in collectives.ranks_of for host in output.hosts):
            hosts = ", ".join(output.hosts[:4])
            notes.append(f"{hosts}: no such host in the journal; compared with the worst rank of all")
    return notes


def _left_out(collectives: RunCollectives, rows: Sequence[SizeComparison]) -> Iterator[str]:
    """Yield a note on the collectives that were not compared: one node's result states nothing about several."""
    compared = {_kind(row.point) for row in rows}
    others = [kind for kind in dict.fromkeys(map(_kind, collectives.points)) if kind not in compared]
    if others:
        yield f"the journal has more, which is not compared: {some_of(others, 6, '; ')}"


def _kind(point: Point) -> str:
    return f"{point.collective} {point.dtype} by {plural(point.ranks, 'rank')} on {plural(point.nnodes, 'node')}"


def _unmatched(collectives: RunCollectives, outputs: Sequence[Output]) -> Iterator[str]:
    for output in outputs:
        if not any(_matches(point, output) for point in collectives.points):
            dtypes = ", ".join(dict.fromkeys(row.dtype for row in output.rows)) or "no dtype at all"
            by = f"by {plural(output.ranks, 'rank')} on {plural(len(output.hosts), 'node')}"
            what = f"{output.collective or 'an unknown collective'} in {dtypes} {by}"
            yield f"{output.origin}: {what}: no counterpart in the journal"


def program_commands(points: Collection[Point]) -> Iterator[str]:
    """Yield the commands of nccl-tests that measure these points, each for a file; with ``-c 1`` all data are checked.

    On one node a process has all GPUs; on several the program is built with MPI, and has a process for each GPU.
    """
    groups: dict[tuple[str, str, int, int], set[int]] = {}
    for point in points:
        key = point.collective, point.dtype, point.ranks, point.nnodes
        groups.setdefault(key, set()).add(point.size_bytes)
    for (collective, dtype, ranks, nnodes), sizes in groups.items():
        launcher, gpus = ("", ranks) if nnodes == 1 else (f"mpirun -np {ranks} ", 1)
        for number, each in enumerate(ranges(sizes), start=1):
            arguments = [*size_arguments(each), "-g", str(gpus), "-d", DTYPES.get(dtype, dtype), "-c", "1"]
            file = f"{collective}-{dtype}-{ranks}-{number}.txt"
            yield f"{launcher}{PROGRAMS[collective]} {' '.join(arguments)} > {file}"


_HEADS = (
    Column(title="collective"),
    Column(title="dtype"),
    Column(title="size"),
    Column(title="ranks", is_right=True),
    Column(title="ours", is_right=True),
    Column(title="nccl-tests", is_right=True),
    Column(title="difference", is_right=True),
    Column(title=""),
)


def crosscheck_table(found: Crosscheck, width: int = 80) -> str:
    """Return the answer, the notes, and a line for each size; busbw is in GB/s.

    Args:
        found: the crosscheck.
        width: columns of the terminal.
    """
    lines = paragraph(answer_text(found), width, rest="  ")
    for mark, texts in (("wrong data", found.wrong), ("not compared", found.unmatched), ("note", found.notes)):
        for text in texts:
            lines += paragraph(f"{mark}: {text}", width, rest="  ")
    rows = sorted(found.rows, key=lambda row: 0 if row.kind in FINDINGS else 2 if row.kind == AGREES else 1)
    if rows:
        lines += ["", *table(_HEADS, ((_cells(row), [row.why] if row.why else []) for row in rows), width)]
    return "\n".join(lines) + "\n"


def answer_text(found: Crosscheck) -> str:
    """Return the answer in one sentence."""
    counts = {kind: len(found.of_kind(kind)) for kind in (*FINDINGS, MISSING, NOT_COMPARABLE, AGREES)}
    of = ", ".join(f"{many} {'agree' if kind == AGREES else kind}" for kind, many in counts.items() if many)
    beyond = f"{100 * found.beyond:g} %"
    if found.answer == FINDING:
        what = f"busbw differs by more than {beyond}" if counts[DIFFERS] else "nccl-tests found wrong data"
        return f"FINDING: {what} ({of or 'no size compared'})"
    if found.answer == NOTHING:
        return f"NOTHING COMPARED: no size has a figure on both sides ({of or 'the journal has none'})"
    if found.answer == AGREEMENT:
        return f"AGREEMENT: busbw differs by no more than {beyond} at any size ({of})"
    return f"UNDECIDED: nothing differs by more than {beyond}, but not everything was compared ({of})"


def _cells(row: SizeComparison) -> tuple[str, ...]:
    point = row.point
    figures = (quantity(value, "") if value is not None else "" for value in (row.ours, row.theirs))
    difference = "" if row.difference is None else percent(row.difference)
    return (point.collective, point.dtype, point.size, str(point.ranks), *figures, difference, row.kind)


SCHEMA_VERSION = 1


def crosscheck_document(found: Crosscheck, *, journal: str, outputs: tuple[Output, ...], exit_code: int) -> str:
    """Return the JSON text. Of nccl-tests' files only the figures are included: they contain the environment."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "answer": found.answer,
        "exit": exit_code,
        "beyond_ratio": found.beyond,
        "partial": found.partial,
        "journal": journal,
        "outputs": [
            {
                "origin": output.origin,
                "collective": output.collective,
                "ranks": output.ranks,
                "processes": output.processes,
                "hosts": list(output.hosts),
                "nccl": output.nccl,
                "wrong": output.wrong,
            }
            for output in outputs
        ],
        "wrong": list(found.wrong),
        "unmatched": list(found.unmatched),
        "notes": list(found.notes),
        "sizes": [_size(row) for row in found.rows],
    }
    return json_document(content)


def _size(row: SizeComparison) -> dict[str, Any]:
    point = row.point
    return {
        "collective": point.collective,
        "dtype": point.dtype,
        "size": point.size,
        "size_bytes": point.size_bytes,
        "world_size": point.ranks,
        "nnodes": point.nnodes,
        "kind": row.kind,
        "ours_gb_per_second": row.ours,
        "nccl_tests_gb_per_second": row.theirs,
        "difference_ratio": row.difference,
        "why": row.why,
    }
