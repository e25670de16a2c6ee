"""The product on NVML's own C interface, as each branch of the driver has it: the library of nvml_stub.c."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from each import of_each
from nvml_stub import BRANCHES, Driver, uuid

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
FAULTS: tuple[tuple[Mapping[str, Any], Mapping[str, str]], ...] = (
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


def planted(gpu: int, answers: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{gpu}.{key}": value for key, value in answers.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drivers")


@of_each("branch", list(BRANCHES))
def test_each_branch_is_read_as_far_as_it_knows_and_healthy_gpus_have_no_finding(branch: int, folder: Path) -> None:
    driver = Driver(folder, branch)
    driver.plant({"3.fabric.mask": DEGRADED})
    ranks = driver.examine()
    degraded = {"fabric_health": "hardware"} if branch >= 550 else {}  # no older branch reports the fabric's health
    assert [rank["wrong"] for rank in ranks] == [*3 * [{}], degraded, *4 * [{}]]
    assert all(rank["missing"].keys() == MISSING[branch] | {"pages.pending"} for rank in ranks)
    assert ranks[0]["values"]["fabric"] == {"state": "completed", "status": "success", "health": []}


def test_each_fault_is_found_on_its_gpu_and_no_other_is_accused(folder: Path) -> None:
    for first in range(0, len(FAULTS), 8):
        driver, faults = Driver(folder, 580), FAULTS[first : first + 8]
        for gpu, (answers, _) in enumerate(faults):
            driver.plant(planted(gpu, answers))
        found = [rank["wrong"] for rank in driver.examine()]
        assert found == [*(codes for _, codes in faults), *(8 - len(faults)) * [{}]]


def test_a_lost_gpu_is_reported_by_its_node_and_the_others_are_read(folder: Path) -> None:
    driver = Driver(folder, 580)
    driver.plant({"3.lost": 1})
    ranks = driver.examine()
    assert [rank["gpu"] for rank in ranks] == [0, 1, 2, 4, 5, 6, 7]
    assert [rank["wrong"] for rank in ranks] == [{"gpu_silent": "hardware"}, *6 * [{}]]
    assert all(rank["values"]["power.draw"] == 690.0 for rank in ranks)


def test_gpus_that_a_cgroup_denies_are_not_counted(folder: Path) -> None:
    driver = Driver(folder, 535)
    driver.plant({f"{gpu}.handle": NO_PERMISSION for gpu in range(4, 8)})
    ranks = driver.examine()
    assert [(rank["gpu"], rank["wrong"]) for rank in ranks] == [(gpu, {}) for gpu in range(4)]


def test_memory_and_processes_of_a_mig_slice_are_its_own_and_the_rest_is_its_gpus(folder: Path) -> None:
    driver, slice_ = Driver(folder, 550), "MIG-3a"
    own = {"uuid": slice_, "memory.total": 20_000_000_000, "compute": "77:5000"}
    driver.plant({"3.mig": 1, **planted(3, {f"slice.{key}": value for key, value in own.items()})})
    (rank,) = driver.examine(slice_)
    values = rank["values"]
    assert (rank["gpu"], values["memory.total"], values["processes"]) == (3, 20_000_000_000, [[77, 5000]])
    assert (values["mig.mode"], values["power.draw"]) == (True, 690.0)


@of_each("branch", [525, 580])
def test_node_info_and_node_watch_read_every_gpu(branch: int, folder: Path) -> None:
    driver = Driver(folder, branch)
    node = ["-m", "pytest_gpucluster", "node"]
    facts = json.loads(driver.run(*node, "info", "gpu", "--json"))["gpus"]
    assert (facts["driver"], [gpu["uuid"] for gpu in facts["gpus"]]) == (BRANCHES[branch], [*map(uuid, range(8))])
    assert [gpu["not_available"] for gpu in facts["gpus"]] == 8 * [{}]
    watch = [*node, "watch", "--once", "--interval", "0.2"]

    def power(text: str) -> list[str]:
        rows = sorted(line.split() for line in text.partition("throttled by\n")[2].splitlines()[:8])
        assert [row[0] for row in rows] == [*"01234567"]
        return [row[4].partition("/")[0] for row in rows]

    assert power(driver.run(*watch)) == 8 * ["690"]
    driver.plant({"3.lost": 1})
    text = driver.run(*watch, code=1)
    assert power(text) == [*3 * ["690"], "-", *4 * ["690"]]
    assert [line.split()[0] for line in text.splitlines() if line.endswith("LOST")] == ["3"]
