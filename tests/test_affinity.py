"""A rank beside its GPU passes, one that is bound elsewhere is named, and what is not known is a note."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster import affinity
from pytest_gpucluster.affinity import Place, examine, own_place, parse, place_of_gpu, require_near, shown
from pytest_gpucluster.errors import EnvironmentBroken

PCI = "00000000:3B:00.0"
WHO: dict[str, Any] = {
    "rank": 5,
    "host": "node-a",
    "gpu": {"index": 1, "uuid": "GPU-1f2e", "serial": "1320", "pci_bus_id": PCI},
}
GPU = Place(cpus=parse("0-31,64-95"), nodes=frozenset({0}))


def sysfs(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (tmp_path / "0000:5e:00.0").mkdir()
    for name, text in {"numa_node": "0\n", "local_cpulist": "0-31,64-95\n", **files}.items():
        (folder / name).write_text(text, encoding="ascii")
    return tmp_path


def of(cpus: str, nodes: str = "0") -> Place:
    return Place(cpus=parse(cpus), nodes=parse(nodes))


@pytest.mark.parametrize(
    ("written", "count"), [("0", 1), ("0-3", 4), ("0-3,8\n", 5), ("0-31,64-95", 64), ("", 0)], ids=str
)
def test_the_kernel_s_lists_are_read_and_written(written: str, count: int) -> None:
    assert len(parse(written)) == count
    assert shown(parse(written)) == (written.strip() or "none")


@pytest.mark.parametrize("written", ["all", "0-", "-1", "0x3"])
def test_what_is_no_list_is_an_error(written: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        parse(written)


def test_the_place_of_a_gpu_is_read_by_the_address_that_nvml_gives(tmp_path: Path) -> None:
    assert place_of_gpu(PCI, sysfs(tmp_path)) == GPU


@pytest.mark.parametrize(
    "files",
    [{"numa_node": "-1\n"}, {"numa_node": "?"}, {"local_cpulist": "\n"}],
    ids=["no node", "no number", "no CPUs"],
)
def test_a_gpu_near_no_node_has_no_place(tmp_path: Path, files: dict[str, str]) -> None:
    assert place_of_gpu(PCI, sysfs(tmp_path, **files)) is None


@pytest.mark.parametrize("pci", ["00000000:99:00.0", "", None, "nonsense"])
def test_an_address_that_is_not_there_has_no_place(tmp_path: Path, pci: str | None) -> None:
    assert place_of_gpu(pci, sysfs(tmp_path)) is None
    assert place_of_gpu(pci, tmp_path / "nowhere") is None


def test_this_process_has_a_place() -> None:
    here = own_place()
    assert here.cpus == os.sched_getaffinity(0)
    assert here.nodes


@pytest.mark.parametrize(
    "text", ["Name:\tpython\n", "Mems_allowed_list:\tall\n", None], ids=["absent", "odd", "no file"]
)
def test_a_kernel_that_does_not_tell_is_an_error(tmp_path: Path, text: str | None) -> None:
    status = tmp_path / "status"
    if text is not None:
        status.write_text(text, encoding="ascii")
    with pytest.raises(EnvironmentBroken, match="does not say where this process may take memory"):
        own_place(status)


@pytest.mark.parametrize("cpus", ["0-31,64-95", "7"], ids=["all of the node's", "one of them"])
def test_a_rank_beside_its_gpu_is_fine(cpus: str) -> None:
    assert examine(WHO, of(cpus, "0-1"), GPU) == []


def test_a_rank_on_another_node_s_cpus_is_named_with_what_was_found_and_wanted() -> None:
    [finding] = examine(WHO, of("32-63", "0-1"), GPU)
    assert str(finding) == (
        "GPU 1 (GPU-1f2e, serial 1320, PCI 00000000:3B:00.0) on node-a: affinity (environment): rank 5 may run on the "
        "CPUs 32-63, none of which is beside its GPU; allowed: the CPUs 0-31,64-95 and memory of node 0; what to do: "
        f"{affinity.REMEDY}"
    )
    with pytest.raises(EnvironmentBroken, match="rank 5 may run on the CPUs 32-63, none"):
        require_near([finding])


def test_a_rank_that_may_take_no_memory_beside_its_gpu_is_named() -> None:
    [finding] = examine(WHO, of("0-31", "1"), GPU)
    assert (finding.kind, finding.found) == ("environment", "rank 5 may take memory of node 1, and not of its GPU's")
    with pytest.raises(EnvironmentBroken, match="node 1"):
        require_near([finding])


def test_a_rank_that_is_not_bound_is_a_note() -> None:
    [finding] = examine(WHO, of("0-127", "0-1"), GPU)
    assert (finding.kind, "not all of which" in finding.found) == ("note", True)
    require_near([finding])


def test_no_numa_information_is_a_note() -> None:
    [finding] = examine(WHO, of("0-127"), None)
    assert (finding.kind, finding.found) == ("note", "rank 5 has no NUMA information about its GPU")
    require_near([finding])
