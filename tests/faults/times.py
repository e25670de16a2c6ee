"""How long it took from a fault to the report on disk and to the next test's pass, and whether that was short enough.

Every figure is from stamps that the suite under test has written and from the files that the product has written. A
goal that is missed fails no test, for these times depend on what else the machine does. It is said, here and by
perf/faults.py.
"""

import json
from dataclasses import dataclass, field

from pytest_gpucluster.metrics import codec
from pytest_gpucluster.session.options import Timeouts
from pytest_gpucluster.text import Column, fitted_table, plural


@dataclass(frozen=True)
class Goal:
    """What is demanded: from what to what, in at most so many seconds."""

    text: str
    seconds: float

    def is_met(self, seconds):
        """Tell whether a time is short enough. What was not measured is not."""
        return seconds is not None and seconds <= self.seconds  # False of NaN, too


DEATH = Goal("a dead rank to a complete JUnit, on its host", 2.0)
HANG = Goal("a hang to its report, past the deadline, where the rank can be released", 5.0)
SURVIVED = Goal("a fault that is survived (a hang: its deadline) to the next test passing", 2.0)
SIGNAL = Goal("a signal, or a lost launcher, to a complete JUnit", 2.0)

_STUCK_SECONDS = 20.0
_BESIDE_DEAD_SECONDS = 2.0
"""As of a death on the same host. The two heartbeats that may come on top of `dead` are within it."""


def stuck(setting):
    """Return the goal where a rank cannot be released: 20 s as shipped, and less where `stuck` is set shorter."""
    seconds = _STUCK_SECONDS - (Timeouts().stuck - setting)
    return Goal(f"a hang that nothing ends to a complete JUnit, past the deadline, with stuck={setting:g}", seconds)


def lost_node(dead):
    """Return the goal for a node that is lost, which is noticed by its silence alone."""
    return Goal(f"a lost node to a complete JUnit, with dead={dead:g}", dead + _BESIDE_DEAD_SECONDS)


@dataclass(frozen=True)
class Cell:
    """A time, if there was one to take, and what it is held against, if anything is demanded."""

    seconds: float | None = None
    goal: Goal | None = None

    @property
    def is_missed(self):
        """Tell whether something is demanded and not so."""
        return self.goal is not None and not self.goal.is_met(self.seconds)


@dataclass(frozen=True)
class Row:
    """A fault with its times."""

    fault: str
    report: Cell
    next_test: Cell = Cell()

    @property
    def is_missed(self):
        """Tell whether one of its goals is missed."""
        return self.report.is_missed or self.next_test.is_missed


@dataclass
class Times:
    """The rows of the table that is printed at the end of the session."""

    rows: list[Row] = field(default_factory=list)

    def ended(self, fault, run, *, since, goal):
        """Add a fault that the run has ended of: the time until the JUnit file was what it is now, with all tests.

        Args:
            fault: how it is called in the table.
            since: wall-clock time of the fault, or of the deadline that it let pass.
        """
        written = run.completed_at > 0.0
        self.rows.append(Row(fault, Cell(run.completed_at - since if written else None, goal)))

    def survived(self, fault, run, case, *, since, passed, report=None):
        """Add a fault that the run has gone on after.

        Args:
            case: the testcase that tells of it.
            since: as of :meth:`ended`.
            passed: a stamp of the next test. The last rank to write it counts.
            report: what is demanded of the time until the JUnit file told of it, beside what is of the next test.
        """
        settled = run.settled.get(case)
        after = max(run.stamp(passed, rank).at for rank in run.stamps)
        self.rows.append(
            Row(fault, Cell(None if settled is None else settled - since, report), Cell(after - since, SURVIVED))
        )

    def write(self, path):
        """Write all rows as JSON."""
        path.write_text(json.dumps(codec.to_json(self.rows)), encoding="utf-8")


def read(path):
    """Return what :meth:`Times.write` has written."""
    return [codec.read(Row, told, str(path)) for told in json.loads(path.read_text(encoding="utf-8"))]


_HEADS = (
    Column(title="seconds after the fault, or after its deadline"),
    *(Column(title=title, is_right=True) for title in ("report", "goal", "next test", "goal")),
    Column(title=""),
)


def table(rows):
    """Return the lines of a table."""
    head, found = fitted_table(_HEADS, [_shown(row) for row in rows], 1000)
    return [head, *(line for lines in found for line in lines)]


def _shown(row):
    cells = [part for cell in (row.report, row.next_test) for part in _parts(cell)]
    return (row.fault, *cells, "MISSED" if row.is_missed else "met")


def _parts(cell):
    seconds = "-" if cell.seconds is None else f"{round(cell.seconds, 2) + 0.0:.2f}"  # no -0.00
    if cell.seconds is None and cell.goal is None:
        seconds = ""
    return seconds, "" if cell.goal is None else f"{cell.goal.seconds:g}"


def verdicts(rows):
    """Return a line for each goal: whether it is met, by how many rows, and the worst of them."""
    by_goal = {}
    for row in rows:
        for cell in (row.report, row.next_test):
            if cell.goal is not None:
                by_goal.setdefault(cell.goal, []).append((cell.seconds, row.fault))
    return [_verdict(goal, found) for goal, found in by_goal.items()]


def _verdict(goal, found):
    met = all(goal.is_met(seconds) for seconds, _ in found)
    # Without a time, or NaN, is worse than any time.
    seconds, fault = max(found, key=lambda one: (one[0] is None or one[0] != one[0], one[0] or 0.0))
    worst = "not measured" if seconds is None else f"{seconds:.2f} s"
    rows = plural(len(found), "row")
    return f"goal of {goal.seconds:g} s, {goal.text}: {'met' if met else 'MISSED'} ({rows}, worst {worst}: {fault})"
