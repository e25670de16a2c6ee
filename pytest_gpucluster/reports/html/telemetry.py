"""What GPUs did during a test, as a table. Values are those of ``telemetry.summary``, from ranks of any version."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pytest_gpucluster.journal_lines import RankPlace, TestResult
from pytest_gpucluster.judge.misses import most_telling
from pytest_gpucluster.reports.html.measured import EMBEDDED_RANKS, shared_labels, short_name, worst_first
from pytest_gpucluster.reports.html.readable import word
from pytest_gpucluster.reports.html.table import Table, table
from pytest_gpucluster.reports.telemetry_text import telemetry_text

_FIGURES = {
    "sm_clock_mhz": "SM clock, MHz",
    "memory_clock_mhz": "Memory clock, MHz",
    "power_watts": "Power, W",
    "temperature_celsius": "Temperature, degC",
    "utilization_percent": "Utilisation, %",
}
_HIGHEST = "sm_clock_max_mhz"
_ROWS = 24
_WHOLE = "the whole test"


def telemetry_table(result: TestResult, places: Mapping[int, RankPlace]) -> Table | None:
    """Return what the GPUs did: those of the worst ranks in each measurement, in the order in which measurements are
    shown, then those of ranks in the whole test.

    Culprits come first, then the GPU that was held back most; of many ranks these are all. None where nothing was read.
    """
    rows: list[tuple[str, ...]] = []
    known: set[tuple[str, ...]] = set()
    shared = shared_labels(result)
    for judged in worst_first(result.measurements):
        told = judged.telemetry.get(judged.worst_rank) if judged.worst_rank is not None else None
        if told and judged.worst_rank is not None:
            cells = _cells(told)
            # Values of one window share their telemetry: it stands here once.
            if (str(judged.worst_rank), *cells) not in known:
                known.add((str(judged.worst_rank), *cells))
                rows.append((*_named(judged.worst_rank, places), short_name(judged, shared), *cells))
    telling = most_telling(result.telemetry)
    order = {rank: place for place, rank in enumerate((*result.culprits, *([telling] if telling is not None else [])))}
    is_small = len(result.telemetry) <= EMBEDDED_RANKS
    for rank in sorted(result.telemetry, key=lambda rank: (order.get(rank, len(order)), rank)):
        if result.telemetry[rank] and (is_small or rank in order):
            rows.append((*_named(rank, places), _WHOLE, *_cells(result.telemetry[rank])))
    if not rows:
        return None
    head = ("Rank", "Host", "GPU", "During", *_FIGURES.values(), "Throttle, counters and notes")
    made = table(
        "What the GPUs did: median (lowest to highest)", head, rows, numbers=tuple(_FIGURES.values()), most=_ROWS
    )
    return made if is_small else replace(made, left_out=f"the journal has that of all {len(result.telemetry)} ranks")


def _named(rank: int, places: Mapping[int, RankPlace]) -> tuple[str, str, str]:
    place = places.get(rank)
    if place is None:
        return str(rank), "", ""
    return str(rank), word(place.host), word((place.gpu or {}).get("index", ""))


def _cells(told: Mapping[str, Any]) -> tuple[str, ...]:
    rest = {key: value for key, value in told.items() if key not in _FIGURES}
    return (*(_figure(key, told) for key in _FIGURES), telemetry_text(rest))


def _figure(key: str, told: Mapping[str, Any]) -> str:
    if key not in told:
        return ""
    value = told[key]
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(map(_is_number, value)):
        return word(repr(value))
    low, median, high = (f"{each:.0f}" for each in value)
    highest = told.get(_HIGHEST)
    of_highest = f" of {highest:.0f}" if key == "sm_clock_mhz" and _is_number(highest) else ""
    return f"{median}{of_highest}" + (f" ({low} to {high})" if low != high else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
