"""The inventory of one rank and its node, which the preflight compares before anything can hang.

CUDA and NVML number GPUs differently (``CUDA_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER``, cgroups), so a GPU is
identified by its UUID and never by its index.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from typing import Any, Literal

from pytest_gpucluster import __version__
from pytest_gpucluster.device.identity import VisibleGpus
from pytest_gpucluster.errors import EnvironmentBroken, LaunchError, OptionError
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.node.nvml import NOT_AVAILABLE, NvmlGpu, open_nvml, read_values
from pytest_gpucluster.node.nvml_queries import keys

Device = Literal["cuda", "cpu"]
NVML_QUERIES = keys(
    *("serial", "vbios", "board.part_number", "inforom", "gsp.firmware", "power.limit", "ecc.mode", "mig.mode")
)
"""Key of a rank's ``gpu`` -> NVML query."""
VISIBLE_GPUS: Callable[[], VisibleGpus] = VisibleGpus
"""What CUDA shows to this process. The simulation replaces it."""


def identify(facts: RankFacts, device: Device) -> dict[str, Any]:
    """Describe this rank in plain JSON types.

    Returns:
        rank, host, node_rank, local_rank, local_world_size, pid: as launched.
        gpu: ``index`` (NVML's), ``uuid``, ``pci_bus_id``, ``name``, ``memory_bytes``, ``serial``, ``vbios``,
        ``board_part_number``, ``inforom``, ``gsp_firmware``, ``power_limit_watts``, ``ecc`` and ``mig`` (true for on);
        None on cpu. NVML's values are None where it does not report them.
        cuda_index: N of ``cuda:N``; None on cpu.
        versions: ``python``, ``torch``, ``cuda``, ``nccl``, ``driver``, ``pytest_gpucluster``.
        visible_gpus, node_gpus: the number of GPUs visible to CUDA in this process, and of those that NVML counts.
        nvml: empty, or why NVML's values are missing.

    A rehearsal on cpu reads no GPU, even where there is one.

    Raises:
        OptionError: the device is cuda, and this process has none.
        LaunchError: LOCAL_RANK is beyond the visible GPUs.
    """
    gpus = VISIBLE_GPUS()
    who: dict[str, Any] = {
        "rank": facts.rank,
        "host": facts.hostname,
        "node_rank": facts.node_rank,
        "local_rank": facts.local_rank,
        "local_world_size": facts.local_world_size,
        "pid": os.getpid(),
        "gpu": None,
        "cuda_index": None,
        "versions": {
            "python": platform.python_version(),
            **gpus.software(),
            "driver": None,
            "pytest_gpucluster": __version__,
        },
        "visible_gpus": 0,
        "node_gpus": None,
        "nvml": "",
    }
    if device == "cpu":
        return who
    visible = gpus.count()
    if visible < 1:
        raise no_cuda(facts, torch_version=str(who["versions"]["torch"]), cuda_version=who["versions"]["cuda"])
    index = choose_cuda_index(facts, visible)
    found = gpus[index]
    uuid = full_uuid(found.uuid, found.name)
    known: NvmlGpu | None = None
    values: dict[str, Any] = dict.fromkeys(NVML_QUERIES)
    try:
        nvml = open_nvml()
        who["versions"]["driver"] = nvml.driver_version()
        who["node_gpus"] = len(nvml.gpus())
        known = nvml.find(uuid)
        if known is None:
            who["nvml"] = f"NVML does not list {uuid}, which CUDA shows as cuda:{index}"
        else:
            values |= read_values(nvml, uuid, NVML_QUERIES).values
    except Exception as error:
        # Drivers fail in many ways. The reason is recorded; the preflight decides.
        who["nvml"] = str(error) if isinstance(error, EnvironmentBroken) else f"NVML failed: {error}"
        who["versions"]["driver"] = who["versions"]["driver"] or NOT_AVAILABLE
    who["visible_gpus"], who["cuda_index"] = visible, index
    who["gpu"] = {
        "index": known.index if known else None,
        "uuid": uuid,
        "pci_bus_id": known.pci_bus_id if known else None,
        "name": found.name,
        "memory_bytes": found.memory_bytes,
        **values,
    }
    return who


def choose_cuda_index(facts: RankFacts, visible: int) -> int:
    """Choose this rank's ``cuda:N`` among the visible GPUs.

    Where a launcher shows each rank only its own GPU, each of them is ``cuda:0``. The preflight compares the UUIDs.

    Raises:
        LaunchError: LOCAL_RANK is beyond the visible GPUs.
    """
    if visible == 1:
        return 0
    if facts.local_rank < visible:
        return facts.local_rank
    raise LaunchError(
        f"{facts}: LOCAL_RANK={facts.local_rank} is beyond the {visible} GPUs that this process sees"
        f" (cuda:0 to cuda:{visible - 1}); one rank needs one GPU of its own"
        + _visible_devices()
        + f"\nwhat to do: start at most {visible} ranks on this node (--nproc-per-node={visible}), or show"
        " every rank all of the node's GPUs, or each rank exactly its own"
    )


def no_cuda(facts: RankFacts, *, torch_version: str, cuda_version: str | None) -> OptionError:
    """Return the error of a rank without a CUDA device although the device is cuda."""
    if cuda_version is None:
        why = f"torch {torch_version} is built without CUDA"
        remedy = "install a torch with CUDA"
    else:
        why = f"torch {torch_version} (CUDA {cuda_version}) finds no usable GPU"
        remedy = "see `nvidia-smi` on this host, and whether the job or container was given its GPUs"
    return OptionError(
        f"{facts}: --gpucluster-device is cuda (the default), but {why}"
        + _visible_devices()
        + f"\nwhat to do: {remedy}; or rehearse without GPUs: --gpucluster-device=cpu"
    )


def full_uuid(uuid: str, name: str) -> str:
    """Add the prefix of NVML and nvidia-smi to a UUID of torch."""
    if uuid.startswith(("GPU-", "MIG-")):
        return uuid
    return f"MIG-{uuid}" if re.search(r"\bMIG\b", name) else f"GPU-{uuid}"


def _visible_devices() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if value is None else f" (CUDA_VISIBLE_DEVICES={value!r})"
