"""A healthy H100 and its node, as the counters' sources report them, with planted values."""

from fake_nvml import HEALTHY_H100, FakeNvml

from pytest_gpucluster.metrics.finding import Identity
from pytest_gpucluster.node.health.counters import Sources
from pytest_gpucluster.node.infiniband import Adapters
from pytest_gpucluster.node.kernel_log import KernelLog

UUID, PCI = "GPU-5f2c", "00000000:3B:00.0"
GPU = Identity(host="gpu-07", index=0, uuid=UUID, pci=PCI)
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."


def nvml(**planted):
    return FakeNvml({UUID: {**HEALTHY_H100, **planted}}, pci={UUID: PCI})


def sources(**changes):
    settings = {
        "gpu": GPU,
        "nvml": nvml(),
        "of_node": True,
        "gpus_of_node": {"0000:3b:00.0": GPU},
        "kernel_log": lambda: KernelLog(lines=("Linux", XID_79, XID_79), source="dmesg"),
        "adapters": lambda: Adapters(why_not="none here"),
    }
    return Sources(**{**settings, **changes})
