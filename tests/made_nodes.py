"""Nodes for tests, as the kernel shows them below a folder: InfiniBand, RoCE, EFA, Ethernet, clouds, a laptop."""

import os

from sysfs_ports import ROCE_GIDS, add_port, write

from pytest_gpucluster.node.fabric.nccl_facts import Gpu, Sources, VisibleGpus
from pytest_gpucluster.node.fabric.ports import FabricSources
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.sysfs import Tree

H100 = "NVIDIA H100 80GB HBM3"
AZURE = "7783-7084-3265-9085-8269-3286-77"
HEAD = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


class Node:
    """A node that is planted piece by piece."""

    def __init__(self, root):
        self.root = root
        self.sysfs, self.proc = root / "sys", root / "proc"
        self.found = []
        self.visible = []
        self.environ = {}
        self.nccl = "2.27.5"
        self.gpus_unknown = ""
        for folder in (self.sysfs, self.proc):
            folder.mkdir(parents=True, exist_ok=True)
        write(self.root / "etc/nccl.conf", None)

    def pci(self, address, *above, numa_node=0, **files):
        """Add a device below a host bridge and its bridges."""
        folder = self.sysfs.joinpath("devices", *above, address)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"numa_node": str(numa_node), **files}.items():
            write(folder / name, text)
        devices = self.sysfs / "bus/pci/devices"
        devices.mkdir(parents=True, exist_ok=True)
        if not (devices / address).exists():
            os.symlink(folder, devices / address)
        return folder

    def gpu(self, number, name=H100):
        """Add a GPU behind a PCIe switch of its own."""
        address = f"0000:{0x20 + number:02x}:00.0"
        identity = {"class": "0x030200", "vendor": "0x10de"}
        self.pci(address, *switch(number), f"0000:{0x90 + number:02x}:00.0", **identity)
        self.visible.append(Gpu(name=name, pci=address))

    def card(self, device, *, close_to=None, driver="mlx5_core", interface="", **port):
        """Add an RDMA port: behind the switch of a GPU, or on a bridge of its own. ``interface``: of RoCE."""
        number = len(list((self.sysfs / "class/infiniband").glob("*")))
        address = f"0000:{0x40 + number:02x}:00.0"
        above = (
            (*switch(close_to), f"0000:{0x90 + close_to:02x}:01.0")
            if close_to is not None
            else ("pci0000:e0", "0000:e0:01.0")
        )
        function = self.pci(address, *above)
        add_port(self.sysfs, device, interface=interface, **port)
        link = self.sysfs / "class/infiniband" / device / "device"
        link.unlink()
        os.symlink(function, link)
        self.driver(function, driver)
        write(self.root / f"dev/infiniband/uverbs{number}", "")
        if interface:
            (function / "net" / interface).mkdir(parents=True, exist_ok=True)

    def roce(self, device, interface, **card):
        """Add a RoCE port and its network interface."""
        self.card(device, link_layer="Ethernet", gids=ROCE_GIDS, interface=interface, **card)
        self.network(interface, speed=400_000)

    def driver(self, function, name):
        drivers = self.sysfs / "bus/pci/drivers" / name
        drivers.mkdir(parents=True, exist_ok=True)
        if not (function / "driver").exists():
            os.symlink(drivers, function / "driver")

    def network(self, name, *, real=True, bridge=False, driver="mlx5_core", speed=10_000, over=(), address=""):
        """Add an interface that is up. ``over``: those that it is made of; without any of it, it is virtual."""
        folder = self.sysfs / "class/net" / name
        folder.mkdir(parents=True, exist_ok=True)
        if real:
            (folder / "device").mkdir(exist_ok=True)
            self.driver(folder / "device", driver)
        if bridge:
            (folder / "bridge").mkdir()
        for lower in over:
            (folder / f"lower_{lower}").mkdir()
        write(folder / "speed", -1 if speed is None else speed)
        self.found.append(Interface(name=name, running=True, addresses=(address or f"10.0.0.{len(self.found) + 1}",)))

    def default(self, name, metric=0):
        """Give an interface the default route."""
        routes = self.proc / "net/route"
        text = routes.read_text() if routes.exists() else HEAD + "eth9\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\n"
        write(routes, f"{text.rstrip()}\n{name}\t00000000\t0100000A\t0003\t0\t0\t{metric}\t00000000\t0\t0\t0")

    def dmi(self, **tables):
        """Write the firmware's tables."""
        for name, text in tables.items():
            write(self.sysfs / "class/dmi/id" / name, text)

    def sources(self):
        """Return the sources of this node's facts."""
        home = self.root / "home"
        fabric = FabricSources(tree=Tree(root=self.root), environ=self.environ, home=lambda: home)
        return Sources(
            fabric=fabric,
            hostname=lambda: "gpu-001",
            interfaces=lambda: list(self.found),
            gpus=lambda: VisibleGpus(
                gpus=tuple(self.visible),
                why_not=self.gpus_unknown,
                nvlink=bool(self.visible),
                nvls=bool(self.visible) and all(gpu.name == H100 for gpu in self.visible),
            ),
            nccl=lambda tree: self.nccl,
        )


