"""The simulated device: healthy GPUs reach their limits, and each fault acts on what its GPU does."""

import math
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forked_ranks import on_ranks
from torch.nn.modules.module import _global_forward_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks

from pytest_gpucluster.agreement import hang_diagnosis
from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.benchmarks.burn_in import TimeSeries, burn_in
from pytest_gpucluster.benchmarks.collective_payload import COLLECTIVES, Payload
from pytest_gpucluster.benchmarks.hbm import measure_hbm
from pytest_gpucluster.benchmarks.host_link import measure_host_link
from pytest_gpucluster.benchmarks.matmul import measure_matmul, square_shape
from pytest_gpucluster.benchmarks.storage import bandwidth, consistency
from pytest_gpucluster.benchmarks.storage.shared_filesystem import small_files_per_second
from pytest_gpucluster.device import backends
from pytest_gpucluster.errors import WrongResult, connection_cut
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics.sampling import Sampling
from pytest_gpucluster.node import sysfs
from pytest_gpucluster.simulation import device
from pytest_gpucluster.simulation.cluster import load, shipped
from pytest_gpucluster.simulation.device import Exchange, Place, Simulated, World, calls, plant_in_training
from pytest_gpucluster.simulation.faults import parse
from pytest_gpucluster.simulation.nvml import Machine
from pytest_gpucluster.simulation.rates import Rates, conditions

CPU = torch.device("cpu")
SAMPLING = Sampling(warmup_seconds=1, window_seconds=2, longest_seconds=10, tolerance_ratio=0.01)
GROUP = SimpleNamespace(group_name="all")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Make a rank's world: GPU 3 of gpu-01, with these faults."""

    def make(*faults, name="2x8xH100"):
        described = load(name).with_faults([parse(fault) for fault in faults])
        found = World(described, Machine.of(tmp_path, described.hosts[-1], 3))
        found.places["all"] = tuple(Place(host, gpu) for host in described.hosts for gpu in range(8))
        monkeypatch.setitem(backends.BACKENDS, "cpu", lambda place: Simulated(place, found))
        return found

    return make


def tflops(dtype="bf16", n=8192):
    return measure_matmul(CPU, square_shape(n, dtype), dtype=dtype, sampling=SAMPLING).tflops


def hbm():
    return measure_hbm(CPU, "copy", payload_bytes=8 * 2**30, sampling=SAMPLING).bytes_per_second


def h2d():
    return measure_host_link(CPU, "h2d", payload_bytes=2**26, copies=32, sampling=SAMPLING).bytes_per_second


def step():
    by, begin = backends.accelerator(CPU), backends.accelerator(CPU).now()
    by.trained(1e15, GROUP)
    return 1 / (by.now() - begin)


def busbw(name="all_reduce", ranks=GROUP, **more):
    by, seconds = backends.accelerator(CPU), []
    for _ in range(200):
        begin = by.now()
        by.communicate(lambda: None, name, 10**9, ranks, **more)
        seconds.append(by.now() - begin)
    return seconds


@pytest.mark.parametrize("name", shipped())
def test_a_healthy_gpu_reaches_every_limit(name):
    described, limits, low = load(name), loader.load(), []
    for seed in range(20):
        rates = Rates(replace(described, seed=seed), limits)
        for metric, labels, ranks, count, n in conditions(described):
            judged = {**labels, "best_of": "4096, 8192, 16384"} if n else labels
            limit = limits.limit(metric, sku=described.sku, world_size=ranks, nnodes=count, labels=judged)
            sizes = (4096, 8192, 16384) if n else (0,)
            best = max(rates.of(metric, labels, world_size=ranks, nodes=count, n=each).value for each in sizes)
            if limit is not None and limit.min is not None and best * (1 - 3 * described.spread) < limit.min:
                low.append(f"seed {seed}: {metric} {labels}: {best:g} of {limit.min:g}")
    assert not low


def test_rows_set_a_rate_and_others_check_it():
    found = Rates(load("2x8xH100")).of("nccl.all_reduce.busbw", {"size": "1 GB"}, world_size=16, nodes=2)
    assert found.basis == "published"
    assert not {row.line for row in found.setting} & {row.line for row in found.checking}
    checked = sorted(row.value for row in found.checking)
    assert checked[0] * 0.9 < found.value < checked[-1] * 1.1
    assert Rates(load("2x8xB200")).of("hbm.write.bandwidth").basis == "floor"
    assert Rates(replace(load("2x8xH100"), rates={"hbm.copy.bandwidth": 3.0})).of("hbm.copy.bandwidth").value == 3.0


def test_what_a_device_asks_for_is_in_the_table_of_rates(world):
    found = world()
    for measured in (tflops, hbm, h2d, step, busbw):
        measured()
    known = {(each.metric, tuple(sorted(each.labels.items())), *each[2:]) for each in conditions(found.cluster)}
    assert 5 == len(found.rates._known.keys() & known) == len(found.rates._known)


