"""The limits in force: what a metric must reach on a SKU, under which conditions, and why an entry decides.

Files are layers. Where an entry of a later file applies, it decides; elsewhere the earlier files stand.
Within one file the entry with the most conditions decides.

:func:`explain` also works where a run is only partly known (a size that was not named, a topology that is not yet
chosen): an entry then decides only if the unknown facts match its conditions, and the next entry decides if not.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pytest_gpucluster.errors import MeasurementError, ThresholdsError
from pytest_gpucluster.judge.judged import JudgedLimit
from pytest_gpucluster.metrics import datasheets, measurement, stats, units
from pytest_gpucluster.metrics.catalogue import Metric

# The facts about a run that a limit can depend on, besides a measurement's labels.
TOPOLOGY = ("world_size", "nnodes", "local_world_size")
# Labels that may stand directly under `when`. Others go under `labels:` there, so that a misspelt key is an
# error.
KNOWN_LABELS = ("size", "dtype", "transport")
FORMS = "a value, 'X or more', 'below X' or 'X to Y'"
"""How a condition is written."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One line of ``when``: the fact ``key`` must be equal to, or lie in the range of, ``text``.

    A number or quantity is compared by its amount, so ``1 GB`` holds for ``1000 MB``. What is neither is
    compared as text. A fact that is missing, or of another dimension, never holds.
    """

    key: str
    text: str
    dimension: str | None
    low: float = -math.inf
    high: float = math.inf
    high_open: bool = False

    @property
    def exact(self) -> bool:
        """Return whether a single value satisfies the condition."""
        return self.dimension is None or self.low == self.high

    def holds(self, fact: str | None) -> bool:
        """Return whether a fact, as text, satisfies the condition."""
        if fact is None:
            return False
        if self.dimension is None:
            return fact == self.text
        amount = units.magnitude(fact)
        if amount is None or amount[0] != self.dimension:
            return False
        # "1.1 GB" and "1100 MB" differ in the last bit.
        value, slack = amount[1], 1e-12 * abs(amount[1])
        return self.low - slack <= value and (
            value + slack < self.high if self.high_open else value - slack <= self.high
        )

    def overlaps(self, other: Condition) -> bool:
        """Return whether one fact could satisfy both conditions."""
        if self.dimension is None or other.dimension is None:
            return self.text == other.text
        if self.dimension != other.dimension:
            return False
        first, second = (self, other) if self.low <= other.low else (other, self)
        return second.low < first.high if first.high_open else second.low <= first.high


def condition(key: str, text: str) -> Condition:
    """Read a condition.

    >>> condition("size", "1 GB or more").holds("1000 MB")
    True

    Raises: ThresholdsError saying what is allowed.
    """
    parts = re.fullmatch(
        r"(?P<least>.+?) +or +more|below +(?P<below>.+)|(?P<first>.+?) +to +(?P<last>.+)|(?P<exact>.+)", text
    )
    ends = {name: end for name, end in parts.groupdict().items() if end} if parts else {}
    amounts = {name: units.magnitude(end) for name, end in ends.items()}
    known = [amount for amount in amounts.values() if amount is not None]
    if "exact" in ends and not known and key not in TOPOLOGY and key != "size":
        return Condition(key=key, text=text, dimension=None)
    allowed = {"size": ("amount of data", "number")}.get(key, ("number",) if key in TOPOLOGY else None)
    dimensions = {dimension for dimension, _ in known}
    wrong = allowed is not None and not dimensions.issubset(allowed)
    if len(known) < len(amounts) or len(dimensions) != 1 or wrong:
        kind = {"size": "sizes such as 1 GB"}.get(key, "numbers such as 8")
        raise ThresholdsError(f"{key} is {text!r}; allowed is {FORMS}, with {kind}")
    if key in TOPOLOGY and any(value < 1 or not value.is_integer() for _, value in known):
        raise ThresholdsError(f"{key} is {text!r}; it counts in whole numbers from 1")
    amount = {name: value[1] for name, value in amounts.items() if value is not None}
    exact = amount.get("exact")
    found = Condition(
        key=key,
        text=text,
        dimension=known[0][0],
        low=amount.get("least", amount.get("first", -math.inf if exact is None else exact)),
        high=amount.get("below", amount.get("last", math.inf if exact is None else exact)),
        high_open="below" in amount,
    )
    if found.low > found.high:
        raise ThresholdsError(f"{key} is {text!r}; nothing lies in that range")
    return found


EVERY_SKU = "every SKU"
"""Stands for the SKU in a limit that holds on each SKU whose own entries do not decide."""
DECLARED = "the metric's declaration"
"""The origin of what no file states: that a metric is only recorded."""


@dataclass(frozen=True, kw_only=True)
class Limit(JudgedLimit):
    """What a metric must reach on a SKU, in the metric's canonical unit, or why it is only recorded there.

    ``min``, ``max``, ``min_ratio_to_median`` (one of them or more) with a ``source``, or ``record_only`` with the
    reason. ``min_ratio_to_median`` is what ``straggler_ratios`` must reach on every rank. ``expect_transport`` names
    what may have carried the data, by the measurement's label ``transport``. ``expected``, in the same unit, is
    reported next to the limit and never judged.
    """

    metric: str
    sku: str
    unit: str
    when: tuple[Condition, ...] = ()
    record_only: str | None = None
    layer: int = 0

    @property
    def precedence(self) -> tuple[int, bool, int, int]:
        """Order entries: later files first, then the SKU's own, then more conditions, then more exact ones."""
        exact = sum(condition.exact for condition in self.when)
        return self.layer, self.sku != EVERY_SKU, len(self.when), exact

    def applies(self, facts: Mapping[str, str]) -> bool:
        """Return whether all conditions hold."""
        return all(condition.holds(facts.get(condition.key)) for condition in self.when)

    def overlaps(self, other: Limit) -> bool:
        """Return whether some run could satisfy the conditions of both."""
        theirs = {condition.key: condition for condition in other.when}
        return all(ours.overlaps(theirs[ours.key]) for ours in self.when if ours.key in theirs)

    def conditions(self) -> str:
        """Write the conditions in one line."""
        return ", ".join(f"{condition.key} {condition.text}" for condition in self.when) or "always"


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """All limits and SKUs in force."""

    skus: Mapping[str, datasheets.Sku]
    limits: tuple[Limit, ...]

    @functools.cached_property
    def _by_name(self) -> Mapping[tuple[str, str], list[Limit]]:
        ordered = sorted(self.limits, key=lambda limit: limit.precedence, reverse=True)
        return stats.grouped(((limit.sku, limit.metric), limit) for limit in ordered)

    @property
    def metrics(self) -> list[str]:
        """The metrics with an entry, in the order of the files, and then the others that are declared as recorded."""
        declared = (metric.name for metric in measurement.METRICS.values() if metric.recorded)
        return list(dict.fromkeys([*(limit.metric for limit in self.limits), *declared]))

    def slower(self, factor: float) -> Thresholds:
        """Return the limits with a shipped rehearsal's floors of rates divided by this factor, its times multiplied."""

        def slowed(limit: Limit) -> Limit:
            if limit.sku != datasheets.CPU_REHEARSAL or limit.layer > 0:  # an operator's own hold as they are written
                return limit
            if limit.min is not None and limit.unit.endswith(("/s", "FLOPS")):
                return replace(limit, min=limit.min / factor)
            if limit.max is not None and limit.unit in ("s", "ms", "us"):
                return replace(limit, max=limit.max * factor)
            return limit

        return self if factor == 1.0 else replace(self, limits=tuple(map(slowed, self.limits)))

    def sku_for(self, nvml_name: str) -> str | None:
        """Name the SKU whose pattern matches the whole NVML name. None: an unknown GPU.

        Raises: ThresholdsError if several SKUs claim the name.
        """
        found = datasheets.matching(self.skus.values(), nvml_name)
        if len(found) > 1:
            raise ThresholdsError(
                f"the GPU {nvml_name!r} is claimed by {' and '.join(map(repr, found))}: make their nvml_name"
                " patterns narrower, or choose one with --gpucluster-sku"
            )
        return found[0] if found else None

    def limit(self, metric: str, *, sku: str, world_size: int, nnodes: int, labels: Mapping[str, str]) -> Limit | None:
        """Return the entry that decides about this metric here, or None if there is none."""
        known = facts(world_size=world_size, nnodes=nnodes, labels=labels)
        return next((limit for limit in self.entries(metric, sku=sku) if limit.applies(known)), None)

    def entries(self, metric: str, *, sku: str) -> Sequence[Limit]:
        """Return every entry for a metric on a SKU, the one that decides first in front.

        The last one of a metric that is declared as recorded is that declaration.
        """
        own, of_all = (self._by_name.get((name, metric), []) for name in (sku, EVERY_SKU))
        if sku not in self.skus:
            return own
        found = sorted((*own, *of_all), key=lambda limit: limit.precedence, reverse=True) if of_all else own
        declared = measurement.METRICS.get(metric)
        return [*found, _recorded(declared)] if declared is not None and declared.recorded else found


