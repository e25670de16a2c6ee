"""What a metric is: a quantity with a name, and in families of metrics what is the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Better = Literal["higher", "lower", "none"]
Scope = Literal["rank", "node", "world"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity with a name that limits can be set on.

    ``scope`` says who must report it: every rank, one rank per node, or anyone. ``peak`` names the attribute
    of ``hardware.Peaks`` that the value is held beside. ``peak_is_bound``: a value above the peak is
    impossible; it is False where a formula, not bytes on a wire, makes the value, and better algorithms pass
    the peak legitimately.
    """

    name: str
    unit: str
    better: Better
    scope: Scope = "rank"
    peak: str | None = None
    peak_is_bound: bool = True
    doc: str

    @property
    def is_rate(self) -> bool:
        """Tell whether it is a speed of hardware: one that a data sheet bounds, so that each SKU has floors of its own.

        A test that asks for such a rate is not judged without a floor, whatever its other values are.
        """
        return self.peak is not None


def errors(docs: Mapping[str, str]) -> Iterator[Metric]:
    """Yield metrics that are relative errors, of name -> what they compare."""
    for name, doc in docs.items():
        yield Metric(name=name, unit="ratio", better="lower", doc=doc)
