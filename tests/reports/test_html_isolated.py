"""The result of a search for culprits in the page."""

from __future__ import annotations

import re
from typing import Any

from pytest_gpucluster.isolation.finding import Culprit, IsolationResult, Outcome
from pytest_gpucluster.reports.findings import isolation_of
from pytest_gpucluster.reports.html.criterion import search_values
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


def shown(**changes: Any) -> dict[str, Any]:
    values = search_values(isolation_of(searched(**changes)))
    assert values is not None
    return values


def test_a_search_is_shown_as_the_product_writes_it_and_a_link_with_both_ends() -> None:
    search = shown()
    culprits = [(each["name"], each["failed_probes"]) for each in search["culprits"]]
    assert culprits == [("gpu-02", "failed 2 of 3 probes: intermittent")]
    assert (search["cleared"], search["undecided"]) == ("gpu-01", "gpu-03: no time")
    culprit = {"units": [0, 2], "kind": "link", "failed": 3, "probes": 3, "intermittent": False, "evidence": []}
    assert shown(culprits=[culprit])["culprits"][0]["name"].endswith("between gpu-01 and gpu-03")
    assert re.search("not reproduced.*rank lost", shown(culprits=[], reproduced=False, cut_short="rank lost")["result"])


def test_a_form_of_another_version_is_reported() -> None:
    search = shown(culprits=[{"units": "gpu-02"}])
    assert "culprits[0].units must be a list, found 'gpu-02'; see the journal" in search["undecided"]
    assert search["culprits"] == []
