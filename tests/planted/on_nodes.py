"""The conftest.py of a suite in which node-b has another network, clock, resolver, file system, host or environment.

A fault is the word for it. Each test starts from what is healthy.
"""

import errno
import os
import time
from pathlib import Path

import pytest
from planted import criterion_of, fault_of, pytest_collection_modifyitems  # noqa: F401  # a hook

from pytest_gpucluster import files
from pytest_gpucluster.benchmarks.storage import checkpoint, consistency
from pytest_gpucluster.files import Mount
from pytest_gpucluster.node import name_resolution, network, pci, sysfs
from pytest_gpucluster.node.fabric import ports
from pytest_gpucluster.node.fabric.nccl_log import NcclLog
from pytest_gpucluster.node.fabric.ports import FabricSources
from pytest_gpucluster.node.sysfs import Tree
from pytest_gpucluster.session.cluster import Cluster

HOST = os.environ["GPUCLUSTER_HOSTNAME"]
ROOT = Path(os.environ["NODES"]) / HOST
FAULT = ""
"""On this node."""
CALL = network.call


def pytest_runtest_setup(item):
    global FAULT
    FAULT = fault_of(item) if HOST == "node-b" else ""
    network.call = refused if FAULT == "refused" else CALL
    network.NOW = (lambda: time.time() + 5) if FAULT == "ahead" else time.time
    name_resolution.SYSTEM = {"slow": Slow, "ignorant": Ignorant, "silent": Silent}.get(FAULT, Quick)()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if FAULT == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "bond7"
    checkpoint.VISIBILITY_SECONDS = honest_seen_seconds if fault_of(item) == "right" else 0.5
    consistency._MOST_SECONDS_EACH = 0.02
    for name, honest in HONEST.items():
        setattr(files if name == "read_mounts" else consistency, name, BROKEN.get(FAULT, {}).get(name, honest))
    sysfs.ROOT = ROOT / "host" / fault_of(item) if criterion_of(item) == "test_host" else Path("/")


# ---- network, resolver -----------------------------------------------------------------------------------------------


def refused(*arguments, **more):
    raise ConnectionRefusedError("[Errno 111] Connection refused")


class Quick(name_resolution.SystemResolver):
    """Whatever DNS is like where this runs."""

    def forward(self, name):
        return "127.0.0.1"

    def reverse(self, address):
        return "here"


class Slow(Quick):
    def reverse(self, address):
        time.sleep(1.2)
        return "late"


class Ignorant(Quick):
    def forward(self, name):
        raise OSError("[Errno -2] Name or service not known")


class Silent(Quick):
    def reverse(self, address):
        time.sleep(60)


# ---- file system -----------------------------------------------------------------------------------------------------

honest_seen_seconds = checkpoint.VISIBILITY_SECONDS
HONEST = {
    name: getattr(consistency, name)
    for name in ("write_probe", "read_probe", "read_renamed", "write_small", "read_small", "statvfs")
} | {"read_mounts": files.read_mounts}
OTHER = Mount(point="/", kind="nfs4", source="server:/other", root="/", options=("rw",))
GONE = Mount(point="/gone", kind="nfs4", source="server:/gone", root="/", options=("rw",))
kept, count = {}, [0]


def old(path):
    return kept.setdefault(path, path.read_bytes())


def elsewhere(path, content):
    HONEST["write_probe"](path.with_suffix(".elsewhere"), content)


def flipped(path):
    content = path.read_bytes()
    return content[:9] + bytes([content[9] ^ 1]) + content[10:]


def sometimes_missing(path):
    count[0] += 1
    if count[0] % 3 == 0:
        raise FileNotFoundError(path)
    return path.read_bytes()


def stale(path):
    if path == "/gone":
        raise OSError(errno.ESTALE, "Stale file handle")
    return os.statvfs(path)


def full(path, content):
    raise OSError(errno.ENOSPC, "No space left on device")


