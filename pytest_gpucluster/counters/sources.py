"""Where the counters of one rank come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpucluster import infiniband, kernel_log
from pytest_gpucluster.infiniband import Adapters
from pytest_gpucluster.kernel_log import KernelLog, normalised
from pytest_gpucluster.metrics.finding import Identity, identity
from pytest_gpucluster.nvml import Nvml


def ports_of_node() -> Adapters:
    """Read the ports without their tables of GIDs, which count nothing."""
    return infiniband.read(gids=False)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Whom a rank asks. Tests put their own here.

    Attributes:
        gpu: the names of this rank's GPU; the host alone on cpu.
        nvml: None where it cannot be used; then ``why_no_nvml`` says why.
        of_node: this rank also answers for its node.
        gpus_of_node: PCI address, as the kernel writes it, -> the GPU of a rank of this node.
        kernel_log: read where there is a GPU.
        adapters: the InfiniBand ports.
        of_switches: it answers for the NVSwitches of the node, too.
    """

    gpu: Identity
    nvml: Nvml | None = None
    why_no_nvml: str = "NVML is not available"
    of_node: bool = False
    gpus_of_node: Mapping[str, Identity] = field(default_factory=dict)
    kernel_log: Callable[[], KernelLog] = field(default_factory=kernel_log.Reader)
    adapters: Callable[[], Adapters] = ports_of_node
    of_switches: bool = True

    @property
    def has_gpu(self) -> bool:
        """Tell whether this rank has a GPU; a rehearsal on cpu has none."""
        return self.gpu.uuid is not None

    def without_ports(self) -> Sources:
        """Return the same without the node's ports and NVSwitches: another rank looks at them."""
        return replace(self, adapters=Adapters, of_switches=False)

    @classmethod
    def of(
        cls,
        inventory: Sequence[Mapping[str, Any]],
        *,
        rank: int,
        nvml: Nvml | None = None,
        why_no_nvml: str = "NVML is not available",
        **others: Any,
    ) -> Sources:
        """Make the sources of a rank.

        Args:
            inventory: what every rank has said of itself (``inventory.identify``).
            rank: whose sources they are.
            nvml, why_no_nvml: as above.
            others: ``kernel_log`` and ``adapters``, to replace them.
        """
        me = next(who for who in inventory if who["rank"] == rank)
        place = me["host"], me["node_rank"]
        ranks = [identity(who) for who in inventory if (who["host"], who["node_rank"]) == place and who["gpu"]]
        return cls(
            gpu=identity(me),
            nvml=nvml,
            why_no_nvml=why_no_nvml,
            of_node=me["local_rank"] == 0,
            gpus_of_node={address: gpu for gpu in ranks if (address := normalised(gpu.pci or ""))},
            **others,
        )
