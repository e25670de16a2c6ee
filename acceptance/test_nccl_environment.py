"""Is NCCL left to choose, or does a variable that somebody has set once choose for it?"""

import json
import socket

import pytest

from pytest_gpucluster import infiniband, peer_memory
from pytest_gpucluster.fabric_exchange import settings_of_all
from pytest_gpucluster.hardware import promise_of
from pytest_gpucluster.nccl_findings import judge
from pytest_gpucluster.nccl_values import Place
from pytest_gpucluster.surroundings.notice import require_nothing


@pytest.mark.criterion("nccl.environment")
def test_nccl_environment(artifacts, board, cluster, fabric_sources, gpu, inventory, measure, record_property):
    """Accepted: no variable of NCCL, UCX or CUDA is set that makes this run slow, wrong or different between its ranks.

    Looked at: every NCCL_* and UCX_* variable and a few more, in the environment and in NCCL's own files
    (``NCCL_CONF_FILE`` or ``~/.nccl.conf``, ``/etc/nccl.conf``). All of them are on record with their origin. What
    surely hurts here is an error; what helps in some places and hurts in others, and what is meant for debugging only,
    is noted. What this suite has set itself is left out.

    Why: NCCL_P2P_DISABLE=1 or NCCL_ALGO=Ring, once set to look for a bug, costs half of the bandwidth for years, and no
    message ever says so.

    When it fails: unset what is named, where its origin says, on the named hosts. docs/fabric.md lists what each
    variable does. It is an error and no verdict on the hardware.

    On cpu nothing uses NCCL; the variables are looked at all the same.
    """
    mine = fabric_sources.settings()
    promise = promise_of(gpu.sku)
    place = Place(
        nnodes=cluster.nnodes,
        local_ranks=cluster.local_world_size,
        nvlink=promise is not None and bool(promise.nvlinks),
        nvls=promise is not None and promise.nvswitch and promise.fabric_state,
        adapters=infiniband.read(fabric_sources.sysfs),
        peermem=bool(peer_memory.read(fabric_sources.sysfs, fabric_sources.proc).module),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )
    for setting in mine:
        record_property(f"environment.{setting.name}", f"{setting.value} ({setting.origin})")
    findings = [found for setting in mine if (found := judge(setting, place, cluster.hostname)) is not None]
    everyone = settings_of_all(board, mine, inventory, cluster.rank)
    if everyone is not None:
        (artifacts / "environment.json").write_text(json.dumps(everyone.distinct(), indent=1), encoding="utf-8")
        findings += everyone.findings(inventory)
    hurting = sum(found.kind != "note" for found in findings)
    measure("nccl.environment.findings", hurting, unit="findings", record_only=True)
    require_nothing(findings)
