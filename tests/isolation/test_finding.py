import math

from pytest_gpucluster.isolation.finding import Culprit, IsolationResult, Outcome
from pytest_gpucluster.metrics.codec import to_json

UNIT = Culprit(units=(3,), kind="unit", failed=3, probes=3, evidence=("round 2, with 4: 100 GB/s",))
NOW_AND_THEN = Culprit(units=(7,), kind="unit", failed=3, probes=11, evidence=())
LINK = Culprit(units=(4, 5), kind="link", failed=5, probes=5, evidence=())


def name(unit):
    return f"gpu-{unit:03}"


def isolated(*culprits, reproduced=True, undecided=(), why=""):
    rounds = ((Outcome(members=(0,), busbw=1.0), Outcome(members=(1,), busbw=1.0)), (Outcome(members=(0, 1), busbw=2),))
    found = {"culprits": culprits, "cleared": (0, 1), "undecided": undecided, "rounds": rounds}
    return IsolationResult(**found, why_undecided=why, reproduced=reproduced)


def test_a_culprit_has_a_line():
    assert UNIT.summary(name).startswith("gpu-003: failed 3 of 3 probes")
    assert NOW_AND_THEN.summary(name) == "gpu-007: failed 3 of 11 probes: intermittent"
    assert LINK.summary(name) == (
        "the link between gpu-004 and gpu-005: failed 5 of 5 probes; each of the two passes with others"
    )
    assert [culprit.intermittent for culprit in (UNIT, NOW_AND_THEN, LINK)] == [False, True, False]


def test_the_summary_has_the_culprits_and_the_effort():
    first, *rest = isolated(UNIT, LINK, undecided=(9,), why="gpu-009 failed").summary(name)
    assert first.startswith("2 culprits found")
    assert first.endswith("2 rounds, 3 probes")
    assert rest == [
        UNIT.summary(name),
        "  round 2, with 4: 100 GB/s",
        LINK.summary(name),
        *("undecided: gpu-009", "gpu-009 failed", "cleared: gpu-000, gpu-001"),
    ]
    assert isolated(UNIT).summary()[0].startswith("1 culprit found")


def test_neither_a_fault_that_was_not_reproduced_nor_an_unconfirmed_one_is_a_pass():
    assert isolated(reproduced=False).summary()[0] == "not reproduced in 2 rounds, 3 probes"
    assert isolated().summary()[0].startswith("no culprit confirmed")


def test_it_can_be_written_as_json():
    plain = to_json(isolated(NOW_AND_THEN, why="so"))
    assert plain["culprits"] == [{"units": [7], "kind": "unit", "failed": 3, "probes": 11, "evidence": []}]
    assert plain["rounds"][1] == [{"members": [0, 1], "busbw": 2, "wrong": "", "failure": ""}]
    assert to_json(Outcome(members=(0, 3), busbw=math.nan))["busbw"] == "NaN"
