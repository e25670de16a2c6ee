"""How fast and wide a GPU's PCIe link is while data cross it: an idle link slows down, so only that tells."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster.nvml import NotAvailable, Nvml

QUERIES = {"generation": "pcie.generation", "width": "pcie.width"}


class PcieLink:
    """Looks at one GPU's link, as often as it is called. What NVML does not tell is named, and fails nobody.

    Args:
        nvml: where to ask; None if NVML cannot be used, or on cpu.
        uuid: the GPU; None on cpu.
    """

    def __init__(self, nvml: Nvml | None, uuid: str | None) -> None:
        self._nvml, self._uuid = nvml, uuid
        self._best: dict[str, int] = {}
        self._missing: dict[str, str] = {}

    def __call__(self) -> None:
        """Look once: two questions, some milliseconds at most on a healthy driver."""
        if self._nvml is None or self._uuid is None:
            return
        for name, query in QUERIES.items():
            try:
                value = int(self._nvml.read(self._uuid, query))
            except NotAvailable as error:
                self._missing.setdefault(name, str(error))
            else:
                # A link that reached its speed once can do it, and the first look may come before it has.
                self._best[name] = max(value, self._best.get(name, value))

    def told(self) -> dict[str, Any]:
        """Return what was seen, for the report: ``pcie``, the best generation and width; empty if nobody looked.

        >>> PcieLink(None, None).told()
        {}
        """
        seen = [f"gen{self._best['generation']}"] if "generation" in self._best else []
        seen += [f"x{self._best['width']}"] if "width" in self._best else []
        lacking = [f"{name} not available: {why}" for name, why in self._missing.items() if name not in self._best]
        text = ", ".join([" ".join(seen), *lacking] if seen else lacking)
        return {"pcie": f"{text} under load" if seen and not lacking else text} if text else {}
