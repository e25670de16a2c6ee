"""What would keep a run from ACCEPTED, before it is started: facts in, findings out. Pure.

A finding that is more than a note keeps the run from ACCEPTED.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.agreement.preflight import Expectation, sku_matches
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.judge.judge import judge_value
from pytest_gpucluster.judge.limits import Thresholds, demand
from pytest_gpucluster.metrics.finding import Finding, environment, note
from pytest_gpucluster.node.host import NodeSnapshot
from pytest_gpucluster.node.host_checks import Reading, readings
from pytest_gpucluster.node.scheduler import pod_findings
from pytest_gpucluster.runners.kubernetes_manifest import GPU
from pytest_gpucluster.runners.sweep_kubernetes import node_problem
from pytest_gpucluster.text import plural

Obstacle = tuple[Finding, Sequence[str]]
"""A finding, and the criteria that it costs. None: all, for the run would not start, or end without a verdict."""


@dataclass(frozen=True, kw_only=True)
class RequiredTest:
    """A test that an acceptance needs; ``skipped`` is why it would not run ("": it would), ``remedy`` what to do."""

    nodeid: str
    criterion: str
    skipped: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What ``session.forecast`` has written; its docstring has the fields."""

    nodes: int
    ranks_per_node: int
    device: str
    part: str
    torch: str
    nvml: str
    cuda: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[str, ...] = ()
    expect: Expectation | None = None
    sku: str | None = None
    thresholds: str | None = None
    problems: tuple[str, ...] = ()
    tests: tuple[RequiredTest, ...] = ()

    @property
    def gpus_per_node(self) -> int:
        """GPUs that each node must have; 0 in a rehearsal and where they are simulated."""
        return 0 if self.device != "cuda" else self.expect.gpus_per_node if self.expect else self.ranks_per_node

    def criteria(self, file: str = "") -> tuple[str, ...]:
        """Return the required criteria, of one file or of all."""
        return tuple(dict.fromkeys(test.criterion for test in self.tests if f"{file}::" in test.nodeid or not file))


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the ranks of several nodes meet, as given to torchrun; why the name does not resolve; what its port is:
    "free", "in use", "refused" (by another host, where nothing listens yet) or "silent"."""

    option: str
    host: str
    port: int
    unknown: str | None = None
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class SlurmFacts:
    """``scontrol show config`` by key; ``gpus``: node -> its GPUs in GRES; ``why_not``: why Slurm cannot be queried."""

    config: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[str, int] = field(default_factory=dict)
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class KubernetesFacts:
    """kubectl's version ("": there is none), the nodes as it lists them, or why not, and what this user may not do."""

    version: str
    nodes: Sequence[Mapping[str, Any]] = ()
    denied: Sequence[str] = ()
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that was collected; None: not needed here.

    Attributes:
        host: this one.
        elsewhere: this host only starts the run; how to look at a node. Else "".
        unknown_names: name in the hosts file -> why it does not resolve.
        node: this host, where it is a node of the run; ``in_pod``: it is a pod.
    """

    host: str
    plan: Forecast
    limits: Thresholds
    elsewhere: str = ""
    rendezvous: Rendezvous | None = None
    unknown_names: Mapping[str, str] = field(default_factory=dict)
    node: NodeSnapshot | None = None
    in_pod: bool = False
    slurm: SlurmFacts | None = None
    kubernetes: KubernetesFacts | None = None

    def stop(self, code: str, found: str, allowed: str, remedy: str, *criteria: str) -> Obstacle:
        """Return what keeps these criteria, or all, from being satisfied."""
        return environment(code, self.host, found, allowed=allowed, remedy=remedy), criteria

    def note(self, code: str, found: str, allowed: str, remedy: str, *, host: str = "") -> Obstacle:
        """Return what is worth knowing."""
        return note(code, host or self.host, found, allowed=allowed, remedy=remedy), ()


def examine(facts: Facts) -> list[Obstacle]:
    """Apply every check."""
    return [found for check in CHECKS for found in check(facts)]


def _launch(facts: Facts) -> Iterator[Obstacle]:
    """Launches that cannot be accepted, whatever the hardware; inputs that are unusable; tests that are skipped."""
    plan, expect = facts.plan, facts.plan.expect
    if plan.device != "cuda":
        remedy = f"leave out --gpucluster-device={plan.device}, and `unset GPUCLUSTER_DEVICE GPUCLUSTER_SIMULATE`"
        found = f"{'a rehearsal on cpu' if plan.device == 'cpu' else 'a simulated cluster'} accepts nothing"
        yield facts.stop("launch.rehearsal", found, "--gpucluster-device=cuda", remedy)
    if plan.part:
        remedy = (
            "`gpucluster run -- acceptance/` without -k, -m, single tests, changed workloads, limits that only record"
        )
        yield facts.stop("launch.part", plan.part, "the whole suite and its limits, as shipped", remedy)
    if expect is not None and (plan.nodes, plan.ranks_per_node) != (expect.nodes, expect.gpus_per_node):
        found = f"{plural(plan.nodes, 'node')} with {plural(plan.ranks_per_node, 'rank')} each would start"
        remedy = f"`gpucluster run --nnodes={expect.nodes} --nproc-per-node={expect.gpus_per_node} ...`"
        yield facts.stop("launch.shape", found, f"--gpucluster-expect={expect}, a rank for each GPU", remedy)
    for problem in plan.problems:
        remedy = "`ls -ld` on that path as this user, on every node"
        yield facts.stop("input.unusable", problem, "what is given can be used on every node", remedy)
    skipped: dict[tuple[str, str], list[str]] = {}
    for test in plan.tests:
        if test.skipped:
            skipped.setdefault((test.skipped, test.remedy), []).append(test.criterion)
    for (why, remedy), criteria in skipped.items():
        yield facts.stop("test.skipped", why, "every required criterion runs", remedy, *criteria)


_LEAST_DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> the oldest branch of the driver that runs it. Source:
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html, table 1."""


