"""What is not as it should be with a host, beside the figures that limits are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pytest_gpucluster.affinity import shown
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.host.facts import HostFacts
from pytest_gpucluster.host.memory import SHM
from pytest_gpucluster.metrics.finding import Finding, Identity, Kind

ANY, PERFORMANCE = "any", "performance"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How the hosts are meant to be set up: words of the workload's section ``host``. "any": it does not matter."""

    governor: str = PERFORMANCE
    numa_balancing: str = ANY
    iommu: str = "passthrough"
    acs: str = "off"


def examine(facts: HostFacts, wanted: Wanted) -> list[Finding]:
    """Apply every check. Settings that hurt are of the environment: no GPU is at fault."""
    return [finding for check in CHECKS for finding in check(facts, wanted)]


def require_fit(findings: list[Finding]) -> None:
    """Make sure that nothing but notes was found.

    Raises: EnvironmentBroken with all that is more than a note: nothing of it is a fault of the hardware.
    """
    wrong = [str(finding) for finding in findings if finding.kind != "note"]
    if wrong:
        raise EnvironmentBroken("\n".join(wrong))


def _finding(
    facts: HostFacts, code: str, kind: Kind, found: str, allowed: str, remedy: str, gpu: Identity | None = None
) -> Finding:
    return Finding(
        code=code, kind=kind, gpu=gpu or Identity(host=facts.host), found=found, allowed=allowed, remedy=remedy
    )


def _shm(facts: HostFacts, wanted: Wanted) -> Iterator[Finding]:
    shm = facts.memory.shm
    if shm is not None and shm.kind != "tmpfs":
        yield _finding(
            facts,
            "shm_is_no_memory",
            "environment",
            f"{SHM} is {f'a {shm.kind}' if shm.kind else 'no mount of its own'}",
            "a tmpfs: NCCL and data loaders exchange data through it at each step",
            "mount it as the distribution does (systemd: dev-shm.mount), or let the container runtime do it",
        )


def _governor(facts: HostFacts, wanted: Wanted) -> Iterator[Finding]:
    # Source: Linux kernel, Documentation/admin-guide/pm/cpufreq.rst, generic scaling governors.
    governors = facts.processors.governors
    remedy = "`cpupower frequency-set -g performance` on this host, and a service that does so at each boot"
    if not governors:
        found = "the kernel shows no CPU frequency governor, as in most virtual machines"
        yield _finding(facts, "governor", "note", found, "anything", "nothing here; ask whoever runs the hypervisor")
        return
    others = {name: cpus for name, cpus in governors.items() if name != PERFORMANCE}
    if follows := others.get("powersave", frozenset()) & facts.processors.autonomous:
        others["powersave"] -= follows
        yield _finding(
            facts,
            "governor",
            "note",
            f"the CPU frequency governor is powersave of a driver that follows the load, on the CPUs {shown(follows)}",
            f"anything; {PERFORMANCE} keeps the clock up between launches",
            remedy,
        )
    others = {name: cpus for name, cpus in others.items() if cpus}
    if others:
        found = ", ".join(f"{name} on the CPUs {shown(cpus)}" for name, cpus in sorted(others.items()))
        yield _finding(
            facts,
            "governor",
            "environment" if wanted.governor == PERFORMANCE else "note",
            f"the CPU frequency governor is {found}",
            f"{PERFORMANCE} on all CPUs: a CPU that has to wake up first launches kernels late",
            f"{remedy}; or accept it: --gpucluster-workload host.governor=any",
        )


def _offline(facts: HostFacts, wanted: Wanted) -> Iterator[Finding]:
    if facts.processors.offline:
        found = f"the CPUs {shown(facts.processors.offline)} are switched off"
        yield _finding(facts, "cpus_offline", "note", found, "anything", "nothing, if that is meant, as without SMT")


