"""times.py: each kind of fault has its own goal, and what is over it, or was not measured, is said to be missed."""

from __future__ import annotations

from pathlib import Path

import pytest
import times
from times import DEATH, HANG, SIGNAL, SURVIVED, Cell, Goal, Row, Times, table, verdicts
from torchrun import Run, Stamp


class Taken(Run):
    """A run of which only the moments are known."""

    stamps = {0: [Stamp("after_it", 11.0, 1)], 1: [Stamp("after_it", 11.5, 2)]}  # noqa: RUF012  # as the property that it stands for


def taken(**moments: object) -> Taken:
    return Taken(directory=Path(), agents=[], token="", started=0.0, deadline=0.0, **moments)


GOALS = {
    "death": (DEATH, 2.0),
    "signal": (SIGNAL, 2.0),
    "survived": (SURVIVED, 2.0),
    "released from a hang": (HANG, 5.0),
    "stuck, as shipped": (times.stuck(10.0), 20.0),
    "stuck, with a shorter wait": (times.stuck(2.0), 12.0),
    "a lost node, as shipped": (times.lost_node(30.0), 32.0),
    "a lost node, with a shorter wait": (times.lost_node(3.0), 5.0),
}


@pytest.mark.parametrize(("goal", "seconds"), GOALS.values(), ids=GOALS)
def test_each_kind_of_fault_has_its_own_goal(goal: Goal, seconds: float) -> None:
    assert goal.seconds == seconds
    for measured, met in ((seconds, True), (seconds + 0.01, False), (float("nan"), False), (None, False)):
        row = Row("a fault", Cell(measured, goal))
        assert row.is_missed != met
        assert table([row])[-1].split("|")[-2].strip() == ("met" if met else "MISSED")
        [verdict] = verdicts([row])
        assert f"goal of {seconds:g} s, " in verdict
        assert (": met (1 row, worst " in verdict, ": MISSED (1 row, worst " in verdict) == (met, not met)


def test_the_table_shows_each_time_beside_its_goal_and_leaves_out_what_there_is_not() -> None:
    rows = [
        Row("ended", Cell(0.5, DEATH)),
        Row("raised", Cell(1.25), Cell(2.5, SURVIVED)),
        Row("hung", Cell(None, HANG), Cell(1.0, SURVIVED)),
    ]
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table(rows)]
    assert lines[0][1:] == ["report", "goal", "next test", "goal", ""]
    assert lines[2:] == [
        ["ended", "0.50", "2", "", "", "met"],
        ["raised", "1.25", "", "2.50", "2", "MISSED"],
        ["hung", "-", "5", "1.00", "2", "MISSED"],
    ]
    assert len({len(line) for line in table(rows)}) == 1, "columns that stand below each other"
    said = verdicts(rows)
    assert [line.partition(" (")[0].rpartition(": ")[2] for line in said if "survived" not in line] == ["met", "MISSED"]
    assert any(line.endswith(": MISSED (2 rows, worst 2.50 s: raised)") for line in said)
    assert any(line.endswith(": MISSED (1 row, worst not measured: hung)") for line in said)


def test_the_times_are_those_of_the_stamps_and_of_the_report_on_disk(tmp_path: Path) -> None:
    found = Times()
    found.ended("ended", taken(completed_at=10.75), since=10.0, goal=DEATH)
    run = taken(settled={"test_it": 10.5})
    found.survived("hung", run, "test_it", since=10.0, passed="after_it", report=HANG)
    found.survived("never told", run, "test_other", since=10.0, passed="after_it", report=HANG)
    assert found.rows == [
        Row("ended", Cell(0.75, DEATH)),
        Row("hung", Cell(0.5, HANG), Cell(1.5, SURVIVED)),  # the slower of two ranks
        Row("never told", Cell(None, HANG), Cell(1.5, SURVIVED)),
    ]
    assert [row.is_missed for row in found.rows] == [False, False, True]
    found.write(tmp_path / "times.json")
    assert times.read(tmp_path / "times.json") == found.rows


def test_a_report_that_was_never_written_is_no_short_time() -> None:
    # completed_at is 0 then, which lies before every fault.
    found = Times()
    found.ended("silent", taken(), since=1.8e9, goal=DEATH)
    assert found.rows[0].is_missed