def nearly_full(path):
    told = list(os.statvfs(path))
    told[3] = told[4] = 0
    return os.statvfs_result(told)


BROKEN = {
    "old": {"read_probe": old},
    "unshared": {"write_probe": elsewhere},
    "flipped": {"read_probe": flipped},
    "missing": {"read_renamed": sometimes_missing},
    "torn": {"read_renamed": lambda path: path.read_bytes()[:4096]},
    "other": {"read_mounts": lambda: (OTHER,)},
    "stale": {"read_mounts": lambda: (*HONEST["read_mounts"](), GONE), "statvfs": stale},
    "full": {"write_small": full},
    "space": {"statvfs": nearly_full},
}


# ---- fabric, NCCL ----------------------------------------------------------------------------------------------------

SOCKETS = """\
node-a:1:2 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
node-a:1:2 [0] NCCL INFO NET/IB : No device found.
node-a:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
node-a:1:2 [0] NCCL INFO Using network Socket
node-a:1:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node-a:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
node-a:1:2 [0] NCCL INFO AllReduce: 64000 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
"""
LOGS = {"sockets": SOCKETS, "unknown": "NCCL INFO something\n"}
"""Fault -> what NCCL has logged, on both nodes."""
ENVIRONMENTS = {
    "right": {"NCCL_IB_HCA": "mlx5", "OMP_NUM_THREADS": "4"},
    "note": {"NCCL_DEBUG": "INFO", "NCCL_P2P_DISABLE": "1"},
    "otherwise": {"NCCL_IB_HCA": "mlx5"},
    "same_effect": {"NCCL_IB_HCA": "mlx5_0"},
}
"""Fault -> what is set on both nodes."""


@pytest.fixture
def fabric_sources(request):
    """Each host has a sysfs and an environment of its own."""
    planted, home = fault_of(request.node), ROOT / "home"
    environ = ENVIRONMENTS.get(planted, {})
    if planted == "own":
        environ = os.environ
    elif FAULT == "differs":
        environ = {"NCCL_MIN_NCHANNELS": "32"}
    conf = "NCCL_CHECK_POINTERS=1\n" if FAULT == "hurts" else "NCCL_CROSS_NIC=0\n" if planted == "right" else ""
    home.mkdir(exist_ok=True)
    (home / ".nccl.conf").write_text(conf)
    fabric = "fabric"
    if planted in ("not_set", "otherwise", "same_effect"):
        fabric = "mixed"
    elif FAULT == "down":
        fabric = "down"
    elif FAULT == "no_ports" or planted == "none_anywhere":
        fabric = "none"
    return FabricSources(tree=Tree(root=ROOT / fabric), environ=environ, home=lambda: home)


honest_expects = ports.expects_infiniband
honest_carried_by = Cluster.carried_by


def carried_by(self, group):
    self.has_gpus = True
    try:
        return honest_carried_by(self, group)
    finally:
        self.has_gpus = False


@pytest.fixture(autouse=True)
def as_on_gpus(request, monkeypatch):
    """Expect of this rehearsal the fabric of two nodes with GPUs, and of NCCL what it has logged."""
    planted = fault_of(request.node)
    if criterion_of(request.node) == "test_infiniband" and planted not in ("rehearsed", "none_anywhere"):

        def expects(*given, nnodes, on_cpu, **named):
            return honest_expects(*given, **named, nnodes=1 if planted == "one_node" else nnodes, on_cpu=False)

        monkeypatch.setattr(request.module, "expects_infiniband", expects)
    if FAULT == "no_way":
        monkeypatch.setattr(pci, "MODULES", ())
    if planted in LOGS:
        path = Path(os.environ["TMPDIR"], f"{os.getpid()}.log")
        path.write_text(LOGS[planted])
        request.getfixturevalue("cluster").nccl_log = NcclLog(path)
        monkeypatch.setattr(Cluster, "carried_by", carried_by)
