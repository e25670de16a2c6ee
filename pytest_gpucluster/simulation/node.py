"""What else a simulated node shows: /proc and /sys, the logs of the kernel and NCCL, the clock; and all of it in force.

The files lie below a folder, as the kernel lays them out: each GPU below a PCIe switch of its own, with the nearest
RDMA ports. What a healthy node should have is so set: governor, IOMMU, ACS, limits, GPUDirect RDMA.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from pytest_gpucluster.device.identity import VisibleGpu, VisibleGpus
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.node import host as host_facts
from pytest_gpucluster.node import inventory, kernel_log, name_resolution, network, nvml, sysfs
from pytest_gpucluster.node.fabric.nccl_log import NcclLog
from pytest_gpucluster.node.health import telemetry
from pytest_gpucluster.node.infiniband import ETHERNET
from pytest_gpucluster.node.interfaces import interfaces
from pytest_gpucluster.node.sysfs import format_ranges
from pytest_gpucluster.simulation.cluster import Cluster
from pytest_gpucluster.simulation.nvml import (
    CLUSTER_FILE,
    STALE_PID,
    SimulatedGpu,
    SimulatedNvml,
    gpu_address,
    gpus_of,
)

KERNEL, KERNEL_WITHOUT_DMA_BUF = "6.8.0-79-generic", "5.4.0-216-generic"
_DRIVER = "NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22-I3)"
_CONFIG_BYTES = 256
"""Of a PCI device's configuration, as root reads it: all zero, a bridge has no ACS that redirects."""
_SPEEDS = MappingProxyType({100: "4X EDR", 200: "4X HDR", 400: "4X NDR", 800: "4X XDR"})
"""Gb/s of a port -> width and speed, as the kernel writes them."""
_CARDS = MappingProxyType({100: "MT4119", 200: "MT4123", 400: "MT4129", 800: "MT4131"})
_COUNTERS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors"), 0),
        **dict.fromkeys(("port_xmit_data", "port_rcv_data"), 1_000_000),
        "port_xmit_wait": 1000,
    }
)
_FAULTY_COUNTERS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "dead-rail": {"symbol_error": 65_535, "port_rcv_errors": 8_121, "port_xmit_wait": 4_000_000_000},
        "flapping-port": {"link_error_recovery": 214, "symbol_error": 1_893, "link_downed": 3},
    }
)
"""Fault of a port -> what its counters have had since the driver was loaded, which alone rejects nothing."""
_XID_154 = "Xid (PCI:{pci}): 154, GPU recovery action changed from 0x0 (None) to"
_XIDS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "ecc": (
            "Xid (PCI:{pci}): 48, pid={pid}, name=python, An uncorrectable double bit error (DBE) has been detected on "
            "GPU in the framebuffer at partition 3, subpartition 1.",
        ),
        "row-remap": ("Xid (PCI:{pci}): 64, pid='<unknown>', name=<unknown>, Row Remapper: Failed to remap row",),
        "xid79": (
            "Xid (PCI:{pci}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            f"{_XID_154} 0x2 (Node Reboot Required)",
        ),
        "xid94": (
            "Xid (PCI:{pci}): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping, reset "
            "gpu to activate.",
            "Xid (PCI:{pci}): 94, pid={pid}, name=python, Contained: SM (0x1). RST: No, D-RST: No",
            f"{_XID_154} 0x4 (Drain and Reset)",
        ),
        "xid119": (
            "Xid (PCI:{pci}): 119, pid={pid}, name=python, Timeout after 6s of waiting for RPC response from GPU GSP! "
            "Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x5b8).",
            f"{_XID_154} 0x1 (GPU Reset Required)",
        ),
        "nvlink5-fatal": (
            "Xid (PCI:{pci}): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000)",
            f"{_XID_154} 0x1 (GPU Reset Required)",
        ),
    }
)
"""Fault -> the lines of the driver when it appears."""


def kernel_records(gpus: Sequence[SimulatedGpu]) -> Iterator[bytes]:
    """Yield the records of a host's kernel log so far: of the boot, and of the faults that have appeared."""
    driver = gpus[0].cluster.node.driver
    texts = [f"Linux version {KERNEL} (buildd@lcy02-amd64-080)", f"NVRM: loading {_DRIVER.format(driver)}"]
    yield from (_record(number, text) for number, text in enumerate(texts))
    for gpu in gpus:
        for place, (fault, lines) in enumerate(_XIDS.items()):
            # A record keeps its number, whatever else appears before it.
            first = len(texts) + 8 * (gpu.machine.index * len(_XIDS) + place)
            for number, text in enumerate(lines if gpu.shows(fault) else (), first):
                line = text.format(pci=gpu.address.rpartition(".")[0], pid=gpu.machine.pid or "'<unknown>'")
                yield _record(number, f"NVRM: {line}")


