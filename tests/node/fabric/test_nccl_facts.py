"""The facts of a node, from files as the kernel writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_nodes import H100, Node, azure, efa, google, infiniband, laptop
from sysfs_ports import write

from pytest_gpucluster.metrics.datasheets import promise_of
from pytest_gpucluster.node.fabric.nccl_facts import collect_facts, gpus_by_nvml, gpus_of_ranks
from pytest_gpucluster.node.processes import Output


def test_the_firmware_shows_the_cloud(tmp_path: Path) -> None:
    providers = {infiniband: None, azure: "Azure", efa: "AWS", google: "Google Cloud", laptop: None}
    assert {make: collect_facts(make(tmp_path / make.__name__).sources()).provider for make in providers} == providers
    hyper_v = azure(tmp_path / "another Hyper-V")
    hyper_v.dmi(chassis_asset_tag="0000-1111")
    assert collect_facts(hyper_v.sources()).provider is None


def test_each_port_has_its_card_its_interface_and_the_distance_to_its_gpu(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=2)
    node.roce("mlx5_8", "ens8")
    node.default("ens8", metric=0)
    found = {card.name: card for card in collect_facts(node.sources()).cards}
    assert (found["mlx5_0:1"].distance, found["mlx5_8:1"].distance) == ("PIX", "NODE")
    assert (found["mlx5_0:1"].driver, found["mlx5_0:1"].board) == ("mlx5_core", "MT_0000000838")
    assert (found["mlx5_0:1"].interface, found["mlx5_8:1"].interface) == ("", "ens8")


def test_the_default_route_is_that_of_the_lowest_metric_and_of_what_it_is_made_of(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.network("ens1")
    node.network("ens2")
    node.network("bond0", real=False, over=("ens1", "ens2"))
    node.network("vlan7", real=False, over=("bond0",))
    node.network("wlan0")
    node.default("wlan0", metric=600)
    node.default("vlan7", metric=100)
    found = {one.name: one for one in collect_facts(node.sources()).networks}
    assert {name for name, one in found.items() if one.is_default} == {"ens1", "ens2", "bond0", "vlan7"}
    assert found["vlan7"].is_real
    six = Node(tmp_path / "IPv6 alone")
    six.network("ens1")
    zero = "0" * 32
    write(
        six.proc / "net/ipv6_route",
        f"{zero} 00 {zero} 00 fe80{'0' * 28} 00000400 00000001 00000000 00000003 ens1\n"
        f"{zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200 lo",
    )
    assert [one.is_default for one in collect_facts(six.sources()).networks] == [True]


def test_a_node_with_nothing_has_empty_facts(tmp_path: Path) -> None:
    found = collect_facts(Node(tmp_path).sources())
    assert (found.cards, found.networks, found.settings) == ((), (), ())
    assert (found.rdma_on_bus, found.has_verbs) == ((), False)


@pytest.mark.parametrize(
    ("environ", "launcher", "nnodes"),
    [
        ({}, "", None),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}, "", 4),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_RANK": "0",
          "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "openmpi", 1),
        # Without WORLD_SIZE: a launcher whose variables contradict each other is for the preflight.
        ({"JOB_COMPLETION_INDEX": "0"}, "", None),
    ],
)  # fmt: skip
def test_launcher_and_nodes_are_those_of_the_job(
    tmp_path: Path, environ: dict[str, str], launcher: str, nnodes: int | None
) -> None:
    node = infiniband(tmp_path)
    node.environ.update(environ)
    found = collect_facts(node.sources())
    assert (found.launcher, found.nnodes) == (launcher, nnodes)


def test_virtual_functions_of_a_gpu_are_no_gpus_of_the_node(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.gpu(0)
    node.visible.clear()
    node.pci("0000:21:00.4", "pci0000:21", **{"class": "0x030200", "vendor": "0x10de"})
    (node.sysfs / "bus/pci/devices/0000:21:00.4/physfn").mkdir()
    assert collect_facts(node.sources()).gpus_of_node == ("0000:20:00.0",)


def test_gpus_are_those_of_nvml_with_their_links() -> None:
    ends = {"0": ["switch", "00000000:01:00.0"]}
    gpu = {"index": 0, "name": H100, "uuid": "GPU-1", "pci": "00000000:20:00.0", "nvlink_ends": ends, "processes": None}
    lines = [{"driver": "580.1"}, {"count": 1}, {"gpu": gpu}, {"why_not": ""}]
    visible = gpus_by_nvml(lambda: Output(text="\n".join(map(json.dumps, lines))))
    assert (visible.nvlink, visible.nvls, visible.why_not, [one.name for one in visible.gpus]) == (
        True,
        True,
        "",
        [H100],
    )
    hangs = gpus_by_nvml(lambda: Output(why_not="no answer"))
    assert (hangs.why_not, hangs.gpus, hangs.nvls) == ("no answer", (), False)


def test_in_a_run_the_gpus_are_those_of_the_node_s_ranks() -> None:
    def rank(node: int, gpu: dict[str, str] | None) -> dict[str, Any]:
        return {"node_rank": node, "gpu": gpu}

    one, other = {"name": H100, "pci_bus_id": "0000:20:00.0"}, {"name": "NVIDIA L4", "pci_bus_id": "0000:21:00.0"}
    ranks = [rank(0, one), rank(1, other), rank(0, None)]
    found = gpus_of_ranks(ranks, 0, promise_of("H100 SXM"))
    assert ([gpu.pci for gpu in found.gpus], found.nvlink, found.nvls) == (["0000:20:00.0"], True, True)
    assert not gpus_of_ranks(ranks, 0, None).nvls
    assert not gpus_of_ranks(ranks, 1, promise_of("L40S")).nvls
