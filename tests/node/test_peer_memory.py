from __future__ import annotations

from pathlib import Path

import pytest
from complaints import in_order

from pytest_gpucluster.node.pci import PeerMemory, read_peer_memory
from pytest_gpucluster.node.sysfs import Tree

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05"


def look(folder: Path, *, driver: str | None = OPEN, module: str = "", release: str = "6.8.0-45-generic") -> PeerMemory:
    if driver is not None:
        (folder / "proc/driver/nvidia").mkdir(parents=True)
        (folder / "proc/driver/nvidia/version").write_text(driver)
    if module:
        (folder / "sys/module" / module).mkdir(parents=True)
    (folder / "proc/sys/kernel").mkdir(parents=True)
    (folder / "proc/sys/kernel/osrelease").write_text(release)
    return read_peer_memory(Tree(root=folder))


@pytest.mark.parametrize("module", ["nvidia_peermem", "nv_peer_mem", "efa_nv_peermem"])
def test_a_loaded_module_is_a_way(tmp_path: Path, module: str) -> None:
    found = look(tmp_path, driver=CLOSED, module=module)
    assert found.is_reachable
    assert str(found) == f"module {module}"


@pytest.mark.parametrize("release", ["5.12.0", "5.15.0-1063-nvidia", "6.1"])
def test_a_kernel_with_dma_buf_needs_no_module(tmp_path: Path, release: str) -> None:
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
def test_what_is_missing_is_named(tmp_path: Path, settings: dict[str, str], why: str) -> None:
    found = look(tmp_path, **settings)  # type: ignore[arg-type]
    assert not found.is_reachable
    assert why in str(found)
    assert in_order(str(found), "DMA-BUF")
