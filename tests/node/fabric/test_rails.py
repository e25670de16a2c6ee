from __future__ import annotations

import pytest

from pytest_gpucluster.node.fabric.port_checks import shared_rails
from pytest_gpucluster.node.fabric.ports import leaf_of

HOSTS = [f"gpu-{index:02d}" for index in range(12)]
LEAVES = {host: "leaf-a" if index < 6 else "leaf-b" for index, host in enumerate(HOSTS)}


@pytest.mark.parametrize(
    ("address", "pattern", "leaf"),
    [
        ("core.s4.gpu-07", "switch.switch.node", "s4"),
        ("s4.gpu-07", "switch.node", "s4"),
        ("core.s4.gpu-07.example.org", "switch.switch.node", "s4"),
        ("gpu-07", "node", ""),
        ("gpu-07", "switch.node", ""),
        ("", "", ""),
    ],
    ids=["tree", "one switch", "dots in the name", "no tree", "broken", "not under Slurm"],
)
def test_slurm_has_the_leaf_switch_of_a_node(address: str, pattern: str, leaf: str) -> None:
    variables = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert leaf_of({name: text for name, text in variables.items() if text}) == leaf


def fault(host: str, rail: str = "mlx5_0/1") -> tuple[str, str]:
    return host, rail


def test_single_faults_share_nothing() -> None:
    assert shared_rails([fault("gpu-00"), fault("gpu-07", "mlx5_3/1")], LEAVES) == []
    assert shared_rails([], {}) == []
    assert shared_rails([fault("gpu-00"), fault("gpu-00")], LEAVES) == [], "two faults of one node"


def test_several_nodes_with_faults_on_one_rail_point_to_its_switch() -> None:
    found = shared_rails([fault("gpu-00"), fault("gpu-07"), fault("gpu-07", "mlx5_3/1")], LEAVES)
    assert found == ["rail mlx5_0/1: faults on 2 of its 12 nodes (gpu-00, gpu-07)"]


def test_several_nodes_of_one_leaf_switch_point_to_it() -> None:
    faults = [fault("gpu-06", "mlx5_0/1"), fault("gpu-08", "mlx5_1/1"), fault("gpu-09", "mlx5_2/1")]
    assert shared_rails(faults, LEAVES) == ["leaf switch leaf-b: faults on 3 of its 6 nodes (gpu-06, gpu-08, gpu-09)"]
