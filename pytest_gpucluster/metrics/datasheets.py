"""What the data sheets promise: dense peaks, memory and links per SKU, each with its source.

A peak is used twice: as a yardstick for a measured value, and as the bound above which a value is too fast
to be true. Marketing figures with sparsity are twice these and are never used.

A SKU is recognised by a pattern that must match the whole NVML name, so that "B200" does not take a GB200,
nor "H200" an H200 NVL: a GPU that is not in the table is unknown, and unknown is never accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    fp16_tflops: float
    fp8_tflops: float | None
    hbm_tb_per_second: float
    link_gb_per_second: float | None
    host_gb_per_second: float | None
    source: str
    link_source: str


# The unit of each figure in Peaks, so that it can be converted to a metric's unit.
PEAK_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "fp32_tflops": "TFLOPS",
        "tf32_tflops": "TFLOPS",
        "bf16_tflops": "TFLOPS",
        "fp16_tflops": "TFLOPS",
        "fp8_tflops": "TFLOPS",
        "hbm_tb_per_second": "TB/s",
        "link_gb_per_second": "GB/s",
        "host_gb_per_second": "GB/s",
    }
)
# Peaks of links between GPUs: they bound a value only where all traffic stays on those links.
LINK_PEAKS = frozenset({"link_gb_per_second"})


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What every healthy GPU of a SKU has besides its speed.

    Attributes:
        memory_gb: device memory in GB (decimal), as the data sheet has it. NVML's total is a few percent more.
        pcie_generation, pcie_width: of the link to the host; None where the host is reached another way.
        nvlinks: links that must be up; 0 where the GPU has none, None where bridges are optional.
        nvswitch: the usual baseboard has an NVSwitch, so a Fabric Manager must run.
        fabric_state: NVML reports the state of the GPU's registration with the Fabric Manager.
        ecc: ECC is on as delivered.
        required_queries: what NVML must answer, or health cannot be judged. Others may be missing, and are then named.
        source: where this is from.
    """

    memory_gb: float
    pcie_generation: int | None
    pcie_width: int | None
    nvlinks: int | None
    nvswitch: bool
    fabric_state: bool
    ecc: bool = True
    required_queries: tuple[str, ...]
    source: str


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


_TABLE = "dense figures as collected in stas00/ml-engineering, compute/accelerator/README.md"
_NVLINK = "NVIDIA data sheet, half of the bidirectional NVLink figure"
_PCIE = "PCIe x16 after line coding: gen4 31.5 GB/s, gen5 63 GB/s in one direction"

ANY_GPU = (
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "throttle.reasons",
    "power.limit",
    "power.limit.default",
)
"""Queries that every data center GPU answers, also one that is not in this table."""
_PROTECTED = ("ecc.mode", "ecc.uncorrected.volatile")
_ROWS = ("rows.remapped.uncorrected", "rows.pending", "rows.failed")
_PCIE_LINK = ("pcie.generation", "pcie.width", "pcie.generation.max", "pcie.width.max")
_NVLINKS = ("nvlink.up", "nvlink.errors")
_REQUIRED = (*ANY_GPU, *_PROTECTED, *_ROWS)
_MEMORY_ERRORS = (
    "row remapping instead of retired pages from Ampere on: NVIDIA GPU Memory Error Management,"
    " https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/"
)
_BOARD = f"NVSwitch on HGX boards: NVIDIA Fabric Manager User Guide; {_MEMORY_ERRORS}"
_OPTIONAL_BRIDGES = "NVLink bridges are optional"

_HOPPER_SXM = {
    "fp32_tflops": 67.0,
    "tf32_tflops": 494.5,
    "bf16_tflops": 989.0,
    "fp16_tflops": 989.0,
    "fp8_tflops": 1979.0,
    "link_gb_per_second": 450.0,
    "host_gb_per_second": 63.0,
}

