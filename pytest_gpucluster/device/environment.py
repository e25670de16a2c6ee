"""The environment variables that torch, NCCL and cuBLAS get, each with its reason.

Each library reads them once: torch at its import, NCCL with its first message, cuBLAS at the first product. So
:func:`prepare` runs before anything imports torch, and this module imports none.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPRODUCIBLE = (":4096:8", ":16:8")
"""Workspaces of cuBLAS with which its results are.

Source: https://docs.nvidia.com/cuda/cublas/#results-reproducibility.
"""

NVLS, NO_CACHE, NVLS_OFF_BY_SUITE = "NCCL_NVLS_ENABLE", "NCCL_NO_CACHE", "GPUCLUSTER_NVLS_SWITCHED_OFF"

PRIVATE_LOG = "gpucluster-nccl-"
"""Begins the name of the folder for NCCL's log where the operator has configured none."""

SUBSYSTEMS = "INIT,ENV,GRAPH,NET,TUNING"
"""INIT has the connections, their transports and NVLS; TUNING has a line for each collective on a group's first rank;
ENV, GRAPH and NET have the reasons."""

_LOG = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")


@dataclass(frozen=True, kw_only=True)
class Variable:
    """What one variable is set to.

    Attributes:
        value: of the variable; for NCCL_DEBUG_FILE its name in a private folder.
        given: "always"; "default": unless the operator has set it; "added": to a list with commas; "log": unless the
            operator has set it, or has configured NCCL's log.
        reason: why, with its source.
    """

    value: str
    given: Literal["always", "default", "added", "log"] = "always"
    reason: str


_LEFT_OVER = "left over in an operator's shell, it would change what a wait and a release mean"
_LOG_REASON = "NCCL's log shows transports, algorithms and NVLS; each process has a file in a private folder"

VARIABLES: Mapping[str, Variable] = MappingProxyType(
    {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": Variable(
            value="0",
            reason="torchrun exports 1: at the first timeout the watchdog would kill the process, and its report",
        ),
        "TORCH_NCCL_ENABLE_MONITORING": Variable(
            value="0",
            reason="its monitor aborts the process, and its report, where the watchdog gives no sign of life for too "
            "long. Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
        ),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": Variable(
            value="0", reason="torch would write its flight recorder to files at a timeout; this plugin reads it itself"
        ),
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": Variable(
            value="0",
            reason="by default (1) the watchdog throws a CUDA error again in its own thread, which ends the process by "
            "SIGABRT: a GPU that died would leave no failure of its test, and no verdict about the hardware. With 0 "
            "the watchdog of that group ends in silence: this plugin's own watcher holds the deadlines. "
            "Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp",
        ),
        "TORCH_NCCL_BLOCKING_WAIT": Variable(value="0", reason=_LEFT_OVER),
        "TORCH_NCCL_USE_COMM_NONBLOCKING": Variable(value="0", reason=_LEFT_OVER),
        "TORCH_FR_BUFFER_SIZE": Variable(
            value="2000", reason="the flight recorder: which collectives each rank has entered and left"
        ),
        "NCCL_DEBUG": Variable(value="INFO", given="log", reason=_LOG_REASON),
        "NCCL_DEBUG_FILE": Variable(value="%p.log", given="log", reason=_LOG_REASON),
        "NCCL_DEBUG_SUBSYS": Variable(value=SUBSYSTEMS, given="log", reason=_LOG_REASON),
        NO_CACHE: Variable(
            value=NVLS,
            given="added",
            reason="NCCL then reads for each communicator whether to use NVLS, by default once for a process; a "
            "communicator's own configuration has no such field. Source: NCCL 2.29, src/misc/param.cc, "
            "ncclGetEnvNoCacheOnce; src/transport/nvls.cc, ncclNvlsInit; nccl.h, ncclConfig_t",
        ),
        WORKSPACE: Variable(
            value=REPRODUCIBLE[0],
            given="default",
            reason="torch checks once, at the first product on a GPU, whether results must be reproducible (pytorch, "
            "aten/src/ATen/Context.cpp, alertCuBLASConfigNotDeterministic). On Hopper it is as large as torch's "
            "default, 32 MiB, and on older GPUs larger, so that no product gets slower (pytorch, "
            "aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize)",
        ),
    }
)


def prepare(environment: MutableMapping[str, str]) -> None:
    """Set ``VARIABLES``; a second call changes nothing. Nothing is made on disk."""
    own_log = not any(name in environment for name in _LOG)
    for name, variable in VARIABLES.items():
        if variable.given == "always":
            environment[name] = variable.value
        elif variable.given == "added":
            named = [one for one in environment.get(name, "").split(",") if one]
            if not {variable.value, "ALL"} & set(named):
                environment[name] = ",".join([*named, variable.value])
        elif name not in environment and (own_log or variable.given == "default"):
            environment[name] = _log_file(variable.value) if name == "NCCL_DEBUG_FILE" else variable.value


def _log_file(name: str) -> str:
    # The folder cannot be guessed: NCCL follows a link that another user has put there.
    return str(Path(tempfile.gettempdir()) / f"{PRIVATE_LOG}{secrets.token_hex(8)}" / name)


def switch_nvls_off(environment: MutableMapping[str, str]) -> None:
    """Disable NVLS for communicators that are made from now on."""
    environment[NVLS] = "0"
    environment[NVLS_OFF_BY_SUITE] = "1"


def not_reproducible(environment: Mapping[str, str]) -> str:
    """Return why cuBLAS is not reproducible in this environment: "" if it is."""
    found = environment.get(WORKSPACE)
    if found in REPRODUCIBLE:
        return ""
    allowed = " or ".join(REPRODUCIBLE)
    return f"{WORKSPACE} is {found!r}, and cuBLAS is reproducible only with {allowed}: unset it, or set {allowed}"
