"""May a network card reach GPU memory on this node? Both ways of GPUDirect RDMA, as far as they are seen from outside.

Without one, each byte between nodes goes through the host's memory, and NCCL says so in its log only.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MODULES = ("nvidia_peermem", "nv_peer_mem")
"""Kernel modules that register GPU memory with the RDMA stack; the second one is older.
Source: NCCL, src/transport/net_ib.cc, ncclIbGdrSupport, which looks for the same."""

FIRST_KERNEL_WITH_DMA_BUF = (5, 12)
"""Source: NVIDIA GPU Operator, "GPUDirect RDMA and GPUDirect Storage": DMA-BUF needs Linux 5.12, a driver with open
kernel modules (515 or newer) and CUDA 11.7."""


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """How GPU memory can be reached. ``module`` is empty where none is loaded; ``why_no_dma_buf`` where there is it."""

    module: str
    why_no_dma_buf: str

    @property
    def is_reachable(self) -> bool:
        """Tell whether there is any way."""
        return bool(self.module) or not self.why_no_dma_buf

    def __str__(self) -> str:
        if self.module:
            return f"module {self.module}"
        return f"no module, and no DMA-BUF: {self.why_no_dma_buf}" if self.why_no_dma_buf else "DMA-BUF"


def read(sysfs: Path = Path("/sys"), proc: Path = Path("/proc"), release: str | None = None) -> PeerMemory:
    """Look at modules, driver and kernel.

    Args:
        sysfs, proc: where they are mounted.
        release: of the kernel, such as ``5.15.0-1063-nvidia``; by default of the one that runs.
    """
    # Path.is_dir raises where a folder above is closed to this user.
    module = next((name for name in MODULES if os.path.isdir(sysfs / "module" / name)), "")
    return PeerMemory(module=module, why_no_dma_buf=_why_no_dma_buf(proc, release or os.uname().release))


def _why_no_dma_buf(proc: Path, release: str) -> str:
    version = proc / "driver" / "nvidia" / "version"
    try:
        driver = version.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{version}: {error.strerror or error}"
    if "Open Kernel Module" not in driver:
        return "the driver's kernel modules are not the open ones"
    found = re.match(r"(\d+)\.(\d+)", release)
    if found is None or (int(found[1]), int(found[2])) < FIRST_KERNEL_WITH_DMA_BUF:
        return f"kernel {release} is older than {'.'.join(map(str, FIRST_KERNEL_WITH_DMA_BUF))}"
    return ""
