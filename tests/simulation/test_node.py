"""A simulated node under the unmodified checks: a healthy one passes, and each fault is found where it is."""

import threading
import time
from dataclasses import replace

import pytest
from examined import Examined

from pytest_gpucluster.node import kernel_log, name_resolution, network, nvml
from pytest_gpucluster.node.fabric.nccl_advice import find_fabric
from pytest_gpucluster.node.health import counters, telemetry
from pytest_gpucluster.node.nvml import read_values
from pytest_gpucluster.simulation import cluster, faults, node
from pytest_gpucluster.simulation.nvml import SimulatedGpu, gpus_of


@pytest.fixture(autouse=True)
def load_lasts(monkeypatch):
    """Let a GPU count as loaded for longer than any test takes on a slow machine."""
    monkeypatch.setattr("pytest_gpucluster.simulation.nvml._LOADED_SECONDS", 600.0)


@pytest.fixture
def examine(tmp_path, monkeypatch):
    return lambda found: Examined(found, tmp_path, monkeypatch)


def with_fault(text, like="2x4xH100"):
    return cluster.load(like).with_faults([faults.parse(text)] if text else [])


@pytest.mark.parametrize("name", cluster.shipped())
def test_nothing_is_found_on_a_healthy_cluster(name, examine):
    full = cluster.load(name)
    found = examine(replace(full, nodes=min(2, full.nodes)))
    assert found.found == set()
    assert found.problems == []
    assert {code for code, _ in found.notes} == {"affinity"}, "ranks are not bound, as torchrun leaves them"
    assert found.readings["host.memlock"] == 100
    assert found.readings["host.cpus"] >= 4
    assert found.readings["host.shm"] >= 1
    fabric = find_fabric(found.nccl)
    assert (fabric.kind, len(fabric.cards)) == ("InfiniBand", full.node.ports)
    assert {card.distance for card in fabric.cards} == {"PIX"}


def test_a_node_with_ethernet_ports_is_healthy(examine):
    found = cluster.load("2x4xH100")
    found = examine(replace(found, node=replace(found.node, link_layer="Ethernet", numa_nodes=1)))
    assert found.found == set()
    assert find_fabric(found.nccl).kind == "RoCE"


@pytest.mark.parametrize(
    ("fault", "codes", "place"),
    [
        ("throttle:gpu-01/3", "throttle temperature", "gpu-01/3"),
        ("ecc:gpu-01/3", "ecc_uncorrected xid_48", "gpu-01/3"),
        ("ecc-corrected:gpu-01/3", "", ""),
        ("row-remap:gpu-01/3", "row_remap_failed xid_64", "gpu-01/3"),
        ("row-remapped:gpu-01/3", "", ""),
        ("xid79:gpu-01/3", "gpu_lost gpu_not_listed xid_79 xid_154", "gpu-01/3"),
        ("xid94:gpu-01/3", "ecc_uncorrected row_remap_pending xid_154 recovery_action", "gpu-01/3"),
        ("xid119:gpu-01/3", "gpu_lost xid_119 xid_154", "gpu-01/3"),
        ("pcie:gpu-01/3", "pcie_width", "gpu-01/3"),
        ("nvlink-down:gpu-01/3", "nvlink_down", "gpu-01/3"),
        ("stale-process:gpu-01/3", "memory_taken", "gpu-01/3"),
        ("mig:gpu-01/3", "mig fleet", "gpu-01/3"),
        ("vbios:gpu-01/3", "fleet", "gpu-01/3"),
        ("nic-down:gpu-01", "port_state", "gpu-01/mlx5_7"),
        ("no-gdr:gpu-01", "peer_memory", "gpu-01"),
    ],
)
def test_a_fault_is_found_where_it_is_and_nobody_else_is_accused(fault, codes, place, examine):
    assert examine(with_fault(fault)).found == {(code, place) for code in codes.split()}


def test_a_fatal_nvlink_error_is_one_of_nvlink_5(examine):
    codes = ("xid_149", "xid_154", "nvlink_down", "recovery_action")
    assert examine(with_fault("nvlink5-fatal:gpu-01/3", "2x4xB200")).found == {(code, "gpu-01/3") for code in codes}


def test_a_power_cap_is_found_on_all_gpus_of_the_host(examine):
    capped = {("power_limit", f"gpu-01/{gpu}") for gpu in range(4)}
    # Of two limits that are equally frequent, none is the usual one.
    differ = {("fleet", f"gpu-0{host}/{gpu}") for host in range(2) for gpu in range(4)}
    assert examine(with_fault("power-cap:gpu-01")).found == capped | differ


