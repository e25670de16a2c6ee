"""What a search for who is to blame has found, as a page shows it."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster import isolation_told
from pytest_gpucluster.isolation.finding import Culprit, Isolated
from pytest_gpucluster.isolation.probe import Outcome
from pytest_gpucluster.reports.html.isolated import search_of

NAMES = {0: "gpu-01", 1: "gpu-02", 2: "gpu-03"}


def told(**changes: Any) -> dict[str, Any]:
    found = Isolated(
        culprits=(Culprit(units=(1,), kind="unit", failed=2, probes=3, evidence=("round 1, alone: 212 GB/s",)),),
        cleared=(0,),
        undecided=(2,),
        rounds=((Outcome(members=(0, 1), busbw=212.0), Outcome(members=(2,), busbw=None, failure="timed out")),),
        why_undecided="the time was spent",
        reproduced=True,
    )
    return {**isolation_told.to_json(found, NAMES, seconds=12.3), **changes}


def test_a_search_is_shown_as_the_product_writes_it() -> None:
    search = search_of(told())
    assert search is not None
    assert [(each.who, each.often) for each in search.accused] == [("gpu-02", "failed 2 of 3 probes: intermittent")]
    assert search.accused[0].evidence == ("round 1, alone: 212 GB/s",)
    assert search.cleared == "gpu-01"
    assert search.undecided == "gpu-03: the time was spent"
    assert search.told == "1 round, 2 probes, 12.3 s"
    assert search.probes is not None
    assert search.probes.rows == (("1", "gpu-01, gpu-02", "212 GB/s"), ("1", "gpu-03", "timed out"))


def test_a_link_is_named_with_both_ends() -> None:
    culprit = {"units": [0, 2], "kind": "link", "failed": 3, "probes": 3, "intermittent": False, "evidence": []}
    search = search_of(told(culprits=[culprit]))
    assert search is not None
    assert search.accused[0].who == "the link between gpu-01 and gpu-03"


def test_that_a_fault_did_not_show_again_or_that_it_was_cut_short_is_said() -> None:
    search = search_of(told(culprits=[], reproduced=False, cut_short="a rank was lost"))
    assert search is not None
    assert "did not show again" in search.told
    assert "ended before it was through: a rank was lost" in search.told


def test_no_search_is_nothing() -> None:
    assert search_of({}) is None


def test_a_form_of_another_version_is_shown_whole_and_said_to_be_so() -> None:
    search = search_of(told(culprits=[{"units": "gpu-02"}]))
    assert search is not None
    assert "units" in search.told
    assert '"gpu-02"' in search.raw
    assert search.accused == ()
