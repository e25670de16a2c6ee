from __future__ import annotations

from counted import PCI, UUID, XID_79, nvml, sources
from fake_nvml import FakeNvml

from pytest_gpucluster.metrics.finding import Identity
from pytest_gpucluster.node import kernel_log
from pytest_gpucluster.node.health import counters
from pytest_gpucluster.node.health.counters import QUERIES, Sources
from pytest_gpucluster.node.infiniband import Adapters
from pytest_gpucluster.node.kernel_log import KernelLog
from pytest_gpucluster.node.nvml import NotAvailable


def test_flags_links_and_counts_become_numbers_by_name() -> None:
    planted = {"rows.pending": True, "nvlink.errors": {"replay": {0: 0, 17: 3}}, "nvlink.up": {0: True, 1: False}}
    taken = counters.read(sources(nvml=nvml(**planted)))
    assert taken.values["rows.pending"] == 1
    assert taken.values["nvlink.replay[17]"] == 3
    assert (taken.values["nvlink.up[0]"], taken.values["nvlink.up[1]"]) == (1, 0)
    assert taken.values["ecc.uncorrected.volatile"] == 0
    assert taken.values["pcie.replays"] == 0
    assert set(taken.missing) == {"pages.pending", "infiniband"}, "an H100 has no retired pages"


def test_lines_that_are_alike_are_different_xids() -> None:
    taken = counters.read(sources())
    assert taken.log is not None
    assert [(xid.pci, xid.code) for xid in taken.log.xids.values()] == [("0000:3b:00.0", 79)] * 2
    log = KernelLog(lines=(XID_79 * 2,), source="/dev/kmsg", numbers=(5,))
    taken = counters.read(sources(kernel_log=lambda: log))
    assert taken.log is not None
    assert list(taken.log.xids) == ["5 #1", "5 #2"], "two on one line"
    log = KernelLog(lines=("a", XID_79, "b"), source="/dev/kmsg", numbers=(7, 8, 9))
    taken = counters.read(sources(kernel_log=lambda: log))
    assert taken.log is not None
    assert (list(taken.log.xids), taken.log.numbers) == (["8 #1"], (7, 9)), "where the kernel numbers its records"


def test_a_rank_that_is_not_the_first_of_its_node_looks_at_its_gpu_only() -> None:
    def not_read() -> object:
        raise AssertionError("asked")

    taken = counters.read(sources(of_node=False, kernel_log=not_read, adapters=not_read))
    assert taken.log is None
    assert set(taken.missing) == {"pages.pending"}
    # A rehearsal.
    taken = counters.read(sources(gpu=Identity(host="gpu-07"), nvml=None, kernel_log=not_read))
    assert (dict(taken.values), dict(taken.missing)) == ({}, {"infiniband": "none here"})
    made = Sources.of([{**who(0), "gpu": None}], rank=0)
    assert (made.has_gpu, dict(made.gpus_of_node)) == (False, {})


def test_what_cannot_be_read_is_missing_by_name_and_the_rest_is_there() -> None:
    log = KernelLog(why_not="dmesg: refused")
    taken = counters.read(sources(nvml=nvml(**{"ecc.uncorrected.volatile": NotAvailable("ask root", "no permission")}),
                                  kernel_log=lambda: log))  # fmt: skip
    assert taken.missing["ecc.uncorrected.volatile"] == "ask root"
    assert taken.missing["xid"] == "dmesg: refused"
    assert taken.values["rows.failed"] == 0
    assert taken.lost == ""
    taken = counters.read(sources(nvml=None, why_no_nvml="no driver library"))
    assert {name: taken.missing[name] for name in QUERIES} == dict.fromkeys(QUERIES, "no driver library")
    taken = counters.read(sources(nvml=FakeNvml({UUID: {}}, silent=[UUID])))
    assert "lost" in taken.lost
    assert set(QUERIES) <= set(taken.missing)


def who(rank: int, node: int = 0, local_rank: int = 0, pci: str | None = PCI) -> dict[str, object]:
    gpu = {"index": local_rank, "uuid": f"GPU-{rank}", "serial": "1", "pci_bus_id": pci}
    return {"rank": rank, "host": f"gpu-{node}", "node_rank": node, "local_rank": local_rank, "gpu": gpu}


def test_a_rank_knows_the_gpus_of_its_own_node_by_their_address() -> None:
    inventory = [
        who(0),
        who(1, local_rank=1, pci="00000000:5E:00.0"),
        who(2, node=1),
        who(3, node=1, local_rank=1, pci=None),
    ]
    first = Sources.of(inventory, rank=0, nvml=nvml())
    assert {address: gpu.uuid for address, gpu in first.gpus_of_node.items()} == {
        "0000:3b:00.0": "GPU-0",
        "0000:5e:00.0": "GPU-1",
    }
    assert (first.of_node, first.has_gpu, first.gpu.uuid) == (True, True, "GPU-0")
    assert isinstance(first.kernel_log, kernel_log.Reader)
    second = Sources.of(inventory, rank=3, adapters=lambda: Adapters(why_not="none"))
    assert (second.of_node, second.gpu.host, second.nvml) == (False, "gpu-1", None)
    assert second.adapters().why_not == "none"
    assert {gpu.uuid for gpu in second.gpus_of_node.values()} == {"GPU-2"}
