"""The meaning of a driver's report and what to do, from ``xid.tsv`` in this folder and the text of the line itself.

    >>> from pytest_gpucluster.node import kernel_log
    >>> entry = lookup(kernel_log.parse(["NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus."])[0])
    >>> entry.action, entry.rejects
    ('reboot the node', True)

Formats of lines: ``NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x0 ...)`` has
a unit of NVLink 5, a severity, and in brackets what the interrupt was and the error status;
``..., 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)`` has the action before and now, whose
names differ between drivers. An SXid's text begins with its severity. Its other two lines, ``Severity 1 Engine
instance ...`` (0 is not fatal) and ``Data {...}``, come after it. Sources: those of ``xid.tsv``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pytest_gpucluster.node.kernel_log import Xid

TABLE = Path(__file__).with_name("xid.tsv")
HARMLESS = frozenset({"none", "restart the application"})
NVLINK5 = range(144, 151)
RECOVERY_ACTION = 154
_THEN = ", then "

_CODES = re.compile(r"(?P<kind>SXid )?(?P<codes>\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)(?: (?P<rest>.+))?")
_UNIT = re.compile(
    r"\b(?P<unit>[A-Z][A-Z0-9_/]+)(?: Degraded)?\s+(?:Link )?(?P<severity>Fatal|Non-?[Ff]atal)\b"
    r"(?:[^(\[]*[(\[]0x(?P<info>[0-9a-fA-F]+)(?:[ ,]+0x(?P<status>[0-9a-fA-F]+))?)?"
)
_NOW = re.compile(r"\bto 0x(?P<value>[0-9a-fA-F]+)\b")
_SEVERITY = re.compile(r"(?P<word>Fatal|Non-?[Ff]atal|Correctable)\b|Severity (?P<number>\d)")
_LINK_EVENTS = frozenset({"NETIR_LINK_EVT", "NETIR_LINK_DOWN"})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a report means, the action for it, and the next step, if known. Any action but ``HARMLESS`` rejects."""

    meaning: str
    action: str
    next: str = ""

    @property
    def rejects(self) -> bool:
        """Whether a GPU, an NVLink or the node needs action; an error that a program can cause does not reject."""
        return not HARMLESS.issuperset(self.action.split(_THEN))

    @property
    def advice(self) -> str:
        """The action and the next step."""
        return f"{self.action}; {self.next}" if self.next else self.action


def lookup(report: Xid) -> Entry:
    """Return what a report means. A report that is not in the table, or is truncated, rejects."""
    if report.is_switch:
        return _first(*_keys_of_switch(report))
    code = str(report.code)
    if report.code in NVLINK5:
        keys = tuple(_keys_of_nvlink5(report))
    elif report.code == RECOVERY_ACTION and (now := _NOW.search(report.text)) is not None:
        keys = (f"{code} {int(now['value'], 16):#x}",)
    else:
        keys = ()
    entry = _first(code, "other Xid")
    detail = _first(*keys, code, "other Xid")
    return entry if detail is entry else replace(detail, meaning=f"{entry.meaning}: {detail.meaning}")


def recovery_action(value: int) -> Entry:
    """Return what NVML's recovery action of a GPU means (``nvmlDeviceGpuRecoveryAction_t``); an unknown one rejects."""
    return _first(f"{RECOVERY_ACTION} {value:#x}", f"{RECOVERY_ACTION}")


@cache
def table() -> Mapping[str, Entry]:
    """Return the table: a report without alternatives, such as "79", "144 Fatal" or "154 0x2", -> its entry."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {
        key: Entry(meaning=meaning, action=action, next=following)
        for report, action, meaning, following in rows
        for key in _keys(report)
    }


def _keys(report: str) -> Iterator[str]:
    match = _CODES.fullmatch(report)
    if match is None:
        yield report
        return
    rest = f" {match['rest']}" if match["rest"] else ""
    unit, *statuses = rest.split(" 0x")
    details = [f"{unit} 0x{status}" for status in statuses] or [unit]
    for part in match["codes"].split(", "):
        first, _, last = part.partition("-")
        for code in range(int(first), int(last or first) + 1):
            yield from (f"{match['kind'] or ''}{code}{detail}" for detail in details)


def _keys_of_nvlink5(report: Xid) -> Iterator[str]:
    match = _UNIT.search(report.text)
    if match is None:
        return
    units = match["unit"].split("/")
    severity = "Fatal" if match["severity"] == "Fatal" else "Nonfatal"
    if severity == "Fatal" and match["info"] and _LINK_EVENTS.intersection(units):
        yield f"{report.code} NETIR_LINK_EVT cause {int(match['info'], 16) >> 20 & 0x3F}"
    if match["status"]:
        yield from (f"{report.code} {unit} {int(match['status'], 16):#x}" for unit in units)
    yield f"{report.code} {severity}"


def _keys_of_switch(report: Xid) -> Iterator[str]:
    match = _SEVERITY.match(report.text)
    if match is not None:
        # Source: NVSWITCH_ERROR_SEVERITY_TYPE in NVIDIA's driver, 0 is NONFATAL and 1 FATAL.
        word = match["word"] or {"0": "Non-fatal", "1": "Fatal"}.get(match["number"], "unknown")
        severity = "Non-fatal" if word.startswith("Non") else word
        yield f"SXid {report.code} {severity}"
        yield f"SXid {severity}"
    else:
        yield f"SXid {report.code}"
    yield "SXid"


def _first(*keys: str) -> Entry:
    return next(table()[key] for key in keys if key in table())