def switch(number):
    """Return the host bridge of a GPU, and the ports down to its PCIe switch."""
    return (f"pci0000:{0x10 + number:02x}", f"0000:{0x10 + number:02x}:01.0", f"0000:{0x80 + number:02x}:00.0")


def eight_gpus(root):
    """A node of eight H100 with GPUDirect RDMA, and no network so far."""
    node = Node(root)
    for number in range(8):
        node.gpu(number)
    (node.sysfs / "module/nvidia_peermem").mkdir(parents=True)
    return node


def infiniband(root, ports=8):
    """Rail-optimised: each of eight GPUs has its own port of 400 Gb/s; eth0 for everything else."""
    node = eight_gpus(root)
    for number in range(ports):
        node.card(f"mlx5_{number}", close_to=number)
    node.network("eth0", driver="igb")
    node.default("eth0")
    return node


def roce(root):
    """Eight rails of RoCE, and eth0."""
    node = eight_gpus(root)
    for number in range(8):
        node.roce(f"mlx5_{number}", f"rail{number}", close_to=number)
    node.network("eth0", driver="igb")
    node.default("eth0")
    return node


def ethernet(root, speed=100_000):
    """No RDMA: one network card."""
    node = eight_gpus(root)
    node.network("ens1", driver="ice", speed=speed)
    node.default("ens1")
    return node


def efa(root):
    """A machine of AWS with four EFA devices."""
    node = eight_gpus(root)
    node.dmi(sys_vendor="Amazon EC2", product_name="p5.48xlarge")
    for number in range(4):
        node.card(f"rdmap{number}s0", close_to=number, driver="efa", link_layer="Unknown", rate="100 Gb/sec (4X EDR)")
    node.network("ens5", driver="ena", speed=None)
    node.default("ens5")
    return node


def azure(root):
    """A machine of Azure: eight InfiniBand ports, and one of accelerated Ethernet."""
    node = eight_gpus(root)
    node.dmi(sys_vendor="Microsoft Corporation", product_name="Virtual Machine", chassis_asset_tag=AZURE)
    for number in range(8):
        node.card(f"mlx5_ib{number}", close_to=number)
    node.card("mlx5_an0", link_layer="Ethernet", gids=ROCE_GIDS, rate="100 Gb/sec (4X EDR)", interface="eth0")
    node.network("eth0", driver="hv_netvsc", speed=100_000)
    node.default("eth0")
    return node


def google(root):
    """A machine of Google Cloud with several gVNICs: A3 Mega."""
    node = eight_gpus(root)
    node.dmi(sys_vendor="Google", product_name="Google Compute Engine")
    for number in range(9):
        node.network(f"eth{number}", driver="gve", speed=None)
    node.default("eth0")
    return node


def laptop(root):
    """No GPU, one wireless card, and what containers and a VPN leave."""
    node = Node(root)
    node.gpus_unknown = "NVML Shared Library Not Found"
    node.nccl = None
    node.network("wlp2s0", driver="iwlwifi", speed=None)
    node.network("docker0", real=False, bridge=True, speed=None)
    node.default("wlp2s0", metric=600)
    return node


def pod(root):
    """A container to which only its own virtual interface was given."""
    node = eight_gpus(root)
    node.environ["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
    node.network("eth0", real=False, speed=None)
    node.default("eth0")
    return node


MAKERS = {
    "infiniband": infiniband,
    "roce": roce,
    "ethernet": ethernet,
    "efa": efa,
    "azure": azure,
    "google": google,
    "laptop": laptop,
    "pod": pod,
}
