"""The criteria matmul and hbm themselves, run by torchrun on the CPU: what they accept, and how a fault fails them."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# A device whose steps take a millisecond on a busy machine too, and what rank 1's does wrong, by the id of the test.
FAULTS = """
import os, random, time
import torch
from pytest_gpucluster.benchmarks import matmul, memory, memory_passes
from pytest_gpucluster.benchmarks.scaled_product import scaled_product

FAULTS = dict(pair.split("=") for pair in os.environ["FAULTS"].split()) if os.environ["RANK"] == "1" else {}
FAULT, CALLS = None, 0

def pytest_runtest_setup(item):
    global FAULT, CALLS
    FAULT, CALLS = FAULTS.get(item.callspec.id), 0

def spoil(target):
    global CALLS
    CALLS += 1
    if FAULT == "noisy":
        time.sleep(random.Random(int(time.monotonic() / 0.03)).uniform(0.001, 0.005))
    elif FAULT == "slow256":
        time.sleep(0.1 if target.numel() == 256 * 256 else 0.001)
    else:
        time.sleep(0.03 if FAULT == "slow" else 0.001)
    if FAULT == "bit" and CALLS == 7:
        target.view(torch.uint8)[5] ^= 16
    elif FAULT == "nan" and CALLS == 7:
        target[5] = float("nan")

def mm(a, b, out):
    torch.mm(a, b, out=out)
    spoil(out.view(-1))

def fp8(device):
    multiply = scaled_product(device)
    def spoilt(a, b, out):
        multiply(a, b, out)
        spoil(out.view(-1))
    return spoilt

class Spoilt(memory_passes.Operations):
    def copy(self, source, target):
        super().copy(source, target)
        spoil(target)
    def read(self, source, total):
        super().read(source, total)
        spoil(total.view(-1))
    def write(self, target, value):
        super().write(target, value)
        spoil(target)

