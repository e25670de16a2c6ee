from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from each import of_each

from pytest_gpucluster.node import pci
from pytest_gpucluster.node.pci import unlisted_gpus
from pytest_gpucluster.node.sysfs import Tree

GPU, OTHER = "0000:3b:00.0", "0000:5e:00.0"


class Bus:
    """A bus, the driver's folder and /dev in a folder."""

    def __init__(self, root: Path) -> None:
        self.tree = Tree(root=root)
        self.devices, self.driver = root / "sys/bus/pci/devices", root / "proc/driver/nvidia/gpus"
        self.nodes, self.mounts = root / "dev", root / "proc/self/mountinfo"
        for folder in (self.devices, self.driver, self.nodes, self.mounts.parent):
            folder.mkdir(parents=True)
        self.mounts.write_text("36 35 98:0 / /proc rw,nosuid - proc proc rw\n")

    def add(
        self,
        address: str,
        *,
        vendor: str = "0x10de",
        kind: str = "0x030200",
        config: bytes = b"\xde\x10\x30\x23",
        driver: str | None = "nvidia",
        minor: int | None = 0,
        node: bool = True,
    ) -> None:
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

    def states(self, *listed: str) -> dict[str, str]:
        found = unlisted_gpus(listed, self.tree)
        assert all(gpu.detail for gpu in found)
        return {gpu.address: gpu.state for gpu in found}


@pytest.fixture
def bus(tmp_path: Path) -> Bus:
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
def test_a_gpu_that_nvml_does_not_list_is_reported_with_its_state(case: tuple[dict, str], tmp_path: Path) -> None:
    device, state = case
    bus = Bus(tmp_path / repr(device))
    bus.add(OTHER, minor=None if device.get("minor", 0) is None else 7)
    bus.add(GPU, **device)
    assert bus.states(OTHER) == {GPU: state}


def test_what_is_no_gpu_or_listed_by_nvml_is_left_out(bus: Bus, tmp_path: Path) -> None:
    bus.add(GPU)
    assert bus.states("00000000:3B:00.0") == {}
    # Of another vendor; an NVSwitch; the audio part of a card.
    for number, device in enumerate(({"vendor": "0x8086"}, {"kind": "0x068000"}, {"kind": "0x040300"})):
        bus.add(f"0000:7{number}:00.0", minor=number + 1, **device)
    assert bus.states(GPU) == {}
    with pytest.raises(OSError, match="No such file"):
        unlisted_gpus((), Tree(root=tmp_path / "none"))


def test_a_container_that_shows_a_part_of_the_gpus_hides_the_others(bus: Bus) -> None:
    bus.add(GPU, minor=None)
    bus.mounts.write_text("99 35 0:5 / /proc/driver/nvidia rw - tmpfs tmpfs rw\n")
    assert bus.states() == {GPU: "hidden"}
    bus.mounts.write_text("99 35 0:5 / /proc/driver/nvidia/params rw - tmpfs tmpfs rw\n")
    assert bus.states() == {GPU: "dead"}, "another file of the driver hides none"


@pytest.mark.parametrize(
    ("code", "state"),
    [(errno.EPERM, "hidden"), (errno.EACCES, "hidden"), (errno.EIO, "dead"), (errno.ENODEV, "dead")],
)
def test_the_error_of_opening_distinguishes_hidden_from_dead(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    bus.add(GPU)

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(pci.os, "open", refuse)
    assert bus.states() == {GPU: state}
