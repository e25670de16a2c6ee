"""How long it took from a fault to the report on disk, and from a fault to the next test's pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrun import Run

GOAL_SECONDS = 2.0


@dataclass
class Times:
    """The rows of the table that is printed at the end of the session."""

    rows: list[tuple[str, float, float | None, float | None]] = field(default_factory=list)

    def add(
        self, fault: str, run: Run, case: str, *, since: float, passed: str | None = None, over: bool = False
    ) -> None:
        """Add a row.

        Args:
            fault: how it is called in the table.
            case: the testcase that tells of it.
            since: wall-clock time of the fault, or of the deadline that it let pass.
            passed: a stamp of the next test, if the run survives the fault.
            over: the run ends of it: show also when the launcher has ended.
        """
        after = None if passed is None else max(run.stamp(passed, rank).at for rank in run.stamps) - since
        self.rows.append((fault, run.settled[case] - since, after, run.ended_at - since if over else None))

    def lines(self) -> list[str]:
        """Return the table."""
        title = "seconds after the fault (or its deadline)"
        width = max(len(title), *(len(row[0]) for row in self.rows))
        lines = [f"{title:{width}}  report  next test  launcher ended"]
        for fault, *cells in self.rows:
            shown = [_cell(seconds, size) for seconds, size in zip(cells, (6, 9, 14), strict=True)]
            lines.append("  ".join([f"{fault:{width}}", *shown]).rstrip())
        return lines


def _cell(seconds: float | None, width: int) -> str:
    if seconds is None:
        return " " * width
    mark = "" if seconds <= GOAL_SECONDS else " !"
    return f"{seconds:.2f}{mark}".rjust(width)
