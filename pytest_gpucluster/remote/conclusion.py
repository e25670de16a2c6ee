"""One exit code and one line of what came of a run on all nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.journal.verdict import BROKEN, INCOMPLETE, REJECTED
from pytest_gpucluster.text import one_line

REJECTS, INTERRUPTED, BROKE, NODES_SILENT = 1, 2, 11, 12
"""``NODES_SILENT`` is this command's own: a node of the file did not answer."""
_CHARACTERS = 1000


@dataclass(frozen=True, kw_only=True)
class NodeEnd:
    """What came of one node: its exit code, or why there is none."""

    name: str
    exit: int | None
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What the journal says that was brought from the node of rank 0."""

    word: str
    exit: int
    reason: str
    rehearsal: bool
    nnodes: int


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The exit code, and what the operator reads."""

    exit: int
    line: str


def conclude(
    ends: Sequence[NodeEnd],
    record: Record | None,
    *,
    no_record: str = "",
    silent: Mapping[str, str] | None = None,
    interrupted: str = "",
) -> Conclusion:
    """Return what a run came to.

    A pass takes that every node ended with 0, that the journal is here and says so too, of as many nodes as were
    started, and that no node of the file was left out. A rejection counts more than all else.

    Args:
        ends: of all nodes that were started, rank 0's first.
        record: what its journal says; None where it could not be had.
        no_record: why not.
        silent: nodes that were left out since they did not answer -> why.
        interrupted: by what, if it was.
    """
    codes = [end.exit for end in ends]
    if REJECTS in codes or (record is not None and (record.exit == REJECTS or record.word == REJECTED)):
        reason = record.reason if record is not None else _who(ends, {REJECTS})
        return _said(REJECTED, REJECTS, reason, record)
    if interrupted:
        return _said(BROKEN, INTERRUPTED, f"interrupted ({interrupted})", record)
    lost = [end for end in ends if end.exit is None]
    if lost:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        told = f"; its journal says: {record.reason}" if record is not None and record.exit else ""
        return _said(BROKEN, BROKE, f"{lost[0].name}: {lost[0].why or 'nobody knows how it ended'}{more}{told}", record)
    first = codes[0] if codes else BROKE
    bad = {code for code in codes if code is not None and code not in (0, 10, 12)}
    if first in (0, 10, 12) and bad:
        return _said(BROKEN, BROKE, f"{_who(ends, bad)}, where rank 0's node ended with {first}", record)
    if bad:
        reason = record.reason if record is not None else _who(ends, bad)
        return _said(BROKEN, int(first or BROKE), reason, record)
    if record is None:
        return _said(BROKEN, BROKE, f"no record of the run is here: {no_record or 'nobody said why'}", record)
    if record.nnodes != len(ends):
        reason = f"its journal is of {record.nnodes} nodes, but {len(ends)} were started"
        return _said(BROKEN, BROKE, reason, record)
    worst = max(int(code or 0) for code in codes)
    if record.exit != worst:
        reason = f"the nodes ended with {worst}, but the journal says {record.word}, exit code {record.exit}"
        return _said(BROKEN, BROKE, reason, record)
    if silent:
        names = ", ".join(list(silent)[:8]) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
        of = len(ends) + len(silent)
        reason = f"{len(ends)} of {of} nodes: {record.word} ({record.reason}); no answer: {names}"
        return _said(INCOMPLETE, NODES_SILENT, reason, record)
    return _said(record.word, record.exit, record.reason, record)


def _said(word: str, code: int, reason: str, record: Record | None) -> Conclusion:
    rehearsal = "REHEARSAL, " if record is not None and record.rehearsal else ""
    return Conclusion(exit=code, line=one_line(f"{rehearsal}{word}, exit code {code}: {reason}", _CHARACTERS))


def _who(ends: Sequence[NodeEnd], codes: set[int]) -> str:
    told = [f"{end.name} ended with {end.exit}" for end in ends if end.exit in codes]
    return ", ".join(told[:8]) + (f" and {len(told) - 8} more" if len(told) > 8 else "")
