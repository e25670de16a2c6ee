"""Every error that this project raises on purpose.

    GpuClusterError
    |-- UsageProblem                 the operator asked for something impossible: exit code 4, nothing was measured
    |   |-- OptionError              an option or ini value
    |   |-- LaunchError              the launcher's variables: missing, partial, contradictory, or an unknown name
    |   |-- ThresholdsError          a limits or workloads file
    |   `-- CurveError               a file of a loss curve, or a reference curve of another experiment
    |-- EnvironmentBroken            the run could not be carried through: JUnit error, exit code 11
    |   |-- PreflightError           the ranks that came are not the ranks that were declared
    |   |-- StoreError               the rendezvous store does not answer
    |   |-- OutOfStep                ranks are at different points of the session
    |   |-- CommunicationError       a process group could not be made or used
    |   |   `-- NvlsFailed                   NCCL could not use NVLS, the sums in the NVLink switch
    |   `-- PeerGaveUp               another rank did not post the value that this one waits for
    |-- HardwareFault                a wrong result or a GPU that died: JUnit failure, exit code 1
    |   `-- WrongResult              verification found data that differ from the expected ones
    |-- MeasurementError             ``measure`` was called with an invalid measurement
    |   `-- UnitError                  a quantity or unit that cannot be understood, or that is of another dimension
    |-- InconclusiveMeasurement      the samples scatter too much to be compared with a limit: never a pass
    |-- JournalError                 a journal that is missing, foreign, or newer than this version
    |-- CertificateError             a certificate that is missing, foreign, damaged, or newer than this version
    `-- OutputError                  what another program has written is missing, foreign, damaged or cut off

Every message says where, what was found and what is allowed, and what to do.

:func:`kind_of` states which failure an exception is: a verdict about the hardware, or a broken run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


class GpuClusterError(Exception):
    """The root of all errors raised on purpose by this package.

    Args:
        ranks: whose GPUs are at fault, where one rank has looked at several; by default that of the rank that raises.
        hosts: that are at fault as a whole.
    """

    def __init__(self, *args: object, ranks: Iterable[int] = (), hosts: Iterable[str] = ()) -> None:
        super().__init__(*args)
        self.ranks, self.hosts = tuple(ranks), tuple(hosts)


class UsageProblem(GpuClusterError):
    """The run cannot work as requested. Nothing was measured."""


class OptionError(UsageProblem):
    """A ``--gpucluster-*`` option, ini value or environment variable has a value that is not allowed."""


class LaunchError(UsageProblem):
    """The launcher's environment variables are missing, partial or contradictory, or name a host that is not known."""


class ThresholdsError(UsageProblem):
    """A YAML file of limits or workloads is malformed. The message lists every problem as file:line:column."""


class CurveError(UsageProblem):
    """A loss curve cannot be read, or is not of the experiment that it is to be compared with."""


class EnvironmentBroken(GpuClusterError):
    """The run could not be carried through, and no GPU is known to be the cause."""


class PreflightError(EnvironmentBroken):
    """Ranks, nodes, GPUs or versions are not the declared ones."""


class StoreError(EnvironmentBroken):
    """The rendezvous store cannot be reached or has stopped answering."""


class OutOfStep(EnvironmentBroken):
    """Ranks are at different points of the session, so that nothing more can be agreed on.

    Args:
        message: who is where.
        culprits: the ranks that are not where most of them are.
    """

    def __init__(self, message: str, culprits: Sequence[int]) -> None:
        super().__init__(message)
        self.culprits = list(culprits)


class CommunicationError(EnvironmentBroken):
    """A process group could not be made or used."""


class NvlsFailed(CommunicationError):
    """NCCL got no memory for NVLS, the sums in the NVLink switch, or could not be kept from using it."""


class PeerGaveUp(EnvironmentBroken):
    """Another rank did not post the value that this one waits for. If that rank has failed, it is the culprit."""


class HardwareFault(GpuClusterError):
    """A GPU, link or node gave a wrong result or failed: the hardware is rejected."""


class WrongResult(HardwareFault):
    """Verification found data that differ from the expected data."""


class MeasurementError(GpuClusterError):
    """``measure`` was called with an unknown metric, a wrong unit or a value that is no number."""


