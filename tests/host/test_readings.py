"""The figures that limits are set for: in the metrics' units, with what was found, and never a guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import HEALTHY, facts, limits, space

from pytest_gpucluster import metrics
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.host.readings import Reading, readings


def of(root: Path, files: dict[str, str | None] | None = None, **others: object) -> dict[str, Reading]:
    return {one.metric: one for one in readings(facts(root, files, **others))}  # type: ignore[arg-type]


def test_every_figure_of_a_host_is_in_its_metric_s_unit(tmp_path: Path) -> None:
    found = of(tmp_path, ranks=8)
    declared = {name for name in metrics.METRICS if name.startswith("host.")}
    assert set(found) == declared
    for one in found.values():
        assert metrics.known(one.metric).unit == one.unit
        assert metrics.known(one.metric).scope == "node"
    values = {name: round(one.value, 3) for name, one in found.items() if name != "host.cpus"}
    assert values == {
        "host.nofile": 1048576,
        "host.memlock": 100,
        "host.shm": 125,
        "host.tasks": 524288,
        "host.memory": round(2113568112 * 1024 / 8e9, 3),
    }


@pytest.mark.parametrize(
    ("metric", "files", "told"),
    [
        (
            "host.nofile",
            {"/proc/self/limits": limits(nofile=1024)},
            "open files 1,024, which can be raised to 1,048,576",
        ),
        (
            "host.memlock",
            {"/proc/self/limits": limits(memlock=65536)},
            "locked memory 65,536 bytes, no CAP_IPC_LOCK",
        ),
        (
            "host.memory",
            {"/sys/fs/cgroup/memory.max": "8000000000\n"},
            "the node has 2.16e+03 GB, for 1 rank; the control group may use 8 GB",
        ),
        (
            "host.tasks",
            {"/sys/fs/cgroup/pids.max": "512\n"},
            "this user may have 8,255,000, the node 4,194,304, the control group 512; 1 rank on the node",
        ),
    ],
    ids=["nofile", "memlock", "memory", "tasks"],
)
def test_a_figure_says_what_it_was_made_from(
    tmp_path: Path, metric: str, files: dict[str, str | None], told: str
) -> None:
    found = of(tmp_path, files)[metric]
    assert found.found == told
    assert str(found) == f"{metric}: {told}; for more: {found.remedy}"


def test_dev_shm_says_what_is_free_for_whom(tmp_path: Path) -> None:
    found = of(tmp_path, ranks=2, space=space(64 * 10**6, 60 * 10**6))["host.shm"]
    assert found.value == pytest.approx(0.03)
    assert found.found == "/dev/shm: 0.06 GB of 0.064 GB are free, for 2 ranks"


def test_cpus_say_when_no_control_group_is_seen(tmp_path: Path) -> None:
    found = of(tmp_path, {"/proc/self/cgroup": None})["host.cpus"]
    assert found.found.startswith("128 CPUs are online, no control group can be seen, so its limits are not known")


@pytest.mark.parametrize(
    ("missing", "metric"),
    [("/proc/self/limits", "host.nofile"), ("/proc/meminfo", "host.memlock")],
)
def test_a_figure_that_is_not_known_is_an_error_and_never_a_pass(tmp_path: Path, missing: str, metric: str) -> None:
    with pytest.raises(EnvironmentBroken, match=f"^gpu-07: {metric} is not known: /proc/"):
        of(tmp_path, {missing: None})


def test_cpus_that_are_not_known_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match=r"host\.cpus is not known"):
        of(tmp_path, {name: None for name in HEALTHY if "cpu" in name})


def test_a_dev_shm_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    def refuse(path: Path) -> tuple[int, int]:
        raise FileNotFoundError(path)

    with pytest.raises(EnvironmentBroken, match=r"host\.shm is not known: the file system at /dev/shm tells nothing"):
        of(tmp_path, space=refuse)
