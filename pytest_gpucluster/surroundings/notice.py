"""Findings about a host, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.health.finding import Finding, Identity, Kind


def notice(code: str, kind: Kind, host: str, found: str, *, allowed: str, remedy: str) -> Finding:
    """Make a finding about a host, and about no GPU of it in particular."""
    return Finding(code=code, kind=kind, gpu=Identity(host=host), found=found, allowed=allowed, remedy=remedy)


def decisive(findings: Iterable[Finding]) -> list[Finding]:
    """Return what is more than a note."""
    return [one for one in findings if one.kind != "note"]


def require_nothing(findings: Iterable[Finding]) -> None:
    """Make sure that nothing but notes was found; notes are printed.

    Raises:
        HardwareFault: what was found is of the kind "hardware", maybe beside others.
        EnvironmentBroken: what was found is of the kind "environment".
    """
    found = list(findings)
    wrong = decisive(found)
    notes = [one for one in found if one.kind == "note"]
    if not wrong:
        for note in notes:
            print(note)
        return
    codes = ", ".join(dict.fromkeys(one.code for one in wrong))
    places = ", ".join(dict.fromkeys(str(one.gpu) for one in wrong))
    text = "\n".join([f"{codes}: {places}", *(f"- {one}" for one in (*wrong, *notes))])
    if any(one.kind == "hardware" for one in wrong):
        raise HardwareFault(text)
    raise EnvironmentBroken(text)
