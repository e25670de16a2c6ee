"""Does any environment variable override a choice of NCCL's for the worse?"""

import dataclasses
import json

import pytest

from pytest_gpucluster.metrics.datasheets import promise_of
from pytest_gpucluster.metrics.finding import require_nothing
from pytest_gpucluster.node.fabric.nccl_advice import advise
from pytest_gpucluster.node.fabric.nccl_facts import Sources, collect_facts, gpus_of_ranks
from pytest_gpucluster.node.fabric.nccl_rules import judge_environment
from pytest_gpucluster.node.fabric.port_exchange import settings_of_all


@pytest.mark.first(4)
@pytest.mark.criterion("nccl.environment")
def test_nccl_environment(artifacts, board, cluster, fabric_sources, gpu, inventory, measure, record_property):
    """Accepted: no variable of NCCL, UCX or CUDA is set that makes this run slow, wrong or different between its ranks.

    Checked: every NCCL_* and UCX_* variable and a few more, in the environment and in NCCL's own files
    (``NCCL_CONF_FILE`` or ``~/.nccl.conf``, ``/etc/nccl.conf``). All of them are recorded with their origin. What
    surely hurts here is an error; what helps in some places and hurts in others, and what is meant for debugging only,
    is noted. What this suite has set itself is left out.

    Recorded as well is the advice of ``gpucluster node nccl-env`` for this node: its fabric, the variables that it
    needs and why. One that is not set, or set otherwise, is noted and fails nothing: the collectives measure its
    cost.

    Why: NCCL_P2P_DISABLE=1 or NCCL_ALGO=Ring, once set to look for a bug, costs half of the bandwidth for years, and no
    message reports it.

    When it fails: unset what is named, where its origin says, on the named hosts. What each variable does is in
    docs/reference/reference.md. It is an error, no verdict on the hardware.

    On cpu nothing uses NCCL; the variables are checked all the same.
    """
    mine = fabric_sources.settings()
    node = Sources(
        fabric=fabric_sources,
        hostname=lambda: cluster.hostname,
        gpus=lambda: gpus_of_ranks(inventory, cluster.node_rank, promise_of(gpu.sku)),
        nccl=lambda tree: inventory[cluster.rank]["versions"]["nccl"],
    )
    facts = dataclasses.replace(collect_facts(node), nnodes=cluster.nnodes, local_ranks=cluster.local_world_size)
    for setting in mine:
        record_property(f"environment.{setting.name}", f"{setting.value} ({setting.origin})")
    findings = [finding for setting in mine if (finding := judge_environment(setting, facts)) is not None]
    of_all = settings_of_all(board, mine, inventory, cluster.rank)
    if of_all is not None:
        (artifacts / "environment.json").write_text(json.dumps(of_all.distinct(), indent=1), encoding="utf-8")
        findings += of_all.findings
    advice = advise(facts)
    for name, text in advice.properties().items():
        record_property(name, text)
    findings += advice.notes(cluster.hostname)
    hurting = sum(finding.kind != "note" for finding in findings)
    measure("nccl.environment.findings", hurting, unit="findings", record_only=True)
    require_nothing(findings)
