"""GPUs on the PCI bus, their paths, and the access of network cards to their memory."""

import errno
import os
import struct

import pytest
from complaints import in_order
from each import of_each

from pytest_gpucluster.node import pci
from pytest_gpucluster.node import pci as pci_path
from pytest_gpucluster.node.pci import PeerMemory, read_peer_memory, unlisted_gpus
from pytest_gpucluster.node.sysfs import Tree

GPU, OTHER = "0000:3b:00.0", "0000:5e:00.0"


class Bus:
    """A bus, the driver's folder and /dev in a folder."""

    def __init__(self, root):
        self.tree = Tree(root=root)
        self.devices, self.driver = root / "sys/bus/pci/devices", root / "proc/driver/nvidia/gpus"
        self.nodes, self.mounts = root / "dev", root / "proc/self/mountinfo"
        for folder in (self.devices, self.driver, self.nodes, self.mounts.parent):
            folder.mkdir(parents=True)
        self.mounts.write_text("36 35 98:0 / /proc rw,nosuid - proc proc rw\n")

    def add(
        self,
        address,
        *,
        vendor="0x10de",
        kind="0x030200",
        config=b"\xde\x10\x30\x23",
        driver="nvidia",
        minor=0,
        node=True,
    ):
        entry = self.devices / address
        entry.mkdir()
        (entry / "vendor").write_text(f"{vendor}\n")
        (entry / "class").write_text(f"{kind}\n")
        (entry / "config").write_bytes(config + bytes(60))
        if driver:
            target = self.devices.parent / "drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (entry / "driver").symlink_to(target)
        if minor is not None:
            (self.driver / address).mkdir()
            (self.driver / address / "information").write_text(f"Model: \t NVIDIA H100\nDevice Minor: \t {minor}\n")
            if node:
                (self.nodes / f"nvidia{minor}").touch()

    def states(self, *listed):
        found = unlisted_gpus(listed, self.tree)
        assert all(gpu.detail for gpu in found)
        return {gpu.address: gpu.state for gpu in found}


@pytest.fixture
def bus(tmp_path):
    return Bus(tmp_path)


@of_each(
    "case",
    [
        # Fallen off the bus; the driver does not list it; it can be opened.
        ({"config": b"\xff" * 4}, "dead"),
        ({"minor": None}, "dead"),
        ({}, "answers"),
        # No device file in this container; given to a virtual machine; without a driver; with a display.
        ({"node": False}, "hidden"),
        ({"driver": "vfio-pci"}, "elsewhere"),
        ({"driver": None}, "no driver"),
        ({"kind": "0x030000"}, "answers"),
    ],
)
def test_a_gpu_that_nvml_does_not_list_is_reported_with_its_state(case, tmp_path):
    device, state = case
    bus = Bus(tmp_path / repr(device))
    bus.add(OTHER, minor=None if device.get("minor", 0) is None else 7)
    bus.add(GPU, **device)
    assert bus.states(OTHER) == {GPU: state}


def test_what_is_no_gpu_or_listed_by_nvml_is_left_out(bus, tmp_path):
    bus.add(GPU)
    assert bus.states("00000000:3B:00.0") == {}
    # Of another vendor; an NVSwitch; the audio part of a card.
    for number, device in enumerate(({"vendor": "0x8086"}, {"kind": "0x068000"}, {"kind": "0x040300"})):
        bus.add(f"0000:7{number}:00.0", minor=number + 1, **device)
    assert bus.states(GPU) == {}
    with pytest.raises(OSError, match="No such file"):
        unlisted_gpus((), Tree(root=tmp_path / "none"))


def test_a_container_that_shows_a_part_of_the_gpus_hides_the_others(bus):
    bus.add(GPU, minor=None)
    bus.mounts.write_text("99 35 0:5 / /proc/driver/nvidia rw - tmpfs tmpfs rw\n")
    assert bus.states() == {GPU: "hidden"}
    bus.mounts.write_text("99 35 0:5 / /proc/driver/nvidia/params rw - tmpfs tmpfs rw\n")
    assert bus.states() == {GPU: "dead"}, "another file of the driver hides none"


@pytest.mark.parametrize(
    ("code", "state"),
    [(errno.EPERM, "hidden"), (errno.EACCES, "hidden"), (errno.EIO, "dead"), (errno.ENODEV, "dead")],
)
def test_the_error_of_opening_distinguishes_hidden_from_dead(bus, monkeypatch, code, state):
    bus.add(GPU)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pci.os, "open", refuse)
    assert bus.states() == {GPU: state}


