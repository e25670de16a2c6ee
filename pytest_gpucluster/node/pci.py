"""GPUs on this node's PCI bus: those that NVML does not list, and their path to CPU and network card.

Peer memory: whether a network card can reach GPU memory, by one
of the two methods of GPUDirect RDMA. Without it, all data between nodes goes through host memory, which only NCCL's log
shows.

Data between two GPUs, or between a GPU and a network card, can stay below the PCIe switch that both are on. With Access
Control Services (ACS) redirecting, or with an IOMMU that translates, it goes through the CPU: slower, and lost on some
machines. Source: NCCL user guide, troubleshooting, "PCI Access Control Services (ACS)",
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.node.sysfs import PCI_DEVICES, Tree, pci_address

_DRIVER_FOLDER = "/proc/driver/nvidia"
DRIVER = f"{_DRIVER_FOLDER}/gpus"
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")
"""VGA and 3D controllers, the two classes that GPUs have. Source: PCI Code and ID Assignment Specification."""

State = Literal["answers", "dead", "hidden", "elsewhere", "no driver"]


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """A GPU on the bus.

    ``state``: ``answers`` it can be opened; ``dead`` it does not answer on the bus, or the driver cannot open it;
    ``hidden`` this job has no access (container, cgroup); ``elsewhere`` another driver has it, such as one for virtual
    machines; ``no driver`` none has it. ``detail`` has the evidence.
    """

    address: str
    state: State
    detail: str = ""


def unlisted_gpus(listed: Iterable[str], tree: Tree | None = None) -> tuple[PciGpu, ...]:
    """Return the NVIDIA GPUs on the bus whose addresses NVML does not list.

    Raises:
        OSError: the bus cannot be read, so whether there are further GPUs is unknown.
    """
    tree = tree or Tree()
    os.listdir(tree.path(PCI_DEVICES))
    known = {pci_address(address) for address in listed}
    unlisted = [name for name in gpus_on_bus(tree) if pci_address(name) not in known]
    states = [_state(tree, name) for name in unlisted]
    return tuple(PciGpu(address=n, state=state, detail=why) for n, (state, why) in zip(unlisted, states, strict=True))


def gpus_on_bus(tree: Tree) -> list[str]:
    """Return the addresses of all NVIDIA GPUs on the bus. A virtual function is a part of one of them."""

    def is_gpu(folder: str) -> bool:
        kind = tree.text(f"{folder}/class") or ""
        is_whole = not tree.has(f"{folder}/physfn")
        return tree.text(f"{folder}/vendor") == _NVIDIA and kind[:6] in _DISPLAY and is_whole

    return [name for name in tree.entries(PCI_DEVICES) if is_gpu(f"{PCI_DEVICES}/{name}")]


def _state(tree: Tree, address: str) -> tuple[State, str]:
    folder = f"{PCI_DEVICES}/{address}"
    try:
        with tree.path(f"{folder}/config").open("rb", buffering=0) as config:  # to read 4 bytes only from the device
            begin = config.read(4)
    except OSError as error:
        return "dead", f"its PCI configuration cannot be read: {error.strerror or error}"
    if begin == b"\xff" * 4:
        return "dead", "its PCI configuration reads as all ones"
    bound = tree.target(f"{folder}/driver")
    if bound is None:
        return "no driver", "no driver is bound to it"
    if bound != "nvidia":
        return "elsewhere", f"the driver {bound} has it"
    # N of /dev/nvidiaN. Source: NVIDIA driver README, "The /proc interface": ``Device Minor: 3``.
    information = tree.text(f"{DRIVER}/{address}/information") or ""
    minor = re.search(r"^Device Minor:\s*(\d+)\s*$", information, re.MULTILINE)
    if minor is not None:
        node = tree.path(f"/dev/nvidia{minor[1]}")
        try:  # which fails for a GPU that the driver could not initialise
            os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            hidden = error.errno in (errno.ENOENT, errno.EPERM, errno.EACCES)
            return "hidden" if hidden else "dead", f"{node}: {error.strerror or error}"
        return "answers", f"{node} can be opened"
    # Newer container runtimes mount over another file of the driver, which hides no GPU.
    if any(f"{mount.point}/".startswith(f"{DRIVER}/") or mount.point == _DRIVER_FOLDER for mount in tree.mounts()):
        return "hidden", "this container does not show it"
    return "dead", "the driver is bound to it and does not list it"


MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
"""Kernel modules that register GPU memory with the RDMA stack; the second one is older, the third one Amazon's.
Source: NCCL, src/transport/net_ib.cc, ncclIbGdrSupport; awslabs/libfabric-ci-scripts pull request 176."""

FIRST_KERNEL_WITH_DMA_BUF = (5, 12)
"""Source: NVIDIA GPU Operator, "GPUDirect RDMA and GPUDirect Storage": DMA-BUF needs Linux 5.12, a driver with open
kernel modules (515 or newer) and CUDA 11.7."""


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """The methods of GPUDirect RDMA. ``module``: empty where none is loaded; ``why_no_dma_buf``: empty with DMA-BUF."""

    module: str
    why_no_dma_buf: str

    @property
    def is_reachable(self) -> bool:
        """Whether either method is available."""
        return bool(self.module) or not self.why_no_dma_buf

    def __str__(self) -> str:
        if self.module:
            return f"module {self.module}"
        return f"no module, and no DMA-BUF: {self.why_no_dma_buf}" if self.why_no_dma_buf else "DMA-BUF"


def read_peer_memory(tree: Tree) -> PeerMemory:
    """Read modules, driver and kernel."""
    module = next((name for name in MODULES if tree.has(f"/sys/module/{name}")), "")
    cards = tree.entries("/sys/class/infiniband")
    # An older EFA driver. Source: openucx/ucx issue 10966.
    if not module and any(tree.text(f"/sys/class/infiniband/{name}/gdr") == "1" for name in cards):
        module = "efa, with gdr"
    driver, release = tree.text(f"{_DRIVER_FOLDER}/version"), tree.text("/proc/sys/kernel/osrelease") or "unknown"
    found, why_not = re.match(r"(\d+)\.(\d+)", release), ""
    if driver is None:
        why_not = f"{_DRIVER_FOLDER}/version cannot be read"
    elif "Open Kernel Module" not in driver:
        why_not = "the driver's kernel modules are not the open ones"
    elif found is None or (int(found[1]), int(found[2])) < FIRST_KERNEL_WITH_DMA_BUF:
        why_not = f"kernel {release} is older than {'.'.join(map(str, FIRST_KERNEL_WITH_DMA_BUF))}"
    return PeerMemory(module=module, why_no_dma_buf=why_not)


_READABLE_WITHOUT_ROOT = 64
"""Bytes of a device's configuration that any user may read. Source: Linux kernel, drivers/pci/pci-sysfs.c,
pci_read_config."""

# Source: PCI Express Base Specification; the names are those of linux/pci_regs.h.
_CAPABILITY_LIST, _EXPRESS, _TYPE_SHIFT, _DOWNSTREAM = 0x34, 0x10, 4, 6
_FIRST_EXTENDED, _ACS, _ACS_CONTROL = 0x100, 0x000D, 6
REDIRECTS = {0x04: "request redirect", 0x08: "completion redirect", 0x10: "upstream forwarding"}
"""Bits of ACS control that send traffic between two devices below a switch to the CPU: PCI_ACS_RR, PCI_ACS_CR,
PCI_ACS_UF."""


@dataclass(frozen=True, kw_only=True)
class PciPath:
    """The PCIe path from one GPU to the CPU.

    Attributes:
        pci: the GPU's address.
        iommu: type of its IOMMU group, such as ``DMA-FQ`` or ``identity``; empty where there is none.
        redirecting: address of each switch port on the path that redirects, and the names of its bits.
        hidden: the ports' configuration cannot be read here, so ``redirecting`` may be incomplete.
    """

    pci: str
    iommu: str = ""
    redirecting: tuple[tuple[str, tuple[str, ...]], ...] = ()
    hidden: bool = False

    @property
    def is_translated(self) -> bool:
        """Whether an IOMMU translates this GPU's addresses.

        Source: Linux kernel, Documentation/ABI/testing/sysfs-kernel-iommu_groups: DMA and DMA-FQ translate, identity
        does not.
        """
        return self.iommu.startswith("DMA")


def read_pci_path(tree: Tree, pci: str | None) -> PciPath | None:
    """Read the path from a GPU to the CPU; None if the kernel does not list the GPU."""
    folder = tree.pci_device(pci)
    if folder is None:
        return None
    ports, hidden = [], False
    for bridge in tree.path(folder).resolve().parents:
        if pci_address(bridge.name) != bridge.name:
            continue
        try:
            config = (bridge / "config").read_bytes()
        except OSError:
            config = b""
        hidden = hidden or len(config) <= _READABLE_WITHOUT_ROOT
        bits = redirects(config)
        if bits:
            ports.append((bridge.name, bits))
    kind = tree.text(f"{folder}/iommu_group/type") or ""
    return PciPath(pci=folder.rpartition("/")[2], iommu=kind, redirecting=tuple(ports), hidden=hidden)


def redirects(config: bytes) -> tuple[str, ...]:
    """Name the ACS bits that redirect, from the configuration of a PCIe switch's downstream port; none for others.

    A root port is at the CPU already.
    """
    if _port_type(config) != _DOWNSTREAM:
        return ()
    place, seen = _FIRST_EXTENDED, set[int]()
    while place >= _FIRST_EXTENDED and place not in seen and (head := _word(config, place)):
        if head & 0xFFFF == _ACS:
            control = _word(config, place + 4) >> 16
            return tuple(name for bit, name in REDIRECTS.items() if control & bit)
        seen.add(place)
        place = head >> 20
    return ()


def _port_type(config: bytes) -> int | None:
    place, left = _byte(config, _CAPABILITY_LIST), 48
    while place and left:  # bounded, for a list may be circular
        if _byte(config, place) == _EXPRESS:
            return _byte(config, place + 2) >> _TYPE_SHIFT
        place, left = _byte(config, place + 1), left - 1
    return None


def _byte(config: bytes, place: int) -> int:
    return config[place] if place < len(config) else 0


def _word(config: bytes, place: int) -> int:
    return int.from_bytes(config[place : place + 4], "little")
