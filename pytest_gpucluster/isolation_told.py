"""How what a search for culprits has found is told: on the test's record, on the terminal, and in exclude.txt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.isolation.finding import Culprit, Isolated

_PROBES_SHOWN = 64


def headline(found: Isolated, name: Callable[[int], str], *, cut_short: str = "") -> str:
    """Return in a few words who is to blame, or why that is not known.

    Args:
        found: what the search has found.
        name: tells what a unit is called.
        cut_short: why it has ended before it was through; nothing if it has not.
    """
    if found.culprits:
        return "isolated: " + ", ".join(_named(culprit, name) for culprit in found.culprits)
    if found.rounds and not found.reproduced:
        told = f"not isolated, not reproduced in {found.probes} probe{'s' * (found.probes != 1)}"
        return f"{told}: {cut_short}" if cut_short else told
    return f"not isolated: {cut_short or found.why_undecided}"


def text(found: Isolated, name: Callable[[int], str], *, seconds: float, cut_short: str = "") -> str:
    """Return what was found and what was tried, as lines for a report."""
    ended = [f"it has ended before it was through: {cut_short}"] if cut_short else []
    lines = [f"Search for who is to blame, {seconds:.1f} s:", *found.summary(name), *ended, "Probes:"]
    probed = [(number, one) for number, outcomes in enumerate(found.rounds, start=1) for one in outcomes]
    for number, one in probed[:_PROBES_SHOWN]:
        seen = one.wrong or one.failure or ("no value" if one.busbw is None else f"{one.busbw:.4g} GB/s")
        lines.append(f"  round {number}: {', '.join(map(name, one.members))}: {first_line(seen)}")
    if len(probed) > _PROBES_SHOWN:
        lines.append(f"  and {len(probed) - _PROBES_SHOWN} more, which the journal has")
    return "\n".join(lines)


def to_json(found: Isolated, names: Mapping[int, str], *, seconds: float, cut_short: str = "") -> dict[str, Any]:
    """Return the same in plain JSON types, for the journal. ``names`` tells what each unit is called."""
    return {
        **found.to_json(),
        "names": {str(unit): name for unit, name in names.items()},
        "seconds": seconds,
        "cut_short": cut_short,
    }


def _named(culprit: Culprit, name: Callable[[int], str]) -> str:
    who = " and ".join(map(name, culprit.units))
    who = f"the link between {who}" if culprit.kind == "link" else who
    return f"{who} (intermittent: {culprit.failed} of {culprit.probes} probes)" if culprit.intermittent else who
