"""What a search for who is to blame has found, with its evidence, as a page shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal_fields import Fields
from pytest_gpucluster.reports.html.readable import line, passage, word
from pytest_gpucluster.reports.html.table import Table, table

_PROBES = 64
_NAMED = 16


@dataclass(frozen=True, kw_only=True)
class Accused:
    """A culprit: a node, a GPU, or a link between two of them."""

    who: str
    often: str
    evidence: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search. ``raw`` holds all of it where it is not of the form that this version writes."""

    told: str = ""
    accused: tuple[Accused, ...] = ()
    cleared: str = ""
    undecided: str = ""
    probes: Table | None = None
    raw: str = ""


def search_of(isolation: Mapping[str, Any]) -> Search | None:
    """Return what the journal says of a search; None where there was none."""
    if not isolation:
        return None
    try:
        return _read(Fields(dict(isolation), "isolation"))
    except JournalError as error:
        # Of another version: shown as it is, because evidence is never dropped.
        return Search(told=line(str(error)), raw=passage(json.dumps(isolation, indent=1, default=str), 4096))


def _read(told: Fields) -> Search:
    names = told.texts("names")

    def name(unit: int) -> str:
        return word(names.get(str(unit), f"unit {unit}"))

    def listed(units: tuple[int, ...]) -> str:
        more = f" and {len(units) - _NAMED} more" if len(units) > _NAMED else ""
        return ", ".join(map(name, units[:_NAMED])) + more

    accused = []
    for culprit in told.each("culprits"):
        who = " and ".join(map(name, culprit.integers("units")))
        who = f"the link between {who}" if culprit.text("kind", "unit") == "link" else who
        often = f"failed {culprit.integer('failed', 0)} of {culprit.integer('probes', 0)} probes"
        often += ": intermittent" if culprit.flag("intermittent", False) else ""
        evidence = tuple(line(str(each)) for each in culprit.items("evidence"))
        accused.append(Accused(who=who, often=often, evidence=evidence[:_PROBES]))
    rounds = told.items("rounds")
    probes = [
        (str(number), listed(probe.integers("members")), _seen(probe))
        for number, outcomes in enumerate(rounds, start=1)
        for probe in Fields({"probes": outcomes}, "isolation: rounds").each("probes")
    ]
    undecided, why = listed(told.integers("undecided")), told.text("why_undecided", "")
    cut = told.text("cut_short", "")
    parts = [
        f"{len(rounds)} {'round' if len(rounds) == 1 else 'rounds'}, {len(probes)} probes, "
        f"{told.number('seconds', 0.0):.1f} s",
        "" if told.flag("reproduced", False) or accused else "the fault did not show again",
        f"ended before it was through: {cut}" if cut else "",
    ]
    return Search(
        told=line("; ".join(part for part in parts if part)),
        accused=tuple(accused),
        cleared=listed(told.integers("cleared")),
        undecided=line(": ".join(part for part in (undecided, why) if part)),
        probes=table("Probes", ("Round", "Group", "Seen"), probes, most=_PROBES) if probes else None,
    )


def _seen(probe: Fields) -> str:
    wrong, failure = probe.text("wrong", ""), probe.text("failure", "")
    if wrong or failure:
        return "; ".join(part for part in (f"wrong data: {wrong}" if wrong else "", failure) if part)
    value = probe.any_text("busbw")
    if value in ("", "None"):
        return "no value"
    try:
        return f"{float(value):.4g} GB/s"
    except ValueError:
        return value
