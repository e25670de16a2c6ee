"""What a LoRA training has shown, as single figures, each of which is a condition or a record of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pytest_gpucluster.benchmarks.lora.learned import Convergence, Learned
from pytest_gpucluster.metrics.sampling import Series

_PER_TFLOPS = 1e12


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One quantity, by the name of its metric, in a unit.

    ``recorded`` says that it is never judged, whatever limits there are.
    """

    metric: str
    value: float | Series
    unit: str
    labels: Mapping[str, str] = field(default_factory=dict)
    recorded: bool = False


def figures_of(found: Convergence, *, peak_tflops: float | None) -> Iterator[Figure]:
    """Yield the figures of a training.

    Args:
        found: on this rank.
        peak_tflops: of the GPU's data sheet in bf16; None where it is not known, as on cpu: then there is no MFU.
    """
    context = found.curve.context
    labels = {
        "model": context["model"],
        "precision": context["precision"],
        "groups": str(found.groups),
        "group_ranks": str(found.ranks),
    }
    yield Figure(metric="lora.finite_steps", value=found.finite_steps, unit="ratio", labels=labels)
    for precision, parity in found.parity.items():
        if parity.taken > parity.steps:  # else not even all ranks together were finite
            compared = {"model": context["model"], "precision": precision, "steps": str(parity.steps)}
            yield Figure(metric="lora.loss_error", value=parity.loss_error, unit="ratio", labels=compared)
            yield Figure(metric="lora.gradient_error", value=parity.gradient_error, unit="ratio", labels=compared)
    if found.learned is None:
        return
    yield from _learned(found.learned, labels)
    beside = {**labels, "recompute": "on" if found.recomputes else "off"}
    yield from rate_figures(found.tokens_per_second, found.flops_per_token, found.peak_bytes, peak_tflops, beside)


def rate_figures(
    rate: Series | None,
    flops_per_token: int,
    peak_bytes: int | None,
    peak_tflops: float | None,
    labels: Mapping[str, str],
) -> Iterator[Figure]:
    """Yield tokens/s of a GPU, the part of its peak that they are, and the memory that they took.

    A rate that is not known is NaN: what a limit asks for and nobody has measured must not be left out.
    """
    yield Figure(
        metric="lora.tokens_per_second", value=math.nan if rate is None else rate, unit="tokens/s", labels=labels
    )
    if peak_tflops is not None:
        scale = flops_per_token / (peak_tflops * _PER_TFLOPS)
        utilisation = math.nan if rate is None else rate.scaled(scale)
        yield Figure(metric="lora.mfu", value=utilisation, unit="ratio", labels=labels)
    if peak_bytes is not None:
        yield Figure(metric="lora.peak_memory", value=float(peak_bytes), unit="B", labels=labels, recorded=True)


def _learned(learned: Learned, labels: Mapping[str, str]) -> Iterator[Figure]:
    yield Figure(metric="lora.final_loss", value=learned.final_loss, unit="nats", labels=labels)
    yield Figure(metric="lora.held_out_loss", value=learned.held_out_after, unit="nats", labels=labels)
    ratios = {
        "held_out_ratio": learned.held_out_after / learned.held_out_before,
        "moved_adapters": learned.moved_adapters,
        "unchanged_base": learned.unchanged_base,
        "replayed_steps": learned.replayed_steps,
        "resume_error": learned.resume_error,
        "reload_error": learned.reload_error,
    }
    for name, value in ratios.items():
        yield Figure(metric=f"lora.{name}", value=value, unit="ratio", labels=labels)
    if learned.group_error is not None:
        yield Figure(metric="lora.group_error", value=learned.group_error, unit="ratio", labels=labels)
    calls = learned.calls
    if calls is not None and calls.asked:
        asked = {**labels, "asked": str(calls.asked)}
        for name in ("well_formed", "right_function", "right_arguments"):
            share = getattr(calls, name) / calls.asked
            yield Figure(metric=f"lora.calls.{name}", value=share, unit="ratio", labels=asked)
