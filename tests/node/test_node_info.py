"""`gpucluster node info`: parts, GPUs, topology and text."""

import json
import re

import fake_node
import pytest
from each import of_each
from made_nodes import Node

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node import info, info_gpus
from pytest_gpucluster.node.host import read_node
from pytest_gpucluster.node.info import VIEWS, collect_info
from pytest_gpucluster.node.info_text import render_info
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.processes import Output, Process
from pytest_gpucluster.node.sysfs import Tree
from pytest_gpucluster.text import columns


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


def read(fake=None, answer=None):
    answer = fake_node.child_answer(fake) if answer is None else answer
    return info_gpus.read_gpus(answer, lambda pid: Process(pid=pid, user="alice", command="train"))


def test_every_value_of_every_gpu_is_reported():
    gpus = read(fake_node.nvml())
    assert (gpus["why_not"], gpus["driver"], gpus["count"]) == ("", "580.65.06", 8)
    assert [gpu["index"] for gpu in gpus["gpus"]] == list(range(8))
    gpu = gpus["gpus"][3]
    assert (gpu["name"], gpu["pci"]) == ("NVIDIA H100 80GB HBM3", "00000000:23:00.0")
    assert {key for key in info_gpus.QUERIES if gpu[key] is None} == set()
    assert gpu["not_available"] == {}
    json.dumps(gpus, allow_nan=False)


def test_without_a_driver_the_reason_is_reported():
    def no_driver():
        raise EnvironmentBroken("NVML Shared Library missing")

    lines = []
    info_gpus.query_gpus(no_driver, lines.append)
    gpus = read(answer=Output(text="\n".join(map(json.dumps, lines))))
    assert gpus["why_not"] == "NVML Shared Library missing"
    assert gpus["gpus"] == []


def test_a_driver_that_hangs_is_named_with_what_it_was_asked_and_the_gpus_before_it_are_kept(tmp_path):
    lines = fake_node.child_answer(fake_node.nvml(count=2)).text.splitlines()
    at = next(at for at, line in enumerate(lines) if "power.draw of GPU 1" in line)
    (tmp_path / "lines").write_text("\n".join([*lines[: at + 1], '{"of']))
    answer = info_gpus.run_child(["sh", "-c", f"cat {tmp_path}/lines; sleep 600"], 2.0)
    gpus = read(answer=answer)
    assert re.search(" 2 s; .*power.draw of GPU 1$", gpus["why_not"])
    [first] = gpus["gpus"]
    assert (gpus["count"], first["index"], first["not_available"]) == (2, 0, {})


@pytest.mark.parametrize(
    ("answer", "why_not"),
    [
        (Output(why_not="no answer in 30 s"), "no answer in 30 s"),
        (Output(text='{"driver": "1", "count": 1}\n'), "the child "),
    ],
    ids=["silent", "crashed"],
)
def test_a_child_that_exits_without_output_is_no_node_without_gpus(answer, why_not):
    assert read(answer=answer)["why_not"].startswith(why_not)


def topology_of(tree, fake):
    return info_gpus.read_topology(info_gpus.read_gpus(fake_node.child_answer(fake)), info.network_adapters(tree), tree)


def test_gpus_behind_switches_are_as_many_links_apart_as_they_have_to_the_switches(node):
    topology = topology_of(node, fake_node.nvml())
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
    topology = topology_of(node, fake)
    assert topology["between_gpus"] == [["X", "NV4", "NODE"], ["NV4", "X", "NODE"], ["NODE", "NODE", "X"]]


def test_without_links_the_kernel_says_it_and_where_it_does_not_it_is_not_guessed(node, tmp_path):
    fake = fake_node.nvml({"nvlink.ends": NotAvailable("not supported")}, count=2)
    assert topology_of(node, fake)["between_gpus"][0] == ["X", "NODE"]
    topology = topology_of(Tree(root=tmp_path), fake)
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
    made = Node(tree.root)
    made.pci("0000:50:00.0", *one)
    made.pci("0000:51:00.0", *other, numa_node=numa)
    assert info_gpus.by_kernel(tree, "00000000:50:00.0", "0000:51:00.0") == way
    assert info_gpus.by_kernel(tree, "0000:51:00.0", "0000:50:00.0") == way
    assert info_gpus.by_kernel(tree, "0000:51:00.0", None) == "?"