_H100_SXM = Sku(
    name="H100 SXM",
    nvml_names=("NVIDIA H100 80GB HBM3",),
    peaks=Peaks(
        **_HOPPER_SXM,
        hbm_tb_per_second=3.35,
        source=f"NVIDIA H100 data sheet, https://www.nvidia.com/en-us/data-center/h100/; {_TABLE}",
        link_source=f"{_NVLINK} (NVLink 4: 900 GB/s); {_PCIE}",
    ),
    promise=Promise(
        memory_gb=80.0,
        pcie_generation=5,
        pcie_width=16,
        nvlinks=18,
        nvswitch=True,
        fabric_state=True,
        required_queries=(*_REQUIRED, *_PCIE_LINK, *_NVLINKS, "mig.mode"),
        source=f"NVIDIA H100 data sheet, SXM: 80 GB, PCIe gen5, 18 NVLinks of 50 GB/s; {_BOARD}",
    ),
)
_H100_PCIE = Sku(
    name="H100 PCIe",
    nvml_names=("NVIDIA H100 PCIe",),
    peaks=Peaks(
        fp32_tflops=51.0,
        tf32_tflops=378.0,
        bf16_tflops=756.0,
        fp16_tflops=756.0,
        fp8_tflops=1513.0,
        hbm_tb_per_second=2.0,
        link_gb_per_second=None,
        host_gb_per_second=63.0,
        source=f"NVIDIA H100 data sheet, PCIe, https://www.nvidia.com/en-us/data-center/h100/; {_TABLE}",
        link_source=f"NVLink bridges are optional, so no link rate holds for every board; {_PCIE}",
    ),
    promise=Promise(
        memory_gb=80.0,
        pcie_generation=5,
        pcie_width=16,
        nvlinks=None,
        nvswitch=False,
        fabric_state=False,
        required_queries=(*_REQUIRED, *_PCIE_LINK, "mig.mode"),
        source=f"NVIDIA H100 data sheet, PCIe: 80 GB, PCIe gen5; {_OPTIONAL_BRIDGES}; {_MEMORY_ERRORS}",
    ),
)
_H100_NVL = Sku(
    name="H100 NVL",
    nvml_names=("NVIDIA H100 NVL",),
    peaks=Peaks(
        fp32_tflops=60.0,
        tf32_tflops=417.5,
        bf16_tflops=835.0,
        fp16_tflops=835.0,
        fp8_tflops=1671.0,
        hbm_tb_per_second=3.9,
        link_gb_per_second=None,
        host_gb_per_second=63.0,
        source=f"NVIDIA H100 data sheet, NVL, https://www.nvidia.com/en-us/data-center/h100/; {_TABLE}",
        link_source=f"NVLink bridges are optional, so no link rate holds for every board; {_PCIE}",
    ),
    promise=Promise(
        memory_gb=94.0,
        pcie_generation=5,
        pcie_width=16,
        nvlinks=None,
        nvswitch=False,
        fabric_state=False,
        required_queries=(*_REQUIRED, *_PCIE_LINK, "mig.mode"),
        source=f"NVIDIA H100 data sheet, NVL: 94 GB, PCIe gen5; {_OPTIONAL_BRIDGES}; {_MEMORY_ERRORS}",
    ),
)
_H200 = Sku(
    name="H200",
    nvml_names=("NVIDIA H200",),
    peaks=Peaks(
        **_HOPPER_SXM,
        hbm_tb_per_second=4.8,
        source=f"NVIDIA H200 data sheet, SXM, https://www.nvidia.com/en-us/data-center/h200/; {_TABLE}",
        link_source=f"{_NVLINK} (NVLink 4: 900 GB/s); {_PCIE}",
    ),
    promise=Promise(
        memory_gb=141.0,
        pcie_generation=5,
        pcie_width=16,
        nvlinks=18,
        nvswitch=True,
        fabric_state=True,
        required_queries=(*_REQUIRED, *_PCIE_LINK, *_NVLINKS, "mig.mode"),
        source=f"NVIDIA H200 data sheet, SXM: 141 GB, PCIe gen5, 18 NVLinks of 50 GB/s; {_BOARD}",
    ),
)
_A100_80GB = Sku(
    name="A100 80GB",
    # Older drivers leave the brand out.
    nvml_names=(r"(?:NVIDIA )?A100-SXM4-80GB",),
    peaks=Peaks(
        fp32_tflops=19.5,
        tf32_tflops=156.0,
        bf16_tflops=312.0,
        fp16_tflops=312.0,
        fp8_tflops=None,  # Ampere has no fp8 units
        hbm_tb_per_second=2.0,
        link_gb_per_second=300.0,
        host_gb_per_second=31.5,
        source=f"NVIDIA A100 data sheet, SXM, https://www.nvidia.com/en-us/data-center/a100/; {_TABLE}",
        link_source=f"{_NVLINK} (NVLink 3: 600 GB/s); {_PCIE}",
    ),
    promise=Promise(
        memory_gb=80.0,
        pcie_generation=4,
        pcie_width=16,
        nvlinks=12,
        nvswitch=True,
        fabric_state=False,
        required_queries=(*_REQUIRED, *_PCIE_LINK, *_NVLINKS, "mig.mode"),
        source=f"NVIDIA A100 data sheet, SXM: 80 GB, PCIe gen4, 12 NVLinks of 50 GB/s; {_BOARD}",
    ),
)
_B200 = Sku(
    name="B200",
    nvml_names=("NVIDIA B200",),
    peaks=Peaks(
        fp32_tflops=80.0,
        tf32_tflops=1125.0,
        bf16_tflops=2250.0,
        fp16_tflops=2250.0,
        fp8_tflops=4500.0,
        hbm_tb_per_second=8.0,
        link_gb_per_second=900.0,
        host_gb_per_second=63.0,
        source=f"NVIDIA HGX data sheet, https://www.nvidia.com/en-us/data-center/hgx/; {_TABLE}",
        link_source=f"{_NVLINK} (NVLink 5: 1800 GB/s); {_PCIE}",
    ),
    promise=Promise(
        memory_gb=180.0,
        pcie_generation=5,
        pcie_width=16,
        nvlinks=18,
        nvswitch=True,
        fabric_state=True,
        required_queries=(*_REQUIRED, *_PCIE_LINK, *_NVLINKS, "mig.mode"),
        source=f"NVIDIA DGX B200 data sheet: 1440 GB in 8 GPUs, PCIe gen5, 18 NVLinks of 100 GB/s; {_BOARD}",
    ),
)
_GB200 = Sku(
    name="GB200",
    nvml_names=("NVIDIA GB200",),
    peaks=Peaks(
        fp32_tflops=80.0,
        tf32_tflops=1250.0,
        bf16_tflops=2500.0,
        fp16_tflops=2500.0,
        fp8_tflops=5000.0,
        hbm_tb_per_second=8.0,
        link_gb_per_second=900.0,
        host_gb_per_second=450.0,  # the host is reached over NVLink-C2C, not PCIe
        source=f"NVIDIA GB200 NVL72 data sheet, https://www.nvidia.com/en-us/data-center/gb200-nvl72/; {_TABLE}",
        link_source=f"{_NVLINK} (NVLink 5: 1800 GB/s); NVLink-C2C: half of the 900 GB/s of a superchip, both its GPUs'",
    ),
    promise=Promise(
        memory_gb=186.0,
        pcie_generation=None,
        pcie_width=None,
        nvlinks=18,
        nvswitch=True,
        fabric_state=True,
        required_queries=(*_REQUIRED, *_NVLINKS, "mig.mode"),
        source=f"NVIDIA GB200 NVL72 data sheet: 13.4 TB in 72 GPUs; 18 NVLinks of 100 GB/s; {_BOARD}",
    ),
)
_L40S = Sku(
    name="L40S",
    nvml_names=("NVIDIA L40S",),
    peaks=Peaks(
        fp32_tflops=91.6,
        tf32_tflops=183.0,
        bf16_tflops=362.0,
        fp16_tflops=362.0,
        fp8_tflops=733.0,
        hbm_tb_per_second=0.864,
        link_gb_per_second=31.5,
        host_gb_per_second=31.5,
        source=f"NVIDIA L40S data sheet, https://www.nvidia.com/en-us/data-center/l40s/; {_TABLE}",
        link_source=f"no NVLink, so GPUs meet over PCIe gen4; {_PCIE}",
    ),
    promise=Promise(
        memory_gb=48.0,
        pcie_generation=4,
        pcie_width=16,
        nvlinks=0,
        nvswitch=False,
        fabric_state=False,
        required_queries=(*_REQUIRED, *_PCIE_LINK),
        source=f"NVIDIA L40S data sheet: 48 GB with ECC, PCIe gen4 x16, no NVLink, no MIG; {_MEMORY_ERRORS}",
    ),
)