class UnitError(MeasurementError):
    """A text is no quantity, a unit is unknown, or two units are of different dimensions."""


class InconclusiveMeasurement(GpuClusterError):
    """The samples scatter too much for a verdict. It is never a pass."""


class JournalError(GpuClusterError):
    """A journal cannot be read: missing, foreign, or written by a newer version."""


class CertificateError(GpuClusterError):
    """A certificate cannot be read, or was changed after it was sealed."""


class OutputError(GpuClusterError):
    """What another program has written cannot be read: missing, foreign, damaged or cut off."""


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
"""How a rank sees that a peer ended or was released. Source: gloo/transport/tcp/pair.cc, c10d's socket.cpp,
and ncclGetErrorString of ncclRemoteError."""


_NVLS = re.compile(r"^.*NVLink SHARP \(NVLS\) Multicast.*$", re.IGNORECASE | re.MULTILINE)
"""Source: NCCL 2.29.7, src/transport/nvls.cc; torch quotes NCCL's last warning in its DistBackendError. NCCL 2.28 goes
on without NVLS there: https://github.com/NVIDIA/nccl/issues/2077, which also has the 128 places of a switch."""


_LONGEST_TEXT = 100_000
"""Characters of an exception's text that are searched, half of them from its end. Libraries put their own message at
either end, and a search of ten million characters takes half a second."""

_ENVIRONMENT = (OSError, ImportError, MemoryError)
_OF_TORCH = {"DistError", "OutOfMemoryError"}
"""By name, so that torch need not be imported: failed communication, and memory that another process may hold."""


def connection_cut(error: BaseException) -> bool:
    """Return whether an exception only reports that a peer is gone: from a collective, while a group was made, or while
    waiting for its value."""
    if isinstance(error, PeerGaveUp):
        return True
    return isinstance(error, (RuntimeError, CommunicationError)) and bool(_CUT.search(text_of(error)))


def communication_failed(error: BaseException) -> bool:
    """Return whether ranks could not communicate, whatever the cause."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, CommunicationError) or "DistError" in names or connection_cut(error)


def translate_nvls(error: BaseException) -> BaseException:
    """Return NvlsFailed in place of an error in which NCCL reports that it got no memory for NVLS; else the error."""
    found = _NVLS.search(text_of(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return error
    failed = NvlsFailed(
        "NCCL could not take memory for NVLS: the NVLink switch has no multicast group left, or Fabric Manager failed\n"
        "The switch has 128 groups for all jobs on the node, and aborted process groups may still hold some. "
        "End other jobs, look at `nvidia-smi -q` (Fabric) and at Fabric Manager's log, and repeat the run.\n"
        f"NCCL reports: {found[0].strip()}"
    )
    failed.__cause__ = error
    return failed.with_traceback(error.__traceback__)


def text_of(error: BaseException) -> str:
    """Return an exception's text, also where its ``__str__`` raises; of a very long one the beginning and the end."""
    try:
        text = str(error)
    except Exception as broken:  # must not hide the failure
        return f"(its text cannot be read: {type(broken).__name__})"
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]}\n{text[-half:]}"


def kind_of(error: BaseException, when: str) -> str:
    """Return "failed" (the hardware is judged) or "error" (the run or its environment broke).

    As in pytest itself, an exception in a test's body is a failure and one around it an error, unless its type
    states otherwise.
    """
    if isinstance(error, (HardwareFault, InconclusiveMeasurement)) or gpu_died(error) == "hardware":
        return "failed"
    if isinstance(error, (EnvironmentBroken, MeasurementError, UsageProblem)) or gpu_died(error):
        return "error"
    if isinstance(error, _ENVIRONMENT) or _OF_TORCH & {kind.__name__ for kind in type(error).__mro__}:
        return "error"
    return "failed" if when == "call" else "error"


def gpu_died(error: BaseException) -> str | None:
    """Return whether this process's CUDA context is dead: "hardware" if the GPU itself is the cause, else "unknown"."""
    if not isinstance(error, RuntimeError):
        return None
    text = text_of(error)
    if "CUDA" not in text or not _STICKY.search(text):
        return None
    return "hardware" if _DIED_OF_HARDWARE.search(text) else "unknown"
