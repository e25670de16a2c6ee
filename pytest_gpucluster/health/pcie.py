"""Does the link to the host run at full speed and width? Idle links slow down, so it is read under load."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import Situation
from pytest_gpucluster.metrics.finding import Finding


def check(situation: Situation) -> Iterator[Finding]:
    """Hold the best generation and width under load against the promise and what card and slot can do."""
    promise = situation.promise
    if promise is not None and promise.pcie_generation is None:
        return
    yield from _compare(situation, "pcie.generation", "gen", promise.pcie_generation if promise else None)
    yield from _compare(situation, "pcie.width", "x", promise.pcie_width if promise else None)


def _compare(situation: Situation, query: str, unit: str, promised: int | None) -> Iterator[Finding]:
    # The best: a link that reached its speed once can do it, and the first reading may come before it has.
    best = max(situation.loaded(query), default=None)
    able = situation.before.get(f"{query}.max")
    wanted = max((value for value in (promised, able) if value is not None), default=None)
    if best is None or wanted is None or best >= wanted:
        return
    limits = "" if able is None else f"; card and slot can do {unit}{able}"
    by_slot = able is not None and able <= best
    yield situation.finding(
        query.replace(".", "_"),
        "hardware",
        f"PCIe {unit}{best} under load{limits}",
        allowed=f"{unit}{wanted}" + (f", as the {situation.sku} promises" if wanted == promised else ""),
        remedy="look at the slot, riser, retimer and the BIOS setting of this slot"
        if by_slot
        else "reseat the GPU or its board, and look at the link's errors (`nvidia-smi -q`, part PCI, and `lspci -vv`)",
    )
