"""Every error that this project raises on purpose.

    GpuClusterError
    |-- UsageProblem                 the operator asked for something impossible: exit code 4, nothing was measured
    |   |-- OptionError              an option or ini value
    |   |-- LaunchError              the launcher's variables: missing, partial, contradictory, or an unknown name
    |   |-- ThresholdsError          a limits or workloads file
    |   `-- CurveError               a file of a loss curve, or a golden one of another experiment
    |-- EnvironmentBroken            the run could not be carried through: JUnit error, exit code 11
    |   |-- PreflightError           the ranks that came are not the ranks that were declared
    |   |-- StoreError               the rendezvous store does not answer
    |   |-- OutOfStep                ranks are at different points of the session
    |   |-- CommunicationError       a process group could not be made or used
    |   |   `-- NvlsFailed                   NCCL could not use NVLS, the sums in the NVLink switch
    |   `-- PeerGaveUp               another rank did not come to say what this one waits for
    |-- HardwareFault                a wrong result or a GPU that died: JUnit failure, exit code 1
    |   `-- WrongResult              verification found data that differ from the expected ones
    |-- MeasurementError             ``measure`` was called with something that is no measurement
    |   `-- UnitError                  a quantity or unit that cannot be understood, or that is of another dimension
    |-- InconclusiveMeasurement      the samples scatter too much to hold against a limit: never a pass
    |-- JournalError                 a journal that is missing, foreign, or newer than this version
    |-- RecordError                  an acceptance record that is missing, foreign, damaged, or newer than this version
    `-- OutputError                  what another program has written is missing, foreign, damaged or cut off

Every message says where, what was found and what is allowed, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class GpuClusterError(Exception):
    """The root of all errors raised on purpose by this package."""


class UsageProblem(GpuClusterError):
    """The run was asked for in a way that cannot work. Nothing was measured."""


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
    """NCCL could not take memory for NVLS, the sums in the NVLink switch, or could not be kept from using it."""


class PeerGaveUp(EnvironmentBroken):
    """Another rank did not come to say what this one waits for. What happened there is to blame, where it is known."""


class HardwareFault(GpuClusterError):
    """A GPU, link or node gave a wrong result or failed: the hardware is rejected."""


class WrongResult(HardwareFault):
    """Verification found data that differ from what they must be."""


class MeasurementError(GpuClusterError):
    """``measure`` was given an unknown metric, a wrong unit or something that is no number."""


class UnitError(MeasurementError):
    """A text is no quantity, a unit is unknown, or two units are of different dimensions."""


class InconclusiveMeasurement(GpuClusterError):
    """The samples scatter too much for a verdict. It is never a pass."""


class JournalError(GpuClusterError):
    """A journal cannot be read: missing, foreign, or written by a newer version."""


class RecordError(GpuClusterError):
    """An acceptance record cannot be read, or is not as it was sealed."""


class OutputError(GpuClusterError):
    """What another program has written cannot be read: missing, foreign, damaged or cut off."""