def _record(number: int, text: str) -> bytes:
    return f"4,{number},{1_000_000 * (number + 3)},-;{text}\n".encode()


class SimulatedVisibleGpus(VisibleGpus):
    """What CUDA shows to a rank: all GPUs of its host.

    Args:
        gpus: of the host.
    """

    def __init__(self, gpus: Sequence[SimulatedGpu]) -> None:
        super().__init__()
        self._gpus = gpus

    def software(self) -> dict[str, str | None]:
        """Return this torch, and the described CUDA and NCCL."""
        cluster = self._gpus[0].cluster
        return {**super().software(), "cuda": cluster.node.cuda, "nccl": cluster.nccl.version}

    def count(self) -> int:
        """Count them."""
        return len(self._gpus)

    def __getitem__(self, index: int) -> VisibleGpu:
        """Describe one."""
        gpu = self._gpus[index]
        name, memory_bytes = gpu.cluster.gpu.name, gpu.cluster.gpu.memory_bytes
        return VisibleGpu(name=name, uuid=gpu.uuid.removeprefix("GPU-"), memory_bytes=memory_bytes)


class SimulatedResolver(name_resolution.SystemResolver):
    """The names of the cluster's hosts, which all share this machine.

    Args:
        host: of this process.
    """

    def __init__(self, host: str) -> None:
        self._host = host

    def forward(self, name: str) -> str:
        """Return this machine's own address for any name."""
        return "127.0.0.1"

    def reverse(self, address: str) -> str:
        """Return the host's name for any address."""
        return self._host


# ---- files -----------------------------------------------------------------------------------------------------------


class _Files:
    """The files of a host below a folder, which stands for the root of its file system."""

    def __init__(self, root: Path) -> None:
        self._root, self._made = root, {root}

    def write(self, absolute: str, content: object) -> None:
        """Write a file with a line, or bytes."""
        path = self._root / absolute.lstrip("/")
        self._make(path.parent)
        path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())

    def link(self, absolute: str, to: str) -> None:
        """Make a link to a folder, which is made too."""
        path, target = (self._root / each.lstrip("/") for each in (absolute, to))
        self._make(target)
        self._make(path.parent)
        path.symlink_to(os.path.relpath(target, path.parent))

    def _make(self, folder: Path) -> None:
        if folder not in self._made:
            folder.mkdir(parents=True, exist_ok=True)
            self._made.add(folder)