def _numa(facts: HostFacts, wanted: Wanted) -> Iterator[Finding]:
    # Source: Linux kernel, Documentation/admin-guide/sysctl/kernel.rst, numa_balancing; AMD, "Instinct MI300X system
    # optimization", disable NUMA auto-balancing.
    several = len(facts.processors.nodes or ()) > 1
    balancing = facts.processors.numa_balancing
    if several and balancing:
        kind: Kind = "environment" if wanted.numa_balancing == "off" else "note"
        yield _finding(
            facts,
            "numa_balancing",
            kind,
            f"the kernel moves memory between {len(facts.processors.nodes or ())} NUMA nodes by itself "
            f"(kernel.numa_balancing={balancing})",
            "off, where ranks are bound to their GPU's node: looking where memory is used takes page faults",
            "`sysctl kernel.numa_balancing=0`, and the same in /etc/sysctl.d",
        )
    unknown = [str(gpu.who) for gpu in facts.gpus if gpu.node is None]
    if several and unknown:
        found = f"the kernel does not know beside which NUMA node these are: {'; '.join(unknown)}"
        remedy = "look at the BIOS or at the hypervisor's topology: ranks cannot be bound beside their GPUs"
        yield _finding(facts, "gpu_without_node", "note", found, "a node for each GPU", remedy)
    known = [f"GPU {gpu.who.index}: node {gpu.node}" for gpu in facts.gpus if gpu.node is not None]
    if known:
        found = f"NUMA nodes: {', '.join(known)}"
        yield _finding(facts, "gpu_nodes", "note", found, "anything", "nothing; the criterion affinity compares ranks")


def _iommu(facts: HostFacts, wanted: Wanted) -> Iterator[Finding]:
    # Source: as pci_path.
    for gpu in facts.gpus:
        if gpu.path is None or not gpu.path.is_translated:
            continue
        # On Arm the GPU may reach memory through the SMMU by design, as on Grace.
        strict = wanted.iommu == "passthrough" and facts.machine == "x86_64"
        yield _finding(
            facts,
            "iommu",
            "environment" if strict else "note",
            f"an IOMMU translates the addresses of this GPU (its group is of the type {gpu.path.iommu})",
            "passthrough, or none: translation sends data between GPU and network card by way of the CPU",
            "iommu=pt on the kernel's command line, or VT-d / AMD-Vi off in the BIOS; or accept it: "
            "--gpucluster-workload host.iommu=any",
            gpu.who,
        )
    hidden = [gpu for gpu in facts.gpus if gpu.path is None]
    if hidden:
        found = f"whether an IOMMU translates cannot be seen for {len(hidden)} of {len(facts.gpus)} GPUs"
        remedy = "look at /sys/kernel/iommu_groups/*/type on the host, where DMA and DMA-FQ translate"
        yield _finding(facts, "iommu", "note", found, "anything", remedy)


def _acs(facts: HostFacts, wanted: Wanted) -> Iterator[Finding]:
    # Source: as pci_path.
    for gpu in facts.gpus:
        if gpu.path is None or not gpu.path.redirecting:
            continue
        ports = "; ".join(f"{port} ({', '.join(bits)})" for port, bits in gpu.path.redirecting)
        yield _finding(
            facts,
            "acs",
            "environment" if wanted.acs == "off" else "note",
            f"PCIe switch ports above this GPU redirect what devices below them tell each other: {ports}",
            "ACS off at switch ports, where no virtual machine needs it",
            "`setpci -s PORT ECAP_ACS+0x6.w=0000` for each port at each boot, or ACS off in the BIOS; or accept it: "
            "--gpucluster-workload host.acs=any",
            gpu.who,
        )
    hidden = [gpu for gpu in facts.gpus if gpu.path is None or gpu.path.hidden]
    if hidden:
        found = f"whether ACS redirects cannot be seen for {len(hidden)} of {len(facts.gpus)} GPUs"
        remedy = "as root: `lspci -vvv | grep -i acsctl`, where no switch port may show ReqRedir+ or CmpltRedir+"
        yield _finding(facts, "acs", "note", found, "anything", remedy)


def _huge_pages(facts: HostFacts, wanted: Wanted) -> Iterator[Finding]:
    reserved, transparent = facts.memory.reserved_pages, facts.memory.transparent
    parts = [f"transparent huge pages: {transparent}"] if transparent else []
    parts += [f"{reserved} huge pages set aside, which other memory cannot use"] if reserved else []
    if parts:
        yield _finding(facts, "huge_pages", "note", "; ".join(parts), "anything", "nothing")


CHECKS: tuple[Callable[[HostFacts, Wanted], Iterator[Finding]], ...] = (
    _shm,
    _governor,
    _offline,
    _numa,
    _iommu,
    _acs,
    _huge_pages,
)
