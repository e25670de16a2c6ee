"""Each piece of advice: a node on which it is given, and one on which it is not."""

from __future__ import annotations

import dataclasses
import doctest
from collections.abc import Callable
from pathlib import Path

import pytest
from made_nodes import MAKERS, Node, azure, efa, eight_gpus, ethernet, google, infiniband, laptop, pod, roce
from sysfs_ports import ROCE_GIDS, write

from pytest_gpucluster.nccl_advice import cards
from pytest_gpucluster.nccl_advice.advice import Advised, Set
from pytest_gpucluster.nccl_advice.advising import advise, place
from pytest_gpucluster.nccl_advice.gathering import gather
from pytest_gpucluster.nccl_advice.left_alone import ALONE
from pytest_gpucluster.nccl_findings import judge
from pytest_gpucluster.nccl_rules import RULES

GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


def of(node: Node) -> Advised:
    return advise(gather(node.sources()))


def values(advised: Advised) -> dict[str, str]:
    return {one.name: one.value for one in advised.set}


def wanted(advised: Advised, name: str) -> Set:
    [found] = [one for one in advised.set if one.name == name]
    return found


def left(advised: Advised) -> dict[str, str]:
    return {one.name: one.why for one in advised.leave}


def steps(advised: Advised) -> str:
    return "\n".join(f"{step.what}: {step.why}" for step in advised.steps)


def test_doctests_hold() -> None:
    assert doctest.testmod(cards).failed == 0


def test_a_rail_optimised_node_of_infiniband_needs_nothing(tmp_path: Path) -> None:
    found = of(infiniband(tmp_path))
    assert (found.set, found.remove, found.steps, found.unknown, found.differs) == ((), (), (), (), False)
    assert left(found)["NCCL_IB_HCA"] == "NCCL takes all active ports by itself, and all 8 of them belong to the fabric"
    assert left(found)["NCCL_SOCKET_IFNAME"] == "NCCL takes eth0 by itself, and there is no other"


def with_storage(root: Path) -> Node:
    node = infiniband(root)
    node.card("mlx5_8", board="MT_0000000359", rate="100 Gb/sec (4X EDR)")
    return node


def test_the_cards_are_named_exactly_where_others_are_active(tmp_path: Path) -> None:
    hca = wanted(of(with_storage(tmp_path)), "NCCL_IB_HCA")
    assert hca.value == "=" + ",".join(f"mlx5_{number}:1" for number in range(8))
    assert "mlx5_8:1: it has 100 Gb/s" in hca.why
    assert (hca.source, hca.state, hca.is_met) == (GUIDE, "not set", False)


@pytest.mark.parametrize(
    ("value", "is_met"),
    [
        ("=mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7", True),
        ("^mlx5_8", True),
        ("^=mlx5_8:1", True),
        ("mlx5", False),
        ("=mlx5_0", False),
        ("mlx4_0", False),
    ],
)
def test_a_choice_of_the_same_cards_is_as_good_however_it_is_written(tmp_path: Path, value: str, is_met: bool) -> None:
    node = with_storage(tmp_path)
    node.environ["NCCL_IB_HCA"] = value
    found = of(node)
    assert wanted(found, "NCCL_IB_HCA").is_met is is_met
    assert found.differs is not is_met
    assert [note.found.partition(":")[0] for note in found.notes("gpu-001")] == (
        [] if is_met else ["NCCL_IB_HCA is set otherwise"]
    )


def test_cards_that_cannot_be_told_apart_are_not_named(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=7)
    node.card("mlx5_7", beside=7, rate="")
    found = of(node)
    assert "NCCL_IB_HCA" not in values(found)
    assert "NCCL_IB_HCA" not in left(found)
    assert found.unknown[0].startswith("NCCL_IB_HCA: the rate of mlx5_7:1 is not known. Name the ports")


