"""What only a GPU can show: its clock, its arithmetic, its memory, NVML, NCCL, and the suite itself.

Where there is no GPU each test is skipped, and counted at the end of the run. No rate is compared with a limit: the
acceptance suite does that.
"""

import os
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torchrun

from pytest_gpucluster.benchmarks import dtypes
from pytest_gpucluster.benchmarks.fingerprint import take_fingerprint
from pytest_gpucluster.benchmarks.hbm import measure_hbm
from pytest_gpucluster.benchmarks.host_link import measure_host_link
from pytest_gpucluster.benchmarks.matmul import measure_matmul, square_shape
from pytest_gpucluster.device.backends import Cuda
from pytest_gpucluster.device.clock import EventClock
from pytest_gpucluster.device.environment import VARIABLES, prepare
from pytest_gpucluster.device.process_group import NcclReleaser, init_group
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.launch.launchers import detect
from pytest_gpucluster.metrics.sampling import Sampling
from pytest_gpucluster.node import inventory

pytestmark = pytest.mark.cuda
GPU = torch.device("cuda", 0)
QUICK = Sampling(warmup_seconds=0.1, window_seconds=0.3, longest_seconds=3.0, tolerance_ratio=0.5)
MiB = 2**20


@pytest.fixture(autouse=True, scope="module")
def _environment():
    """Give the libraries what the plugin gives them, before the first product and the first group."""
    with pytest.MonkeyPatch.context() as own:
        for name in os.environ.keys() & VARIABLES.keys():
            own.delenv(name)
        given = {}
        prepare(given)
        for name, value in given.items():
            own.setenv(name, value)
        yield


def test_the_clock_times_the_device_and_the_host_does_not_wait_for_it():
    clock = EventClock(GPU)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for cycles in (2_000_000, 20_000_000, 200_000_000):
        with clock.region():
            torch.cuda._sleep(cycles)
    enqueued = time.perf_counter() - begin
    short, middle, long = clock.read()
    assert 5 < middle / short < 20
    assert 5 < long / middle < 20
    assert enqueued < long


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "fp32", "fp8"])
def test_products_of_each_dtype_are_measured_and_verified(dtype):
    if dtype == "fp8" and torch.cuda.get_device_capability(GPU) < dtypes.CAPABILITY:
        with pytest.raises(EnvironmentBroken, match="fp8"):
            measure_matmul(GPU, square_shape(2048, dtype), dtype=dtype, sampling=QUICK)
        return
    result = measure_matmul(GPU, square_shape(2048, dtype), dtype=dtype, sampling=QUICK)
    assert result.tflops.median > 0


def multiplying(product):
    return patch.object(Cuda, "product", lambda by, **of: product)


def test_tf32_is_not_taken_for_fp32():
    def in_tf32(a, b, out):
        torch.mm((a.view(torch.int32) & ~0x1FFF).view(torch.float32), b, out=out)

    with pytest.raises(WrongResult), multiplying(in_tf32):
        measure_matmul(GPU, square_shape(1024, "fp32"), dtype="fp32", sampling=QUICK)


def test_one_wrong_element_of_a_product_is_found():
    calls = []

    def wrong_later(a, b, out):
        torch.mm(a, b, out=out)
        calls.append(1)
        if len(calls) == 20:
            out.view(torch.int16)[7, 11] ^= 1

    with pytest.raises(WrongResult, match=r"cuda:0.* n=1024"), multiplying(wrong_later):
        measure_matmul(GPU, square_shape(1024, "bf16"), dtype="bf16", sampling=QUICK)


@pytest.mark.parametrize("kind", ["copy", "read", "write"])
def test_passes_over_memory_are_measured_and_verified(kind):
    result = measure_hbm(GPU, kind, payload_bytes=256 * MiB, sampling=QUICK)
    assert result.bytes_per_second.median > 0


@pytest.mark.parametrize("way", ["h2d", "d2h", "both"])
def test_copies_over_the_host_link_are_measured_and_verified(way):
    result = measure_host_link(GPU, way, payload_bytes=16 * MiB, copies=4, sampling=QUICK)
    assert result.bytes_per_second.median > 0


def test_a_gpu_computes_the_same_bits_again():
    found = take_fingerprint(GPU, n=1024, repeats=3)
    assert found.changed == {}
    assert found == take_fingerprint(GPU, n=1024, repeats=3)


def test_nvml_knows_the_gpu_that_torch_computes_on():
    who = inventory.identify(detect({}, "this-host"), "cuda")
    assert who["nvml"] == ""
    assert who["gpu"]["name"] == torch.cuda.get_device_name(GPU)
    assert who["gpu"]["uuid"].endswith(str(torch.cuda.get_device_properties(GPU).uuid))
    assert who["visible_gpus"] <= who["node_gpus"]
    assert who["versions"]["driver"]


def test_a_group_of_nccl_sums_and_can_be_aborted():
    init_group(GPU, store=dist.HashStore(), rank=0, world_size=1)
    value = torch.full((1024,), 3.0, device=GPU)
    dist.all_reduce(value)
    assert value.unique().tolist() == [3.0]
    NcclReleaser().release()
    assert not dist.is_initialized()


def test_the_suite_measures_on_this_gpu(tmp_path):
    acceptance = torchrun.HERE.parent / "acceptance"
    options = [str(acceptance), "-k", "matmul or hbm or inventory or gpu_health", "-p", "no:cacheprovider"]
    torchrun.write_suite(tmp_path, {})
    run = torchrun.torchrun(tmp_path, None, *options, "--gpucluster-device=cuda", ranks=1, deadline=600, forked=False)
    assert run.exits[0] in (0, 1, 10, 11), run.output  # what the hardware is worth is not judged here
    measured = [result for result in run.journal.results if result.measurements]
    names = {each.metric for result in measured for each in result.measurements if each.value}
    assert {"matmul.bf16.tflops", "hbm.copy.bandwidth"} <= names