@pytest.mark.parametrize("fault", ["dead-rail", "flapping-port"])
def test_a_faulty_ports_counters_are_noted(fault, examine):
    found = examine(with_fault(f"{fault}:gpu-01/mlx5_3"))
    assert found.found == set()
    assert ("port_errors", "gpu-01/mlx5_3") in found.notes


def test_a_clock_that_is_ahead(tmp_path, monkeypatch):
    found = with_fault("clock-skew:gpu-01=5s")
    ahead = {}
    for host in found.hosts:
        for (module, name), value in node.seams(found, host, tmp_path).items():
            monkeypatch.setattr(module, name, value)
        ahead[host] = network.NOW() - time.time()
    assert ahead == pytest.approx({"gpu-00": 0, "gpu-01": 5}, abs=0.5)


@pytest.fixture
def on(tmp_path, monkeypatch):
    """Return the function that makes this process one of gpu-01, and returns its GPUs."""

    def enter(fault=""):
        found = with_fault(fault)
        for (module, name), value in node.seams(found, "gpu-01", tmp_path).items():
            monkeypatch.setattr(module, name, value)
        return gpus_of(found, "gpu-01", tmp_path)

    return enter


def test_the_hosts_names_resolve(on):
    on()
    questions = [name_resolution.Question(kind="forward", node=0, name="gpu-00")]
    assert name_resolution.look_up(questions, deadline_seconds=30)[0].error == ""


def test_load_memory_and_processes_are_shown(on):
    gpu, other = on()[:2]
    opened = nvml.open_nvml()
    idle = read_values(opened, gpu.uuid)
    assert list(idle.missing) == ["pages.pending"]
    assert (idle.get("processes"), idle.get("memory.used"), idle.get("throttle.reasons")) == ((), 0, ("gpu_idle",))
    gpu.machine.take(4711)
    gpu.machine.group_bytes = 6 * 10**8
    gpu.machine.work(1)
    busy = read_values(opened, gpu.uuid)
    assert busy.get("processes") == ((4711, 1_100_000_000),)
    assert busy.get("memory.used") + busy.get("memory.free") + busy.get("memory.reserved") == busy.get("memory.total")
    assert (busy.get("power.draw"), busy.get("utilization.gpu"), busy.get("clock.sm")) == (690.0, 100, 1980)
    assert read_values(opened, other.uuid).get("utilization.gpu") == 0


def test_a_gpu_is_the_same_in_every_run_and_another_one_elsewhere(on, tmp_path):
    gpus = on()
    again = [SimulatedGpu(with_fault(""), gpu.machine) for gpu in gpus]
    assert [gpu.values()["serial"] for gpu in gpus] == [gpu.values()["serial"] for gpu in again]
    there = gpus_of(with_fault(""), "gpu-00", tmp_path)
    assert len({gpu.uuid for gpu in (*gpus, *again, *there)}) == 8


def test_the_kernel_log_grows_by_what_appears_under_load(on):
    found = [faults.parse("xid94:gpu-01/2"), faults.parse("xid119:gpu-01/0")]
    gpus = [SimulatedGpu(gpu.cluster.with_faults(found), gpu.machine) for gpu in on()]
    numbers = []
    for index in (2, 0):
        gpus[index].machine.work(2)
        numbers.append([record.split(b",")[1] for record in node.kernel_records(gpus)])
    assert set(numbers[0]) < set(numbers[1]), "a record keeps its number"
    assert kernel_log.read().lines[0].startswith("Linux version")


def test_corrected_errors_are_counted_and_no_fault(on):
    gpu = on("ecc-corrected:gpu-01/1")[1]
    sources = counters.Sources(gpu=counters.Identity(host="gpu-01", uuid=gpu.uuid), nvml=nvml.open_nvml())
    before = counters.read(sources)
    gpu.machine.work(2)
    changes = counters.changes(before, counters.read(sources))
    assert (changes.changed, changes.faults) == ({"ecc.corrected.volatile": 7}, [])


def test_the_sampler_of_the_node_reads_the_simulated_gpus(on):
    gpu = on("power-cap:gpu-01=400W")[1]
    sampler, is_over = telemetry.start_sampler(), threading.Event()

    def work():
        while not is_over.wait(0.05):
            gpu.machine.work(1)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        link = telemetry.Link(sampler.address, gpu.uuid, 0.01, answer_seconds=30)
        with link.window() as window:
            pass
        link.close()
    finally:
        is_over.set()
        worker.join()
        sampler.close()
    summary = window.summary()
    assert summary["not_available"] == {}
    assert summary["power_watts"][2] == 396
    assert summary["throttle"] == ["sw_power_cap"]
