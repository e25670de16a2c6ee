"""What the data sheets promise: dense peaks, memory and links per SKU, each with its source.

A peak is used twice: as a yardstick for a measured value, and as the bound above which a value is too fast
to be true. Marketing figures with sparsity are twice these and are never used.

A SKU is recognised by a pattern that must match the whole NVML name, so that "B200" does not take a GB200,
nor "H200" an H200 NVL: a GPU that is not in the table is unknown, and unknown is never accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

# The SKU of a rehearsal on CPU ranks. It has no peaks: nothing measured there is evidence about hardware.
CPU_REHEARSAL = "cpu-rehearsal"


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Data sheet peaks of one GPU, without sparsity. None: no such unit, or no figure that holds for every
    board.

    ``link_gb_per_second`` is one direction, all links of one GPU to the others of its node (or NVLink
    domain); ``host_gb_per_second`` is one direction of the link to the host: PCIe x16, or NVLink-C2C.
    """

    fp32_tflops: float
    tf32_tflops: float
    bf16_tflops: float
    fp8_tflops: float | None
    hbm_tb_per_second: float
    link_gb_per_second: float | None
    host_gb_per_second: float | None
    source: str
    link_source: str

    @property
    def fp16_tflops(self) -> float:
        """The same as in bf16, on every data sheet here."""
        return self.bf16_tflops


