"""The nodes and GPUs of a run: what all have in common once, and a row a rank for what differs."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import RankPlace
from pytest_gpucluster.reports.html.readable import line, word
from pytest_gpucluster.reports.html.table import Table, table
from pytest_gpucluster.reports.tables import quantity

_NAMES = {
    "index": "GPU",
    "name": "Model",
    "uuid": "UUID",
    "serial": "Serial",
    "pci_bus_id": "PCI",
    "vbios": "VBIOS",
    "board_part_number": "Board part number",
    "inforom": "InfoROM",
    "gsp_firmware": "GSP firmware",
    "memory_bytes": "Memory",
    "power_limit_watts": "Power limit",
    "ecc": "ECC",
    "mig": "MIG",
}
# These tell ranks apart: they stand in the row even where there is one rank only.
_OF_EACH = ("host", "index", "uuid", "serial", "pci_bus_id")
_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Names and values that are the same on every rank, and a row a rank."""

    same: tuple[tuple[str, str], ...]
    ranks: Table | None
    problems: tuple[str, ...]


def inventory(journal: Journal) -> Inventory:
    """Return who took part: rank, host, GPU, UUID, serial, PCI, VBIOS, driver and what else each rank said."""
    if journal.cluster is None or not journal.cluster.ranks:
        problems = journal.cluster.problems if journal.cluster is not None else ()
        return Inventory(same=(), ranks=None, problems=tuple(map(line, problems)))
    ranks = sorted(journal.cluster.ranks, key=lambda place: place.rank)
    facts = [_facts(place) for place in ranks]
    keys = list(dict.fromkeys(key for each in facts for key in each))
    values = {key: {each.get(key, "") for each in facts} for key in keys}
    same = [key for key in keys if key not in _OF_EACH and len(values[key]) == 1]
    differ = [key for key in keys if key not in same]
    rows = [(str(place.rank), *(told.get(key, "") for key in differ)) for place, told in zip(ranks, facts, strict=True)]
    return Inventory(
        same=tuple((_title(key), next(iter(values[key]))) for key in same),
        ranks=table("Ranks", ("Rank", *map(_title, differ)), rows, numbers=("GPU",), most=_RANKS),
        problems=tuple(map(line, journal.cluster.problems)),
    )


def _facts(place: RankPlace) -> dict[str, str]:
    told = {"host": word(place.host), "local_rank": str(place.local_rank)}
    gpu = place.gpu or {}
    known = [key for key in _NAMES if key in gpu]
    told |= {key: word(_shown(key, gpu[key])) for key in (*known, *(key for key in gpu if key not in _NAMES))}
    return told | {f"version.{name}": word(version) for name, version in place.versions.items()}


def _shown(key: str, told: str) -> str:
    """Return a fact with its unit; one of which the journal has something else than a number stays as it is."""
    if key in ("ecc", "mig"):
        return {"True": "on", "False": "off", "None": "unknown"}.get(told, told)
    try:
        if key == "memory_bytes":
            # As many digits as tell a card with a page less from the others.
            return quantity(int(told) / 2**30, "GiB", digits=6)
        if key == "power_limit_watts":
            return f"{float(told):g} W"
    except (ValueError, OverflowError):
        pass  # what follows shows it
    return "unknown" if told == "None" else told


def _title(key: str) -> str:
    if key in ("host", "local_rank"):
        return {"host": "Host", "local_rank": "Local rank"}[key]
    return _NAMES.get(key, word(key.removeprefix("version.").replace("_", " ")))