matmul._mm, matmul.scaled_product, memory.Operations = mm, fp8, Spoilt
"""

OPTIONS = tuple(
    f"--gpucluster-workload={setting}"
    for setting in (
        *("matmul.warmup=0.02s", "matmul.window=0.1s", "matmul.longest=0.3s"),
        *("hbm.sizes=1MB,1MiB", "hbm.warmup=0.02s", "hbm.window=0.1s", "hbm.longest=0.3s"),
    )
)
TOLERANT = ("--gpucluster-workload=matmul.tolerance=300%", "--gpucluster-workload=hbm.tolerance=300%")
STRICT = ("--gpucluster-workload=matmul.tolerance=5%", "--gpucluster-workload=hbm.tolerance=5%")
SMALL, LARGER = "--gpucluster-workload=matmul.sizes=64,128", "--gpucluster-workload=matmul.sizes=128,256"
CASES = {
    "wrong": ("bf16=bit fp16=nan tf32=slow fp8=bit copy=bit read=bit write=slow", SMALL, *TOLERANT),
    "noisy": ("fp32=noisy read=noisy", "-k=fp32 or read", SMALL, *STRICT),
    "one size": ("fp32=slow256", "-k=fp32", LARGER, *TOLERANT),
}
RANK_1 = "rank 1 (node-a)"


def files():
    names = ("test_matmul.py", "test_hbm.py", "workloads.yaml")
    return {name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in names} | {"conftest.py": FAULTS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    def run(case):
        faults, *options = CASES[case]
        directory = tmp_path_factory.mktemp(case)
        return torchrun.torchrun(directory, files(), *OPTIONS, *options, environment={"FAULTS": faults})

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


def result(run, name):
    [found] = [each for each in run.journal.results if each.nodeid.endswith(f"[{name}]")]
    return found


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("test_matmul[bf16]", "matmul bf16 n=64: product 4 is wrong in "),
        ("test_matmul[fp16]", "matmul fp16 n=64: product 4 is wrong in "),
        ("test_matmul[fp8]", "matmul fp8 n=64: product 4 is wrong in "),
        ("test_hbm[copy]", "memory copy of 1 MB: 1 of 125000 8-byte words are wrong"),
        ("test_hbm[read]", "memory read of 1 MB: the sum of read 6 is wrong"),
    ],
)
def test_wrong_data_reject_and_name_rank_and_place(runs, test, told):
    run = runs["wrong"]
    assert run.verdicts[test].startswith(f"failure: {RANK_1}: WrongResult: cpu: {told}")
    assert list(result(run, test.partition("[")[2].rstrip("]")).culprits) == [1]
    assert run.end[:2] == ("REJECTED", 1)


def test_one_line_tells_rank_dtype_product_element_and_values(runs):
    line = runs["wrong"].verdicts["test_matmul[fp16]"]
    assert re.search(
        r"1 of 4096 elements, first at row 0, column 5: found nan \(0x\w{4}\), expected \S+ \(0x\w{4}\)", line
    )
    line = runs["wrong"].verdicts["test_hbm[copy]"]
    assert re.search(r"words are wrong, first at byte 0: found 0x\w{16}, expected 0x\w{16}", line)


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("test_matmul[tf32]", "matmul.tf32.tflops 0.000"),
        ("test_hbm[write]", "hbm.write.bandwidth 0.000"),
    ],
)
def test_a_slow_device_misses_the_shipped_limit_and_is_named(runs, test, told):
    found = runs["wrong"].verdicts[test]
    assert found.startswith(f"failure: {told}")
    assert RANK_1 in found


def test_a_healthy_device_passes_and_the_best_of_its_sizes_is_judged(runs):
    assert runs["wrong"].verdicts["test_matmul[fp32]"] == "passed"
    judged = result(runs["wrong"], "fp32").measurements
    assert [(one.metric, dict(one.labels), one.status) for one in judged] == [
        ("matmul.fp32.tflops", {"n": "64"}, "recorded"),
        ("matmul.fp32.tflops", {"n": "128"}, "recorded"),
        ("matmul.fp32.tflops", {"best_of": "64, 128"}, "passed"),
    ]
    assert all(len(one.values) == 2 for one in judged), "every rank of the run has its own value"


def test_the_judged_value_is_that_of_the_best_size_with_its_samples_on_each_rank(runs):
    *single, best = result(runs["wrong"], "fp32").measurements
    for rank in (0, 1):
        chosen = max(single, key=lambda one: one.intervals[rank][0])
        assert best.values[rank] == chosen.values[rank]
        assert best.intervals[rank] == chosen.intervals[rank]
        assert best.samples[rank] == chosen.samples[rank]
    assert best.stopped is not None
    assert best.stopped.samples == len(best.samples[best.worst_rank])


def test_a_device_that_is_slow_at_its_largest_size_only_passes_by_another_one(runs):
    run = runs["one size"]
    assert run.verdicts["test_matmul[fp32]"] == "passed"
    small, large, best = result(run, "fp32").measurements
    assert large.values[1] < 0.0005, "on rank 1 below the limit, in TFLOPS, and recorded only"
    assert large.status == "recorded"
    assert best.values[1] == small.values[1]
    assert best.labels == {"best_of": "128, 256"}
    assert run.end[1] == 0


def test_sizes_of_buffers_are_labelled_as_quantities(runs):
    judged = result(runs["wrong"], "write").measurements
    assert [one.labels["size"] for one in judged] == ["1 MB", "1 MiB"]
    assert [one.status for one in judged] == ["recorded", "failed"]


@pytest.mark.parametrize("name", ["fp32", "read"])
def test_a_noisy_series_is_inconclusive_and_that_is_no_pass(runs, name):
    largest = result(runs["noisy"], name).measurements[-1]
    assert "5 % is allowed" in largest.inconclusive
    assert largest.status != "passed"
    assert not runs["noisy"].verdicts[f"test_{'matmul' if name == 'fp32' else 'hbm'}[{name}]"].startswith("passed")
    assert runs["noisy"].end[1] != 0
