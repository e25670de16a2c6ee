"""The facts of a node, and the fabric that they show."""

import json

import pytest
from made_nodes import H100, Node, azure, efa, eight_gpus, ethernet, google, infiniband, laptop, pod, roce
from sysfs_ports import ROCE_GIDS, write

from pytest_gpucluster.metrics.datasheets import promise_of
from pytest_gpucluster.node.fabric.nccl_advice import find_fabric
from pytest_gpucluster.node.fabric.nccl_facts import collect_facts, gpus_by_nvml, gpus_of_ranks
from pytest_gpucluster.node.processes import Output


def test_the_firmware_shows_the_cloud(tmp_path):
    providers = {infiniband: None, azure: "Azure", efa: "AWS", google: "Google Cloud", laptop: None}
    assert {make: collect_facts(make(tmp_path / make.__name__).sources()).provider for make in providers} == providers
    hyper_v = azure(tmp_path / "another Hyper-V")
    hyper_v.dmi(chassis_asset_tag="0000-1111")
    assert collect_facts(hyper_v.sources()).provider is None


def test_each_port_has_its_card_its_interface_and_the_distance_to_its_gpu(tmp_path):
    node = infiniband(tmp_path, ports=2)
    node.roce("mlx5_8", "ens8")
    node.default("ens8", metric=0)
    found = {card.name: card for card in collect_facts(node.sources()).cards}
    assert (found["mlx5_0:1"].distance, found["mlx5_8:1"].distance) == ("PIX", "NODE")
    assert (found["mlx5_0:1"].driver, found["mlx5_0:1"].board) == ("mlx5_core", "MT_0000000838")
    assert (found["mlx5_0:1"].interface, found["mlx5_8:1"].interface) == ("", "ens8")


def test_the_default_route_is_that_of_the_lowest_metric_and_of_what_it_is_made_of(tmp_path):
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


def test_a_node_with_nothing_has_empty_facts(tmp_path):
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
def test_launcher_and_nodes_are_those_of_the_job(tmp_path, environ, launcher, nnodes):
    node = infiniband(tmp_path)
    node.environ.update(environ)
    found = collect_facts(node.sources())
    assert (found.launcher, found.nnodes) == (launcher, nnodes)


def test_virtual_functions_of_a_gpu_are_no_gpus_of_the_node(tmp_path):
    node = Node(tmp_path)
    node.gpu(0)
    node.visible.clear()
    node.pci("0000:21:00.4", "pci0000:21", **{"class": "0x030200", "vendor": "0x10de"})
    (node.sysfs / "bus/pci/devices/0000:21:00.4/physfn").mkdir()
    assert collect_facts(node.sources()).gpus_of_node == ("0000:20:00.0",)


def test_gpus_are_those_of_nvml_with_their_links():
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


def test_in_a_run_the_gpus_are_those_of_the_node_s_ranks():
    def rank(node, gpu):
        return {"node_rank": node, "gpu": gpu}

    one, other = {"name": H100, "pci_bus_id": "0000:20:00.0"}, {"name": "NVIDIA L4", "pci_bus_id": "0000:21:00.0"}
    ranks = [rank(0, one), rank(1, other), rank(0, None)]
    found = gpus_of_ranks(ranks, 0, promise_of("H100 SXM"))
    assert ([gpu.pci for gpu in found.gpus], found.nvlink, found.nvls) == (["0000:20:00.0"], True, True)
    assert not gpus_of_ranks(ranks, 0, None).nvls
    assert not gpus_of_ranks(ranks, 1, promise_of("L40S")).nvls


STORAGE = {"rate": "100 Gb/sec (4X EDR)", "board": "MT_0000000359"}


def of(node):
    return find_fabric(collect_facts(node.sources()))


def names(fabric):
    return [card.name for card in fabric.cards]


def outside(fabric):
    return {card.name: why for card, why in fabric.outside}


def test_the_kind_of_each_node(tmp_path):
    kinds = {infiniband: "InfiniBand", roce: "RoCE", ethernet: "Ethernet", efa: "EFA", azure: "InfiniBand",
             google: "Ethernet", laptop: "Ethernet", pod: None, Node: None}  # fmt: skip
    assert {make: of(make(tmp_path / make.__name__)).kind for make in kinds} == kinds
    assert "(eth0)" in of(pod(tmp_path / "again")).why


def test_eight_rails_of_infiniband_are_the_fabric_and_nothing_is_left_out(tmp_path):
    found = of(infiniband(tmp_path))
    assert names(found) == [f"mlx5_{number}:1" for number in range(8)]
    assert (found.outside, found.unclear) == ((), "")
    assert "400 Gb/s (mlx5_0:1, " in found.why


