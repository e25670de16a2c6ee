"""Why an entry of the limits decides about a metric, and why the others do not.

What is known of a run may be a part of it: a size that was not named, a topology that is not yet chosen. Then an entry
decides only where what is not known is as it demands, and the next one where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.limits import EVERY_SKU, Condition, Limit, Thresholds
from pytest_gpucluster.metrics import units

Says = Literal["decides", "decides where", "does not apply", "is overruled"]


@dataclass(frozen=True, kw_only=True)
class Explained:
    """One entry, and what it has to say here. ``why`` is empty where it decides in any case."""

    limit: Limit
    says: Says
    why: str = ""


def explain(
    limits: Thresholds, metric: str, *, sku: str, known: Mapping[str, str], is_all: bool = False
) -> tuple[Explained, ...]:
    """Return what each entry for a metric says, in the order in which they are asked.

    Args:
        limits: in force.
        metric: its name.
        sku: of the GPUs.
        known: facts and labels as they stand in a measurement: ``world_size``, ``nnodes``, ``size`` and so on.
        is_all: nothing else is to be known, as of a measurement: a condition on another label never holds.
    """
    facts = _completed(known)
    found: list[Explained] = []
    decider: Limit | None = None
    for limit in limits.entries(metric, sku=sku):
        against = [part for part in limit.when if part.key in facts and not part.holds(facts[part.key])]
        open_parts = [part for part in limit.when if part.key not in facts]
        if against or (is_all and open_parts):
            why = ", ".join(
                [f"{part.key} is {facts[part.key]}" for part in against]
                + [f"there is no {part.key}" for part in open_parts if is_all]
            )
            found.append(Explained(limit=limit, says="does not apply", why=why))
        elif decider is not None:
            found.append(Explained(limit=limit, says="is overruled", why=_stronger(decider, limit)))
        elif open_parts:
            found.append(Explained(limit=limit, says="decides where", why=", ".join(map(_told, open_parts))))
        else:
            decider = limit
            found.append(Explained(limit=limit, says="decides"))
    return tuple(found)


def demand(limit: Limit) -> str:
    """Return what an entry demands, as "at least 400 GB/s, over NET/IB"; what is only expected stands in brackets."""
    if limit.record_only is not None:
        return "recorded only"
    parts = []
    if limit.min is not None:
        parts.append(f"at least {units.show(limit.min, limit.unit)}".rstrip())
    if limit.max is not None:
        parts.append(f"at most {units.show(limit.max, limit.unit)}".rstrip())
    if limit.min_ratio_to_median is not None:
        parts.append(f"each rank at least {units.show(100 * limit.min_ratio_to_median, '%')} of the others' median")
    if limit.expect_transport is not None:
        parts.append(f"over {' or '.join(limit.expect_transport)}")
    if limit.expected is not None:
        parts[0] += f" (expected {units.show(limit.expected, limit.unit)})"
    return ", ".join(parts)


def looser(new: Limit, old: Limit) -> str:
    """Return in what an entry demands less than another one of the same conditions; "" where in nothing."""
    found = []
    if old.record_only is None and new.record_only is not None:
        found.append(f"it judges no more, where {demand(old)} was demanded")
    else:
        if old.min is not None and (new.min is None or new.min < old.min):
            found.append(f"min is {_or_none(new.min, new.unit)}, not {units.show(old.min, old.unit)}")
        if old.max is not None and (new.max is None or new.max > old.max):
            found.append(f"max is {_or_none(new.max, new.unit)}, not {units.show(old.max, old.unit)}")
        ratio, before = new.min_ratio_to_median, old.min_ratio_to_median
        if before is not None and (ratio is None or ratio < before):
            shown = _or_none(None if ratio is None else 100 * ratio, "%")
            found.append(f"min_ratio_to_median is {shown}, not {units.show(100 * before, '%')}")
        if old.expect_transport is not None and not set(new.expect_transport or ()) <= set(old.expect_transport):
            found.append("it takes other transports")
        if old.expect_transport is not None and new.expect_transport is None:
            found.append("it takes any transport")
    return "; ".join(found)


def _completed(known: Mapping[str, str]) -> dict[str, str]:
    facts = dict(known)
    ranks, nodes = facts.get("world_size", ""), facts.get("nnodes", "")
    if "local_world_size" in facts or not (ranks.isdecimal() and nodes.isdecimal() and int(nodes)):
        return facts
    ranks_of_node, rest = divmod(int(ranks), int(nodes))
    return facts if rest else {**facts, "local_world_size": str(ranks_of_node)}


def _told(part: Condition) -> str:
    return f"{part.key} is {part.text}"


def _stronger(decider: Limit, other: Limit) -> str:
    """Return why the one comes before the other."""
    if decider.layer != other.layer:
        return f"{decider.origin} is in a later file"
    if (decider.sku == EVERY_SKU) != (other.sku == EVERY_SKU):
        return f"{decider.origin} is the SKU's own"
    if len(decider.when) != len(other.when):
        return f"{decider.origin} has more conditions"
    return f"{decider.origin} is more exact"


def _or_none(value: float | None, unit: str) -> str:
    return "none" if value is None else units.show(value, unit)
