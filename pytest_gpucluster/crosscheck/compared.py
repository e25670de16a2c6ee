"""Our figures beside those of nccl-tests, size by size: what differs, and what could not be compared.

Wrong data anywhere are a finding. A figure that is missing on either side is never agreement.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_gpucluster.crosscheck.nccl_output import DTYPES, IN_PLACE, OUT_OF_PLACE, Figure, Output, Row
from pytest_gpucluster.crosscheck.ours import AVERAGE, SLOWEST, Ours, Point

BEYOND_RATIO = 0.05
"""Two programs that call NCCL alike on the same GPUs differ by less; a choice, as are the 3 % of a comparison of runs:
figures of nccl-tests itself scatter by a percent or two from run to run."""

DIFFERS, WRONG, MISSING, NOT_COMPARABLE, AGREES = "differs", "wrong data", "missing", "not comparable", "agrees"
FINDINGS = (DIFFERS, WRONG)

AGREEMENT, FINDING, UNDECIDED, NOTHING = "agreement", "finding", "undecided", "nothing compared"

_MOST_TOLD = 6
_ROUNDING_BYTES = 16
"""Parts of ranks are rounded down to whole 16 bytes. Source: nccl-tests, src/all_gather.cu."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One size. ``ours`` and ``theirs`` are busbw in GB/s; ``difference`` is ours over theirs, less 1."""

    point: Point
    kind: str
    ours: float | None = None
    theirs: float | None = None
    difference: float | None = None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Crosscheck:
    """All sizes, and what is to be said about the whole.

    Attributes:
        beyond: the ratio from which on a difference is a finding.
        rows: the sizes, in the journal's order.
        wrong: outputs with wrong data, each as a sentence.
        unmatched: outputs of which the journal has nothing, each as a sentence.
        notes: what is good to know and decides nothing.
        partial: sizes that nccl-tests has not measured decide nothing.
    """

    beyond: float
    rows: tuple[Compared, ...]
    wrong: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False

    def of_kind(self, *kinds: str) -> tuple[Compared, ...]:
        """Return the sizes of which this was said."""
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


def compare(
    ours: Ours,
    outputs: Sequence[Output],
    *,
    expected: Iterable[Point] | None = None,
    beyond: float = BEYOND_RATIO,
    partial: bool = False,
    other_hosts: bool = False,
) -> Crosscheck:
    """Return what has come of it.

    Args:
        ours: from a journal.
        outputs: of nccl-tests, each with its collective.
        expected: what nccl-tests was asked for; by default all points of the collectives, dtypes and ranks that the
            outputs have.
        beyond: the ratio from which on a difference is a finding.
        partial: what only one side has does not keep the others from an answer.
        other_hosts: the hosts have other names in the journal, such as those of pods.
    """
    wanted = ours.points if expected is None else tuple(expected)
    rows = []
    for point in wanted:
        beside = [output for output in outputs if _is_beside(point, output)]
        if expected is None and not beside:
            continue
        rows.append(_compared(point, beside, ours, beyond, other_hosts))
    return Crosscheck(
        beyond=beyond,
        rows=tuple(rows),
        wrong=tuple(filter(None, map(_wrong_text, outputs))),
        unmatched=tuple(_unmatched(ours, outputs)),
        notes=tuple(dict.fromkeys([*_notes(ours, outputs, other_hosts), *_left_out(ours, rows)])),
        partial=partial,
    )


def _is_beside(point: Point, output: Output) -> bool:
    dtype = DTYPES.get(point.dtype, point.dtype)
    same = (output.collective, output.ranks, len(output.hosts)) == (point.collective, point.ranks, point.nnodes)
    return same and any(row.dtype == dtype for row in output.rows)


def _compared(point: Point, outputs: Sequence[Output], ours: Ours, beyond: float, other_hosts: bool) -> Compared:
    near = [(output, row) for output in outputs for row in output.rows if _is_size(point, row)]
    if not near:
        return Compared(point=point, kind=MISSING, why="nccl-tests has not measured this size")
    nearest = max(row.size_bytes for _, row in near)
    found = [(output, row) for output, row in near if row.size_bytes == nearest]
    # The same size twice, as with `-N`: what is worse of them decides.
    weighed = [_weigh(point, output, row, ours, beyond, other_hosts) for output, row in found]
    return min(weighed, key=lambda each: _ORDER.index(each.kind))


_ORDER = (WRONG, DIFFERS, NOT_COMPARABLE, MISSING, AGREES)


def _is_size(point: Point, row: Row) -> bool:
    """Tell whether a line is of this size: it may be a little less, where ranks' parts were rounded down."""
    short = point.size_bytes - row.size_bytes
    return row.dtype == DTYPES.get(point.dtype, point.dtype) and 0 <= short < point.ranks * _ROUNDING_BYTES