@functools.cache
def _recorded(metric: Metric) -> Limit:
    return Limit(
        metric=metric.name,
        sku=EVERY_SKU,
        unit=metric.unit,
        origin=DECLARED,
        record_only=metric.recorded,
        layer=-1,
    )


def facts(*, world_size: int, nnodes: int, labels: Mapping[str, str]) -> dict[str, str]:
    """Return what conditions are compared with: the topology of the run, and the labels of the measurement.

    A label called like a fact of the topology (``world_size`` of a sub-group) describes who measured, so it
    wins. ``local_world_size`` is known where the ranks divide evenly among the nodes.
    """
    return _completed({"world_size": str(world_size), "nnodes": str(nnodes)} | dict(labels))


def peak_of(metric: Metric, sku: datasheets.Sku | None) -> float | None:
    """Return the data sheet peak of the metric, in the metric's unit, where there is one.

    Raises: MeasurementError if the metric names a peak that no data sheet entry has.
    """
    if metric.peak is None or sku is None or sku.peaks is None:
        return None
    if metric.peak not in datasheets.PEAK_UNITS:
        raise MeasurementError(
            f"metric {metric.name!r} names the peak {metric.peak!r}; known are {', '.join(datasheets.PEAK_UNITS)}"
        )
    peak: float | None = getattr(sku.peaks, metric.peak)
    return None if peak is None else units.convert(peak, datasheets.PEAK_UNITS[metric.peak], metric.unit)


