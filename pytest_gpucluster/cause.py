"""What kind of failure an exception is: a verdict about the hardware, or a broken run."""

from __future__ import annotations

import re

from pytest_gpucluster.errors import (
    CommunicationError,
    EnvironmentBroken,
    HardwareFault,
    InconclusiveMeasurement,
    MeasurementError,
    NvlsFailed,
    PeerGaveUp,
    UsageProblem,
)

_DIED_OF_HARDWARE = re.compile(
    r"uncorrectable (NVLink |ECC )?error|hardware stack error|over nvlink or a hardware error", re.IGNORECASE
)
"""Source: CUDA Runtime API, texts of cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable,
cudaErrorHardwareStackError and cudaErrorContained ("Invalid access of peer GPU memory over nvlink or a hardware
error")."""

_STICKY = re.compile(
    r"uncorrectable|hardware stack error|illegal (memory access|instruction|address)|misaligned address"
    r"|invalid program counter|global/shared address space|over nvlink or a hardware error"
    r"|unspecified launch failure|device-side assert|launch timed out|context is destroyed",
    re.IGNORECASE,
)
"""Errors after which a CUDA context never works again. Source: CUDA Runtime API, cudaError_t ("this leaves the
process in an inconsistent state and any further CUDA work will return the same error")."""


_CUT = re.compile(
    r"connection (closed|reset) by peer|broken pipe|socket (closed|connection .*closed)|connectFullMesh failed"
    r"|failed to (recv|send)|remote process exited|communicator was aborted",
    re.IGNORECASE,
)
"""What a rank sees of a peer's end, or of a peer's release. Source: gloo/transport/tcp/pair.cc, c10d's socket.cpp,
and ncclGetErrorString of ncclRemoteError."""


_NVLS = re.compile(r"^.*NVLink SHARP \(NVLS\) Multicast.*$", re.IGNORECASE | re.MULTILINE)
"""Source: NCCL 2.29.7, src/transport/nvls.cc; torch quotes NCCL's last warning in its DistBackendError. NCCL 2.28 goes
on without NVLS there: https://github.com/NVIDIA/nccl/issues/2077, which also has the 128 places of a switch."""


_LONGEST_TEXT = 100_000
"""Characters of an exception's text that are looked at, half of them from its end. Libraries put what they say of
themselves at either end, and a pattern that is searched for in ten million characters takes half a second."""

_ENVIRONMENT = (OSError, ImportError, MemoryError)
_OF_TORCH = {"DistError", "OutOfMemoryError"}
"""By name, so that torch need not be imported: communication that failed, and memory that somebody else may hold."""


def connection_cut(error: BaseException) -> bool:
    """Tell whether an exception only says that a peer is gone: from a collective, from the making of a group, or before
    it said what this rank waits for."""
    if isinstance(error, PeerGaveUp):
        return True
    return isinstance(error, (RuntimeError, CommunicationError)) and bool(_CUT.search(text_of(error)))


def communication_failed(error: BaseException) -> bool:
    """Tell whether an exception says that ranks could not talk to each other, whoever is to blame."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, CommunicationError) or "DistError" in names or connection_cut(error)


def in_own_words(error: BaseException) -> BaseException:
    """Return an exception, in whose place NvlsFailed where NCCL says that it could not take memory for NVLS."""
    found = _NVLS.search(text_of(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return error
    failed = NvlsFailed(
        "NCCL could not take memory for NVLS: the NVLink switch has no place left, or Fabric Manager is at fault\n"
        "The switch has 128 places for the groups of all jobs on the node, and groups that were aborted may hold some. "
        "End other jobs, look at `nvidia-smi -q` (Fabric) and at Fabric Manager's log, and repeat the run.\n"
        f"NCCL says: {found[0].strip()}"
    )
    failed.__cause__ = error
    return failed.with_traceback(error.__traceback__)


def text_of(error: BaseException) -> str:
    """Return an exception's text, also where its ``__str__`` raises; of a huge one the beginning and the end."""
    try:
        text = str(error)
    except Exception as broken:  # must not hide the failure
        return f"(its text cannot be shown: {type(broken).__name__})"
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]}\n{text[-half:]}"


def kind_of(error: BaseException, when: str) -> str:
    """Return "failed" (the hardware is judged) or "error" (the run or its environment broke).

    As in pytest itself, what goes wrong in a test's body is a failure and what goes wrong around it an error, unless
    the exception says better.
    """
    if isinstance(error, (HardwareFault, InconclusiveMeasurement)) or gpu_died(error) == "hardware":
        return "failed"
    if isinstance(error, (EnvironmentBroken, MeasurementError, UsageProblem)) or gpu_died(error):
        return "error"
    if isinstance(error, _ENVIRONMENT) or _OF_TORCH & {kind.__name__ for kind in type(error).__mro__}:
        return "error"
    return "failed" if when == "call" else "error"


def gpu_died(error: BaseException) -> str | None:
    """Tell whether this process's CUDA context is dead: "hardware" if the GPU itself is the cause, else "unknown"."""
    if not isinstance(error, RuntimeError):
        return None
    text = text_of(error)
    if "CUDA" not in text or not _STICKY.search(text):
        return None
    return "hardware" if _DIED_OF_HARDWARE.search(text) else "unknown"
