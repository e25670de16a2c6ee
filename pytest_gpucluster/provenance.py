"""What a verdict rests on besides the measurements: the limits in force, and the environment of the first rank."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDED = ("CUDA_", "GPUCLUSTER_", "NCCL_", "NVSHMEM_", "OMP_", "PYTORCH_", "TORCH_", "UCX_")
"""Beginnings of the names of variables that change what is measured."""

RECORDED_WHOLE = ("CUBLAS_WORKSPACE_CONFIG", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_PARTITION", "TZ")
"""More such names. Nothing else is recorded: an environment may hold secrets."""

NOT_RECORDED = ("GPUCLUSTER_EXIT_NOTES",)
"""A folder that is made for one run and changes nothing."""


def limits_line(*, sku: str | None, gpu_name: str | None, files: Sequence[Path]) -> dict[str, Any]:
    """Return the journal's line of the limits in force: for which SKU, and of which files, later ones overlaying.

    A file that cannot be read any more has no digest.
    """
    return {
        "type": "limits",
        "sku": sku,
        "gpu_name": gpu_name,
        "files": [{"path": str(path), "sha256": _digest(path)} for path in files],
    }


def environment_line(environ: Mapping[str, str], hostname: str) -> dict[str, Any]:
    """Return the journal's line of the environment of one process: its system, and variables by name."""
    return {
        "type": "environment",
        "host": hostname,
        "system": f"{_distribution()}, Linux {platform.release()}, {platform.machine()}",
        "cpus": os.cpu_count(),
        "variables": {
            name: value
            for name, value in sorted(environ.items())
            if name not in NOT_RECORDED and (name.startswith(RECORDED) or name in RECORDED_WHOLE)
        },
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "an unnamed system")
    except OSError:
        return "an unknown system"