@pytest.mark.parametrize(
    ("fault", "measured", "left"),
    [
        ("slow-gpu:gpu-01/3=20%", tflops, 0.8),
        ("slow-gpu:gpu-01/3", hbm, 0.9),
        ("slow-host:gpu-01", tflops, 0.85),
        ("half-rate", h2d, 0.5),
        ("power-cap:gpu-01", tflops, (500 / 700) ** 0.46),
        ("hbm:gpu-01/3", hbm, 0.8),
        ("pcie:gpu-01/3", h2d, 0.5),
        ("straggler:gpu-01/3", step, 0.7),
        ("straggler:gpu-00/1", step, 0.7),
        ("slow-gpu:gpu-01/2", tflops, 1.0),
        ("slow-gpu:gpu-00/3", hbm, 1.0),
        ("hbm:gpu-01/3", tflops, 1.0),
    ],
)
def test_a_fault_leaves_a_part_of_the_rates_of_its_gpu(world, fault, measured, left):
    world()
    healthy = measured()
    world(fault)
    found = measured()
    assert getattr(found, "median", found) == pytest.approx(left * getattr(healthy, "median", healthy), rel=0.02)


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("dead-rail:gpu-00/mlx5_5", 0.1),
        ("slow-rail:gpu-01/mlx5_0", 0.5),
        ("slow-gpu:gpu-00/0", 0.9),
        ("net-socket", 0.1),
        ("no-gdr:gpu-00", 0.5),
        ("nic-down:gpu-00", 0.5),
    ],
)
def test_the_slowest_part_of_a_group_decides(world, fault, left):
    world()
    healthy = sum(busbw())
    world(fault)
    assert sum(busbw()) == pytest.approx(healthy / left, rel=0.02)


@pytest.mark.parametrize(("port", "is_mine"), [("gpu-00/mlx5_5", False), ("gpu-01/mlx5_3", True)])
def test_a_port_that_flaps_is_slow_now_and_then_and_counts_lost_links(world, tmp_path, monkeypatch, port, is_mine):
    monkeypatch.setattr(sysfs, "ROOT", tmp_path)
    count = tmp_path / "sys/class/infiniband/mlx5_3/ports/1/counters/link_downed"
    count.parent.mkdir(parents=True)
    count.write_text("3\n")
    world(f"flapping-port:{port}")
    seconds = busbw()
    slow = sum(one > 2 * min(seconds) for one in seconds) / len(seconds)
    assert 0.02 < slow < 0.3
    assert (int(count.read_text()) > 3) == is_mine


def test_nvls_matters_within_a_node_only(world):
    found = world("nvls-off")
    found.places["all"] = found.places["all"][:8]
    slow = sum(busbw())
    found = world()
    found.places["all"] = found.places["all"][:8]
    assert sum(busbw()) == pytest.approx(0.78 * slow, rel=0.02)


def test_a_message_takes_the_rails_of_both_ends(world, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_group_rank", lambda group, rank: rank)
    world("dead-rail:gpu-00/mlx5_5")
    assert min(busbw("message", peer=5)) > 5 * max(busbw("message", peer=4))
    assert 38 < 1 / min(busbw("message", peer=4)) < 50  # GB/s of a card of 400 Gb/s
    assert 255 < 1 / min(busbw("message", peer=12)) < 450


def test_a_wrong_product_is_found(world):
    world("wrong-product:gpu-01/3")
    with pytest.raises(WrongResult, match="is wrong in 1 of"):
        tflops()
    world("wrong-product:gpu-01/2")
    assert not tflops().inconclusive


def test_a_wrong_addend_is_added_by_its_gpu_only(world):
    for fault, changed in (("wrong-reduce:gpu-01/3", 1), ("wrong-reduce:gpu-01/4", 0)):
        world(fault)
        sent = torch.zeros(10)
        backends.accelerator(CPU).communicate(lambda: None, "all_reduce", 40, GROUP, sent=sent)
        assert sent.count_nonzero() == changed


def test_slow_files_take_longer_to_read_and_to_write(world, tmp_path, monkeypatch):
    device.plant_in_files(world())
    assert (bandwidth.write_bytes, consistency.read_small) == (os.write, Path.read_bytes)
    for module, names in ((bandwidth, ("write_bytes", "read_into")), (consistency, ("write_small", "read_small"))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))  # so that it is put back
    device.plant_in_files(world("slow-files=0.02s"))
    assert small_files_per_second(tmp_path / "small", 4) < 25
    contents = bandwidth.Contents(0)
    assert bandwidth.write_file(tmp_path / "large", 2**20, contents) > 0.02
    assert bandwidth.read_file(tmp_path / "large", 2**20, contents, direct=False)[0] > 0.02


