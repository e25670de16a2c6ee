"""The figures that limits are set for: in the metrics' units, with what was found, and never a guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import HEALTHY, facts

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.node.host_checks import Reading, readings


def of(root: Path, files: dict[str, str | None] | None = None, **others: object) -> dict[str, Reading]:
    return {one.metric: one for one in readings(facts(root, files, **others))}  # type: ignore[arg-type]


def test_every_figure_of_a_host_is_in_its_metric_s_unit(tmp_path: Path) -> None:
    found = of(tmp_path, ranks=8)
    declared = {name for name in measurement.METRICS if name.startswith("host.")}
    assert set(found) == declared
    for one in found.values():
        assert measurement.known(one.metric).unit == one.unit
        assert measurement.known(one.metric).scope == "node"
    values = {name: round(one.value, 3) for name, one in found.items() if name != "host.cpus"}
    assert values == {
        "host.nofile": 1048576,
        "host.memlock": 100,
        "host.shm": 125,
        "host.tasks": 524288,
        "host.memory": round(2113568112 * 1024 / 8e9, 3),
    }


def test_a_figure_that_is_not_known_is_an_error_and_never_a_pass(tmp_path: Path) -> None:
    def refuse(path: Path) -> tuple[int, int]:
        raise FileNotFoundError(path)

    for metric, missing in {
        "host.nofile": ["/proc/self/limits"],
        "host.memlock": ["/proc/meminfo"],
        "host.cpus": [name for name in HEALTHY if "cpu" in name],
    }.items():
        with pytest.raises(EnvironmentBroken, match=f"^gpu-07: {metric} "):
            of(tmp_path / metric, dict.fromkeys(missing))
    with pytest.raises(EnvironmentBroken, match=r"host\.shm .*/dev/shm"):
        of(tmp_path / "shm", space=refuse)
