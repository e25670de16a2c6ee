"""Metrics of a GPU: matmul, memory, health; and of the inventory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_gpucluster.catalogue.metric import Metric


def _matmul(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"matmul.{kind}.tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{kind}_tflops",
            doc=f"Dense square product in {doc}: 2 n^3 operations over the time of one product.",
        )
    for kind, doc in docs.items():
        yield Metric(
            name=f"matmul.{kind}.best_tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{kind}_tflops",
            doc=f"Dense product in {doc} of the shape and layout that a search found to be the fastest, measured anew:"
            " 2 m n k operations over the time of one product. Recorded; a best of many is held against no limit.",
        )


def _hbm(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"hbm.{kind}.bandwidth",
            unit="TB/s",
            better="higher",
            peak="hbm_tb_per_second",
            doc=f"Device memory: {doc}, over the time of one pass.",
        )


GPU = (
    *_matmul(
        {
            "bf16": "bfloat16",
            "fp16": "half precision",
            "tf32": "fp32 with TF32 tensor cores allowed",
            "fp32": "true fp32, TF32 off",
            "fp8": "fp8 (e4m3) with bf16 output",
        }
    ),
    *_hbm(
        {
            "copy": "device to device copy, bytes read plus bytes written",
            "read": "reduction, bytes read",
            "write": "fill, bytes written",
        }
    ),
    Metric(
        name="inventory.ranks",
        unit="ranks",
        better="none",
        doc="Ranks that reported before the first test. Recorded; the inventory's checks decide.",
    ),
    Metric(
        name="gpu.findings",
        unit="findings",
        better="lower",
        doc="What is wrong with the GPU, as NVML and the kernel log tell it.",
    ),
    Metric(
        name="gpu.usable_dtypes",
        unit="dtypes",
        better="higher",
        doc="Dtypes in which a small product on the GPU equals the CPU's.",
    ),
    Metric(
        name="gpu.memory.total",
        unit="GB",
        better="higher",
        doc="Device memory as NVML counts it, what the driver keeps for itself included.",
    ),
    Metric(
        name="gpu.memory.free",
        unit="%",
        better="higher",
        doc="Device memory that nobody but this job uses, as a part of the total.",
    ),
    Metric(name="gpu.temperature", unit="degC", better="lower", doc="Temperature of the GPU under load."),
    Metric(
        name="gpu.power_limit",
        unit="%",
        better="higher",
        doc="Enforced power limit as a part of the card's default.",
    ),
    Metric(
        name="burn_in.retention",
        unit="%",
        better="higher",
        doc="Rate of the last minute of a burn-in as a part of the first minute's, or of the last and first tenth. What"
        " is missing to 100 % is the decay.",
    ),
    Metric(
        name="burn_in.completed",
        unit="%",
        better="higher",
        doc="How far the burn-in came, as a part of the time that was asked for.",
    ),
    Metric(
        name="burn_in.slowed",
        unit="%",
        better="lower",
        doc="Part of a burn-in in which NVML told of a thermal or hardware slowdown or a power brake, whichever took"
        " longest.",
    ),
    Metric(name="burn_in.temperature", unit="degC", better="lower", doc="Highest temperature during the burn-in."),
    Metric(name="burn_in.power", unit="W", better="none", doc="Median power during the burn-in. Recorded."),
    Metric(
        name="gpu.memory_patterns.wrong_words",
        unit="words",
        better="lower",
        doc="64-bit words of device memory that were not read as they were written, counted in each pass anew.",
    ),
    Metric(
        name="gpu.memory_patterns.share",
        unit="%",
        better="higher",
        doc="Device memory that the patterns were written to, as a part of the total.",
    ),
    Metric(
        name="gpu.determinism.repeated",
        unit="%",
        better="higher",
        doc="Computations that gave the same bits every time on this GPU.",
    ),
    Metric(
        name="gpu.determinism.agreed",
        unit="%",
        better="higher",
        doc="Computations in which this GPU gave the bits of the majority of its model.",
    ),
)
