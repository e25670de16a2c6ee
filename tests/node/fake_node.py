"""A node for tests: eight H100 behind NVSwitches, eight HCAs, two sockets. Nothing of it is this machine's."""

import json

from fake_host import plant, space
from fake_nvml import HEALTHY_H100, FakeNvml
from made_nodes import Node

from pytest_gpucluster.node import info_gpus
from pytest_gpucluster.node.info import Sources
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.processes import Output, Process

CPUINFO = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8480+\n\n"
DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (builder@host)  Sun Jul 27\n"
    "GCC version:  gcc version 12.3.0\n"
)
FILES = {
    "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
    "/proc/cpuinfo": CPUINFO,
    "/proc/sys/kernel/osrelease": "5.15.0-1063-nvidia\n",
    "/proc/uptime": "1036800.5 1.0\n",
    "/proc/loadavg": "1.50 2.25 3.00 2/3000 77\n",
    "/proc/driver/nvidia/version": DRIVER,
    "/proc/meminfo": "MemTotal:  2113568112 kB\nMemAvailable: 2000000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
    "/sys/devices/system/node/node0/cpulist": "0-63\n",
    "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal: 1056784056 kB\nNode 0 MemFree: 900000000 kB\n",
    "/sys/devices/system/node/node0/distance": "10 21\n",
    "/sys/devices/system/node/node1/cpulist": "64-127\n",
    "/sys/devices/system/node/node1/meminfo": "Node 1 MemTotal: 1056784056 kB\nNode 1 MemFree: 900000000 kB\n",
    "/sys/devices/system/node/node1/distance": "21 10\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "16\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "4\n",
    "/sys/module/nvidia/version": "580.65.06\n",
    "/sys/module/nvidia_peermem/version": "580.65.06\n",
    "/usr/local/cuda/version.json": json.dumps({"cuda": {"version": "13.0.1"}}),
    "/sys/class/net/lo/operstate": "unknown\n",
    "/sys/class/net/eth0/operstate": "up\n",
    "/sys/class/net/eth0/speed": "100000\n",
    "/sys/class/net/eth0/mtu": "9000\n",
    "/sys/class/net/eth0/address": "02:00:00:00:00:01\n",
    "/sys/class/net/eth1/operstate": "down\n",
    "/sys/class/net/eth1/speed": "-1\n",
}
MOUNTS = (
    "21 1 0:19 / / rw - ext4 /dev/md0 rw\n22 1 0:20 / /proc rw - proc proc rw\n"
    "23 1 0:21 / /home rw - nfs4 filer:/home rw\n24 1 0:22 / /data ro - lustre mgs@o2ib:/scratch ro\n"
    "25 1 0:23 / /dev/shm rw - tmpfs tmpfs rw\n30 1 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
)


def gpu_pci(number):
    return f"0000:{0x20 + number:02x}:00.0"


def tree(root, changes=None):
    """Plant the node: each GPU shares a PCIe switch with one HCA; four of either are on each socket."""
    cores = {}
    for cpu in range(128):
        folder = f"/sys/devices/system/cpu/cpu{cpu}"
        cores[f"{folder}/topology/physical_package_id"] = f"{cpu // 64}\n"
        cores[f"{folder}/topology/thread_siblings_list"] = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n"
    planted = plant(root, {**FILES, **cores, "/proc/self/mountinfo": MOUNTS, **(changes or {})})
    node = Node(planted.root)
    for number in range(8):
        node.gpu(number)
        node.card(f"mlx5_{number}", close_to=number)
        for device in (gpu_pci(number), f"0000:{0x40 + number:02x}:00.0"):
            folder = planted.path(f"/sys/bus/pci/devices/{device}")
            (folder / "numa_node").write_text(f"{number // 4}\n")
            (folder / "local_cpulist").write_text("64-127\n" if number >= 4 else "0-63\n")
    return planted


def nvml(changes=None, *, count=8, **others):
    """Return eight GPUs, each with these values in place of a healthy H100's."""
    uuids = [f"GPU-{number:08x}-0000-0000-0000-000000000000" for number in range(count)]
    pci = {uuid: gpu_pci(number).replace("0000:", "00000000:", 1).upper() for number, uuid in enumerate(uuids)}
    return FakeNvml({uuid: {**HEALTHY_H100, **(changes or {})} for uuid in uuids}, pci=pci, **others)


def child_answer(fake):
    """Return what the child would write of these GPUs."""
    lines = []
    info_gpus.query_gpus(lambda: fake, lambda line: lines.append(json.dumps(line)))
    return Output(text="\n".join(lines))


def sources(planted, fake=None, **changes):
    """Return the sources of the node."""
    answer = child_answer(nvml() if fake is None else fake)
    planned = {
        "tree": planted,
        "environ": {},
        "hostname": lambda: "gpu-07",
        "gpus": lambda: answer,
        "run": lambda command: Output(
            text="active\n" if command[0] == "systemctl" else "MLNX_OFED_LINUX-24.04-0.6.6.0:\n"
        ),
        "find_process": lambda pid: Process(pid=pid, user="alice", command="python train.py"),
        "interfaces": lambda: (Interface(name="eth0", running=True, addresses=("10.0.0.7", "2001:db8::7")),),
        "space": space(),
        "version": lambda name: {"torch": "2.13.0+cu130"}.get(name),
        "nccl": lambda: "2.28.3",
    }
    return Sources(**{**planned, **changes})
