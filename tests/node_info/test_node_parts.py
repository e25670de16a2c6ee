"""Each part of a node as plain values: from planted files, and from none."""

from __future__ import annotations

import json
from pathlib import Path

import fake_node
import pytest

from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.node_info import cpus, memory, mounted, network, stack, system
from pytest_gpucluster.node_info.gathering import VIEWS, gather
from pytest_gpucluster.node_info.program import Answer
from pytest_gpucluster.nvml import NotAvailable


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return fake_node.tree(tmp_path_factory.mktemp("node"))


def test_a_view_has_its_parts_in_plain_json(node):
    for view, parts in VIEWS.items():
        told = gather(view, fake_node.sources(node))
        assert list(told) == ["schema_version", "view", "host", "at", *parts]
        assert json.loads(json.dumps(told, allow_nan=False))["host"] == "gpu-07"


def test_the_view_of_ports_asks_no_gpu(node):
    def nobody():
        raise AssertionError("asked for GPUs")

    assert "gpus" not in gather("ib", fake_node.sources(node, gpus=nobody))


def test_cpus_are_counted_by_socket_core_and_node(node):
    told = cpus.read(node)
    assert told["model"] == "Intel(R) Xeon(R) Platinum 8480+"
    assert (told["sockets"], told["cores"], told["cpus"], told["offline"]) == (2, 64, 128, 0)
    first, second = told["numa_nodes"]
    assert first == {
        "node": 0,
        "cpus": "0-63",
        "memory_total_bytes": 1056784056 * 1024,
        "memory_free_bytes": 900000000 * 1024,
        "distances": [10, 21],
    }
    assert second["distances"] == [21, 10]


def test_an_arm_cpu_is_told_by_its_makers_numbers(tmp_path):
    text = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    tree = fake_node.plant(tmp_path, {"/proc/cpuinfo": text}, healthy=False)
    assert cpus.read(tree)["model"] == "CPU implementer 0x41, CPU part 0xd4f"


def test_memory_has_its_huge_pages_and_limits(node):
    told = memory.read(node, fake_node.space(10**12, 5 * 10**11))
    assert told["available_bytes"] == 2000000000 * 1024
    assert told["shm"] == {"kind": "tmpfs", "total_bytes": 10**12, "free_bytes": 5 * 10**11}
    assert told["huge_pages"] == [{"size_bytes": 2**21, "total": 16, "free": 4}]
    expected = {"nofile": 1048576, "memlock_bytes": "unlimited", "nproc": 8255000, "may_lock_all": False}
    assert told["limits"] == expected
    assert told["group_bytes"] is None


def test_a_container_and_what_it_may_use_are_seen(tmp_path):
    changes = {
        "/sys/fs/cgroup/memory.max": "8589934592\n",
        "/sys/fs/cgroup/system.slice/job/cpu.max": "400000 100000\n",
    }
    tree = fake_node.tree(tmp_path, changes)
    assert memory.read(tree, fake_node.space())["group_bytes"] == 8 * 2**30
    assert cpus.read(tree)["cpus_of_group"] == 4.0


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, None),
        ({"/.dockerenv": ""}, {}, "docker"),
        ({"/run/.containerenv": ""}, {}, "podman"),
        ({"/run/systemd/container": "lxc\n"}, {}, "lxc"),
        ({"/.dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"APPTAINER_CONTAINER": "/x.sif"}, "apptainer"),
    ],
)
def test_the_kind_of_container_is_told(tmp_path, files, environ, kind):
    assert system.container(fake_node.plant(tmp_path, files, healthy=False), environ) == kind


def test_the_job_is_told_as_the_scheduler_tells_it(node):
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_PER_NODE": "8",
        "SLURM_JOB_PARTITION": "h100",
    }
    told = gather("cpu", fake_node.sources(node, environ={**environ, "SLURM_JOB_NODELIST": "gpu-[07-08]"}))["system"]
    assert told["scheduler"] == {
        "name": "slurm",
        "nnodes": 2,
        "gpus_per_node": 8,
        "job": "7",
        "partition": "h100",
        "nodes": "gpu-[07-08]",
        "gpus": None,
    }


def test_interfaces_and_ports_have_what_sysfs_says(node):
    eth0, eth1 = network.interfaces(node, fake_node.sources(node).interfaces)
    assert (eth0["speed_mbps"], eth0["mtu"], eth0["addresses"]) == (100_000, 9000, ["10.0.0.7", "2001:db8::7"])
    assert (eth1["state"], eth1["speed_mbps"], eth1["addresses"]) == ("down", None, [])
    told = network.adapters(node)
    assert told["why_not"] == ""
    [port] = told["devices"][0]["ports"]
    assert (port["state"], port["rate_gbps"], port["errors"]) == ("ACTIVE", 400.0, {})
    assert told["peer_memory"]["module"] == "nvidia_peermem"


def test_counters_of_errors_are_told_where_they_are_not_zero(tmp_path):
    tree = fake_node.tree(tmp_path)
    counter = tree.path("/sys/class/infiniband/mlx5_2/ports/1/counters/link_downed")
    counter.write_text("3\n")
    errors = [device["ports"][0]["errors"] for device in network.adapters(tree)["devices"]]
    assert errors[2] == {"link_downed": 3}
    assert errors[3] == {}