def _write_system(cluster: Cluster, host: str, node: _Files) -> None:
    """Write what is of the whole host, and of the process that reads it."""
    model, has_gdr = cluster.node, cluster.faults.amount("no-gdr", host) is None
    cpus, nodes, kilobytes = range(model.cpus), range(model.numa_nodes), model.memory_bytes // 1024
    unlimited = "unlimited            unlimited"
    # Ranks really meet over this machine's own interface: it is shown as the node's Ethernet card.
    card = next((one.name for one in interfaces() if one.running and one.name != "lo"), "eth0")
    files = {
        "/proc/self/limits": (
            "Limit                     Soft Limit           Hard Limit           Units\n"
            f"Max processes             {unlimited}            processes\n"
            "Max open files            1048576              1048576              files\n"
            f"Max locked memory         {unlimited}            bytes"
        ),
        "/proc/self/status": (
            f"Name:\tpython\nCapEff:\t{0:016x}\nCpus_allowed_list:\t{format_ranges(cpus)}\n"
            f"Mems_allowed_list:\t{format_ranges(nodes)}"
        ),
        "/proc/self/uid_map": "         0          0 4294967295",
        "/proc/self/mountinfo": (
            "21 1 0:19 / / rw - ext4 /dev/md0 rw\n22 1 0:20 / /proc rw - proc proc rw\n"
            "25 1 0:23 / /dev/shm rw,nosuid,nodev - tmpfs tmpfs rw\n"
            "30 1 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
        ),
        "/proc/self/cgroup": "0::/system.slice/job",
        "/proc/meminfo": "\n".join(
            f"{name}: {amount} kB"
            for name, amount in (
                *(("MemTotal", kilobytes), ("MemFree", kilobytes * 9 // 10), ("MemAvailable", kilobytes * 9 // 10)),
                *(("SwapTotal", 0), ("SwapFree", 0)),
            )
        ),
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: simulated CPU",
        "/proc/loadavg": "1.50 2.25 3.00 2/3000 77",
        "/proc/uptime": "1036800.50 1.00",
        "/proc/sys/fs/nr_open": 1048576,
        "/proc/sys/kernel/threads-max": 16511000,
        "/proc/sys/kernel/pid_max": 4194304,
        "/proc/sys/kernel/numa_balancing": 0,
        "/proc/sys/kernel/osrelease": KERNEL if has_gdr else KERNEL_WITHOUT_DMA_BUF,
        "/proc/driver/nvidia/version": f"NVRM version: {_DRIVER.format(model.driver)}",
        "/proc/net/route": (
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
            f"{card}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0"
        ),
        **{
            f"/sys/fs/cgroup/system.slice/job/{name}": "max"
            for name in ("memory.max", "cpu.max", "pids.max", "memory.high")
        },
        "/sys/fs/cgroup/system.slice/job/cpuset.cpus.effective": format_ranges(cpus),
        f"{host_facts.CPUS}/online": format_ranges(cpus),
        f"{host_facts.CPUS}/offline": "",
        "/sys/devices/system/node/online": format_ranges(nodes),
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "/sys/module/nvidia/version": model.driver,
        f"/sys/class/net/{card}/operstate": "up",
        f"/sys/class/net/{card}/speed": 25_000,
        f"/sys/class/net/{card}/mtu": 9000,
        "/etc/os-release": 'PRETTY_NAME="simulated"',
    }
    policy = f"{host_facts.CPUS}/cpufreq/policy0"
    files |= {f"{policy}/scaling_governor": "performance", f"{policy}/scaling_driver": "intel_pstate"}
    if has_gdr:
        files["/sys/module/nvidia_peermem/version"] = model.driver
    for number in nodes:
        place = f"/sys/devices/system/node/node{number}"
        files[f"{place}/cpulist"] = _cpus_of(cluster, number)
        files[f"{place}/meminfo"] = f"Node {number} MemTotal: {kilobytes // len(nodes)} kB"
        files[f"{place}/distance"] = " ".join("10" if other == number else "21" for other in nodes)
    for cpu in cpus:
        topology = f"{host_facts.CPUS}/cpu{cpu}/topology"
        files[f"{topology}/physical_package_id"] = cpu * len(nodes) // len(cpus)
        files[f"{topology}/thread_siblings_list"] = f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}"
        node.link(f"{host_facts.CPUS}/cpu{cpu}/cpufreq", policy)
    for absolute, text in files.items():
        node.write(absolute, text)
    node.link(f"/sys/class/net/{card}/device", "/sys/devices/pci0000:00/0000:00:1c.0/0000:02:00.0")
    node.link(f"/sys/class/net/{card}/device/driver", "/sys/bus/pci/drivers/ice")


def _cpus_of(cluster: Cluster, numa_node: int) -> str:
    each = cluster.node.cpus // cluster.node.numa_nodes
    return format_ranges(range(numa_node * each, (numa_node + 1) * each))


def _write_gpu(cluster: Cluster, host: str, node: _Files, index: int) -> None:
    address = gpu_address(index)
    place = _write_function(cluster, node, index, address, f"0000:{0x90 + index:02x}:00.0", "nvidia")
    for name, text in {"class": "0x030200", "vendor": "0x10de", "iommu_group/type": "identity"}.items():
        node.write(f"{place}/{name}", text)
    node.write(f"/proc/driver/nvidia/gpus/{address}/information", f"Device Minor: \t {index}")
    node.write(f"/dev/nvidia{index}", "")
    if cluster.faults.amount("stale-process", host, index) is not None:
        process = f"/proc/{STALE_PID + index}"
        node.write(f"{process}/status", "Name:\tpython\nUid:\t20017\t20017\t20017\t20017")
        node.write(f"{process}/cmdline", b"python\0train.py\0--resume\0")


def _write_function(cluster: Cluster, node: _Files, gpu: int, address: str, port: str, driver: str) -> str:
    """Write a PCI device on a port of the switch of a GPU; return its folder."""
    above = f"/sys/devices/pci0000:{0x10 + gpu:02x}"
    for bridge in (f"0000:{0x10 + gpu:02x}:01.0", f"0000:{0x80 + gpu:02x}:00.0", port):
        above = f"{above}/{bridge}"
        node.write(f"{above}/config", bytes(_CONFIG_BYTES))
    place, numa_node = f"{above}/{address}", gpu * cluster.node.numa_nodes // cluster.gpus_per_node
    node.write(f"{place}/config", b"\xde\x10".ljust(_CONFIG_BYTES, b"\0"))
    node.write(f"{place}/numa_node", numa_node)
    node.write(f"{place}/local_cpulist", _cpus_of(cluster, numa_node))
    node.link(f"{sysfs.PCI_DEVICES}/{address}", place)
    node.link(f"{place}/driver", f"/sys/bus/pci/drivers/{driver}")
    return place


def _write_port(cluster: Cluster, host: str, node: _Files, number: int) -> None:
    """Write a card with one port, at the switch of the nearest GPU."""
    model, name = cluster.node, cluster.ports[number]
    gpu = number * cluster.gpus_per_node // model.ports
    switch_port = f"0000:{0x90 + gpu:02x}:{1 + number % 31:02x}.0"
    function = _write_function(cluster, node, gpu, f"0000:{0x40 + number:02x}:00.0", switch_port, "mlx5_core")
    card, gbps = f"/sys/class/infiniband/{name}", round(model.port_rate_bits / 1e9)
    digits = hashlib.sha256(f"{cluster.name}/{host}/{name}".encode()).hexdigest()
    guid = ":".join(("a088", "c203", digits[:4], digits[4:8]))
    is_down = number == model.ports - 1 and cluster.faults.amount("nic-down", host) is not None
    is_ethernet, interface = model.link_layer == ETHERNET, f"rail{number}"
    address = f"0000:0000:0000:0000:0000:ffff:0a{number:02x}:{1 + cluster.hosts.index(host):04x}"
    gids = {0: (f"fe80:0000:0000:0000:{guid}", "IB/RoCE v1")} | ({3: (address, "RoCE v2")} if is_ethernet else {})
    counters = dict(_COUNTERS)
    for fault, found in _FAULTY_COUNTERS.items():
        counters |= found if cluster.faults.amount(fault, host, name) is not None else {}
    port: dict[str, object] = {
        "state": "1: DOWN" if is_down else "4: ACTIVE",
        "phys_state": "2: Polling" if is_down else "5: LinkUp",
        "rate": f"{gbps} Gb/sec ({_SPEEDS.get(gbps, '4X')})",
        "link_layer": model.link_layer,
        "lid": "0x0" if is_ethernet else f"{1 + number:#x}",
        "sm_lid": "0x0" if is_ethernet else "0x1",
        **{f"counters/{counter}": count for counter, count in counters.items()},
        **{f"hw_counters/{counter}": 0 for counter in ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err")},
        **{f"gids/{index}": gid for index, (gid, _) in gids.items()},
        **{f"gid_attrs/types/{index}": kind for index, (_, kind) in gids.items()},
    }
    if is_ethernet:
        port |= {f"gid_attrs/ndevs/{index}": interface for index in gids}
        node.write(f"{function}/net/{interface}/carrier_down_count", 1)
        node.write(f"/sys/class/net/{interface}/operstate", "down" if is_down else "up")
        node.write(f"/sys/class/net/{interface}/speed", -1 if is_down else 1000 * gbps)
        node.link(f"/sys/class/net/{interface}/device", function)
    board = {"fw_ver": "28.43.2026", "hca_type": _CARDS.get(gbps, "MT4129"), "board_id": "MT_0000000838"}
    for attribute, text in {**board, "node_guid": guid}.items():
        node.write(f"{card}/{attribute}", text)
    for attribute, content in port.items():
        node.write(f"{card}/ports/1/{attribute}", content)
    node.link(f"{card}/device", function)
    node.write(f"/dev/infiniband/uverbs{number}", "")


def lose_link(port: str) -> None:
    """Let a port of the host that this process is one of count that it has lost its link."""
    path = sysfs.ROOT / f"sys/class/infiniband/{port}/ports/1/counters/link_downed"
    atomic_write(path, f"{int(path.read_text(encoding='ascii')) + 1}\n")


# ---- the log of NCCL -------------------------------------------------------------------------------------------------

_RACK = "P2P"
"""The transport between nodes that NVLink connects."""


def write_nccl_log(cluster: Cluster, places: Sequence[tuple[str, int]], mine: int) -> None:
    """Append the lines of one rank to its process's log, where NCCL would write one.

    Args:
        cluster: its description.
        places: host and GPU of each rank of the communicator.
        mine: this rank's number in it.
    """
    path = NcclLog.of(os.environ, pid=os.getpid()).path
    if path is None or not path.parent.is_dir():
        return
    host, gpu = places[mine]
    with Path(path).open("a", encoding="utf-8") as log:
        for line in _nccl_lines(cluster, places, mine):
            log.write(f"{host}:{os.getpid()}:{os.getpid()} [{gpu}] NCCL INFO {line}\n")


def _nccl_lines(cluster: Cluster, places: Sequence[tuple[str, int]], mine: int) -> Iterator[str]:
    has, count, (host, gpu) = cluster.faults.amount, len(places), places[mine]
    yield f"NCCL version {cluster.nccl.version}+cuda{cluster.node.cuda}"
    if has("net-socket"):
        yield "NET/IB : No device found."
        yield f"NET/Socket : Using [0]{socket.gethostname()}:10.0.0.1<0>"
    if has("no-gdr", host):
        yield f"GPU Direct RDMA Disabled for HCA 0 '{next(iter(cluster.ports_of(gpu)), None)}'"
    yield f"Using network {_network(cluster)}"
    several = len({place for place, _ in places}) > 1
    with_nvls = not has("nvls-off") and len({place for place in places if place[0] == host}) > 1
    yield f"NVLS multicast support is {'' if with_nvls else 'not '}available on dev {gpu}"
    for other, kind in (((mine + 1) % count, "send"), ((mine - 1) % count, "receive")):
        if other != mine:
            ends = (mine, other) if kind == "send" else (other, mine)
            via = _via(cluster, host, gpu, places[other][0])
            hop = " -> ".join(f"{end}[{places[end][1]}]" for end in ends)
            yield f"Channel 00/0 : {hop} [{kind}] via {via}"
    if with_nvls and not (several and cluster.nccl.transport == _RACK):
        yield f"NVLS comm 0x5581 headRank {gpu} nHeads {cluster.gpus_per_node} memSize 2097152"
    yield f"comm 0x5581 rank {mine} nranks {count} cudaDev {gpu} nvmlDev {gpu} busId {gpu}0 commId 0x1 - Init COMPLETE"


def _network(cluster: Cluster) -> str:
    name = "IB" if cluster.nccl.transport == _RACK else cluster.nccl.transport.partition("/")[2]
    return "Socket" if cluster.faults.amount("net-socket") else name


def _via(cluster: Cluster, host: str, gpu: int, other: str) -> str:
    if host == other:
        return "P2P/CUMEM"
    if cluster.nccl.transport == _RACK:
        return "P2P/MNNVL"
    direct = "" if cluster.faults.amount("no-gdr", host) or cluster.faults.amount("net-socket") else "/GDRDMA"
    return f"NET/{_network(cluster)}/{gpu}{direct}"


# ---- in force --------------------------------------------------------------------------------------------------------


def seams(cluster: Cluster, host: str, folder: Path) -> Mapping[tuple[ModuleType, str], Any]:
    """Return what makes this process one of a simulated host: (module, variable) -> its value.

    The host's files are written, if no other rank has done so.

    Args:
        cluster: its description, with the faults.
        host: one of its hosts.
        folder: of the simulated run, the same for all ranks on this machine.
    """
    root = folder / host / "root"
    root.parent.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / CLUSTER_FILE).write_bytes(pickle.dumps(cluster))
        if not root.exists():
            draft = root.with_name(f"root-{os.getpid()}")
            node = _Files(draft)
            _write_system(cluster, host, node)
            for index in range(cluster.gpus_per_node):
                _write_gpu(cluster, host, node, index)
            for number in range(cluster.node.ports):
                _write_port(cluster, host, node, number)
            draft.rename(root)
    gpus = gpus_of(cluster, host, folder)
    blocks = cluster.node.memory_bytes // 2 // 4096
    ahead_seconds = cluster.faults.amount("clock-skew", host) or 0.0

    def fall(gpu: SimulatedGpu) -> None:
        (root / f"sys/bus/pci/devices/{gpu.address}/config").write_bytes(b"\xff" * _CONFIG_BYTES)

    return {
        (sysfs, "ROOT"): root,
        (nvml, "MAKER"): lambda: SimulatedNvml(gpus, fall),
        (inventory, "VISIBLE_GPUS"): lambda: SimulatedVisibleGpus(gpus),
        (kernel_log, "RECORDS"): lambda kmsg: kernel_records(gpus),
        # A file system of half of the memory, as that of /dev/shm is, and empty.
        (host_facts, "STATVFS"): lambda path: os.statvfs_result((4096, 4096, *[blocks] * 6, 0, 255)),
        (name_resolution, "SYSTEM"): SimulatedResolver(host),
        (network, "NOW"): lambda: time.time() + ahead_seconds,
        (telemetry, "COMMAND"): (sys.executable, "-m", "pytest_gpucluster.simulation.nvml", str(folder), host),
    }