def _gpus(facts: Facts) -> Iterator[Obstacle]:
    plan, count, expect = facts.plan, len(facts.plan.gpus), facts.plan.expect
    if plan.device != "cuda" or facts.elsewhere:
        return
    wanted, newest = read_version(plan.cuda or ""), read_version(plan.driver_cuda or "")
    index = "https://download.pytorch.org/whl/" + ("cu126" if newest[0] == 12 else "cu130")
    install = f"`python -m pip install --force-reinstall torch --index-url {index}`"
    if plan.cuda is None:
        found = f"torch {plan.torch} is built without CUDA"
        yield facts.stop("torch.cpu", found, "a build with CUDA that fits the driver", install)
    if plan.nvml:
        remedy = "`nvidia-smi`; in a container give it the GPUs (docker --gpus all)"
        yield facts.stop("driver.silent", plan.nvml, "a driver that answers", remedy)
    if plan.cuda and plan.driver_cuda:
        found = f"torch is built for CUDA {plan.cuda}, the driver {plan.driver} has CUDA {plan.driver_cuda}"
        allowed = f"a driver of branch {_LEAST_DRIVER.get(wanted[0], '?')} or newer"
        if wanted[0] > newest[0]:
            yield facts.stop("driver.old", found, allowed, f"a newer driver, or {install}")
        elif wanted > newest:
            yield facts.note("driver.older", found, f"{allowed}: minor versions are compatible", "`nvidia-smi`")
    if plan.cuda and not (plan.nvml or count) and wanted[0] <= newest[0]:
        remedy = "`nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES; systemctl status nvidia-fabricmanager`"
        yield facts.stop("gpu.none", "torch sees no GPU", "one for each rank", remedy)
    elif count and (count < plan.ranks_per_node or (count != plan.gpus_per_node and expect is None)):
        remedy = f"`nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES`, or --nproc-per-node={count}"
        allowed = f"{plan.ranks_per_node}, one for each rank{'' if expect else ', and none without'}"
        yield facts.stop("gpu.count", f"torch sees {plural(count, 'GPU')}", allowed, remedy)
    names, sku = list(dict.fromkeys(plan.gpus)), expect.sku if expect else None
    if len(names) > 1 or any(sku and not sku_matches(sku, name, plan.sku) for name in names):
        remedy = "`nvidia-smi -L`; correct --gpucluster-expect, or have the GPUs replaced"
        yield facts.stop("gpu.sku", f"the GPUs are {' and '.join(names)}", sku or "GPUs of one kind", remedy)
    elif names and plan.sku is None:
        remedy = "limits of your own (docs/thresholds.md), or --gpucluster-sku"
        yield facts.stop("gpu.unknown", f"no limits are known for {names[0]}", "a SKU of thresholds.yaml", remedy)


