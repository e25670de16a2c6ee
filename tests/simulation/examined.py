"""All checks of a node, applied to every host of a simulated cluster."""

import re

from pytest_gpucluster.agreement import preflight
from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.metrics.datasheets import promise_of
from pytest_gpucluster.node import host, host_checks, inventory, nvml
from pytest_gpucluster.node.fabric import nccl_advice, nccl_facts, nccl_rules, ports
from pytest_gpucluster.node.health import checks, counters, snapshot
from pytest_gpucluster.simulation import node
from pytest_gpucluster.simulation.nvml import gpus_of

INPUTS = {"values": {}, "problems": []}
USUAL = {"governor": "performance", "numa_balancing": "any", "iommu": "passthrough", "acs": "off"}
WORK_SECONDS = 700
"""Longer than a hot GPU works at its full rate."""


class Examined:
    """What the checks find on a cluster, with ranks whose pids are 1000 and on.

    Attributes:
        found: (code, place) of every finding that decides; a place is HOST/GPU, HOST/PORT or HOST.
        notes: codes of the others.
        inventory: of all ranks.
        problems: of the preflight.
    """

    def __init__(self, cluster, folder, monkeypatch):
        self.cluster, self._folder, self._patch = cluster, folder, monkeypatch
        self.found, self.notes, self.inventory = set(), set(), []
        ranks = [(host, gpu) for host in cluster.hosts for gpu in range(cluster.gpus_per_node)]
        for rank, (name, gpu) in enumerate(ranks):
            self.enter(name)
            gpus_of(cluster, name, folder)[gpu].machine.take(1000 + rank)
            facts = self._facts(rank, name, gpu)
            self.inventory.append({**inventory.identify(facts, "cuda"), "pid": 1000 + rank, "inputs": INPUTS})
        self.problems = [
            problem.text
            for problem in preflight.problems(
                {who["rank"]: who for who in self.inventory},
                self._facts(0, cluster.hosts[0], 0),
                expectation=preflight.Expectation(nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node),
                device="cuda",
            )
        ]
        self._compare_gpus()
        self._compare_ports()
        for name in cluster.hosts:
            self.enter(name)
            self._examine_host(name)
            self._examine_gpus(name)

    def enter(self, name):
        """Make this process one of a host."""
        for (module, variable), value in node.seams(self.cluster, name, self._folder).items():
            self._patch.setattr(module, variable, value)

    def _facts(self, rank, name, gpu):
        return RankFacts(
            rank=rank,
            world_size=len(self.cluster.hosts) * self.cluster.gpus_per_node,
            local_rank=gpu,
            local_world_size=self.cluster.gpus_per_node,
            node_rank=self.cluster.hosts.index(name),
            nnodes=self.cluster.nodes,
            hostname=name,
            launcher="torchrun",
            run_id="1",
        )

    def _add(self, findings):
        for one in findings:
            place = one.gpu.host if one.gpu.index is None else f"{one.gpu.host}/{one.gpu.index}"
            port = re.search(r"\bmlx5_\d+", one.found)
            if port and one.gpu.index is None:
                place = f"{place}/{port[0]}"
            if one.kind == "note":
                self.notes.add((one.code, place))
            else:
                self.found.add((one.code, place))

    def _compare_gpus(self):
        try:
            snapshot.require_uniform(self.inventory)
        except (HardwareFault, EnvironmentBroken) as error:
            places = re.findall(r"GPU (\d+) \(.* on (\S+)", str(error))
            self.found |= {("fleet", f"{host}/{gpu}") for gpu, host in places}

    def _compare_ports(self):
        nodes = {}
        for number, name in enumerate(self.cluster.hosts):
            self.enter(name)
            nodes[number] = ports.read_ports(ports.FabricSources(), host=name, hcas=[""], gid_index=None)
        for findings in ports.examine_ports(nodes, expected=self.cluster.nodes > 1).of_node.values():
            self._add(findings)

    def _examine_host(self, name):
        me = next(who for who in self.inventory if who["host"] == name)
        facts = host.collect_node(self.inventory, rank=me["rank"])
        self._add(host_checks.examine_host(facts, USUAL))
        self.readings = {reading.metric: reading.value for reading in host_checks.readings(facts)}
        for who in self.inventory:
            if who["host"] == name:
                place = host_checks.place_of_gpu(who["gpu"]["pci_bus_id"])
                self._add(host_checks.examine_affinity(who, host_checks.own_place(), place))
        fabric = ports.FabricSources(environ={}, home=lambda: None)
        gpus = nccl_facts.gpus_of_ranks(self.inventory, me["node_rank"], promise_of(self.cluster.sku))
        sources = nccl_facts.Sources(fabric=fabric, gpus=lambda: gpus, nccl=lambda tree: self.cluster.nccl.version)
        self.nccl = nccl_facts.collect_facts(sources)
        self._add(nccl_advice.advise(self.nccl).notes(name))
        self._add(filter(None, (nccl_rules.judge_environment(one, self.nccl) for one in fabric.settings())))

    def _examine_gpus(self, name):
        opened, gpus = nvml.open_nvml(), gpus_of(self.cluster, name, self._folder)
        ranks = [who["rank"] for who in self.inventory if who["host"] == name]
        sources = [counters.Sources.of(self.inventory, rank=rank, nvml=opened) for rank in ranks]
        before = [counters.read(each) for each in sources]
        for gpu in gpus:
            gpu.machine.work(WORK_SECONDS)
        for gpu, rank in zip(gpus, ranks, strict=True):

            def load(sample, gpu=gpu):
                gpu.machine.work(1)
                sample()

            taken = snapshot.collect(
                snapshot.Sources(nvml=opened),
                self.inventory,
                rank=rank,
                sku=self.cluster.sku,
                mig="off",
                load=load,
                held_bytes=0,
            )
            self._add(checks.examine_gpu(taken))
        for each, read in zip(sources, before, strict=True):
            self._add(counters.changes(read, counters.read(each)).faults)
