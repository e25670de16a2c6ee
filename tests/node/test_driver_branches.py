"""The product on NVML's own C interface, as each branch of the driver has it: the library of nvml_stub.c."""

import json
from pathlib import Path

import pytest
from each import of_each
from nvml_stub import BRANCHES, H100, Driver, uuid

from pytest_gpucluster.node import kernel_log, pci
from pytest_gpucluster.node.health import telemetry
from pytest_gpucluster.node.health.telemetry import Link
from pytest_gpucluster.node.sysfs import Tree

NO_PERMISSION, LOST = "!4", "!15"
MISSING = {
    525: {"temperature.margin", "recovery.action"},
    535: {"temperature.margin", "recovery.action"},
    550: {"temperature.margin", "recovery.action"},
    570: set(),
    580: set(),
}
"""Queries that a branch does not know; an H100 has no retired pages with any."""
DEGRADED = 0b10_10_10_01
FAULTS = (
    ({"ecc.uncorrected.volatile": 2}, {"ecc_uncorrected": "hardware"}),
    ({"ecc": 0}, {"ecc_off": "hardware"}),
    ({"rows.failed": 1}, {"row_remap_failed": "hardware"}),
    ({"rows.pending": 1}, {"row_remap_pending": "hardware"}),
    ({"link.7": 0}, {"nvlink_down": "hardware"}),
    ({"link.errors.0.4": 5}, {"nvlink_errors": "hardware"}),
    ({"fabric.mask": DEGRADED}, {"fabric_health": "hardware"}),
    ({"fabric.state": 2}, {"fabric_state": "environment"}),
    ({"compute": "4242:9000000000", "memory.used": 9_520_000_000}, {"memory_taken": "environment"}),
    ({"throttle": 0x40}, {"throttle": "hardware"}),
    ({"temperature.margin": -1}, {"temperature": "hardware"}),
    ({"pcie.width": 8}, {"pcie_width": "hardware"}),
    ({"power.limit": 500_000}, {"power_limit": "hardware"}),
    ({"field.230": 1}, {"recovery_action": "hardware"}),
    ({"mig": 1}, {"mig": "environment"}),
    ({"memory.used": NO_PERMISSION}, {"query_missing": "environment"}),
    ({"power": LOST}, {"gpu_lost": "hardware"}),
    # Healthy: errors that were corrected, rows that were remapped, and a clock that is capped by power.
    ({"ecc.corrected.volatile": 9}, {}),
    ({"rows.corrected": 1, "rows.uncorrected": 1}, {}),
    ({"throttle": 0x4}, {}),
)
"""Answers of one GPU -> the findings about it, with driver 580."""