def _host(facts: Facts) -> Iterator[Obstacle]:
    """Judge the limits of this host as the suite does, and what a pod has of them."""
    node, plan = facts.node, facts.plan
    if node is None:
        return
    sku = plan.sku if plan.sku and plan.sku in facts.limits.skus else next(iter(facts.limits.skus))
    world_size = plan.nodes * plan.ranks_per_node
    values: list[Reading] = []
    try:
        values.extend(readings(node))  # those before an unknown one are kept
    except EnvironmentBroken as error:
        remedy = "`ls -l /proc/self/limits /proc/meminfo /sys/fs/cgroup`; start the container with them"
        yield facts.stop("host.unknown", str(error), "every limit of this host is known", remedy, "host.limits")
    for one in values:
        limit = facts.limits.limit(one.metric, sku=sku, world_size=world_size, nnodes=plan.nodes, labels={})
        judged = judge_value(
            *(one.metric, one.value),
            unit=one.unit,
            sku=sku,
            world_size=world_size,
            nnodes=plan.nodes,
            labels={},
            limits=facts.limits,
        )
        if judged.status not in ("passed", "recorded"):
            allowed = demand(limit, limit.unit) if limit else "a limit"
            yield facts.stop(one.metric, one.found, allowed, one.remedy, "host.limits")
    if facts.in_pod:
        yield from ((found, ("kubernetes",)) for found in pod_findings(node, nnodes=plan.nodes))


def _rendezvous(facts: Facts) -> Iterator[Obstacle]:
    place, plan = facts.rendezvous, facts.plan
    for name, why in facts.unknown_names.items():
        remedy = f"`getent ahosts {name}`; address= in the hosts file"
        yield facts.stop("name.unknown", f"{name}: {why}", "every name resolves here", remedy)
    if place is None and plan.nodes > 1 and not facts.elsewhere:
        remedy = "--master-addr=<address of the first node> --master-port=29500, the same on every node"
        found = f"{plan.nodes} nodes, and no address at which they meet"
        yield facts.stop("rendezvous.missing", found, "--master-addr or --rdzv-endpoint", remedy)
    if place is None:
        return
    where = f"{place.option}: {place.host}"
    if place.unknown is not None:
        remedy = f"`getent ahosts {place.host}`; give an address instead of the name"
        found = f"{where} does not resolve: {place.unknown}"
        yield facts.stop("rendezvous.unknown", found, "it resolves on every node", remedy)
    elif place.answer == "in use":
        remedy = f"`ss -ltnp 'sport = :{place.port}'` there; or another --master-port"
        yield facts.stop("rendezvous.port", f"{where}: port {place.port} is in use", "a free port", remedy)
    elif place.answer == "silent":
        remedy = f"`nc -vz {place.host} {place.port}`; open the ports between the nodes in the firewall"
        found = f"{where}: port {place.port} does not answer, not even by a refusal"
        yield facts.stop("rendezvous.silent", found, "all nodes reach each other", remedy)


_LEAST_KILL_WAIT, _MOST_SLURMD_TIMEOUT = 30, 300
"""Seconds: torchrun waits for 30 s after SIGTERM; Slurm's own default is 300 s (slurm.conf(5))."""


def _slurm(facts: Facts) -> Iterator[Obstacle]:
    slurm, plan = facts.slurm, facts.plan
    if slurm is None:
        return
    if slurm.why_not:
        remedy = "`scontrol ping`; in a container mount Slurm's commands (docs/slurm.md, Containers)"
        yield facts.stop("slurm.silent", slurm.why_not, "Slurm answers", remedy, *plan.criteria("test_scheduler.py"))
        return
    kill, lost = (re.match(r"\d+", slurm.config.get(name, "")) for name in ("KillWait", "SlurmdTimeout"))
    if kill is None or int(kill[0]) < _LEAST_KILL_WAIT:
        found = f"KillWait is {f'{kill[0]} s' if kill else 'unknown'}: a scancel may leave no reports"
        remedy = "`scancel --batch --signal=TERM $JOB`, not a plain scancel; or KillWait=30 in slurm.conf"
        yield facts.note("slurm.kill_wait", found, f"{_LEAST_KILL_WAIT} s or more", remedy)
    if lost is None or not 0 < int(lost[0]) <= _MOST_SLURMD_TIMEOUT:
        found = f"SlurmdTimeout is {f'{lost[0]} s (0: never)' if lost else 'unknown'}: Slurm notices a lost node late"
        remedy = "SlurmdTimeout=300 in slurm.conf; the run itself names a lost node after 30 s"
        yield facts.note("slurm.slurmd_timeout", found, f"1 to {_MOST_SLURMD_TIMEOUT} s", remedy)
    wanted = plan.gpus_per_node
    fitting = [node for node, gpus in slurm.gpus.items() if gpus >= wanted]
    if len(fitting) < plan.nodes:
        found = f"{plural(len(fitting), 'node')} of {len(slurm.gpus)} with {plural(wanted, 'GPU')} or more in GRES"
        remedy = "`sinfo -N -o '%N %G %T'`; --partition NAME; Gres=gpu:8 in slurm.conf (docs/slurm.md, Set up)"
        yield facts.stop("slurm.gres", found, plural(plan.nodes, "node"), remedy)