HOSTILE = "\x1b[2J<script>\u202e\r\nname|" + "x" * 10_000


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return Tree(root=tmp_path_factory.mktemp("bare"))


def shown(view, tree, width=80, **changes):
    return render_info(collect_info(view, fake_node.sources(tree, **changes)), width=width)


@of_each("view", list(VIEWS))
def test_no_line_is_wider_than_asked_for(node, bare, view):
    for tree in (node, bare):
        info = collect_info(view, fake_node.sources(tree))
        for width in (60, 80, 200):
            lines = render_info(info, width=width).splitlines()
            assert max(map(columns, lines)) <= width
            assert all(line == line.rstrip() for line in lines)


def test_a_node_is_summed_up_in_lines_that_say_it_all(node):
    text = shown("summary", node)
    for line in (
        "driver                     580.65.06",
        "7    NVIDIA H100 80GB HBM3  79.65 GiB  61 C  690/700  100 %  yes   no   18/18",
        "mlx5_7/1  InfiniBand  ACTIVE, LinkUp  400 Gb/sec (4X NDR)     1  28.39.2048",
    ):
        assert f"\n  {line}" in text


def test_values_that_gpus_share_stand_once_and_others_with_their_gpus(node):
    fake = fake_node.nvml({"processes": ((7, 1),)})
    fake.planted[list(fake.planted)[3]] |= {"power.limit": 400.0, "ecc.mode": NotAvailable("no permission (ecc.mode)")}
    text = " ".join(shown("gpu", node, fake=fake).split())
    for part in (
        "700 (GPU 0, GPU 1, GPU 2, GPU 4, GPU 5, GPU 6, GPU 7); 400 (GPU 3)",
        "no permission (ecc.mode) (GPU 3)",
        "vbios 96.00.74.00.01 inforom",
        "processes pid 7, memory 1 B, user alice, command python train.py",
        "nvlink ends switch 18",
    ):
        assert part in text


def test_a_lost_gpu_and_a_driver_that_hangs_are_shown(node, bare):
    fake = fake_node.nvml()
    fake.silent = {list(fake.planted)[5]}
    assert "missing                    1 of 8 GPUs " in shown("summary", node, fake=fake)
    late = Output(why_not="no answer in 30 s")
    text = shown("summary", bare, gpus=lambda: late)
    assert "not available              no answer in 30 s\n" in text


def test_names_from_anywhere_do_no_harm(tmp_path):
    changes = {
        "/etc/os-release": f'PRETTY_NAME="{HOSTILE}"\n',
        "/proc/cpuinfo": f"model name : {HOSTILE}\n",
        "/sys/module/nvidia/version": HOSTILE,
        "/proc/self/mountinfo": f"21 1 0:19 / /\\033[2J rw - nfs {'x' * 10_000} rw\n",
        "/sys/class/net/eth0/operstate": HOSTILE,
    }
    tree = fake_node.tree(tmp_path, changes)
    for name in ("rate", "state"):
        tree.path(f"/sys/class/infiniband/mlx5_0/ports/1/{name}").write_text(HOSTILE)
    tree.path("/sys/class/infiniband/mlx5_0/fw_ver").write_text(HOSTILE)
    fake = fake_node.nvml({"serial": HOSTILE, "vbios": HOSTILE, "processes": ((7, 1),)}, name=HOSTILE, driver=HOSTILE)
    hostile = {"fake": fake, "hostname": lambda: HOSTILE, "environ": {"SLURM_JOB_ID": HOSTILE}}
    for view in VIEWS:
        text = shown(view, tree, **hostile)
        assert all(line.isprintable() for line in text.split("\n"))
        assert max(map(columns, text.splitlines())) <= 80