def _sister(of: Sku, name: str, *nvml_names: str, peaks: Mapping[str, Any], promise: Mapping[str, Any]) -> Sku:
    """Return a SKU that is like another one but for these figures."""
    assert of.peaks is not None
    assert of.promise is not None
    return Sku(
        name=name,
        nvml_names=nvml_names,
        peaks=replace(of.peaks, **peaks),
        promise=replace(of.promise, **promise),
    )


_A100_SHEET = "NVIDIA A100 data sheet, https://www.nvidia.com/en-us/data-center/a100/"
_BRIDGED = {"nvlinks": None, "nvswitch": False}
_NO_LINK = f"{_OPTIONAL_BRIDGES}, so no link rate holds for every board; {_PCIE}"
_A100_40GB = _sister(
    _A100_80GB,
    "A100 40GB",
    r"(?:NVIDIA )?A100-SXM4-40GB",
    peaks={"hbm_tb_per_second": 1.555, "source": f"{_A100_SHEET}, 40 GB; {_TABLE}"},
    promise={"memory_gb": 40.0, "source": f"{_A100_SHEET}: 40 GB, PCIe gen4, 12 NVLinks of 50 GB/s; {_BOARD}"},
)
_A100_PCIE_40GB = _sister(
    _A100_40GB,
    "A100 PCIe 40GB",
    r"(?:NVIDIA )?A100-PCIE-40GB",
    peaks={"link_gb_per_second": None, "link_source": _NO_LINK},
    promise={
        **_BRIDGED,
        "required_queries": (*_REQUIRED, *_PCIE_LINK, "mig.mode"),
        "source": f"{_A100_SHEET}, PCIe: 40 GB; {_OPTIONAL_BRIDGES}; {_MEMORY_ERRORS}",
    },
)
_A100_PCIE_80GB = _sister(
    _A100_PCIE_40GB,
    "A100 PCIe 80GB",
    r"(?:NVIDIA )?A100 80GB PCIe",
    peaks={"hbm_tb_per_second": 1.935, "source": f"{_A100_SHEET}, PCIe 80 GB; {_TABLE}"},
    promise={"memory_gb": 80.0, "source": f"{_A100_SHEET}, PCIe: 80 GB; {_OPTIONAL_BRIDGES}; {_MEMORY_ERRORS}"},
)
_H800_PCIE = _sister(
    _H100_PCIE,
    "H800 PCIe",
    "NVIDIA H800 PCIe",
    peaks={"source": f"as H100 PCIe, which has the same die and memory; {_TABLE}"},
    promise={"source": f"as H100 PCIe: 80 GB, PCIe gen5; {_OPTIONAL_BRIDGES}; {_MEMORY_ERRORS}"},
)
_H20 = _sister(
    _H100_SXM,
    "H20",
    "NVIDIA H20",
    peaks={
        "fp32_tflops": 44.0,
        "tf32_tflops": 74.0,
        "bf16_tflops": 148.0,
        "fp16_tflops": 148.0,
        "fp8_tflops": 296.0,
        "hbm_tb_per_second": 4.0,
        "source": "NVIDIA H20 data sheet, as NVIDIA's partners print it: 148 TFLOPS in bf16, 4.0 TB/s",
    },
    promise={"memory_gb": 96.0, "source": f"NVIDIA H20 data sheet: 96 GB, PCIe gen5, 18 NVLinks of 50 GB/s; {_BOARD}"},
)
_GH200 = _sister(
    _H200,
    "GH200",
    "NVIDIA GH200 480GB",
    "NVIDIA GH200 144G HBM3e",
    peaks={
        "hbm_tb_per_second": 4.9,
        "host_gb_per_second": 450.0,
        "source": f"NVIDIA GH200 Grace Hopper Superchip data sheet; {_TABLE}",
        "link_source": f"{_NVLINK} (NVLink 4: 900 GB/s); NVLink-C2C: half of its 900 GB/s",
    },
    promise={
        "memory_gb": 96.0,
        "pcie_generation": None,
        "pcie_width": None,
        **_BRIDGED,
        "required_queries": (*_REQUIRED, "mig.mode"),
        "source": f"NVIDIA GH200 data sheet: 96 GB or more, the host over NVLink-C2C; {_MEMORY_ERRORS}",
    },
)
_B300 = _sister(
    _B200,
    "B300",
    "NVIDIA B300 SXM6 AC",
    peaks={"source": f"NVIDIA HGX data sheet, https://www.nvidia.com/en-us/data-center/hgx/; {_TABLE}"},
    promise={"memory_gb": 270.0, "source": f"NVIDIA HGX B300: 2.1 TB in 8 GPUs, 18 NVLinks of 100 GB/s; {_BOARD}"},
)
_GB300 = _sister(
    _GB200,
    "GB300",
    "NVIDIA GB300",
    peaks={"source": f"as GB200; {_TABLE}"},
    promise={"memory_gb": 278.0, "source": f"NVIDIA GB300 NVL72: 20 TB in 72 GPUs; 18 NVLinks of 100 GB/s; {_BOARD}"},
)

SKUS: Mapping[str, Sku] = MappingProxyType(
    {
        sku.name: sku
        for sku in (
            _H100_SXM,
            _H100_PCIE,
            _H100_NVL,
            _H800_PCIE,
            _H20,
            _H200,
            _GH200,
            _A100_80GB,
            _A100_40GB,
            _A100_PCIE_40GB,
            _A100_PCIE_80GB,
            _B200,
            _B300,
            _GB200,
            _GB300,
            _L40S,
            Sku(name=CPU_REHEARSAL),
        )
    }
)


def promise_of(sku: str | None) -> Promise | None:
    """Return what a SKU promises; None where nothing is known of it."""
    return SKUS[sku].promise if sku is not None and sku in SKUS else None


def matching(skus: Iterable[Sku], nvml_name: str) -> list[str]:
    """Return the SKUs that match a GPU of this NVML name. More than one is a contradiction in the patterns."""
    return [sku.name for sku in skus if sku.matches(nvml_name)]
