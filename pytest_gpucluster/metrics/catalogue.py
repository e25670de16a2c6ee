"""What a metric is, and the metrics of this project, declared in ``pytest_gpucluster/config/criteria``."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, cast, get_args

Better = Literal["higher", "lower", "none"]
Scope = Literal["rank", "group", "node", "world"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity with a name that limits can be set on.

    ``scope``: who must report it: every rank, one rank per node, or one rank of the world; "group" is every rank, of a
    rate at which the ranks of a group work together, so that a few of them alone do not miss a limit. ``peak`` names
    the attribute of ``datasheets.Peaks`` that the value is compared with. ``peak_is_bound``: a value above the peak is
    impossible; it is False where a formula, not bytes on a wire, makes the value, and better algorithms exceed the peak
    legitimately.

    ``recorded``: why the metric is recorded and not judged, where no file of limits has an entry that applies. Empty:
    it is judged, and without a limit a value is an error.
    """

    name: str
    unit: str
    better: Better
    scope: Scope = "rank"
    peak: str | None = None
    peak_is_bound: bool = True
    recorded: str = ""
    doc: str

    @property
    def is_rate(self) -> bool:
        """Return whether it is a rate of hardware: one that a data sheet bounds, so that each SKU has its own floors.

        A test that measures such a rate is not judged without a floor, whatever its other values are.
        """
        return self.peak is not None


def read_metrics(text: str) -> tuple[Metric, ...]:
    """Return the metrics of a text: of each a line ``name: unit, better`` and indented lines with what it is.

    After ``better`` may stand "group", "node" or "world", which is its scope, "peak ATTRIBUTE", and "no bound" of that
    peak. If it is recorded and not judged, the last line is ``recorded: why``.

    >>> [one] = read_metrics("burn_in.power: W, none\\n  Median power.\\n  recorded: no power is better")
    >>> one.unit, one.doc, one.recorded
    ('W', 'Median power.', 'no power is better')

    Raises:
        ValueError: a word of the first line is none of these.
    """
    found = []
    for block in re.split(r"\n(?=\S)", text.strip()):
        head, *lines = block.splitlines()
        name, _, facts = head.partition(": ")
        unit, better, *more = facts.split(", ")
        peaks = [fact for fact in more if fact.startswith("peak ")]
        if better not in get_args(Better) or not {*more} <= {*get_args(Scope), "no bound", *peaks}:
            raise ValueError(
                f"{head!r}: write name: unit, higher, lower or none, group, node or world, peak ATTRIBUTE, no bound"
            )
        doc, _, recorded = " ".join(map(str.strip, lines)).partition(" recorded: ")
        found.append(
            Metric(
                name=name,
                unit=unit,
                better=cast(Better, better),
                scope=next((scope for scope in get_args(Scope) if scope in more), "rank"),
                peak=peaks[0].removeprefix("peak ") if peaks else None,
                peak_is_bound="no bound" not in more,
                recorded=recorded,
                doc=doc,
            )
        )
    return tuple(found)


def declared(table: str) -> tuple[Any, ...]:
    """Return what the modules of ``pytest_gpucluster/config/criteria`` declare in their table of this name.

    The package's listing finds them, so that a new criterion is in no other list; none of them imports torch.
    """
    return tuple(entry for module in _criteria() for entry in getattr(module, table, ()))


@functools.cache
def _criteria() -> tuple[ModuleType, ...]:
    package = importlib.import_module("pytest_gpucluster.config.criteria")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(importlib.import_module(f"{package.__name__}.{name}") for name in names)
