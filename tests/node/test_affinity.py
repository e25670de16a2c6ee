"""A rank on its GPU's node passes, one bound elsewhere is named, and an unknown place is a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from complaints import in_order

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import require_nothing
from pytest_gpucluster.node.host_checks import (
    BINDING,
    Place,
    examine_affinity,
    own_place,
    place_of_gpu,
)
from pytest_gpucluster.node.sysfs import Tree, format_ranges, parse_ranges

PCI = "00000000:3B:00.0"
WHO: dict[str, Any] = {
    "rank": 5,
    "host": "node-a",
    "gpu": {"index": 1, "uuid": "GPU-1f2e", "serial": "1320", "pci_bus_id": PCI},
}
GPU = Place(cpus=parse_ranges("0-31,64-95"), nodes=frozenset({0}))


def sysfs(tmp_path: Path, **files: str) -> Tree:
    devices = tmp_path / "sys/bus/pci/devices"
    folder = devices / "0000:3b:00.0"
    folder.mkdir(parents=True)
    (devices / "0000:5e:00.0").mkdir()
    for name, text in {"numa_node": "0\n", "local_cpulist": "0-31,64-95\n", **files}.items():
        (folder / name).write_text(text, encoding="ascii")
    return Tree(root=tmp_path)


def of(cpus: str, nodes: str = "0") -> Place:
    return Place(cpus=parse_ranges(cpus), nodes=parse_ranges(nodes))


def test_the_kernel_s_lists_are_read_and_written() -> None:
    for written, count in {"0": 1, "0-3": 4, "0-3,8\n": 5, "0-31,64-95": 64, "": 0}.items():
        assert len(parse_ranges(written)) == count
        assert format_ranges(parse_ranges(written)) == (written.strip() or "none")
    for wrong in ("all", "0-", "-1", "0x3"):
        with pytest.raises(ValueError, match="invalid literal"):
            parse_ranges(wrong)


def test_the_place_of_a_gpu_is_read_by_the_address_that_nvml_gives(tmp_path: Path) -> None:
    devices = sysfs(tmp_path)
    assert place_of_gpu(PCI, devices) == GPU
    for pci in ("00000000:99:00.0", "", None, "nonsense"):
        assert place_of_gpu(pci, devices) is None
        assert place_of_gpu(pci, Tree(root=tmp_path / "nowhere")) is None
    # Near no node; no number; no CPUs.
    for name, text in (("numa_node", "-1\n"), ("numa_node", "?"), ("local_cpulist", "\n")):
        folder = devices.path("/sys/bus/pci/devices/0000:3b:00.0")
        (folder / "numa_node").write_text("0\n")
        (folder / name).write_text(text)
        assert place_of_gpu(PCI, devices) is None


def test_a_kernel_without_the_memory_nodes_is_an_error(tmp_path: Path) -> None:
    for text in ("", "Name:\tpython\n", "Mems_allowed_list:\tall\n"):
        status = tmp_path / "proc/self/status"
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_text(text, encoding="ascii")
        with pytest.raises(EnvironmentBroken, match="memory"):
            own_place(Tree(root=tmp_path))
    with pytest.raises(EnvironmentBroken, match="memory"):
        own_place(Tree(root=tmp_path / "none"))


def test_a_rank_on_another_node_s_cpus_is_named_with_what_was_found_and_wanted() -> None:
    [finding] = examine_affinity(WHO, of("32-63", "0-1"), GPU)
    assert in_order(
        str(finding),
        f"GPU 1 GPU-1f2e 1320 PCI 00000000:3B:00.0 node-a rank 5 CPUs 32-63 GPU CPUs 0-31,64-95 0 {BINDING}",
    )
    with pytest.raises(EnvironmentBroken, match="CPUs 32-63"):
        require_nothing([finding])


def test_a_rank_without_memory_on_its_gpu_s_node_is_named() -> None:
    [finding] = examine_affinity(WHO, of("0-31", "1"), GPU)
    assert (finding.kind, in_order(finding.found, "rank 5 memory of node 1")) == ("environment", True)
    with pytest.raises(EnvironmentBroken, match="node 1"):
        require_nothing([finding])


def test_a_rank_that_is_not_bound_is_a_note() -> None:
    [finding] = examine_affinity(WHO, of("0-127", "0-1"), GPU)
    assert (finding.kind, "not all" in finding.found) == ("note", True)
    require_nothing([finding])
    [finding] = examine_affinity(WHO, of("0-127"), None)
    assert (finding.kind, in_order(finding.found, "rank 5 NUMA")) == ("note", True)
    require_nothing([finding])
    assert examine_affinity(WHO, of("0-31,64-95", "0-1"), GPU) == examine_affinity(WHO, of("7", "0-1"), GPU) == [], (
        "all, or one"
    )
