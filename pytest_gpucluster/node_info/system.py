"""The system of a node: its name, kernel and distribution, the container around this process, and the scheduler."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.launch.launchers import Allocation

_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


def read(tree: Tree, environ: Mapping[str, str], *, host: str, allocation: Allocation) -> dict[str, Any]:
    """Tell of the system.

    Returns:
        ``host``; ``system``, the distribution; ``kernel``; ``machine``, such as x86_64; ``uptime_seconds``; ``load``,
        runnable tasks averaged over 1, 5 and 15 minutes; ``root``, whether this process is root here; ``container``,
        what kind of container this process is in, null for none that is known; ``scheduler``.

    Source: os-release(5), proc_uptime(5), proc_loadavg(5).
    """
    return {
        "host": host,
        "system": _distribution(tree),
        "kernel": tree.text("/proc/sys/kernel/osrelease"),
        "machine": platform.machine(),
        "uptime_seconds": _first_number(tree.text("/proc/uptime")),
        "load": _load(tree.text("/proc/loadavg")),
        "root": os.geteuid() == 0,
        "container": container(tree, environ),
        "scheduler": _scheduler(environ, allocation),
    }


def container(tree: Tree, environ: Mapping[str, str]) -> str | None:
    """Return the kind of container that this process is in, or None where nothing tells of one.

    Source: systemd, "The Container Interface" (/run/systemd/container, /run/host); podman-run(1),
    /run/.containerenv; Docker makes /.dockerenv; Apptainer, "Environment and Metadata".
    """
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if any(environ.get(name) for name in _APPTAINER):
        return "apptainer"
    told = tree.text("/run/systemd/container") or environ.get("container", "")
    if told:
        return told
    if tree.has("/run/.containerenv"):
        return "podman"
    if tree.has("/.dockerenv"):
        return "docker"
    return None


def _distribution(tree: Tree) -> str | None:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        found = re.search(r'^PRETTY_NAME="?([^"\n]*)', tree.text(path) or "", re.MULTILINE)
        if found:
            return found[1]
    return None


def _scheduler(environ: Mapping[str, str], allocation: Allocation) -> dict[str, Any] | None:
    if allocation.name is None:
        return None
    names = {
        "job": "SLURM_JOB_ID",
        "partition": "SLURM_JOB_PARTITION",
        "nodes": "SLURM_JOB_NODELIST",
        "gpus": "SLURM_STEP_GPUS",
    }
    if allocation.name == "kubernetes":
        names = {"pod": "HOSTNAME", "namespace": "POD_NAMESPACE", "node": "NODE_NAME"}
    told = {key: environ.get(name) or None for key, name in names.items()}
    return {"name": allocation.name, "nnodes": allocation.nnodes, "gpus_per_node": allocation.gpus_per_node, **told}


def _first_number(text: str | None) -> float | None:
    found = re.match(r"\d+(\.\d+)?", text or "")
    return float(found[0]) if found else None


def _load(text: str | None) -> list[float] | None:
    found = re.match(r"([\d.]+) ([\d.]+) ([\d.]+) ", text or "")
    try:
        return [float(number) for number in found.groups()] if found else None
    except ValueError:  # dots only
        return None
