"""How what a search has found is told."""

from __future__ import annotations

import json

import pytest

from pytest_gpucluster import isolation_told
from pytest_gpucluster.isolating import _in_the_world
from pytest_gpucluster.isolation.finding import Culprit, Isolated
from pytest_gpucluster.isolation.probe import Outcome

NAMES = {0: "node-a", 1: "node-b", 2: "node-c"}
GOOD = Outcome(members=(0, 2), busbw=350.0)
BAD = Outcome(members=(0, 1), busbw=None, failure="not finished within 60 s\nand more")


def culprit(*units, failed=3, probes=3):
    kind = "unit" if len(units) == 1 else "link"
    return Culprit(units=units, kind=kind, failed=failed, probes=probes, evidence=("round 1, with node-a: late",))


def isolated(*culprits, rounds=((GOOD,), (BAD,)), undecided=(), why="", reproduced=True):
    return Isolated(
        culprits=culprits,
        cleared=(0, 2),
        undecided=undecided,
        rounds=rounds,
        why_undecided=why,
        reproduced=reproduced,
    )


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (isolated(culprit(1)), "isolated: node-b"),
        (isolated(culprit(1), culprit(2)), "isolated: node-b, node-c"),
        (isolated(culprit(0, 2)), "isolated: the link between node-a and node-c"),
        (isolated(culprit(1, failed=2, probes=7)), "isolated: node-b (intermittent: 2 of 7 probes)"),
        (isolated(undecided=(1,), why="the search ended early"), "not isolated: the search ended early"),
        (isolated(why="nothing", reproduced=False), "not isolated, not reproduced in 2 probes"),
        (isolated(why="nothing", reproduced=False, rounds=((GOOD,),)), "not isolated, not reproduced in 1 probe"),
    ],
    ids=["node", "two", "link", "intermittent", "undecided", "not reproduced", "one probe"],
)
def test_the_headline_names_the_culprit_or_says_why_there_is_none(found, told):
    assert isolation_told.headline(found, NAMES.__getitem__) == told


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (isolated(why="nothing", reproduced=False), "not isolated, not reproduced in 2 probes: the time is up"),
        (isolated(why="nothing was probed", reproduced=False, rounds=()), "not isolated: the time is up"),
        (isolated(undecided=(1,), why="not confirmed"), "not isolated: the time is up"),
        (isolated(culprit(1)), "isolated: node-b"),
    ],
    ids=["not reproduced", "nothing probed", "undecided", "node"],
)
def test_what_has_cut_the_search_short_is_said_where_nobody_was_found(found, told):
    assert isolation_told.headline(found, NAMES.__getitem__, cut_short="the time is up") == told


def test_the_text_and_the_journal_say_what_has_cut_the_search_short():
    text = isolation_told.text(isolated(culprit(1)), NAMES.__getitem__, seconds=1.0, cut_short="the time is up")
    assert "it has ended before it was through: the time is up" in text.splitlines()
    assert isolation_told.to_json(isolated(), NAMES, seconds=1.0, cut_short="the time is up")["cut_short"]


def test_a_probe_without_a_value_or_a_reason_is_shown_as_that():
    found = isolated(rounds=((Outcome(members=(0, 1), busbw=None),),))
    assert isolation_told.text(found, NAMES.__getitem__, seconds=1.0).endswith("round 1: node-a, node-b: no value")


def test_the_text_has_the_evidence_and_every_probe_in_one_line_each():
    lines = isolation_told.text(isolated(culprit(1)), NAMES.__getitem__, seconds=12.34).splitlines()
    assert lines[0] == "Search for who is to blame, 12.3 s:"
    assert "  round 1, with node-a: late" in lines
    assert lines[-2:] == ["  round 1: node-a, node-c: 350 GB/s", "  round 2: node-a, node-b: not finished within 60 s"]


def test_of_very_many_probes_the_text_has_some_and_says_so():
    found = isolated(culprit(1), rounds=((GOOD,),) * 100)
    lines = isolation_told.text(found, NAMES.__getitem__, seconds=1).splitlines()
    assert sum(line.startswith("  round ") for line in lines if "GB/s" in line) == 64
    assert lines[-1] == "  and 36 more, which the journal has"


def test_the_journal_has_all_of_it_in_plain_types():
    told = json.loads(json.dumps(isolation_told.to_json(isolated(culprit(1)), NAMES, seconds=2.0)))
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