def read_stack(tree, text="active\n", why_not=""):
    answer = Answer(text=text, why_not=why_not)
    return stack.read(tree, lambda command: answer, version=lambda name: None, nccl=lambda: None)


def test_the_stack_has_its_versions(node):
    told = gather("gpu", fake_node.sources(node))["stack"]
    assert (told["driver"], told["driver_kind"], told["toolkit"]) == ("580.65.06", "open", "13.0.1")
    assert (told["torch"], told["nccl"], told["fabric_manager"]) == ("2.13.0+cu130", "2.28.3", "active")
    assert told["ofed"] == "MLNX_OFED_LINUX-24.04-0.6.6.0"
    assert told["modules"] == {"nvidia": "580.65.06", "nvidia_peermem": "580.65.06"}
    assert told["not_available"] == {}


def test_a_proprietary_driver_is_told_apart(tmp_path):
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n"
    tree = fake_node.plant(tmp_path, {"/proc/driver/nvidia/version": text}, healthy=False)
    told = read_stack(tree)
    assert (told["driver"], told["driver_kind"]) == ("535.183.01", "proprietary")


@pytest.mark.parametrize(
    ("text", "why_not", "state"),
    [
        ("inactive\n", "systemctl: it ended with 3", "inactive"),
        ("failed\n", "systemctl: it ended with 3", "failed"),
        ("", "systemctl: no such file", None),
        ("a\nb\n", "", None),
    ],
)
def test_the_fabric_manager_is_what_systemd_says_or_not_known(tmp_path, text, why_not, state):
    told = read_stack(Tree(root=tmp_path), text, why_not)
    assert told["fabric_manager"] == state
    assert ("fabric_manager" in told["not_available"]) is (state is None)


def test_the_nccl_of_a_container_is_found_among_its_libraries(tmp_path):
    folder = tmp_path / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    assert read_stack(Tree(root=tmp_path))["nccl"] is None
    for name in ("libnccl.so", "libnccl.so.2", "libnccl.so.2.9.8", "libnccl.so.2.28.3", "libnccl_static.a"):
        (folder / name).touch()
    assert read_stack(Tree(root=tmp_path))["nccl"] == "2.28.3"


def test_modules_that_cannot_be_looked_at_are_not_called_none(tmp_path):
    told = read_stack(Tree(root=tmp_path))
    assert told["modules"] is None
    assert told["not_available"]["modules"] == "/sys/module cannot be looked at"
    (tmp_path / "sys/module").mkdir(parents=True)
    assert read_stack(Tree(root=tmp_path))["modules"] == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cuda": 3}', '{"cuda": {"version": 13}}'])
def test_a_toolkit_without_a_version_is_none(tmp_path, text):
    tree = fake_node.plant(tmp_path, {"/usr/local/cuda/version.json": text}, healthy=False)
    assert read_stack(tree)["toolkit"] is None


def test_mounts_are_those_that_hold_data(node):
    told = {mount["point"]: mount for mount in mounted.read(node)}
    assert list(told) == ["/", "/home", "/data", "/dev/shm"]
    assert told["/data"] == {
        "point": "/data",
        "kind": "lustre",
        "source": "mgs@o2ib:/scratch",
        "network": True,
        "read_only": True,
    }


def test_where_nothing_is_to_be_seen_nothing_is_made_up(tmp_path):
    bare = Tree(root=tmp_path)
    told = gather("all", fake_node.sources(bare, fake_node.nvml(count=0), interfaces=tuple))
    assert (told["cpu"]["model"], told["cpu"]["sockets"], told["cpu"]["cpus"]) == (None, None, None)
    assert told["memory"]["total_bytes"] is None
    assert told["memory"]["limits"] is None
    assert told["system"]["kernel"] is None
    assert told["stack"]["driver"] is None
    assert told["stack"]["not_available"]["driver"].startswith("/proc/driver/nvidia/version cannot be read")
    assert told["infiniband"]["why_not"].endswith("No such file or directory")
    assert (told["network"], told["mounts"], told["gpus"]["gpus"]) == ([], [], [])


def keys_of(told):
    """Every key that is a name of this project, wherever it stands."""
    if isinstance(told, list):
        return set().union(*map(keys_of, told)) if told else set()
    if not isinstance(told, dict):
        return set()
    named_by_others = ("nvlink_up", "nvlink_version", "nvlink_ends", "governors", "modules", "errors", "not_available")
    inner = (keys_of(value) for key, value in told.items() if key not in named_by_others)
    return set(told).union(*inner)


@pytest.mark.parametrize("scheduler", ["SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST"])
def test_every_key_is_documented(node, scheduler):
    page = (Path(__file__).parents[2] / "docs" / "info.md").read_text(encoding="utf-8")
    fake = fake_node.nvml({"processes": ((7, 1),)}, count=2)
    fake.ways[frozenset(fake.gpus)] = NotAvailable("not supported")
    told = gather("all", fake_node.sources(node, fake, environ={scheduler: "1"}))
    assert {key for key in keys_of(told) if f"`{key}`" not in page and f".{key}`" not in page} == set()