ADDRESS = "00000000:3B:00.0"
PORTS = ("0000:00:01.0", "0000:39:00.0", "0000:3a:04.0")  # root port, upstream and downstream port of a switch
ROOT, UPSTREAM, DOWNSTREAM = 4, 5, 6


def config(kind, control, *, size=4096, before=True):
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


def plant(root, configs, *, iommu=None):
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


def test_a_switch_port_that_redirects_is_named_with_its_bits(tmp_path):
    tree = plant(tmp_path, (config(ROOT, 0x1D), config(UPSTREAM, None), config(DOWNSTREAM, 0x1D)))
    found = pci_path.read_pci_path(tree, ADDRESS)
    assert found is not None
    bits = ("request redirect", "completion redirect", "upstream forwarding")
    assert found.redirecting == (("0000:3a:04.0", bits),), "and the root port is no fault"
    assert (found.hidden, found.iommu, found.is_translated) == (False, "", False)


def test_only_a_switch_port_redirects_wherever_its_acs_stands():
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


def test_lists_that_run_in_a_circle_end():
    data = bytearray(config(DOWNSTREAM, None, before=False))
    data[0x100:0x104] = struct.pack("<I", 0x0001 | 0x100 << 20)
    data[0x68:0x6A] = bytes((0x11, 0x68))
    assert pci_path.redirects(bytes(data)) == ()


def test_without_root_the_ports_are_hidden(tmp_path):
    cut = tuple(data[:64] for data in (config(ROOT, 4), config(UPSTREAM, 4), config(DOWNSTREAM, 4)))
    found = pci_path.read_pci_path(plant(tmp_path, cut), ADDRESS)
    assert (found.hidden, found.redirecting) == (True, ())


@pytest.mark.parametrize(
    ("kind", "translated"),
    [("DMA", True), ("DMA-FQ", True), ("identity", False), ("blocked", False), (None, False)],
)
def test_the_iommu_is_known_by_the_gpu_s_group(tmp_path, kind, translated):
    found = pci_path.read_pci_path(plant(tmp_path, QUIET, iommu=kind), ADDRESS)
    assert (found.iommu, found.is_translated, found.pci) == (kind or "", translated, "0000:3b:00.0")


@pytest.mark.parametrize("pci", [None, "", "nonsense", "00000000:99:00.0"])
def test_a_gpu_that_the_kernel_does_not_show_has_no_path(tmp_path, pci):
    assert pci_path.read_pci_path(plant(tmp_path, QUIET), pci) is None


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05"


def look(folder, *, driver=OPEN, module="", release="6.8.0-45-generic"):
    if driver is not None:
        (folder / "proc/driver/nvidia").mkdir(parents=True)
        (folder / "proc/driver/nvidia/version").write_text(driver)
    if module:
        (folder / "sys/module" / module).mkdir(parents=True)
    (folder / "proc/sys/kernel").mkdir(parents=True)
    (folder / "proc/sys/kernel/osrelease").write_text(release)
    return read_peer_memory(Tree(root=folder))


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem", "efa_nv_peermem"])
def test_a_loaded_module_is_a_way(tmp_path, module):
    found = look(tmp_path, driver=CLOSED, module=module)
    assert found.is_reachable
    assert str(found) == f"module {module}"


@pytest.mark.parametrize("release", ["5.12.0", "5.15.0-1063-nvidia", "6.1"])
def test_a_kernel_with_dma_buf_needs_no_module(tmp_path, release):
    assert look(tmp_path, release=release) == PeerMemory(module="", why_no_dma_buf="")
    assert str(PeerMemory(module="", why_no_dma_buf="")) == "DMA-BUF"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"driver": CLOSED}, "the driver's kernel modules are not the open ones"),
        ({"release": "5.4.0-200-generic"}, "kernel 5.4.0-200-generic is older than 5.12"),
        ({"release": "unknown"}, "kernel unknown is older than 5.12"),
        ({"driver": None}, "version cannot be read"),
    ],
    ids=["closed driver", "old kernel", "no version", "no driver"],
)
def test_what_is_missing_is_named(tmp_path, settings, why):
    found = look(tmp_path, **settings)
    assert not found.is_reachable
    assert why in str(found)
    assert in_order(str(found), "DMA-BUF")
