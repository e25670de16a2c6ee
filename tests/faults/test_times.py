"""times.py: each kind of fault has its own goal, and what is over it, or was not measured, is said to be missed."""

from __future__ import annotations

from pathlib import Path

import times
from each import of_each
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


@of_each("case", list(GOALS.values()))
def test_each_kind_of_fault_has_its_own_goal(case: tuple[Goal, float]) -> None:
    goal, seconds = case
    assert goal.seconds == seconds
    for measured, met in ((seconds, True), (seconds + 0.01, False), (float("nan"), False), (None, False)):
        row = Row("a fault", Cell(measured, goal))
        assert row.is_missed != met
        assert table([row])[-1].split("|")[-2].strip() == ("met" if met else "MISSED")
        [verdict] = verdicts([row])
        assert f"goal of {seconds:g} s, " in verdict
        assert (": met (1 row, worst " in verdict, ": MISSED (1 row, worst " in verdict) == (met, not met)


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
    found.ended("silent", taken(), since=1.8e9, goal=DEATH)  # never written: completed_at is 0
    assert found.rows[-1].is_missed
