"""The criterion matmul.search itself, run by torchrun on the CPU: one shape for all ranks, and how a fault fails it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# Devices on which each shape takes as long as the rank's own table says, and what one of them does wrong.
DEVICES = """
import os, time
import torch
from pytest_gpucluster.benchmarks import matmul
from pytest_gpucluster.benchmarks.scaled_product import scaled_product

RANK = os.environ["RANK"]
# Rank 0 is fastest with 32x32x64, rank 1 with 64x16x64; a product by another rank's taste takes four times as long.
FASTEST = {"0": (32, 32), "1": (64, 16)}[RANK]
FAULTS = dict(pair.split("=") for pair in os.environ["FAULTS"].split())
DTYPE = None

def pytest_runtest_setup(item):
    global DTYPE
    DTYPE = item.callspec.id

def spoil(a, b, out):
    time.sleep(0.001 if tuple(out.shape) == FASTEST else 0.004)
    layout = "".join("n" if x.stride(1) == 1 else "t" for x in (a, b))
    rank, _, what = FAULTS.get(DTYPE, "").partition(":")
    if rank == RANK and what == layout:
        out[3, 5] = float("nan")

def mm(a, b, out):
    torch.mm(a, b, out=out)
    spoil(a, b, out)

def fp8(device):
    multiply = scaled_product(device)
    def slower(a, b, out):
        multiply(a, b, out)
        spoil(a, b, out)
    return slower

matmul._mm, matmul.scaled_product = mm, fp8
"""

OPTIONS = tuple(
    f"--gpucluster-workload=matmul.search.{setting}"
    for setting in (
        *("shapes=64x16x64,32x32x64", "layouts=nn,tn", "look=0.02s"),
        *("warmup=0.02s", "window=0.1s", "longest=0.3s", "tolerance=300%"),
    )
)
CASES = {
    "healthy": ("", "-k=bf16 or fp8"),
    "wrong on rank 1": ("tf32=1:tn fp8=1:nt", "-k=tf32 or fp8 or fp32"),
    "wrong on rank 0": ("fp16=0:tn", "-k=fp16"),
    "too large": ("", "-k=fp32", "--gpucluster-workload=matmul.search.shapes=64x16x64,65536x65536x65536"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    names = ("test_matmul_search.py", "workloads.yaml")
    files = {name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in names} | {"conftest.py": DEVICES}

    def run(case):
        faults, *options = CASES[case]
        directory = tmp_path_factory.mktemp(case.replace(" ", "-"))
        given = {option.partition("=")[2].partition("=")[0] for option in options}
        usual = [option for option in OPTIONS if option.partition("=")[2].partition("=")[0] not in given]
        return torchrun.torchrun(directory, files, *usual, *options, environment={"FAULTS": faults})

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


def judged(run, dtype):
    [found] = [each for each in run.journal.results if each.nodeid.endswith(f"test_matmul_search[{dtype}]")]
    return found


@pytest.mark.parametrize(("dtype", "layouts"), [("bf16", {"nn", "tn"}), ("fp8", {"nt"})])
def test_all_ranks_measure_the_shape_that_the_first_rank_chose(runs, dtype, layouts):
    result = judged(runs["healthy"], dtype)
    assert result.outcome == "passed", runs["healthy"].output
    [best] = result.measurements
    assert best.metric == f"matmul.{dtype}.best_tflops"
    # Rank 1 is four times as fast with the other shape, and measures the same one.
    assert {name: best.labels[name] for name in ("m", "n", "k")} == {"m": "32", "n": "32", "k": "64"}
    assert best.labels["layout"] in layouts
    assert set(best.values) == {0, 1}
    assert best.values[1] < best.values[0]
    assert best.worst_rank == 1


def test_the_rate_is_recorded_with_its_unit_and_held_against_no_limit(runs):
    [best] = judged(runs["healthy"], "bf16").measurements
    assert (best.status, best.unit, best.limit) == ("recorded", "TFLOPS", None)
    assert runs["healthy"].end[:2] == ("REHEARSED", 0)


def test_the_looks_are_on_record_as_what_they_are(runs):
    told = dict(judged(runs["healthy"], "bf16").properties)["matmul.search"]
    assert told.startswith("32x32x64 ")
    assert "64x16x64 nn " in told
    assert told.endswith("TFLOPS, each looked at for a moment to choose by, and not measured")


@pytest.mark.parametrize(
    ("case", "dtype", "rank", "told"),
    [
        (
            "wrong on rank 1",
            "tf32",
            "rank 1 (node-a)",
            "look at matmul tf32 64x16x64 tn: the first product is wrong in 1 ",
        ),
        (
            "wrong on rank 1",
            "fp8",
            "rank 1 (node-a)",
            "look at matmul fp8 64x16x64 nt: the first product is wrong in 1 ",
        ),
        (
            "wrong on rank 0",
            "fp16",
            "rank 0 (node-a)",
            "look at matmul fp16 64x16x64 tn: the first product is wrong in 1 ",
        ),
    ],
)
def test_a_layout_that_is_multiplied_wrongly_rejects_and_names_rank_and_layout(runs, case, dtype, rank, told):
    run = runs[case]
    found = run.verdicts[f"test_matmul_search[{dtype}]"]
    assert found.startswith(f"failure: {rank}: WrongResult: cpu: {told}"), run.output
    assert "of 1024 elements, first at row 3, column 5: found nan" in found
    assert list(judged(run, dtype).culprits) == [int(rank[5])]
    assert run.end[:2] == ("REJECTED", 1)


def test_after_a_wrong_product_the_next_search_is_one_again(runs):
    assert judged(runs["wrong on rank 1"], "fp32").outcome == "passed"


def test_a_shape_that_does_not_fit_is_an_error_that_names_it_and_no_smaller_search(runs):
    run = runs["too large"]
    found = run.verdicts["test_matmul_search[fp32]"]
    assert "matmul fp32 65536x65536x65536 nn needs " in found
    assert found.startswith("error: "), found
    assert run.end[:2] == ("BROKEN", 11)


def test_several_local_workers_skip_it_and_that_is_no_pass(project):
    for name in ("test_matmul_search.py", "workloads.yaml"):
        (project.path / name).write_text((ACCEPTANCE / name).read_text(encoding="utf-8"), encoding="utf-8")
    left = project.run_apart("-n", "2", "--dist", "each", "--max-worker-restart=0", "-k", "bf16", *OPTIONS)
    assert left.verdicts["test_matmul_search[bf16]"].startswith("skipped: local workers cannot agree on one shape")
    assert (left.exit, left.end) == (10, ("INCOMPLETE", 10)), left.output