@pytest.mark.parametrize("name", ["mlx5,0", "ml:x", "=mlx5", "ml x", "mlx\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_card_that_no_list_can_name_is_not_named(tmp_path: Path, name: str) -> None:
    node = infiniband(tmp_path, ports=7)
    node.card(name, beside=7)
    node.card("mlx5_8")
    found = of(node)
    assert "NCCL_IB_HCA" not in values(found)
    assert "cannot be written into a list" in found.unknown[0]


def test_an_old_nccl_is_told_the_address_of_roce_v2_and_a_new_one_is_not(tmp_path: Path) -> None:
    node = roce(tmp_path)
    assert "NCCL_IB_GID_INDEX" not in values(of(node))
    assert left(of(node))["NCCL_IB_GID_INDEX"] == "NCCL 2.27.5 finds the address of RoCE v2 itself"
    node.nccl = "2.20.5"
    found = wanted(of(node), "NCCL_IB_GID_INDEX")
    assert (found.value, found.is_met) == ("3", False)
    node.environ["NCCL_IB_GID_INDEX"] = "0x3"
    assert wanted(of(node), "NCCL_IB_GID_INDEX").is_met


def test_without_knowing_nccl_s_version_its_addresses_are_left_open(tmp_path: Path) -> None:
    node = roce(tmp_path)
    node.nccl = None
    found = of(node)
    assert "NCCL_IB_GID_INDEX" not in {**values(found), **left(found)}
    assert any(text.startswith("NCCL_IB_GID_INDEX: NCCL's version is not known") for text in found.unknown)


def test_addresses_at_different_places_cannot_be_one_number(tmp_path: Path) -> None:
    node = roce(tmp_path)
    node.nccl = "2.18.1"
    moved = {5: ROCE_GIDS[3], 1: ROCE_GIDS[1]}
    table = node.sysfs / "class/infiniband/mlx5_3/ports/1"
    for index in ROCE_GIDS:
        (table / f"gids/{index}").unlink()
    for index, (address, kind) in moved.items():
        write(table / f"gids/{index}", address)
        write(table / f"gid_attrs/types/{index}", kind)
    found = of(node)
    assert "NCCL_IB_GID_INDEX" not in values(found)
    assert any("different places (3, 5)" in text for text in found.unknown)


def test_a_roce_port_without_an_address_is_something_to_do(tmp_path: Path) -> None:
    node = roce(tmp_path)
    assert "give each RoCE port an IP address" not in steps(of(node))
    for index in ROCE_GIDS:
        (node.sysfs / f"class/infiniband/mlx5_3/ports/1/gids/{index}").unlink()
    assert "give each RoCE port an IP address" in steps(of(node))
    assert "mlx5_3:1 have none" in steps(of(node))


def test_over_rdma_the_bootstrap_goes_over_a_card_and_neither_a_bridge_nor_a_rail(tmp_path: Path) -> None:
    assert values(of(roce(tmp_path / "roce")))["NCCL_SOCKET_IFNAME"] == "=eth0"
    node = infiniband(tmp_path / "bridge")
    node.found.clear()
    node.network("cni0", real=False, bridge=True)
    node.network("eth0", driver="igb")
    found = wanted(of(node), "NCCL_SOCKET_IFNAME")
    assert found.value == "=eth0"
    assert "cni0, which is a bridge or a tunnel of this host, and eth0 is what reaches other hosts" in found.why


@pytest.mark.parametrize(("value", "is_met"), [("eth0", True), ("^cni", True), ("cni,eth", False), ("x", False)])
def test_for_the_bootstrap_the_first_interface_that_is_meant_counts(tmp_path: Path, value: str, is_met: bool) -> None:
    node = infiniband(tmp_path)
    node.found.clear()
    node.network("cni0", real=False, bridge=True)
    node.network("eth0", driver="igb")
    node.network("eth1", driver="igb")
    node.environ["NCCL_SOCKET_IFNAME"] = value
    assert wanted(of(node), "NCCL_SOCKET_IFNAME").is_met is is_met


def test_a_first_interface_that_is_a_card_is_left_alone(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.network("tailscale0", real=False, speed=None)
    node.network("ib0", driver="ib_ipoib")
    found = of(node)
    assert "NCCL_SOCKET_IFNAME" not in values(found)
    assert left(found)["NCCL_SOCKET_IFNAME"].startswith("NCCL takes ib0 ")


def test_of_several_cards_none_is_taken_for_the_obvious_one(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    (node.proc / "net/route").unlink()
    node.found.clear()
    node.network("br-1", real=False, bridge=True)
    node.network("eth0")
    node.network("eth1")
    found = of(node)
    assert "NCCL_SOCKET_IFNAME" not in values(found)
    assert "of the others (eth0, eth1) none is the obvious one" in found.unknown[0]


def test_the_way_to_the_bmc_reaches_no_other_node(tmp_path: Path) -> None:
    node = infiniband(tmp_path / "rdma")
    node.found.clear()
    node.network("enxbe3af2b6059f", driver="cdc_ether", speed=None, address="169.254.3.1")
    node.network("eth0", driver="igb")
    found = wanted(of(node), "NCCL_SOCKET_IFNAME")
    assert found.value == "=eth0"
    assert "leads to its own link only (169.254.3.1)" in found.why
    plain = ethernet(tmp_path / "tcp")
    plain.network("usb0", driver="rndis_host", speed=None, address="169.254.0.17")
    assert values(of(plain))["NCCL_SOCKET_IFNAME"] == "=ens1"


def test_a_bridge_with_the_default_route_is_the_way_to_other_hosts(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    (node.proc / "net/route").unlink()
    node.found.clear()
    node.network("br-lan", real=False, bridge=True)
    node.network("eth1")
    node.default("br-lan")
    assert "NCCL_SOCKET_IFNAME" not in values(of(node))


def test_in_a_pod_with_several_virtual_interfaces_none_is_named(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    (node.proc / "net/route").unlink()
    node.found.clear()
    node.network("net0", real=False)
    node.network("net1", real=False)
    assert any("which of net0, net1 reaches the other nodes cannot be seen" in text for text in of(node).unknown)


def two_networks(root: Path, slow: int | None = 10_000) -> Node:
    node = ethernet(root, speed=100_000)
    node.network("ens9", driver="ice", speed=slow)
    return node


def test_tcp_goes_over_the_fast_network_only(tmp_path: Path) -> None:
    found = wanted(of(two_networks(tmp_path)), "NCCL_SOCKET_IFNAME")
    assert found.value == "=ens1"
    assert "NCCL would also send over ens9 (10 Gb/s); the network is ens1 (100 Gb/s)" in found.why


def test_tcp_over_equal_networks_is_left_alone_and_over_unknown_ones_left_open(tmp_path: Path) -> None:
    equal = of(two_networks(tmp_path / "equal", slow=100_000))
    assert left(equal)["NCCL_SOCKET_IFNAME"].endswith("they are equally fast")
    unknown = of(two_networks(tmp_path / "unknown", slow=None))
    assert "NCCL_SOCKET_IFNAME" not in {**values(unknown), **left(unknown)}
    assert any("the speed of ens9 is not told" in text for text in unknown.unknown)


def test_over_tcp_every_interface_that_is_meant_counts(tmp_path: Path) -> None:
    node = two_networks(tmp_path)
    node.environ["NCCL_SOCKET_IFNAME"] = "ens"
    assert not wanted(of(node), "NCCL_SOCKET_IFNAME").is_met
    node.environ["NCCL_SOCKET_IFNAME"] = "^ens9,lo"
    assert wanted(of(node), "NCCL_SOCKET_IFNAME").is_met


def test_tcp_of_100_gb_takes_several_connections_and_slower_or_unknown_does_not(tmp_path: Path) -> None:
    fast = values(of(ethernet(tmp_path / "fast")))
    assert {name: fast.get(name) for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")} == {
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    }
    for speed in (25_000, None):
        found = of(ethernet(tmp_path / str(speed), speed=speed))
        assert values(found) == {}
        assert "NCCL_SOCKET_NTHREADS" in left(found)


def test_on_the_cards_of_a_cloud_nccl_has_its_own_figures(tmp_path: Path) -> None:
    node = eight_gpus(tmp_path)
    node.network("ens5", driver="ena", speed=100_000)
    found = of(node)
    assert values(found) == {}
    assert left(found)["NCCL_SOCKET_NTHREADS"] == "NCCL has figures of its own for ens5"


def test_infiniband_has_no_advice_about_tcp(tmp_path: Path) -> None:
    found = of(infiniband(tmp_path))
    assert not {"NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"} & {*values(found), *left(found)}


def test_efa_has_ways_of_its_own_to_gpu_memory(tmp_path: Path) -> None:
    node = efa(tmp_path)
    (node.sysfs / "module/nvidia_peermem").rmdir()
    assert "load Amazon's module efa_nv_peermem, or use the driver's open" in steps(of(node))
    gdr = node.sysfs / "class/infiniband/rdmap0s0/gdr"
    for value in (0, 1):
        write(gdr, value)
        assert ("GPU memory" in steps(of(node))) is not bool(value)
    gdr.unlink()
    (node.sysfs / "module/efa_nv_peermem").mkdir()
    assert "GPU memory" not in steps(of(node))


def test_efa_needs_its_plugin_and_no_variable_of_old_instructions(tmp_path: Path) -> None:
    node = efa(tmp_path)
    node.environ |= {"FI_EFA_USE_DEVICE_RDMA": "1"}
    found = of(node)
    assert "install aws-ofi-nccl" in steps(found)
    assert values(found) == {}
    assert {"FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "NCCL_PROTO", "NCCL_BUFFSIZE"} <= set(left(found))
    assert [one.now for one in found.leave if one.name == "FI_EFA_USE_DEVICE_RDMA"] == ["1"]
    write(tmp_path / "opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so", "")
    assert "aws-ofi-nccl" not in steps(of(node))


def test_elsewhere_nothing_is_said_of_efa(tmp_path: Path) -> None:
    found = of(infiniband(tmp_path))
    assert "FI_PROVIDER" not in left(found)
    assert steps(found) == ""


def test_azure_needs_its_description_of_the_machine_where_it_is(tmp_path: Path) -> None:
    node = azure(tmp_path / "with")
    assert values(of(node)) == {
        "NCCL_IB_HCA": "=" + ",".join(f"mlx5_ib{number}:1" for number in range(8)),
        "NCCL_TOPO_FILE": "/opt/microsoft/ndv5-topo.xml",
    }
    write(node.root / "etc/nccl.conf", "NCCL_TOPO_FILE=/opt/microsoft/ndv5-topo.xml")
    found = wanted(of(node), "NCCL_TOPO_FILE")
    assert (found.is_met, found.origin) == (True, str(node.root / "etc/nccl.conf"))
    assert "NCCL_TOPO_FILE" not in [one.name for one in of(node).look]
    # What Azure's images set is a link to that file.
    write(node.root / "etc/nccl.conf", "NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml")
    assert not wanted(of(node), "NCCL_TOPO_FILE").is_met
    (node.root / "opt/microsoft/ndv5").mkdir()
    (node.root / "opt/microsoft/ndv5/topo.xml").symlink_to(node.root / "opt/microsoft/ndv5-topo.xml")
    assert wanted(of(node), "NCCL_TOPO_FILE").is_met
    without = of(azure(tmp_path / "without", topology=False))
    assert "NCCL_TOPO_FILE" not in values(without)
    assert "bring /opt/microsoft/ndv5-topo.xml of the host" in steps(without)
    assert "NCCL_TOPO_FILE" not in values(of(infiniband(tmp_path / "own")))


def test_a_machine_of_azure_with_other_gpus_has_no_known_description(tmp_path: Path) -> None:
    node = azure(tmp_path)
    node.seen = [dataclasses.replace(gpu, name="NVIDIA B200") for gpu in node.seen]
    found = of(node)
    assert "NCCL_TOPO_FILE" not in values(found)
    assert any("not known which of Azure's descriptions" in text for text in found.unknown)


def test_google_s_script_is_named_and_its_values_are_not_repeated(tmp_path: Path) -> None:
    node = google(tmp_path)
    found = of(node)
    assert "mount Google's plugin for NCCL" in steps(found)
    assert values(found) == {}
    assert left(found)["NCCL_SOCKET_IFNAME"] == "it belongs to what Google's plugin needs"
    assert left(found)["NCCL_NVLS_ENABLE"] == left(found)["NCCL_ALGO"]
    assert "Google's plugin has a value of its own" in left(found)["NCCL_ALGO"]
    write(tmp_path / "var/lib/tcpxo/lib64/nccl-env-profile.sh", "")
    told = steps(of(node))
    assert "source /var/lib/tcpxo/lib64/nccl-env-profile.sh in the job before torchrun, with NCCL_LIB_DIR=/var/" in told


def test_an_a3_high_has_no_script_and_other_gpus_of_google_s_have_no_such_cards(tmp_path: Path) -> None:
    node = google(tmp_path, cards=5)
    assert "set up GPUDirect-TCPX:" in steps(of(node))
    assert "nccl-env-profile" not in steps(of(node))
    node.seen = [dataclasses.replace(gpu, name="NVIDIA L4") for gpu in node.seen]
    assert steps(of(node)) == ""


def test_what_google_s_plugin_demands_is_no_leftover_where_it_is_in_use(tmp_path: Path) -> None:
    node = google(tmp_path)
    node.environ |= {"NCCL_ALGO": "Ring,Tree", "NCCL_NVLS_ENABLE": "0"}
    assert {one.name for one in of(node).remove} == {"NCCL_ALGO", "NCCL_NVLS_ENABLE"}
    node.environ |= {"NCCL_FASTRAK_CTRL_DEV": "eth0", "NCCL_CHECK_POINTERS": "1"}
    found = of(node)
    assert {one.name for one in found.remove} == {"NCCL_CHECK_POINTERS"}
    assert [one.now for one in found.leave if one.name == "NCCL_ALGO"] == ["Ring,Tree"]
    facts = gather(node.sources())
    judged = {one.name: judge(one, place(facts), "a") for one in facts.settings}
    assert {name: one.kind for name, one in judged.items() if one} == {
        "NCCL_ALGO": "note",
        "NCCL_NVLS_ENABLE": "note",
        "NCCL_CHECK_POINTERS": "environment",
    }
    node.dmi(product_name="Box")
    assert {"NCCL_ALGO", "NCCL_NVLS_ENABLE"} < {one.name for one in of(node).remove}, "elsewhere it is one"


def test_google_s_roce_has_another_script(tmp_path: Path) -> None:
    node = roce(tmp_path)
    assert "Google" not in steps(of(node))
    node.dmi(product_name="Google Compute Engine")
    found = of(node)
    assert "set_nccl_env.sh" in steps(found)
    assert "Google's plugin has a value of its own" in left(found)["NCCL_CROSS_NIC"]


def test_a_machine_of_google_with_one_card_needs_no_script(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.dmi(product_name="Google Compute Engine")
    node.network("ens4", driver="gve", speed=None)
    assert steps(of(node)) == ""


def test_gpu_memory_out_of_reach_is_something_to_do(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    (node.sysfs / "module/nvidia_peermem").rmdir()
    assert "load nvidia_peermem" in steps(of(node))
    assert "nvidia_peermem" not in steps(of(infiniband(tmp_path / "with")))


def test_ports_without_their_device_files_are_something_to_do(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.environ["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
    assert "uverbs" not in steps(of(node))
    for file in (tmp_path / "dev/infiniband").iterdir():
        file.unlink()
    assert "the container (kubernetes) sees no /dev/infiniband/uverbs*" in steps(of(node))


def test_slow_and_inactive_ports_are_something_to_do(tmp_path: Path) -> None:
    node = infiniband(tmp_path, ports=6)
    node.card("mlx5_6", beside=6, rate="200 Gb/sec (2X NDR)")
    node.card("mlx5_7", beside=7, state="2: INIT")
    told = steps(of(node))
    assert "slower than others of the same card: mlx5_6:1 (200 Gb/sec (2X NDR))" in told
    assert "not Active: mlx5_7:1 INIT" in told


def test_where_the_fabric_is_not_known_nothing_is_advised_about_it(tmp_path: Path) -> None:
    found = of(pod(tmp_path))
    assert (found.set, found.leave, found.steps) == ((), (), ())
    assert found.unknown[0].startswith("which network carries the data: no RDMA device is shown")
    assert not found.differs


def test_a_laptop_needs_nothing(tmp_path: Path) -> None:
    found = of(laptop(tmp_path))
    assert (found.set, found.remove, found.steps) == ((), (), ())
    assert found.unknown == ("the GPUs: NVML Shared Library Not Found",)


MPI = {
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "gpu-001",
}


def test_mpirun_must_be_told_to_hand_on_what_is_set(tmp_path: Path) -> None:
    node = with_storage(tmp_path / "mpi")
    assert "mpirun" not in steps(of(node))
    node.environ |= MPI
    assert "start with mpirun -x NCCL_IB_HCA" in steps(of(node))
    nothing = infiniband(tmp_path / "nothing")
    nothing.environ |= MPI
    assert "mpirun" not in steps(of(nothing)), "there is nothing to hand on"


def test_a_job_whose_steps_get_nothing_is_told(tmp_path: Path) -> None:
    node = with_storage(tmp_path)
    node.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    assert "SLURM_EXPORT_ENV" not in steps(of(node))
    node.environ["SLURM_EXPORT_ENV"] = "NONE"
    assert "put export SLURM_EXPORT_ENV=ALL into the batch script" in steps(of(node))


def test_what_is_set_and_hurts_is_to_be_removed_by_the_rules_of_the_criterion(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_IB_TIMEOUT": "22", "NCCL_CROSS_NIC": "0"}
    write(tmp_path / "etc/nccl.conf", "NCCL_ALGO=Ring\nNCCL_IB_DISABLE=2")
    found = of(node)
    assert {one.name: (one.value, one.origin) for one in found.remove} == {
        "NCCL_ALGO": ("Ring", str(tmp_path / "etc/nccl.conf")),
        "NCCL_IB_DISABLE": ("1", "environment"),
    }
    assert [one.also for one in found.remove if one.name == "NCCL_IB_DISABLE"] == [
        (f"2 ({tmp_path / 'etc/nccl.conf'})",)
    ]
    assert [(one.name, one.why) for one in found.look] == [("NCCL_IB_TIMEOUT", RULES["NCCL_IB_TIMEOUT"].does)]
    assert not {"NCCL_IB_DISABLE", "NCCL_ALGO"} & set(left(found))
    assert found.differs


def test_what_only_hurts_over_several_nodes_is_no_harm_in_a_job_of_one(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.environ |= {"NCCL_IB_DISABLE": "1"}
    assert [one.name for one in of(node).remove] == ["NCCL_IB_DISABLE"], "nothing says how many nodes: several"
    node.environ |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    assert of(node).remove == ()


def test_the_loopback_in_a_job_of_one_node_is_no_harm(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.environ |= {"NCCL_SOCKET_IFNAME": "lo", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    assert of(node).remove == ()


FABRICS: dict[str, Callable[[Path], Node]] = {"InfiniBand": infiniband, "RoCE": roce, "Ethernet": ethernet, "EFA": efa}


@pytest.mark.parametrize("one", ALONE, ids=lambda one: f"{one.name}-{'-'.join(one.on) or 'all'}")
def test_what_is_best_left_alone_is_said_where_it_belongs_and_nowhere_else(tmp_path: Path, one: object) -> None:
    from pytest_gpucluster.nccl_advice.left_alone import Alone

    assert isinstance(one, Alone)
    for kind, make in FABRICS.items():
        said = left(of(make(tmp_path / kind))).get(one.name)
        assert (said == one.why) is (not one.on or kind in one.on), kind
    unknown = of(pod(tmp_path / "pod"))
    assert one.name not in left(unknown)


def test_nvls_is_spoken_of_behind_nvswitches_only(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    node.seen = [dataclasses.replace(gpu, name="NVIDIA L40S") for gpu in node.seen]
    assert "NCCL_NVLS_ENABLE" not in left(of(node))


@pytest.mark.parametrize("name", MAKERS)
def test_everything_that_is_said_has_a_reason_and_a_source(tmp_path: Path, name: str) -> None:
    node = MAKERS[name](tmp_path)
    node.environ |= {"NCCL_CHECK_POINTERS": "1", "NCCL_DEBUG": "INFO"}
    found = of(node)
    for one in (*found.set, *found.remove, *found.look, *found.leave, *found.steps):
        assert one.why, one
        assert one.source, one
    names = [one.name for one in (*found.set, *found.remove, *found.leave)]
    assert len(names) == len(set(names)), "one opinion about each variable"


def test_what_goes_on_record_tells_the_fabric_and_every_difference(tmp_path: Path) -> None:
    node = with_storage(tmp_path)
    node.environ["NCCL_IB_HCA"] = "mlx5"
    found = of(node)
    told = found.properties()
    assert told["advice.fabric"].startswith("InfiniBand: 8 active ports")
    assert told["advice.NCCL_IB_HCA"].startswith("=mlx5_0:1,")
    assert "set otherwise: mlx5 (environment)" in told["advice.NCCL_IB_HCA"]
    [note] = found.notes("gpu-001")
    assert (note.kind, note.code, note.gpu.host) == ("note", "advice.nccl_ib_hca", "gpu-001")
    assert of(pod(tmp_path / "pod")).properties()["advice.fabric"].startswith("unknown: ")