def test_a_gpu_that_gets_hot_slows_down_after_its_time_of_load(world, tmp_path):
    world("throttle:gpu-01/3=100s")
    series = TimeSeries(200, tmp_path / "series.csv")
    burn_in(CPU, series, n=16384, dtype="bf16", interval_seconds=5)
    rates = [point.tflops for point in series.points]
    assert rates[-1] == pytest.approx(0.6 * rates[0], rel=0.02)
    assert sum(rate > 0.9 * rates[0] for rate in rates) == pytest.approx(len(rates) / 2, abs=3)


@pytest.mark.parametrize("fault", ["xid79", "xid94", "xid119"])
def test_a_lost_gpu_fails_as_cuda_does(world, fault):
    world(f"{fault}:gpu-01/3")
    with pytest.raises(RuntimeError, match="CUDA error"):
        tflops()


def test_memory_and_identity_are_the_described_ones(world):
    world()
    by = backends.accelerator(CPU)
    free = by.free_bytes()
    by.communicate(lambda: None, "all_to_all", 10**9, GROUP)
    assert by.free_bytes() == free - 1_060_000_000 - 3_280_000_000
    by.left([GROUP])
    assert by.free_bytes() == free
    assert by.capability == (9, 0)
    assert by.total_bytes() == 85520809984
    assert "simulated NVIDIA H100" in by.kind


def trained(steps=1):
    """Train a small model; return the gradient of its embedding in the first step, and the losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
    optimizer, losses, first = torch.optim.SGD(model.parameters(), lr=0.1), [], None
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(torch.arange(16)), torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        first = model[0].weight.grad.clone() if first is None else first
        optimizer.step()
        losses.append(loss.item())
    return first, losses


@pytest.fixture
def hooks():
    yield
    for planted in (_global_forward_hooks, _global_optimizer_post_hooks):
        planted.clear()


def test_training_goes_wrong_where_it_is_planted(world, hooks):
    healthy, falling = trained(20)
    plant_in_training(world("wrong-gradient:gpu-01/2"))
    assert torch.equal(trained()[0], healthy)
    plant_in_training(world("wrong-gradient:gpu-01/3"))
    torch.testing.assert_close(trained()[0], 1.1 * healthy)
    with backends.accelerator(CPU).computed_by_host():
        assert torch.equal(trained()[0], healthy)
    plant_in_training(world("diverge"))
    assert falling[-1] < falling[0] < trained(20)[1][-1]


def test_time_goes_by_only_with_work(world):
    found = world()
    before = found.machine.now
    tflops()
    assert 3 < found.machine.now - before < 60
    assert math.isclose(found.machine.busy_seconds, found.machine.now, rel_tol=0.01)
    assert found.machine.is_loaded


def exchanged(rank, folder):
    """What each collective gives on this rank, simulated and by gloo; and the error once the first rank has ended."""
    described = load("1x8xH100")
    world = World(described, Machine.of(folder, described.hosts[0], rank))
    group, found = dist.group.WORLD, {}
    Simulated(CPU, world).joined(group)
    for name, call in calls(world).items():
        results = []
        for how in (call, collectives.CALLS[name]):
            payload = Payload(group, CPU, 4800, "fp32", name)
            payload.fill()
            how(payload.sent, payload.received, group)
            results.append(payload.received.tolist())
            assert payload.defect() is None
        found[name] = results[0] == results[1]
    exchange = world.exchanges.pop(group.group_name)
    if rank:
        with pytest.raises(RuntimeError) as error:
            exchange.rows(torch.ones(3))
        found["cut"] = connection_cut(error.value)
    return found


def test_ranks_exchange_the_same_as_by_gloo_and_do_not_wait_for_one_that_has_ended(tmp_path):
    first, *others = on_ranks(3, exchanged, tmp_path)
    assert set(first) == {*COLLECTIVES}
    assert all(map(all, (each.values() for each in (first, *others))))
    assert all(each["cut"] for each in others)


def test_a_rank_in_an_exchange_is_seen_as_waiting_so_that_it_is_released():
    mine, peer = socket.socketpair()
    exchange = Exchange.__new__(Exchange)
    exchange._count, exchange._rank, exchange._peers = 2, 1, [mine]
    seen = []

    def answer():
        peer.recv(8)  # from here on the main thread waits
        for _ in range(1000):
            seen.extend([] if seen else hang_diagnosis.unrecorded_operations())
            time.sleep(0 if seen else 0.01)
        peer.sendall(bytes(16))

    before = hang_diagnosis.unrecorded_operations()
    with mine, peer:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert exchange.rows(torch.zeros(1, dtype=torch.float64)).tolist() == [[0.0], [0.0]]
        thread.join()
    assert (before, [(one.name, one.pending) for one in seen]) == ([], [("rows", True)])
