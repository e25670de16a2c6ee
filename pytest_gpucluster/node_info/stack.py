"""The software between the GPUs and a program: driver, Fabric Manager, kernel modules, CUDA, NCCL, torch, OFED."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.node_info.program import Ask

_VERSION = "/proc/driver/nvidia/version"
_MODULES = ("nvidia", "nvidia_uvm", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "nvidia_fs", "mlx5_ib", "ib_uverbs")
"""Of the driver, of GPUDirect RDMA, of GDRCopy, of GPUDirect Storage, and of the RDMA stack."""
_LOADED = "/sys/module"
_LIBRARIES = ("usr/lib/*-linux-gnu", "usr/lib64")
_TOOLKIT = "/usr/local/cuda/version.json"
_FABRIC_MANAGER = ("systemctl", "is-active", "nvidia-fabricmanager")
_OFED = ("ofed_info", "-s")

Version = Callable[[str], "str | None"]


def version_of(distribution: str) -> str | None:
    """Return the version of an installed Python distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_nccl() -> str | None:
    """Return the version of the NCCL that is installed for torch, as nvidia-nccl-cu12; a torch may hold its own."""
    names = {str(one.metadata["Name"]).lower(): one.version for one in metadata.distributions() if one.metadata["Name"]}
    return next((version for name, version in sorted(names.items()) if name.startswith("nvidia-nccl")), None)


def read(
    tree: Tree, ask: Ask, *, version: Version = version_of, nccl: Callable[[], str | None] = installed_nccl
) -> dict[str, Any]:
    """Tell of the stack.

    Returns:
        ``driver``, the loaded kernel driver's version; ``driver_kind``: "open" or "proprietary" kernel modules;
        ``toolkit``, of the CUDA toolkit in /usr/local/cuda; ``torch``, ``nccl``, ``pytest_gpucluster``: installed for
        this Python, and else the NCCL among the system's libraries; ``fabric_manager``, such as active; ``ofed``;
        ``modules``, those of the kernel that matter here, each with its version, "" where it has none;
        ``not_available``, why a key is null.

    Source: NVIDIA driver's README, "The /proc/driver/nvidia Interface"; systemctl(1), is-active.
    """
    missing: dict[str, str] = {}
    text = tree.text(_VERSION)
    if text is None:
        missing["driver"] = f"{_VERSION} cannot be read: no driver of NVIDIA is loaded, or it is hidden here"
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)", text or "")
    told = {
        "driver": found[1] if found else None,
        "driver_kind": None if text is None else "open" if "Open Kernel Module" in text else "proprietary",
        "toolkit": _toolkit(tree),
        "torch": version("torch"),
        "nccl": nccl() or installed_library(tree),
        "pytest_gpucluster": version("pytest-gpucluster"),
        "fabric_manager": _fabric_manager(ask, missing),
        "ofed": _ofed(ask, missing),
        "modules": _modules(tree, missing),
    }
    return {**told, "not_available": missing}


def _modules(tree: Tree, missing: dict[str, str]) -> dict[str, str] | None:
    if not tree.has(_LOADED):
        missing["modules"] = f"{_LOADED} cannot be looked at"
        return None
    return {name: tree.text(f"{_LOADED}/{name}/version") or "" for name in _MODULES if tree.has(f"{_LOADED}/{name}")}


def installed_library(tree: Tree) -> str | None:
    """Return the version of the NCCL that the system has, as in NVIDIA's containers, by the name of its file."""
    names = (path.name for folder in _LIBRARIES for path in tree.path("/").glob(f"{folder}/libnccl.so.*"))
    versions = [found[1] for found in (re.fullmatch(r"libnccl\.so\.(\d+\.\d+\.\d+)", name) for name in names) if found]
    return max(versions, key=lambda version: [int(part) for part in version.split(".")], default=None)


def _toolkit(tree: Tree) -> str | None:
    try:
        told = json.loads(tree.text(_TOOLKIT) or "")["cuda"]["version"]
    except (ValueError, KeyError, TypeError):
        return None  # no toolkit there, or a much older one
    return told if isinstance(told, str) else None


def _fabric_manager(ask: Ask, missing: dict[str, str]) -> str | None:
    answer = ask(_FABRIC_MANAGER)
    # It ends with 3 where the service does not run, and says so.
    words = answer.text.strip().splitlines()
    if len(words) == 1 and re.fullmatch(r"[a-z-]+", words[0]):
        return words[0]
    missing["fabric_manager"] = answer.why_not or "systemctl has told nothing"
    return None


def _ofed(ask: Ask, missing: dict[str, str]) -> str | None:
    answer = ask(_OFED)
    if answer.why_not:
        missing["ofed"] = answer.why_not
        return None
    return answer.text.strip().rstrip(":") or None
