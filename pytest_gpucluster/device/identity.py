"""The GPUs that CUDA shows to this process, and the software for them. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class VisibleGpu:
    """One GPU. ``uuid`` is torch's, without the prefix that NVML gives it."""

    name: str
    uuid: str
    memory_bytes: int


class VisibleGpus:
    """What torch reports. It is imported here, which takes seconds."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch

    def software(self) -> dict[str, str | None]:
        """Return the versions of ``torch``, ``cuda`` and ``nccl``; None for what torch is built without."""
        distributed = self._torch.distributed
        has_nccl = distributed.is_available() and distributed.is_nccl_available()
        return {
            "torch": str(self._torch.__version__),
            "cuda": self._torch.version.cuda,
            "nccl": ".".join(map(str, self._torch.cuda.nccl.version())) if has_nccl else None,
        }

    def count(self) -> int:
        """Count them without making a context; 0 where there is no usable driver."""
        return int(self._torch.cuda.device_count()) if self._torch.cuda.is_available() else 0

    def __getitem__(self, index: int) -> VisibleGpu:
        """Describe ``cuda:index``."""
        found = self._torch.cuda.get_device_properties(index)
        return VisibleGpu(name=str(found.name), uuid=str(found.uuid), memory_bytes=int(found.total_memory))
