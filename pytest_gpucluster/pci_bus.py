"""The GPUs that this node's PCI bus shows although NVML does not, and why that may be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pytest_gpucluster.kernel_log import normalised

DEVICES = Path("/sys/bus/pci/devices")
DRIVER = Path("/proc/driver/nvidia/gpus")
NODES = Path("/dev")
MOUNTS = Path("/proc/self/mountinfo")
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")
"""VGA and 3D controllers, the two classes that GPUs have. Source: PCI Code and ID Assignment Specification."""

State = Literal["answers", "dead", "hidden", "elsewhere", "no driver"]


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """A GPU on the bus.

    ``state``: ``answers`` a process could open it; ``dead`` it does not answer on the bus, or the driver cannot open
    it; ``hidden`` it is not given to this job (container, cgroup); ``elsewhere`` another driver has it, such as one
    for virtual machines; ``no driver`` none has it. ``detail`` says what was seen.
    """

    address: str
    state: State
    detail: str = ""


def unlisted(
    listed: Iterable[str],
    *,
    devices: Path = DEVICES,
    driver: Path = DRIVER,
    nodes: Path = NODES,
    mounts: Path = MOUNTS,
) -> tuple[PciGpu, ...]:
    """Look at the NVIDIA GPUs on the bus whose addresses NVML does not list.

    Raises:
        OSError: the bus cannot be looked at. That is not the same as a bus without further GPUs.
    """
    entries = sorted(devices.iterdir())
    limited = _view_is_limited(mounts, driver)
    known = {normalised(address) for address in listed}
    found = [entry for entry in entries if normalised(entry.name) not in known and _is_gpu(entry)]
    return tuple(_state(entry, driver=driver, nodes=nodes, limited=limited) for entry in found)


def _is_gpu(entry: Path) -> bool:
    return _line(entry / "vendor") == _NVIDIA and _line(entry / "class")[:6] in _DISPLAY


def _state(entry: Path, *, driver: Path, nodes: Path, limited: bool) -> PciGpu:
    address = entry.name
    try:
        with (entry / "config").open("rb", buffering=0) as config:  # no more than is needed is read from the device
            begin = config.read(4)
    except OSError as error:
        return PciGpu(address=address, state="dead", detail=f"its PCI configuration cannot be read: {_said(error)}")
    if begin == b"\xff" * 4:
        return PciGpu(address=address, state="dead", detail="its PCI configuration reads as all ones")
    try:
        bound = (entry / "driver").resolve(strict=True).name
    except OSError:
        return PciGpu(address=address, state="no driver", detail="no driver is bound to it")
    if bound != "nvidia":
        return PciGpu(address=address, state="elsewhere", detail=f"the driver {bound} has it")
    minor = _minor(driver / address / "information")
    if minor is None:
        if limited:
            return PciGpu(address=address, state="hidden", detail="this container does not show it")
        return PciGpu(address=address, state="dead", detail="the driver is bound to it and does not list it")
    return _opened(address, nodes / f"nvidia{minor}")


def _opened(address: str, node: Path) -> PciGpu:
    """Open the GPU's device file, which the driver refuses for a GPU that it could not bring up."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        hidden = error.errno in (errno.ENOENT, errno.EPERM, errno.EACCES)
        return PciGpu(address=address, state="hidden" if hidden else "dead", detail=f"{node}: {_said(error)}")
    return PciGpu(address=address, state="answers", detail=f"{node} can be opened")


def _view_is_limited(mounts: Path, driver: Path) -> bool:
    """Tell whether a container runtime has put its own view over the driver's folder."""
    try:
        lines: Sequence[str] = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    folder = str(driver.parent)
    points = [fields[4] for fields in map(str.split, lines) if len(fields) > 4]
    # Newer runtimes replace a file beside the list of GPUs, which hides none.
    return any(point in (folder, str(driver)) or point.startswith(f"{driver}/") for point in points)


def _minor(information: Path) -> int | None:
    """Read N of /dev/nvidiaN. Source: NVIDIA driver README, "The /proc interface": ``Device Minor: 3``."""
    try:
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    value = next((line.partition(":")[2].strip() for line in lines if line.startswith("Device Minor")), "")
    return int(value) if value.isdigit() else None


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _said(error: OSError) -> str:
    return error.strerror or str(error)
