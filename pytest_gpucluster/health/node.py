"""Does the node show all of its GPUs, and does the job use them?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpucluster.health.situation import Node, Situation
from pytest_gpucluster.kernel_log import normalised
from pytest_gpucluster.metrics.finding import Finding, Identity, Kind
from pytest_gpucluster.pci_bus import PciGpu, State

_KINDS: dict[State, tuple[Kind, str]] = {
    "dead": ("hardware", "power the node off and on; if it stays so, have the GPU or its board replaced"),
    "answers": ("hardware", "look at `nvidia-smi` and the kernel log on this host, and reboot the node"),
    "no driver": (
        "environment",
        "bind the driver (`dmesg | grep -i nvrm`), or take the GPU out of the node's inventory",
    ),
    "hidden": ("note", "nothing, if this job was given fewer GPUs than the node has"),
    "elsewhere": ("note", "nothing, if this GPU is meant for virtual machines"),
}


def check(situation: Situation) -> Iterator[Finding]:
    """Report GPUs on the PCI bus that NVML does not show, GPUs that do not answer, and GPUs without a rank."""
    node = situation.node
    if node is None:
        return
    if node.bus_unreadable:
        yield situation.finding(
            "pci_bus",
            "note",
            f"the PCI bus cannot be looked at, so GPUs that have left it are not noticed: {node.bus_unreadable}",
            allowed="a bus that this job may read",
            remedy="compare `lspci | grep -i nvidia` on this host with `nvidia-smi -L`",
            gpu=Identity(host=situation.gpu.host),
        )
    for gpu in node.unlisted:
        yield _unlisted(situation, gpu)
    silent = node.nvml_gpus - node.answering
    named = sum(gpu.state in ("dead", "answers") for gpu in node.unlisted)
    if silent > named:
        yield situation.finding(
            "gpu_silent",
            "hardware",
            f"NVML counts {node.nvml_gpus} GPUs, and {silent} of them do not answer",
            allowed="every GPU answers",
            remedy="find them with `nvidia-smi` and `dmesg | grep -i xid`, and take the node out of service",
            gpu=Identity(host=situation.gpu.host),
        )
    yield from _unused(situation, node)


def _unlisted(situation: Situation, gpu: PciGpu) -> Finding:
    kind, remedy = _KINDS[gpu.state]
    address = normalised(gpu.address)
    xids = sorted({xid.code for xid in situation.kernel_log.xids() if address and xid.pci[:-2] == address[:-2]})
    log = f"; Xids in the kernel log: {', '.join(map(str, xids))}" if xids else ""
    return situation.finding(
        "gpu_not_listed",
        kind,
        f"the PCI bus shows a GPU that NVML does not: {gpu.detail}{log}",
        allowed="NVML shows every GPU of the node",
        remedy=remedy,
        gpu=Identity(host=situation.gpu.host, pci=gpu.address),
    )


def _unused(situation: Situation, node: Node) -> Iterator[Finding]:
    if node.ranks < node.answering:
        yield situation.finding(
            "gpus_without_rank",
            "note",
            f"{node.ranks} ranks on a node of {node.answering} GPUs: the others are not looked at",
            allowed="one rank for each GPU, for a node to be accepted as a whole",
            remedy=f"start {node.answering} ranks on this node",
            gpu=Identity(host=situation.gpu.host),
        )
