"""Files of /proc and /sys below one root, so that tests can use their own; lists of CPUs; PCI addresses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster import files
from pytest_gpucluster.files import Mount
from pytest_gpucluster.text import number_ranges

ROOT = Path("/")
"""Where a tree begins unless the caller states it. The simulation and tests replace it."""
PCI_DEVICES = "/sys/bus/pci/devices"
_NUMBER = re.compile(r"-?[0-9]+|0x[0-9a-f]+")
_PCI = re.compile(
    r"(?:(?P<domain>[0-9a-fA-F]+):)?(?P<bus>(?:00)?[0-9a-fA-F]{1,2}):(?P<device>[0-9a-fA-F]{1,2})(?:\.(?P<function>[0-7]))?"
)
_LAST_DEVICE = 0x1F
"""A device number has five bits."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """The file system below ``/``, or a test's. What is missing, invalid or not accessible is None or empty."""

    root: Path = field(default_factory=lambda: ROOT)

    def path(self, absolute: str) -> Path:
        """Return an absolute path below the root."""
        return self.root / absolute.lstrip("/")

    def has(self, absolute: str) -> bool:
        """Whether a file or folder exists and can be accessed."""
        # Path.exists raises where a folder above is not accessible.
        return os.path.exists(self.path(absolute))

    def text(self, absolute: str) -> str | None:
        """Return a file's stripped text."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, absolute: str) -> int | None:
        """Return a file's whole number, decimal or with ``0x``."""
        text = self.text(absolute)
        return int(text, 16 if "x" in text else 10) if text is not None and _NUMBER.fullmatch(text) else None

    def numbers(self, absolute: str) -> frozenset[int] | None:
        """Return a file's list of CPUs or nodes as a set."""
        text = self.text(absolute)
        try:
            return None if text is None else parse_ranges(text)
        except ValueError:
            return None

    def entries(self, folder: str) -> list[str]:
        """Return the sorted names in a folder."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def target(self, link: str) -> str | None:
        """Return the name of the folder that a link leads to."""
        return self.path(link).resolve().name if self.has(link) else None

    def meminfo(self, name: str, file: str = "/proc/meminfo") -> int | None:
        """Return a line of meminfo, in bytes where it is in kB. Source: proc_meminfo(5)."""
        found = re.search(rf"\b{name}:\s+(\d+)( kB)?", self.text(file) or "")
        return int(found[1]) * (1024 if found[2] else 1) if found else None

    def load(self) -> list[float] | None:
        """Return the runnable tasks averaged over 1, 5 and 15 minutes. Source: proc_loadavg(5)."""
        found = re.match(r"(\d+\.\d+) (\d+\.\d+) (\d+\.\d+) ", self.text("/proc/loadavg") or "")
        return [float(number) for number in found.groups()] if found else None

    def pci_device(self, pci: str | None) -> str | None:
        """Return the folder of a PCI device, whose address may be in any form."""
        address = pci_address(pci or "")
        folder = f"{PCI_DEVICES}/{address}"
        return folder if address is not None and self.has(folder) else None

    def numa_node(self, pci: str | None) -> int | None:
        """Return the NUMA node of a PCI device.

        Source: Linux kernel, Documentation/ABI/testing/sysfs-bus-pci, numa_node; it is -1 without one.
        """
        folder = self.pci_device(pci)
        node = None if folder is None else self.number(f"{folder}/numa_node")
        return None if node is None or node < 0 else node

    def own_cpus(self) -> frozenset[int]:
        """Return the CPUs that this process may run on. Source: proc_pid_status(5), Cpus_allowed_list."""
        found = re.search(r"^Cpus_allowed_list:\s*([0-9,-]+)$", self.text("/proc/self/status") or "", re.MULTILINE)
        return parse_ranges(found[1]) if found else frozenset(os.sched_getaffinity(0))

    def mounts(self) -> tuple[Mount, ...]:
        """Return the mounts of this process, in the order of mounting."""
        try:
            return files.read_mounts(self.path(str(files.MOUNTINFO)))
        except OSError:
            return ()


def parse_ranges(written: str) -> frozenset[int]:
    """Parse the kernel's list of CPUs or nodes.

    Raises: ValueError if it is not valid.

    >>> sorted(parse_ranges("0-2,8"))
    [0, 1, 2, 8]
    """
    numbers: set[int] = set()
    for part in filter(None, written.strip().split(",")):
        first, dash, last = part.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    return frozenset(numbers)


def format_ranges(numbers: Iterable[int]) -> str:
    """Format CPUs or nodes as the kernel does.

    >>> format_ranges([8, 0, 1, 2]), format_ranges([])
    ('0-2,8', 'none')
    """
    return ",".join(number_ranges(numbers)) or "none"


def pci_address(address: str) -> str | None:
    """Return a PCI address in the kernel's form; None if it is not valid.

    >>> pci_address("00000000:3B:00.0"), pci_address("0000:3b:00"), pci_address("3b:00.0")
    ('0000:3b:00.0', '0000:3b:00.0', '0000:3b:00.0')
    """
    match = _PCI.fullmatch(address.strip())
    if match is None:
        return None
    domain, bus, device = (int(match[name] or "0", 16) for name in ("domain", "bus", "device"))
    if device > _LAST_DEVICE:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match['function'] or 0}"
