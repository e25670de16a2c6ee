"""What the data sheets promise: dense peaks, memory and link rates per SKU, each with its source.

A peak is used twice: as a yardstick beside a measured value, and as the bound above which a value is too fast
to be true. Marketing figures with sparsity are twice these and are never used.

A SKU is recognised by a pattern that must match the whole NVML name, so that "B200" does not take a GB200,
nor "H200" an H200 NVL: a GPU that is not in the table is unknown, and unknown is never accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

# The SKU of a rehearsal on CPU ranks. It has no peaks: nothing measured there says anything about hardware.
CPU_REHEARSAL = "cpu-rehearsal"


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Data sheet peaks of one GPU, without sparsity. None: no such unit, or no figure that holds for every
    board.

    ``link_gb_per_second`` is one direction, all links of one GPU to the others of its node (or NVLink
    domain); ``host_gb_per_second`` is one direction of the PCIe x16 link to the host.
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


# The unit of each figure in Peaks, so that a metric's value can be converted to stand beside it.
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
class Sku:
    """A kind of GPU: how NVML names it, and its peaks where they are known."""

    name: str
    nvml_names: tuple[str, ...] = ()
    peaks: Peaks | None = None

    def matches(self, nvml_name: str) -> bool:
        """Tell whether one of the patterns matches the whole NVML name."""
        return any(re.fullmatch(pattern, nvml_name) for pattern in self.nvml_names)


_TABLE = "dense figures as collected in stas00/ml-engineering, compute/accelerator/README.md"
_NVLINK = "NVIDIA data sheet, half of the bidirectional NVLink figure"
_PCIE = "PCIe x16 after line coding: gen4 31.5 GB/s, gen5 63 GB/s in one direction"

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
        host_gb_per_second=None,  # the host is reached over NVLink-C2C, not PCIe
        source=f"NVIDIA GB200 NVL72 data sheet, https://www.nvidia.com/en-us/data-center/gb200-nvl72/; {_TABLE}",
        link_source=f"{_NVLINK} (NVLink 5: 1800 GB/s)",
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
)

SKUS: Mapping[str, Sku] = MappingProxyType(
    {
        sku.name: sku
        for sku in (
            _H100_SXM,
            _H100_PCIE,
            _H100_NVL,
            _H200,
            _A100_80GB,
            _B200,
            _GB200,
            _L40S,
            Sku(name=CPU_REHEARSAL),
        )
    }
)


def matching(skus: Iterable[Sku], nvml_name: str) -> list[str]:
    """Name the SKUs that claim a GPU of this NVML name. More than one is a contradiction in the patterns."""
    return [sku.name for sku in skus if sku.matches(nvml_name)]