def planted(gpu, answers):
    return {f"{gpu}.{key}": value for key, value in answers.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drivers")


@of_each("branch", list(BRANCHES))
def test_each_branch_is_read_as_far_as_it_knows_and_healthy_gpus_have_no_finding(branch, folder):
    driver = Driver(folder, branch)
    driver.plant({"3.fabric.mask": DEGRADED})
    ranks = driver.examine()
    degraded = {"fabric_health": "hardware"} if branch >= 550 else {}  # no older branch reports the fabric's health
    assert [rank["wrong"] for rank in ranks] == [*3 * [{}], degraded, *4 * [{}]]
    assert all(rank["missing"].keys() == MISSING[branch] | {"pages.pending"} for rank in ranks)
    assert ranks[0]["values"]["fabric"] == {"state": "completed", "status": "success", "health": []}


def test_the_newest_cuda_of_a_driver_is_read(folder):
    driver = Driver(folder, 580)
    driver.plant({"cuda": 12080})
    read = "from pytest_gpucluster.node.nvml import PyNvml; print(PyNvml().cuda_version())"
    assert driver.run("-c", read) == "12.8\n"


def test_each_fault_is_found_on_its_gpu_and_no_other_is_accused(folder):
    for first in range(0, len(FAULTS), 8):
        driver, faults = Driver(folder, 580), FAULTS[first : first + 8]
        for gpu, (answers, _) in enumerate(faults):
            driver.plant(planted(gpu, answers))
        found = [rank["wrong"] for rank in driver.examine()]
        assert found == [*(codes for _, codes in faults), *(8 - len(faults)) * [{}]]


def test_a_lost_gpu_is_reported_by_its_node_and_the_others_are_read(folder):
    driver = Driver(folder, 580)
    driver.plant({"3.lost": 1})
    ranks = driver.examine()
    assert [rank["gpu"] for rank in ranks] == [0, 1, 2, 4, 5, 6, 7]
    assert [rank["wrong"] for rank in ranks] == [{"gpu_silent": "hardware"}, *6 * [{}]]
    assert all(rank["values"]["power.draw"] == 690.0 for rank in ranks)


def test_gpus_that_a_cgroup_denies_are_not_counted(folder):
    driver = Driver(folder, 535)
    driver.plant({f"{gpu}.handle": NO_PERMISSION for gpu in range(4, 8)})
    ranks = driver.examine()
    assert [(rank["gpu"], rank["wrong"]) for rank in ranks] == [(gpu, {}) for gpu in range(4)]


def test_memory_and_processes_of_a_mig_slice_are_its_own_and_the_rest_is_its_gpus(folder):
    driver, slice_ = Driver(folder, 550), "MIG-3a"
    own = {"uuid": slice_, "memory.total": 20_000_000_000, "compute": "77:5000"}
    driver.plant({"3.mig": 1, **planted(3, {f"slice.{key}": value for key, value in own.items()})})
    (rank,) = driver.examine(slice_)
    values = rank["values"]
    assert (rank["gpu"], values["memory.total"], values["processes"]) == (3, 20_000_000_000, [[77, 5000]])
    assert (values["mig.mode"], values["power.draw"]) == (True, 690.0)


@of_each("branch", list(BRANCHES))
def test_node_info_reads_every_gpu(branch, folder):
    driver = Driver(folder, branch)
    facts = json.loads(driver.run("-m", "pytest_gpucluster", "node", "info", "gpu", "--json"))["gpus"]
    assert (facts["driver"], [gpu["uuid"] for gpu in facts["gpus"]]) == (BRANCHES[branch], [*map(uuid, range(8))])
    assert [gpu["not_available"] for gpu in facts["gpus"]] == 8 * [{}]


@of_each("branch", list(BRANCHES))
def test_the_sampler_process_reads_each_gpu_and_names_one_that_is_lost(branch, folder, monkeypatch):
    driver = Driver(folder, branch)
    for name in ("LD_LIBRARY_PATH", "NVML_STUB"):
        monkeypatch.setenv(name, driver.environment[name])
    sampler = telemetry.start_sampler()

    def summary(gpu, answers):
        driver.plant(planted(3, answers))
        link = Link(sampler.address, uuid(gpu), answer_seconds=30.0)
        with link.window() as window:
            pass
        link.close()
        return window.summary()

    try:
        healthy, hot = summary(3, {}), summary(3, {"throttle": 0x40, "clock.1": 1200})
        lost, other = summary(3, {"lost": 1}), summary(4, {})
    finally:
        sampler.close()
    assert (healthy["sm_clock_mhz"], healthy["power_watts"], healthy["throttle"]) == (3 * [1755], 3 * [690], [])
    assert (healthy["sm_clock_max_mhz"], healthy["slowdown_celsius"], healthy["not_available"]) == (1980, 89, {})
    assert (hot["sm_clock_mhz"], hot["throttle"]) == (3 * [1200], ["hw_thermal"])
    assert lost["lost"]
    assert lost["not_available"].keys() == telemetry.QUERIES.keys()
    assert (other["samples"], other.get("lost", ""), other["not_available"]) == (1, "", {})


GROWTH = (
    ({}, []),
    ({"ecc.uncorrected.volatile": 2}, ["ecc_uncorrected"]),
    ({"rows.uncorrected": 1}, ["row_remapped"]),
    ({"rows.failed": 1}, ["row_remap_failed"]),
    ({"rows.pending": 1}, ["row_remap_pending"]),
    ({"link.7": 0}, ["nvlink_down"]),
    ({"link.errors.0.4": 5}, ["nvlink_errors"]),
    ({"field.230": 1}, ["recovery_action"]),
    ({"lost": 1}, ["gpu_lost"]),
    ({"ecc.corrected.volatile": 9}, []),
    ({"pcie.replays": 9}, []),
)
"""Answers of a GPU that were others before a test -> the faults of its counters."""


@of_each("branch", list(BRANCHES))
def test_counters_that_grow_during_a_test_are_faults(branch, folder):
    driver = Driver(folder, branch)
    found = driver.count(uuid(3), [planted(3, answers) for answers, _ in GROWTH])
    old = {"recovery_action"} if branch < 570 else set()  # older branches do not report it
    assert [one["faults"] for one in found] == [[code for code in codes if code not in old] for _, codes in GROWTH]
    unknown = MISSING[branch] - {"temperature.margin"} | {"pages.pending"}
    assert [set(one["missing"]) == unknown for one, (answers, _) in zip(found, GROWTH, strict=True)] == [
        "lost" not in answers and "link.7" not in answers for answers, _ in GROWTH
    ]


RECORDED = Path(__file__).parents[1] / "data/selftest/cuda-580.159.04-2.11.0-2.28.9"
"""Recorded in November 2026 in a virtual machine with one H100 SXM, driver 580.159.04: its README in tests/data."""
OF_THAT_MACHINE = {
    **{key: None for key in H100 if key.startswith(("link", "field.13", "field.147"))},
    "driver": "580.159.04",
    "gsp": "580.159.04",
    "vbios": "96.00.DA.00.0C",
    "part": "695-2G520-0200-000",
    "memory.reserved": 503_316_480,
    "memory.used": 0,
    "clock.1": 1980,
    "power": 122_782,
    "temperature.0": 35,
    "utilization": 0,
    "fabric.state": 0,
    "fabric.mask": 0,
}
"""What that GPU has answered otherwise than H100: no NVLink is passed through, and nothing runs on it."""


def test_the_answers_of_a_recorded_gpu_are_read_as_they_were_recorded(folder):
    driver = Driver(folder, 580, gpus=1)
    driver.plant(OF_THAT_MACHINE)
    [rank] = driver.examine()
    recorded = json.loads((RECORDED / "nvml.json").read_text())["gpus"]["0"]
    values, missing = rank["values"], rank["missing"]
    assert {key: value for key, value in recorded["values"].items() if key in values and values[key] != value} == {}
    assert set(recorded["values"]) - set(values) <= {"clock.memory.max", "memory.free", "nvlink.ends"}
    assert missing["pages.pending"] == recorded["missing"]["pages.pending"]["kind"]
    assert rank["wrong"] == {}


def test_the_gpu_is_found_among_the_recorded_pci_devices_and_its_node_is_unknown(tmp_path):
    tree = Tree(root=tmp_path)
    for line in (RECORDED / "pci.txt").read_text().splitlines():
        path, vendor, device, kind, node, *_ = line.split()
        for name, text in {"vendor": vendor, "device": device, "class": kind, "numa_node": node}.items():
            file = tmp_path / path.lstrip("/") / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
    assert pci.gpus_on_bus(tree) == ["0000:00:06.0"]
    assert tree.numa_node("00000000:00:06.0") is None, "the kernel's -1 is no node"


def test_the_recorded_kernel_log_has_no_xid():
    lines = (RECORDED / "dmesg-nvrm.txt").read_text().splitlines()
    assert len(lines) == 3
    assert list(kernel_log.parse(lines)) == []