def test_excluded_cards_are_named_with_the_reason(tmp_path):
    slower, storage = infiniband(tmp_path / "slower"), roce(tmp_path / "storage")
    slower.card("mlx5_8", close_to=0, **STORAGE)
    storage.card("mlx5_8", rate="200 Gb/sec (4X HDR)")
    for node, kind, name, words in (
        (azure(tmp_path / "azure"), "InfiniBand", "mlx5_an0:1", "Ethernet"),
        (storage, "RoCE", "mlx5_8:1", "InfiniBand"),
        (slower, "InfiniBand", "mlx5_8:1", "100 Gb/s"),
    ):
        found = of(node)
        [(left_out, why)] = outside(found).items()
        assert (found.kind, left_out, len(found.cards)) == (kind, name, 8)
        assert words in why


def test_two_kinds_of_which_neither_is_clearly_more_are_not_known(tmp_path):
    node = infiniband(tmp_path, ports=2)
    for number in range(4):
        node.roce(f"mlx5_{number + 4}", f"rail{number}", close_to=number + 4, rate="400 Gb/sec (4X NDR)")
    found = of(node)
    assert found.kind is None
    assert "InfiniBand" in found.why
    assert (found.cards, found.outside) == ((), ())
    unknown = infiniband(tmp_path / "unknown rate")
    unknown.roce("mlx5_8", "ens8", rate="")
    assert of(unknown).kind is None


def test_a_slower_port_of_the_same_card_is_a_fault_and_not_left_out(tmp_path):
    node = infiniband(tmp_path, ports=7)
    node.card("mlx5_7", close_to=7, rate="200 Gb/sec (2X NDR)")
    found = of(node)
    assert outside(found) == {}
    assert len(found.cards) == 8


def test_a_card_far_from_all_gpus_is_left_out_where_each_gpu_has_one(tmp_path):
    node = infiniband(tmp_path)
    node.card("mlx5_8")
    node.card("mlx5_9")
    found = of(node)
    assert set(outside(found)) == {"mlx5_8:1", "mlx5_9:1"}
    assert "(NODE)" in outside(found)["mlx5_8:1"]


def test_cards_far_from_all_gpus_belong_to_it_where_the_gpus_have_none(tmp_path):
    node = eight_gpus(tmp_path)
    for number in range(4):
        node.card(f"mlx5_{number}")
    found = of(node)
    assert (len(found.cards), outside(found), found.unclear) == (4, {}, "")


@pytest.mark.parametrize("visible", [0, 1, 4])
def test_cards_close_to_gpus_that_a_job_was_not_given_are_of_the_fabric(tmp_path, visible):
    node = infiniband(tmp_path)
    del node.visible[visible:]
    assert (len(of(node).cards), outside(of(node))) == (8, {})
    node.card("mlx5_8")
    assert set(outside(of(node))) == {"mlx5_8:1"}


def test_an_unknown_rate_leaves_it_open(tmp_path):
    node = infiniband(tmp_path, ports=7)
    node.card("mlx5_7", close_to=7, rate="")
    assert "mlx5_7:1" in of(node).unclear


def test_ports_that_are_all_down_are_no_known_fabric(tmp_path):
    node = eight_gpus(tmp_path)
    node.card("mlx5_0", close_to=0, state="1: DOWN")
    node.network("eth0")
    found = of(node)
    assert found.kind is None
    assert "mlx5_0:1 DOWN" in found.why


def test_rdma_in_software_is_no_fabric(tmp_path):
    node = infiniband(tmp_path)
    node.card("rxe0", link_layer="Ethernet", gids=ROCE_GIDS)
    link = node.sysfs / "class/infiniband/rxe0/device"
    link.unlink()
    (node.sysfs / "devices/virtual/net/rxe").mkdir(parents=True)
    link.symlink_to(node.sysfs / "devices/virtual/net/rxe")
    assert "software" in outside(of(node))["rxe0:1"]
    alone = Node(tmp_path / "alone")
    alone.network("wlan0")
    alone.card("rxe0", link_layer="Ethernet", gids=ROCE_GIDS)
    (alone.sysfs / "class/infiniband/rxe0/device").unlink()
    assert of(alone).kind is None


def test_a_container_that_was_given_no_device_is_not_known_and_the_cards_on_the_bus_are_named(tmp_path):
    node = pod(tmp_path)
    node.network("eth1")
    node.pci("0000:18:00.0", "pci0000:16", **{"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"})
    found = of(node)
    assert found.kind is None
    assert "0000:18:00.0" in found.why
    assert "(kubernetes)" in found.why
    plain = eight_gpus(tmp_path / "plain")
    plain.network("rail0", speed=400_000)
    assert of(plain).kind == "Ethernet"
    plain.pci("0000:18:00.0", "pci0000:16", **{"class": "0x020000", "vendor": "0x15b3", "device": "0x1021"})
    assert (of(plain).kind, "0000:18:00.0" in of(plain).why) == (None, True)
