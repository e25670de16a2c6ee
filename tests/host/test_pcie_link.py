"""The PCIe link is told as it was at its best under load; what NVML does not tell is named."""

from __future__ import annotations

from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.host.pcie_link import PcieLink
from pytest_gpucluster.nvml import NotAvailable

UUID = "GPU-1"


def link(**changes: object) -> PcieLink:
    return PcieLink(
        FakeNvml({UUID: {**HEALTHY_H100, **{f"pcie.{name}": value for name, value in changes.items()}}}), UUID
    )


def looked(seen: PcieLink, times: int = 1) -> dict[str, str]:
    for _ in range(times):
        seen()
    return seen.told()


def test_generation_and_width_are_told() -> None:
    assert looked(link()) == {"pcie": "gen5 x16 under load"}


def test_the_best_of_all_looks_counts() -> None:
    generations = iter([1, 4, 3])
    assert looked(link(generation=lambda: next(generations), width=8), 3) == {"pcie": "gen4 x8 under load"}


def test_what_is_not_available_is_named_and_fails_nobody() -> None:
    told = looked(link(generation=NotAvailable("not supported by this GPU or driver")), 2)
    assert told == {"pcie": "x16, generation not available: not supported by this GPU or driver"}
    lost = looked(PcieLink(FakeNvml({}), UUID))
    assert lost["pcie"].startswith("generation not available: the GPU is lost")


def test_nobody_looks_on_cpu() -> None:
    assert looked(PcieLink(None, None)) == {}
    assert link().told() == {}