Effect = Literal["decides", "decides where", "does not apply", "is overruled"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The effect of one entry on a run. ``why`` is empty where it decides in any case."""

    limit: Limit
    effect: Effect
    why: str = ""


def explain(limits: Thresholds, metric: str, *, sku: str, known: Mapping[str, str]) -> tuple[Explanation, ...]:
    """Return the effect of each entry for a metric, in the order of precedence.

    Args:
        limits: in force.
        metric: its name.
        sku: of the GPUs.
        known: facts and labels as they stand in a measurement: ``world_size``, ``nnodes``, ``size`` and so on.
    """
    facts = _completed(known)
    found: list[Explanation] = []
    decider: Limit | None = None
    for limit in limits.entries(metric, sku=sku):
        against = [part for part in limit.when if part.key in facts and not part.holds(facts[part.key])]
        open_parts = [part for part in limit.when if part.key not in facts]
        if against:
            why = ", ".join(f"{part.key} is {facts[part.key]}" for part in against)
            found.append(Explanation(limit=limit, effect="does not apply", why=why))
        elif decider is not None:
            found.append(Explanation(limit=limit, effect="is overruled", why=_stronger(decider, limit)))
        elif open_parts:
            why = ", ".join(f"{part.key} is {part.text}" for part in open_parts)
            found.append(Explanation(limit=limit, effect="decides where", why=why))
        else:
            decider = limit
            found.append(Explanation(limit=limit, effect="decides"))
    return tuple(found)


def demand(limit: JudgedLimit, unit: str) -> str:
    """Return what an entry demands, as ">= 400 GB/s, over NET/IB"."""
    return ", ".join(limit.demands(unit)) or "recorded only"


def looser(new: JudgedLimit, old: JudgedLimit, unit: str) -> str:
    """Return in what an entry demands less than another one of the same conditions; "" where in nothing."""
    if old.demands(unit) and not new.demands(unit):
        return f"it judges no more, where {demand(old, unit)} was demanded"
    found = []
    if old.min is not None and (new.min is None or new.min < old.min):
        found.append(f"min is {_or_none(new.min, unit)}, not {units.show(old.min, unit)}")
    if old.max is not None and (new.max is None or new.max > old.max):
        found.append(f"max is {_or_none(new.max, unit)}, not {units.show(old.max, unit)}")
    ratio, before = new.min_ratio_to_median, old.min_ratio_to_median
    if before is not None and (ratio is None or ratio < before):
        percent = _or_none(None if ratio is None else 100 * ratio, "%")
        found.append(f"min_ratio_to_median is {percent}, not {units.show(100 * before, '%')}")
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