# The unit of each figure in Peaks, so that it can be converted to a metric's unit.
PEAK_UNITS: Mapping[str, str] = {
    "fp32_tflops": "TFLOPS",
    "tf32_tflops": "TFLOPS",
    "bf16_tflops": "TFLOPS",
    "fp16_tflops": "TFLOPS",
    "fp8_tflops": "TFLOPS",
    "hbm_tb_per_second": "TB/s",
    "link_gb_per_second": "GB/s",
    "host_gb_per_second": "GB/s",
}
# Peaks of links between GPUs: they bound a value only where all traffic stays on those links.
LINK_PEAKS = frozenset({"link_gb_per_second"})


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What every healthy GPU of a SKU has besides its speed.

    Attributes:
        memory_gb: device memory in GB (decimal), as the data sheet has it. NVML's total is a few percent more.
        pcie_generation: of the x16 link to the host; None where the host is reached another way.
        nvlinks: links that must be up; 0 where the GPU has none, None where bridges are optional.
        nvswitch: the usual baseboard has an NVSwitch, so a Fabric Manager must run.
        fabric_state: NVML reports the state of the GPU's registration with the Fabric Manager.
        mig: NVML reports the MIG mode.
        ecc: ECC is on as delivered.
        source: where this is from.
    """

    memory_gb: float
    pcie_generation: int | None
    nvlinks: int | None = None
    nvswitch: bool = False
    fabric_state: bool = False
    mig: bool = True
    ecc: bool = True
    source: str

    @property
    def pcie_width(self) -> int | None:
        """Of the link to the host; None where the host is reached another way."""
        return None if self.pcie_generation is None else 16

    @property
    def required_queries(self) -> tuple[str, ...]:
        """What NVML must answer, or health cannot be judged. Others may be missing, and are then named."""
        return (
            *(*ANY_GPU, "ecc.mode", "ecc.uncorrected.volatile"),
            *("rows.remapped.uncorrected", "rows.pending", "rows.failed"),
            *(_PCIE_LINK if self.pcie_generation else ()),
            *(("nvlink.up", "nvlink.errors") if self.nvlinks else ()),
            *(("mig.mode",) if self.mig else ()),
        )


@dataclass(frozen=True, kw_only=True)
class Sku:
    """A kind of GPU: how NVML names it, and its peaks and other promises where they are known."""

    name: str
    nvml_names: tuple[str, ...] = ()
    peaks: Peaks | None = None
    promise: Promise | None = None

    def matches(self, nvml_name: str) -> bool:
        """Return whether one of the patterns matches the whole NVML name."""
        return any(re.fullmatch(pattern, nvml_name) for pattern in self.nvml_names)


ANY_GPU = (
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "throttle.reasons",
    "power.limit",
    "power.limit.default",
)
"""Queries that every data center GPU answers, also one that is not in this table."""
_PCIE_LINK = ("pcie.generation", "pcie.width", "pcie.generation.max", "pcie.width.max")

_TABLE = "dense figures as collected in stas00/ml-engineering, compute/accelerator/README.md"
_NVLINK = "NVIDIA data sheet, half of the bidirectional NVLink figure"
_PCIE = "PCIe x16 after line coding: gen4 31.5 GB/s, gen5 63 GB/s in one direction"
_MEMORY_ERRORS = (
    "row remapping instead of retired pages from Ampere on: NVIDIA GPU Memory Error Management,"
    " https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"
)
_BOARD = f"NVSwitch on HGX boards: NVIDIA Fabric Manager User Guide; {_MEMORY_ERRORS}"
_BRIDGES = f"NVLink bridges are optional; {_MEMORY_ERRORS}"
_NO_LINK = f"NVLink bridges are optional, so no link rate holds for every board; {_PCIE}"
_A100 = "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/"
_H100 = "NVIDIA H100 data sheet"
_H100_PAGE = "https://www.nvidia.com/en-us/data-center/h100/"
_HGX = "NVIDIA HGX data sheet, https://www.nvidia.com/en-us/data-center/hgx/"
_GB200_SHEET = "NVIDIA GB200 NVL72 data sheet"

_GEN4: dict[str, Any] = {"host_gb_per_second": 31.5, "pcie_generation": 4}
_GEN5: dict[str, Any] = {"host_gb_per_second": 63.0, "pcie_generation": 5}
_CARD: dict[str, Any] = {"link_gb_per_second": None, "link_source": _NO_LINK, "nvlinks": None, "nvswitch": False}


def _figures(fp32: float, tf32: float, bf16: float, fp8: float | None, hbm: float) -> dict[str, Any]:
    """Return dense TFLOPS, and TB/s of the device memory."""
    names = ("fp32_tflops", "tf32_tflops", "bf16_tflops", "fp8_tflops", "hbm_tb_per_second")
    return dict(zip(names, (fp32, tf32, bf16, fp8, hbm), strict=True))


def _on_board(generation: int, link_gb_per_second: float, nvlinks: int) -> dict[str, Any]:
    """Return the links of a GPU on a board with an NVSwitch."""
    source = f"{_NVLINK} (NVLink {generation}: {2 * link_gb_per_second:.0f} GB/s); {_PCIE}"
    links: dict[str, Any] = {"link_gb_per_second": link_gb_per_second, "nvlinks": nvlinks, "link_source": source}
    return {**links, "nvswitch": True, "fabric_state": generation > 3}


def _sku(name: str, *nvml_names: str, like: str = "", source: str, promised: str, **figures: Any) -> None:
    """Add a SKU. What is not given is as of the SKU ``like``; ``source`` is of the peaks, ``promised`` of the rest."""
    all_figures = _FIGURES[name] = {**_FIGURES.get(like, {}), **figures}
    peaks, promise = (
        {each.name: all_figures[each.name] for each in fields(kind) if each.name in all_figures}
        for kind in (Peaks, Promise)
    )
    _SKUS[name] = Sku(
        name=name,
        nvml_names=nvml_names,
        peaks=Peaks(**peaks, source=source),
        promise=Promise(**promise, source=promised),
    )


_FIGURES: dict[str, dict[str, Any]] = {}
_SKUS: dict[str, Sku] = {}
SKUS: Mapping[str, Sku] = MappingProxyType(_SKUS)

_sku(
    "H100 SXM",
    "NVIDIA H100 80GB HBM3",
    **_figures(67.0, 494.5, 989.0, 1979.0, hbm=3.35),
    **_on_board(4, 450.0, nvlinks=18),
    **_GEN5,
    memory_gb=80.0,
    source=f"{_H100}, {_H100_PAGE}; {_TABLE}",
    promised=f"{_H100}, SXM: 80 GB, PCIe gen5, 18 NVLinks of 50 GB/s; {_BOARD}",
)
_sku(
    "H100 PCIe",
    "NVIDIA H100 PCIe",
    **_figures(51.0, 378.0, 756.0, 1513.0, hbm=2.0),
    **_CARD,
    **_GEN5,
    memory_gb=80.0,
    source=f"{_H100}, PCIe, {_H100_PAGE}; {_TABLE}",
    promised=f"{_H100}, PCIe: 80 GB, PCIe gen5; {_BRIDGES}",
)
_sku(
    "H100 NVL",
    "NVIDIA H100 NVL",
    like="H100 PCIe",
    **_figures(60.0, 417.5, 835.0, 1671.0, hbm=3.9),
    memory_gb=94.0,
    source=f"{_H100}, NVL, {_H100_PAGE}; {_TABLE}",
    promised=f"{_H100}, NVL: 94 GB, PCIe gen5; {_BRIDGES}",
)
_sku(
    "H800 PCIe",
    "NVIDIA H800 PCIe",
    like="H100 PCIe",
    source=f"as H100 PCIe, which has the same die and memory; {_TABLE}",
    promised=f"as H100 PCIe: 80 GB, PCIe gen5; {_BRIDGES}",
)
_sku(
    "H20",
    "NVIDIA H20",
    like="H100 SXM",
    **_figures(44.0, 74.0, 148.0, 296.0, hbm=4.0),
    memory_gb=96.0,
    source="NVIDIA H20 data sheet, as NVIDIA's partners print it: 148 TFLOPS in bf16, 4.0 TB/s",
    promised=f"NVIDIA H20 data sheet: 96 GB, PCIe gen5, 18 NVLinks of 50 GB/s; {_BOARD}",
)
_sku(
    "H200",
    "NVIDIA H200",
    like="H100 SXM",
    hbm_tb_per_second=4.8,
    memory_gb=141.0,
    source=f"NVIDIA H200 data sheet, SXM, https://www.nvidia.com/en-us/data-center/h200/; {_TABLE}",
    promised=f"NVIDIA H200 data sheet, SXM: 141 GB, PCIe gen5, 18 NVLinks of 50 GB/s; {_BOARD}",
)
_sku(
    "GH200",
    "NVIDIA GH200 480GB",
    "NVIDIA GH200 144G HBM3e",
    like="H200",
    hbm_tb_per_second=4.9,
    memory_gb=96.0,
    host_gb_per_second=450.0,  # the host is reached over NVLink-C2C, not PCIe
    pcie_generation=None,
    nvlinks=None,
    nvswitch=False,
    link_source=f"{_NVLINK} (NVLink 4: 900 GB/s); NVLink-C2C: half of its 900 GB/s",
    source=f"NVIDIA GH200 Grace Hopper Superchip data sheet; {_TABLE}",
    promised=f"NVIDIA GH200 data sheet: 96 GB or more, the host over NVLink-C2C; {_MEMORY_ERRORS}",
)
_sku(
    "A100 80GB",
    r"(?:NVIDIA )?A100-SXM4-80GB",  # older drivers leave the brand out
    **_figures(19.5, 156.0, 312.0, None, hbm=2.0),  # Ampere has no fp8 units
    **_on_board(3, 300.0, nvlinks=12),
    **_GEN4,
    memory_gb=80.0,
    source=f"NVIDIA A100 data sheet, SXM, https://www.nvidia.com/en-us/data-center/a100/; {_TABLE}",
    promised=f"NVIDIA A100 data sheet, SXM: 80 GB, PCIe gen4, 12 NVLinks of 50 GB/s; {_BOARD}",
)
_sku(
    "A100 40GB",
    r"(?:NVIDIA )?A100-SXM4-40GB",
    like="A100 80GB",
    hbm_tb_per_second=1.555,
    memory_gb=40.0,
    source=f"{_A100}, 40 GB; {_TABLE}",
    promised=f"{_A100}: 40 GB, PCIe gen4, 12 NVLinks of 50 GB/s; {_BOARD}",
)
_sku(
    "A100 PCIe 40GB",
    r"(?:NVIDIA )?A100-PCIE-40GB",
    like="A100 40GB",
    **_CARD,
    source=f"{_A100}, 40 GB; {_TABLE}",
    promised=f"{_A100}, PCIe: 40 GB; {_BRIDGES}",
)
_sku(
    "A100 PCIe 80GB",
    r"(?:NVIDIA )?A100 80GB PCIe",
    like="A100 PCIe 40GB",
    hbm_tb_per_second=1.935,
    memory_gb=80.0,
    source=f"{_A100}, PCIe 80 GB; {_TABLE}",
    promised=f"{_A100}, PCIe: 80 GB; {_BRIDGES}",
)
_sku(
    "B200",
    "NVIDIA B200",
    **_figures(80.0, 1125.0, 2250.0, 4500.0, hbm=8.0),
    **_on_board(5, 900.0, nvlinks=18),
    **_GEN5,
    memory_gb=180.0,
    source=f"{_HGX}; {_TABLE}",
    promised=f"NVIDIA DGX B200 data sheet: 1440 GB in 8 GPUs, PCIe gen5, 18 NVLinks of 100 GB/s; {_BOARD}",
)
_sku(
    "B300",
    "NVIDIA B300 SXM6 AC",
    like="B200",
    memory_gb=270.0,
    source=f"{_HGX}; {_TABLE}",
    promised=f"NVIDIA HGX B300: 2.1 TB in 8 GPUs, 18 NVLinks of 100 GB/s; {_BOARD}",
)
_sku(
    "GB200",
    "NVIDIA GB200",
    like="B200",
    **_figures(80.0, 1250.0, 2500.0, 5000.0, hbm=8.0),
    memory_gb=186.0,
    host_gb_per_second=450.0,  # the host is reached over NVLink-C2C, not PCIe
    pcie_generation=None,
    link_source=f"{_NVLINK} (NVLink 5: 1800 GB/s); NVLink-C2C: half of the 900 GB/s of a superchip, both its GPUs'",
    source=f"{_GB200_SHEET}, https://www.nvidia.com/en-us/data-center/gb200-nvl72/; {_TABLE}",
    promised=f"{_GB200_SHEET}: 13.4 TB in 72 GPUs; 18 NVLinks of 100 GB/s; {_BOARD}",
)
_sku(
    "GB300",
    "NVIDIA GB300",
    like="GB200",
    memory_gb=278.0,
    source=f"as GB200; {_TABLE}",
    promised=f"NVIDIA GB300 NVL72: 20 TB in 72 GPUs; 18 NVLinks of 100 GB/s; {_BOARD}",
)
_sku(
    "L40S",
    "NVIDIA L40S",
    **_figures(91.6, 183.0, 362.0, 733.0, hbm=0.864),
    **_GEN4,
    link_gb_per_second=31.5,
    nvlinks=0,
    mig=False,
    memory_gb=48.0,
    link_source=f"no NVLink, so GPUs meet over PCIe gen4; {_PCIE}",
    source=f"NVIDIA L40S data sheet, https://www.nvidia.com/en-us/data-center/l40s/; {_TABLE}",
    promised=f"NVIDIA L40S data sheet: 48 GB with ECC, PCIe gen4 x16, no NVLink, no MIG; {_MEMORY_ERRORS}",
)
_SKUS[CPU_REHEARSAL] = Sku(name=CPU_REHEARSAL)


def promise_of(sku: str | None) -> Promise | None:
    """Return what a SKU promises; None where nothing is known of it."""
    return SKUS[sku].promise if sku is not None and sku in SKUS else None


def matching(skus: Iterable[Sku], nvml_name: str) -> list[str]:
    """Return the SKUs that match a GPU of this NVML name. More than one is a contradiction in the patterns."""
    return [sku.name for sku in skus if sku.matches(nvml_name)]
