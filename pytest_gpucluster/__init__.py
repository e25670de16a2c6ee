"""A pytest plugin that decides whether a GPU cluster is accepted.

What plugins, conftests and tests of other projects may import is here: from this package and from none of its modules.
A name stays for all releases of a major version, and so do the arguments and fields that its docstring names. Importing
this package or its plugin module loads neither torch nor NVML nor YAML; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpucluster.agreement.store import Board
    from pytest_gpucluster.benchmarks.storage import checkpoint
    from pytest_gpucluster.errors import (
        EnvironmentBroken,
        GpuClusterError,
        HardwareFault,
        InconclusiveMeasurement,
        WrongResult,
    )
    from pytest_gpucluster.journal.run_directory import VerdictRecord
    from pytest_gpucluster.judge.limits import Thresholds as Limits
    from pytest_gpucluster.launch.hostlist import compress_hostlist
    from pytest_gpucluster.metrics.catalogue import Metric
    from pytest_gpucluster.metrics.sampling import Series
    from pytest_gpucluster.metrics.time_budget import counted
    from pytest_gpucluster.session.cluster import Cluster
    from pytest_gpucluster.session.fixtures import Gpu, Measure, Telemetry
    from pytest_gpucluster.session.reporting import ReportProgress
    from pytest_gpucluster.session.selection import TrainingInputs

__version__ = "0.1.0"
__all__ = [
    "Board",
    "Cluster",
    "EnvironmentBroken",
    "Gpu",
    "GpuClusterError",
    "HardwareFault",
    "InconclusiveMeasurement",
    "Limits",
    "Measure",
    "Metric",
    "ReportProgress",
    "Series",
    "Telemetry",
    "TrainingInputs",
    "VerdictRecord",
    "WrongResult",
    "__version__",
    "checkpoint",
    "compress_hostlist",
    "counted",
]
_HOMES = {
    "Board": "agreement.store:Board",
    "Cluster": "session.cluster:Cluster",
    "Gpu": "session.fixtures:Gpu",
    "Limits": "judge.limits:Thresholds",
    "Measure": "session.fixtures:Measure",
    "Metric": "metrics.catalogue:Metric",
    "ReportProgress": "session.reporting:ReportProgress",
    "Series": "metrics.sampling:Series",
    "Telemetry": "session.fixtures:Telemetry",
    "TrainingInputs": "session.selection:TrainingInputs",
    "VerdictRecord": "journal.run_directory:VerdictRecord",
    "checkpoint": "benchmarks.storage.checkpoint",
    "compress_hostlist": "launch.hostlist:compress_hostlist",
    "counted": "metrics.time_budget:counted",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES.get(name, f"errors:{name}").partition(":")
    found = import_module(f"{__name__}.{module}")
    return getattr(found, attribute) if attribute else found
