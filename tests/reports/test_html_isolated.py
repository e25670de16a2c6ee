"""The result of a search for culprits in the page."""

from __future__ import annotations

import re
from typing import Any

from pytest_gpucluster.isolation.finding import Culprit, IsolationResult, Outcome
from pytest_gpucluster.reports.html.criterion import search_of
from pytest_gpucluster.session import isolation

NAMES = {0: "gpu-01", 1: "gpu-02", 2: "gpu-03"}


def searched(**changes: Any) -> dict[str, Any]:
    found = IsolationResult(
        culprits=(Culprit(units=(1,), kind="unit", failed=2, probes=3, evidence=("round 1, alone: 212 GB/s",)),),
        cleared=(0,),
        undecided=(2,),
        rounds=((Outcome(members=(0, 1), busbw=212.0), Outcome(members=(2,), busbw=None, failure="timed out")),),
        why_undecided="no time",
        reproduced=True,
    )
    return {**isolation.isolation_json(found, NAMES, seconds=12.3), **changes}


def test_a_search_is_shown_as_the_product_writes_it_and_a_link_with_both_ends() -> None:
    search = search_of(searched())
    assert search is not None
    culprits = [(each.name, each.failed_probes) for each in search.culprits]
    assert culprits == [("gpu-02", "failed 2 of 3 probes: intermittent")]
    assert (search.cleared, search.undecided) == ("gpu-01", "gpu-03: no time")
    culprit = {"units": [0, 2], "kind": "link", "failed": 3, "probes": 3, "intermittent": False, "evidence": []}
    search = search_of(searched(culprits=[culprit]))
    assert search is not None
    assert search.culprits[0].name.endswith("between gpu-01 and gpu-03")


def test_a_form_of_another_version_is_shown_whole_and_reported() -> None:
    search = search_of(searched(culprits=[{"units": "gpu-02"}]))
    assert search is not None
    assert "units" in search.result
    assert '"gpu-02"' in search.raw
    assert search.culprits == ()
    search = search_of(searched(culprits=[], reproduced=False, cut_short="rank lost"))
    assert search is not None
    assert re.search("not reproduced.*rank lost", search.result)
