"""The paths between devices, by NVLinks and by the kernel's PCI devices."""

from __future__ import annotations

import fake_node
import pytest
from each import of_each

from pytest_gpucluster.node import info, info_gpus
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.sysfs import Tree


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return fake_node.tree(tmp_path_factory.mktemp("node"))


def read(tree, fake):
    return info_gpus.read_topology(info_gpus.read_gpus(fake_node.child_answer(fake)), info.network_adapters(tree), tree)


def test_gpus_behind_switches_are_as_many_links_apart_as_they_have_to_the_switches(node):
    topology = read(node, fake_node.nvml())
    assert topology["between_gpus"] == [["X" if one == other else "NV18" for other in range(8)] for one in range(8)]
    assert topology["adapters"] == [f"mlx5_{number}" for number in range(8)]
    expected = [
        ["PIX" if nic == gpu else "NODE" if nic // 4 == gpu // 4 else "SYS" for gpu in range(8)] for nic in range(8)
    ]
    assert topology["to_gpus"] == expected
    assert topology["numa_nodes"] == [0] * 4 + [1] * 4
    assert topology["cpus"] == ["0-63"] * 4 + ["64-127"] * 4


def test_links_to_each_other_are_counted_by_the_address_at_their_end(node):
    fake = fake_node.nvml(count=3)
    uuids = list(fake.planted)
    ends = {uuid: dict.fromkeys(range(4), ("gpu", fake.pci[uuids[1 - at]])) for at, uuid in enumerate(uuids[:2])}
    for uuid in uuids:
        fake.planted[uuid]["nvlink.ends"] = ends.get(uuid, {})
    topology = read(node, fake)
    assert topology["between_gpus"] == [["X", "NV4", "NODE"], ["NV4", "X", "NODE"], ["NODE", "NODE", "X"]]


def test_without_links_the_kernel_says_it_and_where_it_does_not_it_is_not_guessed(node, tmp_path):
    fake = fake_node.nvml({"nvlink.ends": NotAvailable("not supported")}, count=2)
    assert read(node, fake)["between_gpus"][0] == ["X", "NODE"]
    topology = read(Tree(root=tmp_path), fake)
    assert topology["between_gpus"] == [["X", "?"], ["?", "X"]]
    assert (topology["numa_nodes"], topology["cpus"], topology["to_gpus"]) == ([None, None], [None, None], [])


ROOT, PORT, UP = "pci0000:16", "0000:16:01.0", "0000:17:00.0"


@of_each(
    "case",
    [
        ((ROOT, PORT, UP, "0000:18:00.0"), (ROOT, PORT, UP, "0000:18:01.0"), 0, "PIX"),
        ((ROOT, PORT), (ROOT, PORT), 0, "PIX"),  # two functions of one card
        ((ROOT, PORT, UP, "0000:18:00.0"), (ROOT, PORT, UP, "0000:18:01.0", "0000:19:00.0", "0000:1a:00.0"), 0, "PXB"),
        ((ROOT, PORT), (ROOT, "0000:16:02.0"), 0, "PHB"),
        ((ROOT, PORT), ("pci0000:44", "0000:44:01.0"), 0, "NODE"),
        ((ROOT, PORT), ("pci0000:44", "0000:44:01.0"), 1, "SYS"),
        ((ROOT, PORT), ("pci0000:44", "0000:44:01.0"), -1, "?"),
    ],
)
def test_the_way_between_two_devices_is_what_their_paths_do_not_share(tmp_path_factory, case):
    one, other, numa, way = case
    tree = Tree(root=tmp_path_factory.mktemp("node"))
    fake_node.add_pci(tree, "0000:50:00.0", *one)
    fake_node.add_pci(tree, "0000:51:00.0", *other, numa_node=numa)
    assert info_gpus.by_kernel(tree, "00000000:50:00.0", "0000:51:00.0") == way
    assert info_gpus.by_kernel(tree, "0000:51:00.0", "0000:50:00.0") == way
    assert info_gpus.by_kernel(tree, "0000:51:00.0", None) == "?"
