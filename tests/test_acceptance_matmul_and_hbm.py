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
        *("matmul.sizes=64,128", "matmul.warmup=0.02s", "matmul.window=0.1s", "matmul.longest=0.3s"),
        *("hbm.sizes=1MB,1MiB", "hbm.warmup=0.02s", "hbm.window=0.1s", "hbm.longest=0.3s"),
    )
)
TOLERANT = ("--gpucluster-workload=matmul.tolerance=300%", "--gpucluster-workload=hbm.tolerance=300%")
STRICT = ("--gpucluster-workload=matmul.tolerance=5%", "--gpucluster-workload=hbm.tolerance=5%")
CASES = {
    "wrong": ("bf16=bit fp16=nan tf32=slow fp8=bit copy=bit read=bit write=slow", *TOLERANT),
    "noisy": ("fp32=noisy read=noisy", "-k=fp32 or read", *STRICT),
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


def test_a_healthy_device_passes_and_only_its_largest_size_is_judged(runs):
    assert runs["wrong"].verdicts["test_matmul[fp32]"] == "passed"
    judged = result(runs["wrong"], "fp32").measurements
    assert [(one.metric, one.labels["n"], one.status) for one in judged] == [
        ("matmul.fp32.tflops", "64", "recorded"),
        ("matmul.fp32.tflops", "128", "passed"),
    ]
    assert all(len(one.values) == 2 for one in judged), "every rank of the run has its own value"


def test_sizes_of_buffers_are_labelled_as_quantities(runs):
    judged = result(runs["wrong"], "write").measurements
    assert [one.labels["size"] for one in judged] == ["1 MB", "1 MiB"]
    assert [one.status for one in judged] == ["recorded", "failed"]


@pytest.mark.parametrize("name", ["fp32", "read"])
def test_a_noisy_series_is_inconclusive_and_that_is_no_pass(runs, name):
    largest = result(runs["noisy"], name).measurements[-1]
    assert "5 % is allowed" in largest.inconclusive
    assert largest.status == "failed"
    assert runs["noisy"].end[:2] == ("REJECTED", 1)
