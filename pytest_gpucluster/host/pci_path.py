"""The way from a GPU to its CPU: the IOMMU that may stand in it, and switches that may send data the long way round.

Data between two GPUs, or between a GPU and a network card, can stay below the PCIe switch that both are on. With Access
Control Services (ACS) redirecting, or with an IOMMU that translates, they go up to the CPU and down again: slower, and
on some machines never arriving.

Source: NCCL user guide, troubleshooting, "PCI Access Control Services (ACS)",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.kernel_log import normalised

DEVICES = "/sys/bus/pci/devices"

_READABLE_WITHOUT_ROOT = 64
"""Bytes of a device's configuration that any user may read. Source: Linux kernel, drivers/pci/pci-sysfs.c,
pci_read_config."""

# Source: PCI Express Base Specification; the names are those of linux/pci_regs.h.
_CAPABILITY_LIST, _EXPRESS, _TYPE_SHIFT, _DOWNSTREAM = 0x34, 0x10, 4, 6
_FIRST_EXTENDED, _ACS, _ACS_CONTROL = 0x100, 0x000D, 6
REDIRECTS = {0x04: "request redirect", 0x08: "completion redirect", 0x10: "upstream forwarding"}
"""Bits of ACS control that send what two devices below a switch tell each other up to the CPU: PCI_ACS_RR, PCI_ACS_CR,
PCI_ACS_UF."""


@dataclass(frozen=True, kw_only=True)
class PciPath:
    """The way from one GPU up.

    Attributes:
        pci: the GPU's address.
        iommu: what its IOMMU group does, such as ``DMA-FQ`` or ``identity``; empty where no IOMMU is seen.
        redirecting: address of each switch port on the way that redirects -> the names of the bits that are set.
        hidden: the ports' configuration may not be read here, so ``redirecting`` says nothing.
    """

    pci: str
    iommu: str = ""
    redirecting: tuple[tuple[str, tuple[str, ...]], ...] = ()
    hidden: bool = False

    @property
    def is_translated(self) -> bool:
        """Tell whether an IOMMU translates this GPU's addresses.

        Source: Linux kernel, Documentation/ABI/testing/sysfs-kernel-iommu_groups: DMA and DMA-FQ translate, identity
        does not.
        """
        return self.iommu.startswith("DMA")


def read(tree: Tree, pci: str | None) -> PciPath | None:
    """Follow the way up from a GPU; None if it is not among the kernel's devices.

    Args:
        pci: its address as NVML writes it, such as 00000000:3B:00.0.
    """
    address = normalised(pci or "")
    folder = f"{DEVICES}/{address}"
    if address is None or not tree.has(folder):
        return None
    ports, hidden = [], False
    for bridge in _bridges(tree.path(folder).resolve()):
        try:
            config = (bridge / "config").read_bytes()
        except OSError:
            config = b""
        hidden = hidden or len(config) <= _READABLE_WITHOUT_ROOT
        bits = redirects(config)
        if bits:
            ports.append((bridge.name, bits))
    kind = tree.text(f"{DEVICES}/{address}/iommu_group/type") or ""
    return PciPath(pci=address, iommu=kind, redirecting=tuple(ports), hidden=hidden)


def _bridges(device: Path) -> list[Path]:
    """Return the folders of the bridges above a device, the nearest first: each is the folder that holds the next."""
    return [above for above in device.parents if normalised(above.name) == above.name]


def redirects(config: bytes) -> tuple[str, ...]:
    """Name the ACS bits that redirect, from the configuration of a PCIe switch's downstream port; none for others.

    At a root port nothing is redirected that was not at the CPU already.
    """
    if _port_type(config) != _DOWNSTREAM:
        return ()
    for place in _extended(config):
        if _word(config, place) & 0xFFFF == _ACS:
            control = _word(config, place + 4) >> 16
            return tuple(name for bit, name in REDIRECTS.items() if control & bit)
    return ()


def _port_type(config: bytes) -> int | None:
    place, left = _byte(config, _CAPABILITY_LIST), 48
    while place and left:  # a list that runs in a circle ends as well
        if _byte(config, place) == _EXPRESS:
            return _byte(config, place + 2) >> _TYPE_SHIFT
        place, left = _byte(config, place + 1), left - 1
    return None


def _extended(config: bytes) -> list[int]:
    places: list[int] = []
    place = _FIRST_EXTENDED
    while place >= _FIRST_EXTENDED and place not in places and _word(config, place):
        places.append(place)
        place = _word(config, place) >> 20
    return places


def _byte(config: bytes, place: int) -> int:
    return config[place] if place < len(config) else 0


def _word(config: bytes, place: int) -> int:
    return int.from_bytes(config[place : place + 4], "little")