def _weigh(point: Point, output: Output, row: Row, ours: Ours, beyond: float, other_hosts: bool) -> Compared:
    if any(figure.wrong for figure in row.figures.values()):
        wrong = max(figure.wrong or 0 for figure in row.figures.values())
        return Compared(point=point, kind=WRONG, why=f"{wrong:g} wrong elements")
    # As ours: an all-reduce leaves its sum where its part was, everything else goes into another tensor.
    half = IN_PLACE if point.collective == "all_reduce" and not output.speeds_only else OUT_OF_PLACE
    figure = row.figures.get(half)
    kind = AVERAGE if output.ranks == output.processes else SLOWEST
    ranks, foreign = _ranks_of(point, output, ours)
    if foreign and not other_hosts:
        return Compared(point=point, kind=NOT_COMPARABLE, why=foreign)
    mine = point.busbw(kind, ranks)
    why = _why_not(point, figure, half, mine, beyond, speeds_only=output.speeds_only)
    theirs = None if figure is None or not math.isfinite(figure.busbw) else figure.busbw
    if why or figure is None or mine is None or theirs is None:
        return Compared(point=point, kind=NOT_COMPARABLE, ours=mine, theirs=theirs, why=why)
    difference = mine / theirs - 1
    apart = abs(difference) > beyond
    return Compared(
        point=point,
        kind=DIFFERS if apart else AGREES,
        ours=mine,
        theirs=theirs,
        difference=difference,
        why="" if not apart else "ours is lower" if difference < 0 else "ours is higher",
    )


def _ranks_of(point: Point, output: Output, ours: Ours) -> tuple[list[int] | None, str]:
    """Return our ranks on the output's hosts, or None for all; and why that is not the same place."""
    unknown = [host for host in output.hosts if host not in ours.ranks_of]
    if unknown:
        known = ", ".join(list(ours.ranks_of)[:4]) or "none"
        return None, f"it ran on {', '.join(unknown[:4])}; the journal's hosts are {known}"
    return sorted(rank for host in output.hosts for rank in ours.ranks_of[host]), ""


def _why_not(
    point: Point, figure: Figure | None, half: str, mine: float | None, beyond: float, *, speeds_only: bool
) -> str:
    """Return why two figures cannot be held against each other, or an empty text."""
    if point.inconclusive:
        return f"ours is inconclusive: {point.inconclusive}"
    if mine is None or mine <= 0:
        return "ours has no value on these ranks"
    if figure is None:
        return f"nccl-tests has no {half} figure"
    if not math.isfinite(figure.busbw) or figure.busbw <= 0:
        return f"nccl-tests says {figure.busbw:g} GB/s"
    if figure.resolution > beyond * figure.busbw:
        return f"{figure.busbw:g} GB/s is printed too coarsely; use the file of -J"
    if figure.wrong is None and not speeds_only:
        return "nccl-tests has not looked at the data; run it without -c 0"
    return ""


def _wrong_text(output: Output) -> str:
    if not output.wrong:
        return ""
    what = f"{output.collective}: " if output.collective else ""
    return f"{what}{output.wrong:g} wrong elements ({output.origin})"


def _notes(ours: Ours, outputs: Sequence[Output], other_hosts: bool) -> list[str]:
    notes = []
    theirs = {output.nccl for output in outputs if output.nccl}
    for version in sorted(theirs - {ours.nccl}):
        mine = f"torch's is {ours.nccl}" if ours.nccl else "the journal does not tell torch's"
        notes.append(f"nccl-tests used NCCL {version}; {mine}: another version may be faster or slower")
    if any(output.speeds_only for output in outputs):
        notes.append(
            "SuperBench keeps busbw alone: whether the data were right is not known, and an all_reduce is taken as out "
            "of place, in float, by one process for all GPUs of a node"
        )
    for output in outputs:
        if other_hosts and any(host not in ours.ranks_of for host in output.hosts):
            shown = ", ".join(output.hosts[:4])
            notes.append(f"{shown}: no such host in the journal; the worst rank of all stands beside it")
    return notes


def _left_out(ours: Ours, rows: Sequence[Compared]) -> Iterator[str]:
    """Tell of what the journal has besides: an answer about one node is none about several."""
    compared = {_kind(row.point) for row in rows}
    others = [kind for kind in dict.fromkeys(map(_kind, ours.points)) if kind not in compared]
    if others:
        more = f"; and {len(others) - _MOST_TOLD} more" if len(others) > _MOST_TOLD else ""
        yield f"the journal has more, and nothing stands beside it: {'; '.join(others[:_MOST_TOLD])}{more}"


def _kind(point: Point) -> str:
    nodes = "1 node" if point.nnodes == 1 else f"{point.nnodes} nodes"
    return f"{point.collective} {point.dtype} by {point.ranks} ranks on {nodes}"


def _unmatched(ours: Ours, outputs: Sequence[Output]) -> Iterator[str]:
    for output in outputs:
        if not any(_is_beside(point, output) for point in ours.points):
            dtypes = ", ".join(dict.fromkeys(row.dtype for row in output.rows)) or "no dtype at all"
            nodes = "1 node" if len(output.hosts) == 1 else f"{len(output.hosts)} nodes"
            what = f"{output.collective or 'an unknown collective'} in {dtypes} by {output.ranks} ranks on {nodes}"
            yield f"{output.origin}: {what}: the journal has nothing of that kind"
