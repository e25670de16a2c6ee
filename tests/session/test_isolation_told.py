"""How what a search has found is told."""

import json
from types import SimpleNamespace

import pytest

from pytest_gpucluster.isolation.finding import Culprit, IsolationResult, Outcome
from pytest_gpucluster.session.isolation import Search, _in_the_world

NAMES = {0: "node-a", 1: "node-b", 2: "node-c"}
GOOD = Outcome(members=(0, 2), busbw=350.0)
BAD = Outcome(members=(0, 1), busbw=None, failure="late\nand more")


def search(found, *, seconds=1.0, cut_short=""):
    return Search(plan=SimpleNamespace(names=NAMES, cut_short=cut_short), found=found, seconds=seconds)


def culprit(*units, failed=3, probes=3):
    kind = "unit" if len(units) == 1 else "link"
    return Culprit(units=units, kind=kind, failed=failed, probes=probes, evidence=("round 1, with node-a: late",))


def isolated(*culprits, rounds=((GOOD,), (BAD,)), undecided=(), why="", **more):
    found = {"culprits": culprits, "cleared": (0, 2), "undecided": undecided, "rounds": rounds}
    return IsolationResult(**found, why_undecided=why, **{"reproduced": True, **more})


@pytest.mark.parametrize(
    ("found", "cut_short", "told"),
    [
        (isolated(culprit(1)), "", "isolated: node-b"),
        (isolated(culprit(1)), "no time", "isolated: node-b"),
        (isolated(culprit(1), culprit(2)), "", "isolated: node-b, node-c"),
        (isolated(culprit(0, 2)), "", "isolated: the link between node-a and node-c"),
        (isolated(culprit(1, failed=2, probes=7)), "", "isolated: node-b (intermittent: 2 of 7 probes)"),
        (isolated(undecided=(1,), why="the search ended early"), "", "not isolated: the search ended early"),
        (isolated(undecided=(1,), why="not confirmed"), "no time", "not isolated: no time"),
        (isolated(reproduced=False, rounds=((GOOD,),)), "", "not isolated, not reproduced in 1 probe"),
        (isolated(reproduced=False, unjudged=1), "", "not isolated, not reproduced in 2 probes, 1 of them not judged"),
        (isolated(reproduced=False), "no time", "not isolated, not reproduced in 2 probes: no time"),
        (isolated(why="nothing was probed", reproduced=False, rounds=()), "no time", "not isolated: no time"),
    ],
)
def test_the_headline_names_the_culprit_or_says_why_there_is_none(found, cut_short, told):
    assert search(found, cut_short=cut_short).headline == told


def test_the_text_and_the_journal_say_what_has_cut_the_search_short():
    text = search(isolated(culprit(1)), cut_short="no time").text()
    assert [line for line in text.splitlines() if line.endswith(": no time")]
    assert search(isolated(), cut_short="no time").to_json()["cut_short"]


def test_a_probe_without_a_value_or_a_reason_is_shown_as_that():
    found = isolated(rounds=((Outcome(members=(0, 1), busbw=None),),))
    assert search(found).text().endswith("round 1: node-a, node-b: no value")


def test_the_text_has_the_evidence_and_every_probe_in_one_line_each():
    lines = search(isolated(culprit(1)), seconds=12.34).text().splitlines()
    assert lines[0].endswith(", 12.3 s:")
    assert "  round 1, with node-a: late" in lines
    assert lines[-2:] == ["  round 1: node-a, node-c: 350 GB/s", "  round 2: node-a, node-b: late"]


def test_of_very_many_probes_the_text_has_some_and_says_so():
    found = isolated(culprit(1), rounds=((GOOD,),) * 100)
    lines = search(found).text().splitlines()
    assert sum(line.startswith("  round ") for line in lines if "GB/s" in line) == 64
    assert lines[-1].startswith("  and 36 more")


def test_the_journal_has_all_of_it_in_plain_types():
    told = json.loads(json.dumps(search(isolated(culprit(1))).to_json()))
    assert told["names"] == {"0": "node-a", "1": "node-b", "2": "node-c"}
    assert told["culprits"][0]["units"] == [1]
    assert [[one["members"] for one in outcomes] for outcomes in told["rounds"]] == [[[0, 2]], [[0, 1]]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rank 1: 3 sums are wrong, which rank 0 contributed", "rank 7: 3 sums are wrong, which rank 4 contributed"),
        ("rank 2 is none of this group", "rank 2 is none of this group"),
        ("ranks 0-1, frank 1", "ranks 0-1, frank 1"),
    ],
    ids=["both", "unknown", "other words"],
)
def test_ranks_of_a_group_get_their_numbers_in_the_run(text, told):
    assert _in_the_world(text, [4, 7]) == told
