"""Every metric of this project: its name, its unit, which way is better, and what the number means."""

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


def _matmul(docs: Mapping[str, str]) -> Iterator[Metric]:
    for kind, doc in docs.items():
        yield Metric(
            name=f"matmul.{kind}.tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{kind}_tflops",
            doc=f"Dense square product in {doc}: 2 n^3 operations over the time of one product.",
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


def _errors(docs: Mapping[str, str]) -> Iterator[Metric]:
    for name, doc in docs.items():
        yield Metric(name=name, unit="ratio", better="lower", doc=doc)


HARDWARE = (
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
        name="nccl.all_reduce.algbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        doc="All-reduce payload bytes over time: no rank takes in its payload faster than its links.",
    ),
    Metric(
        name="nccl.all_reduce.busbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        # The ring formula counts bytes that in-switch reduction and trees never send.
        peak_is_bound=False,
        doc="All-reduce algbw times 2 (n - 1) / n, as nccl-tests defines it. The slowest rank decides.",
    ),
    Metric(
        name="nccl.all_reduce.average_busbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        peak_is_bound=False,
        doc="The same from the mean of all ranks' times, as nccl-tests prints it; busbw decides.",
    ),
    Metric(
        name="nccl.all_reduce.latency",
        unit="us",
        better="lower",
        doc="Time of one small all-reduce. The slowest rank decides.",
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
)

TRAINING = (
    *_errors(
        {
            "training.step.loss_error": "Difference of the loss to that of the CPU's same steps, all in fp32.",
            "training.step.gradient_error": "Likewise for the gradients: of their norm before clipping, or their "
            "distance.",
            "training.step.weight_error": "Distance of the weights to the CPU's, as a part of the way that those have "
            "gone.",
            "training.step.bf16_loss_error": "Difference of the loss in bf16 to that of the same device in fp32.",
            "training.step.bf16_gradient_error": "Likewise for the gradients: of their norm, or their distance.",
            "training.step.bf16_weight_error": "Distance of the weights after steps in bf16 to those in fp32, as "
            "above.",
            "ddp.loss_error": "Difference of a rank's loss to that of one process with the same global batch.",
            "ddp.gradient_error": "Likewise for the gradients that the ranks share: of their norm, or their distance.",
        }
    ),
)

CATALOGUE = (*HARDWARE, *TRAINING)
"""In the order in which documents list them."""
