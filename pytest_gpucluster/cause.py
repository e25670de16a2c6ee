"""What kind of failure an exception is: a verdict about the hardware, or a broken run."""

from __future__ import annotations

import re

from pytest_gpucluster.errors import (
    EnvironmentBroken,
    HardwareFault,
    InconclusiveMeasurement,
    MeasurementError,
    UsageProblem,
)

_DIED_OF_HARDWARE = re.compile(
    r"uncorrectable (NVLink |ECC )?error|hardware stack error|contained", re.IGNORECASE
)
"""Source: CUDA Runtime API, cudaError_t: cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable,
cudaErrorHardwareStackError, cudaErrorContained."""

_STICKY = re.compile(
    r"uncorrectable|hardware stack error|illegal (memory access|instruction|address)|misaligned address"
    r"|unspecified launch failure|device-side assert|launch timed out|context is destroyed|contained",
    re.IGNORECASE,
)
"""Errors after which a CUDA context never works again. Source: CUDA Runtime API, cudaError_t ("this leaves the
process in an inconsistent state and any further CUDA work will return the same error")."""


def kind_of(error: BaseException, when: str) -> str:
    """Return "failed" (the hardware is judged) or "error" (the run or its environment broke).

    As in pytest itself, what goes wrong in a test's body is a failure and what goes wrong around it an error, unless
    the exception says better.
    """
    if isinstance(error, (HardwareFault, InconclusiveMeasurement)) or gpu_died(error) == "hardware":
        return "failed"
    if isinstance(error, (EnvironmentBroken, MeasurementError, UsageProblem)) or gpu_died(error):
        return "error"
    return "failed" if when == "call" else "error"


def gpu_died(error: BaseException) -> str | None:
    """Tell whether this process's CUDA context is dead: "hardware" if the GPU itself is the cause, else "unknown"."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "CUDA" not in text or not _STICKY.search(text):
        return None
    return "hardware" if _DIED_OF_HARDWARE.search(text) else "unknown"
