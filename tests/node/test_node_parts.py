"""Each part of a node as plain values: from planted files, and from none."""

from __future__ import annotations

import json

import fake_node
import pytest
from each import of_each

from pytest_gpucluster.node import info
from pytest_gpucluster.node.host import read_node
from pytest_gpucluster.node.info import VIEWS, collect_info
from pytest_gpucluster.node.processes import Output
from pytest_gpucluster.node.sysfs import Tree


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return fake_node.tree(tmp_path_factory.mktemp("node"))


def test_a_view_has_its_parts_in_plain_json(node):
    for view, parts in VIEWS.items():
        info = collect_info(view, fake_node.sources(node))
        assert list(info) == ["schema_version", "view", "host", "at", *parts]
        assert json.loads(json.dumps(info, allow_nan=False))["host"] == "gpu-07"


def test_cpus_are_counted_by_socket_core_and_node(node):
    cpus = info.cpu_part(read_node(node))
    assert cpus["model"] == "Intel(R) Xeon(R) Platinum 8480+"
    assert (cpus["sockets"], cpus["cores"], cpus["cpus"], cpus["offline"]) == (2, 64, 128, 0)
    first, second = cpus["numa_nodes"]
    assert (first["cpus"], first["memory_total_bytes"], first["distances"]) == ("0-63", 1056784056 * 1024, (10, 21))
    assert second["distances"] == (21, 10)


def test_memory_has_its_huge_pages_and_limits(node):
    memory = info.memory_part(read_node(node, space=fake_node.space(10**12, 5 * 10**11)))
    assert memory["available_bytes"] == 2000000000 * 1024
    assert memory["shm"] == {"kind": "tmpfs", "total_bytes": 10**12, "free_bytes": 5 * 10**11}
    assert memory["huge_pages"] == [{"size_bytes": 2**21, "total": 16, "free": 4}]
    expected = {"nofile": 1048576, "memlock_bytes": "unlimited", "nproc": 8255000, "may_lock_all": False}
    assert memory["limits"] == expected
    assert memory["group_bytes"] is None


def test_a_container_and_what_it_may_use_are_seen(tmp_path):
    changes = {
        "/sys/fs/cgroup/memory.max": "8589934592\n",
        "/sys/fs/cgroup/system.slice/job/cpu.max": "400000 100000\n",
    }
    snapshot = read_node(fake_node.tree(tmp_path, changes), space=fake_node.space())
    assert info.memory_part(snapshot)["group_bytes"] == 8 * 2**30
    assert info.cpu_part(snapshot)["cpus_of_group"] == 4.0


@of_each(
    "case",
    [
        ({}, {}, None),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/run/systemd/container": "lxc\n"}, {}, "lxc"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
    ],
)
def test_the_kind_of_container_is_reported(tmp_path_factory, case):
    files, environ, kind = case
    assert info.container(fake_node.plant(tmp_path_factory.mktemp("node"), files, healthy=False), environ) == kind


def test_interfaces_and_ports_have_what_sysfs_says(node):
    eth0, eth1 = collect_info("ib", fake_node.sources(node))["network"]
    assert (eth0["speed_mbps"], eth0["mtu"], eth0["addresses"]) == (100_000, 9000, ("10.0.0.7", "2001:db8::7"))
    assert (eth1["state"], eth1["speed_mbps"], eth1["addresses"]) == ("down", None, ())
    adapters = info.network_adapters(node)
    assert adapters["why_not"] == ""
    [port] = adapters["devices"][0]["ports"]
    assert (port["state"], port["rate_gbps"], port["errors"]) == ("ACTIVE", 400.0, {})
    assert adapters["peer_memory"]["module"] == "nvidia_peermem"


def read_stack(tree, text="active\n", why_not=""):
    answer = Output(text=text, why_not=why_not)
    return info.read_stack(tree, lambda command: answer, version=lambda name: None, nccl=lambda: None)


def test_the_stack_has_its_versions(node):
    info = collect_info("gpu", fake_node.sources(node))["stack"]
    assert (info["driver"], info["driver_kind"], info["toolkit"]) == ("580.65.06", "open", "13.0.1")
    assert (info["torch"], info["nccl"], info["fabric_manager"]) == ("2.13.0+cu130", "2.28.3", "active")
    assert info["ofed"] == "MLNX_OFED_LINUX-24.04-0.6.6.0"
    assert info["modules"] == {"nvidia": "580.65.06", "nvidia_peermem": "580.65.06"}
    assert info["not_available"] == {}


@of_each(
    "case",
    [
        ("inactive\n", "systemctl: it ended with 3", "inactive"),
        ("failed\n", "systemctl: it ended with 3", "failed"),
        ("", "systemctl: no such file", None),
        ("a\nb\n", "", None),
    ],
)
def test_the_fabric_manager_is_what_systemd_says_or_not_known(tmp_path, case):
    text, why_not, state = case
    info = read_stack(Tree(root=tmp_path), text, why_not)
    assert info["fabric_manager"] == state
    assert ("fabric_manager" in info["not_available"]) is (state is None)


def test_the_nccl_of_a_container_is_found_among_its_libraries(tmp_path):
    folder = tmp_path / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    assert read_stack(Tree(root=tmp_path))["nccl"] is None
    for name in ("libnccl.so", "libnccl.so.2", "libnccl.so.2.9.8", "libnccl.so.2.28.3", "libnccl_static.a"):
        (folder / name).touch()
    assert read_stack(Tree(root=tmp_path))["nccl"] == "2.28.3"


def test_where_nothing_is_to_be_seen_nothing_is_made_up(tmp_path):
    info = collect_info("all", fake_node.sources(Tree(root=tmp_path), fake_node.nvml(count=0), interfaces=tuple))
    seen = [info["cpu"][key] for key in ("model", "sockets", "cpus")]
    seen += [info["memory"]["total_bytes"], info["memory"]["limits"], info["system"]["kernel"]]
    assert [*seen, info["stack"]["driver"], info["stack"]["modules"]] == [None] * 8
    for key, where in {"driver": "/proc/driver/nvidia/version", "modules": "/sys/module"}.items():
        assert where in info["stack"]["not_available"][key]
    assert info["infiniband"]["why_not"]
    assert (info["network"], info["mounts"], info["gpus"]["gpus"]) == ([], [], [])