LEAST_KUBECTL = (1, 27)
"""The first with kustomize 5. Source: https://github.com/kubernetes-sigs/kustomize#kubectl-integration."""
_PRODUCT = "nvidia.com/gpu.product"
"""Label of GPU feature discovery. Source: https://github.com/NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery."""
_RDMA = re.compile(r"rdma|/efa$|roce|infiniband|/ib$|hca", re.IGNORECASE)
"""Names of RDMA resources, which a site chooses for its device plugin."""


def _kubernetes(facts: Facts) -> Iterator[Obstacle]:
    """kubectl, rights, and the nodes: device plugin, labels, taints, RDMA resource."""
    kube, plan = facts.kubernetes, facts.plan
    if kube is None:
        return
    if read_version(kube.version) < LEAST_KUBECTL:
        remedy = "`kubectl version --client`; a newer one of https://dl.k8s.io"
        found = f"kubectl is {kube.version}" if kube.version else "there is no kubectl"
        yield facts.stop("kubernetes.kubectl", found, "1.27 or newer, for kustomize 5", remedy)
    for right in kube.denied:
        remedy = f"`kubectl auth can-i {right}`; a role in this namespace, or another by --namespace"
        yield facts.stop("kubernetes.rights", f"this user may not {right}", "what docs/kubernetes.md does", remedy)
    if kube.why_not:
        remedy = "`kubectl get nodes`; KUBECONFIG, --namespace"
        yield facts.stop("kubernetes.nodes", kube.why_not, "the nodes are listed", remedy)
        return
    usable = []
    for node in kube.nodes:
        name = str(node["metadata"]["name"])
        if why := _why_unusable(node, plan):
            yield facts.note(*why, remedy=f"`kubectl describe node {name}`; docs/kubernetes.md", host=name)
        else:
            usable.append(name)
            if plan.nodes > 1 and plan.gpus_per_node and not any(map(_RDMA.search, _allocatable(node))):
                remedy = f"`kubectl describe node {name}`, Allocatable; the RDMA device plugin (docs/kubernetes.md)"
                found = "it has no RDMA resource: NCCL would take sockets"
                yield facts.note("kubernetes.rdma", found, "one, where nodes have InfiniBand", remedy, host=name)
    if len(usable) < plan.nodes:
        remedy = "the notes on nodes; `kubectl get nodes -o wide`; --selector LABELS"
        found = f"{len(usable)} usable of {plural(len(kube.nodes), 'node')}"
        yield facts.stop("kubernetes.nodes", found, f"{plan.nodes} or more", remedy)


def _why_unusable(node: Mapping[str, Any], plan: Forecast) -> tuple[str, str, str] | None:
    """Return why no pod of the run would start on a node, as code, found and allowed; None if one would."""
    if problem := node_problem(node):
        return "kubernetes.node", problem, "Ready, and not cordoned"
    gpus, wanted = _allocatable(node).get(GPU, "0"), plan.gpus_per_node
    if int(gpus) < wanted:
        return "kubernetes.gpus", f"{GPU} is {gpus}", f"{wanted}, from NVIDIA's device plugin"
    product = str((node["metadata"].get("labels") or {}).get(_PRODUCT, "")).replace("-", " ")
    sku = plan.expect.sku if plan.expect else None
    if wanted and product and sku and not sku_matches(sku, product):
        return "kubernetes.sku", f"its GPUs are {product} (label {_PRODUCT})", sku
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint.get("effect") in ("NoSchedule", "NoExecute") and taint.get("key") != GPU:
            found = f"taint {taint.get('key')}={taint.get('value', '')}:{taint['effect']}"
            return "kubernetes.taint", found, f"none but {GPU}, or a toleration in the overlay and sweep/pod.yaml"
    return None


def _allocatable(node: Mapping[str, Any]) -> Mapping[str, str]:
    found = (node.get("status") or {}).get("allocatable") or {}
    return {str(name): str(amount) for name, amount in found.items() if str(amount) != "0"}


def read_version(text: str) -> tuple[int, int]:
    """Read the first two numbers of a version; (0, 0) where there are none.

    >>> read_version("13.0"), read_version("v1.27.3-eks"), read_version("")
    ((13, 0), (1, 27), (0, 0))
    """
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _elsewhere(facts: Facts) -> Iterator[Obstacle]:
    if facts.elsewhere:
        found = "this host only starts the run: GPUs, driver, limits and files of the nodes were not looked at"
        yield facts.note("node.unseen", found, "each node is looked at", facts.elsewhere)


CHECKS = (_launch, _rendezvous, _gpus, _host, _slurm, _kubernetes, _elsewhere)
