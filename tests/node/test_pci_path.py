"""The way up from a GPU: what its IOMMU does, and switch ports that redirect."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pytest_gpucluster.node import pci as pci_path
from pytest_gpucluster.node.sysfs import Tree

GPU = "00000000:3B:00.0"
PORTS = ("0000:00:01.0", "0000:39:00.0", "0000:3a:04.0")  # root port, upstream and downstream port of a switch
ROOT, UPSTREAM, DOWNSTREAM = 4, 5, 6


def config(kind: int, control: int | None, *, size: int = 4096, before: bool = True) -> bytes:
    """The configuration of a port: its PCIe capability, and ACS behind another extended one."""
    data = bytearray(4096)
    data[0x34] = 0x40
    data[0x40:0x42] = bytes((0x01, 0x68))  # power management, then PCIe
    data[0x68:0x6A], data[0x6A] = bytes((0x10, 0x00)), kind << 4 | 2
    place = 0x100
    if before:
        data[0x100:0x104] = struct.pack("<I", 0x0001 | 1 << 16 | 0x148 << 20)  # advanced error reporting
        place = 0x148
    if control is not None:
        data[place : place + 4] = struct.pack("<I", 0x000D | 1 << 16)
        data[place + 4 : place + 8] = struct.pack("<HH", 0x005F, control)
    return bytes(data[:size])


def plant(root: Path, configs: tuple[bytes, bytes, bytes], *, iommu: str | None = None) -> Tree:
    folder = root / "sys/devices/pci0000:00"
    for port, data in zip(PORTS, configs, strict=True):
        folder /= port
        folder.mkdir(parents=True)
        (folder / "config").write_bytes(data)
    gpu = folder / "0000:3b:00.0"
    gpu.mkdir()
    devices = root / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    (devices / gpu.name).symlink_to(gpu)
    if iommu is not None:
        group = root / "sys/kernel/iommu_groups/7"
        group.mkdir(parents=True)
        (group / "type").write_text(f"{iommu}\n")
        (gpu / "iommu_group").symlink_to(group)
    return Tree(root=root)


QUIET = (config(ROOT, 0), config(UPSTREAM, None), config(DOWNSTREAM, 0))


def test_a_switch_port_that_redirects_is_named_with_its_bits(tmp_path: Path) -> None:
    tree = plant(tmp_path, (config(ROOT, 0x1D), config(UPSTREAM, None), config(DOWNSTREAM, 0x1D)))
    found = pci_path.read_pci_path(tree, GPU)
    assert found is not None
    bits = ("request redirect", "completion redirect", "upstream forwarding")
    assert found.redirecting == (("0000:3a:04.0", bits),), "and the root port is no fault"
    assert (found.hidden, found.iommu, found.is_translated) == (False, "", False)


def test_only_a_switch_port_redirects_wherever_its_acs_stands() -> None:
    for before in (True, False):
        assert pci_path.redirects(config(DOWNSTREAM, 0x04, before=before)) == ("request redirect",)
    # Off, source validation, blocking, egress; an endpoint, a legacy one, a root port, an upstream port.
    for kind, control in (
        *((DOWNSTREAM, it) for it in (0, 1, 2, 0x60)),
        *((it, 0x1C) for it in (0, 1, ROOT, UPSTREAM)),
    ):
        assert pci_path.redirects(config(kind, control)) == ()
    for data in (b"", b"\xff" * 64, b"\xff" * 4096, config(DOWNSTREAM, 4, size=256)):
        assert pci_path.redirects(data) == ()


def test_lists_that_run_in_a_circle_end() -> None:
    data = bytearray(config(DOWNSTREAM, None, before=False))
    data[0x100:0x104] = struct.pack("<I", 0x0001 | 0x100 << 20)
    data[0x68:0x6A] = bytes((0x11, 0x68))
    assert pci_path.redirects(bytes(data)) == ()


def test_without_root_the_ports_are_hidden(tmp_path: Path) -> None:
    cut = tuple(data[:64] for data in (config(ROOT, 4), config(UPSTREAM, 4), config(DOWNSTREAM, 4)))
    found = pci_path.read_pci_path(plant(tmp_path, cut), GPU)  # type: ignore[arg-type]  # three of them
    assert found is not None
    assert (found.hidden, found.redirecting) == (True, ())


@pytest.mark.parametrize(
    ("kind", "translated"),
    [("DMA", True), ("DMA-FQ", True), ("identity", False), ("blocked", False), (None, False)],
)
def test_the_iommu_is_known_by_the_gpu_s_group(tmp_path: Path, kind: str | None, translated: bool) -> None:
    found = pci_path.read_pci_path(plant(tmp_path, QUIET, iommu=kind), GPU)
    assert found is not None
    assert (found.iommu, found.is_translated, found.pci) == (kind or "", translated, "0000:3b:00.0")


@pytest.mark.parametrize("pci", [None, "", "nonsense", "00000000:99:00.0"])
def test_a_gpu_that_the_kernel_does_not_show_has_no_path(tmp_path: Path, pci: str | None) -> None:
    assert pci_path.read_pci_path(plant(tmp_path, QUIET), pci) is None
