"""What a metric is, and the metrics of this project, declared in ``pytest_gpucluster/config/criteria``."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

Better = Literal["higher", "lower", "none"]
Scope = Literal["rank", "node", "world"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity with a name that limits can be set on.

    ``scope``: who must report it: every rank, one rank per node, or one rank of the world. ``peak`` names the attribute
    of ``datasheets.Peaks`` that the value is compared with. ``peak_is_bound``: a value above the peak is impossible; it
    is False where a formula, not bytes on a wire, makes the value, and better algorithms exceed the peak legitimately.

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


def metrics(
    unit: str,
    better: Better,
    docs: Mapping[str, str],
    *,
    scope: Scope = "rank",
    peak: str | None = None,
    peak_is_bound: bool = True,
    recorded: str | Mapping[str, str] = "",
) -> Iterator[Metric]:
    """Yield metrics that have all but name and meaning in common.

    Args:
        docs: name -> what it is.
        recorded: why they are recorded and not judged; or name -> why, of those that are.
    """
    for name, doc in docs.items():
        yield Metric(
            name=name,
            unit=unit,
            better=better,
            scope=scope,
            peak=peak,
            peak_is_bound=peak_is_bound,
            recorded=recorded if isinstance(recorded, str) else recorded.get(name, ""),
            doc=doc,
        )


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
