"""Many short criteria in one session, every tenth with a fault that it survives; each rank samples its resources."""

import ctypes
import gc
import json
import os
import time
from pathlib import Path

import pytest
from stamps import RANK, all_reduce, meet

from pytest_gpucluster.benchmarks import collectives, matmul
from pytest_gpucluster.metrics.sampling import Sampling

TESTS = int(os.environ["SOAK_TESTS"])
FAULT_EVERY = 10
SAMPLING = Sampling(warmup_seconds=0.002, window_seconds=0.005, longest_seconds=5.0, tolerance_ratio=1e6)
LEAK = os.environ.get("SOAK_LEAK", "")
"""The leak of each test on rank 1, for a test of the check: "descriptor", "thread" or "memory"."""
LEAKED = []


def usage(pid):
    """Return the descriptors, threads, and kB of anonymous memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
        "memory": int(fields["RssAnon"].split()[0]),
    }


def children(word):
    """Return the children of this rank whose command has a word."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and word in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except (OSError, IndexError):
            continue  # it has ended
    return found


@pytest.fixture(autouse=True)
def sampled(number):
    """Sample between the tests: before this one, and well after the last fault."""
    if number % FAULT_EVERY == FAULT_EVERY - 2:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory does not count
        processes = {f"rank {RANK}": os.getpid()}
        for name, word in {"recorder": "recorder.process", "sampler": "sampler_process"}.items():
            for pid in children(word):
                processes[name] = pid
        line = {"number": number, **{name: usage(pid) for name, pid in processes.items()}}
        with Path(os.environ["SOAK_SAMPLES"], f"rank{RANK}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    yield
    if LEAK and RANK == 1:
        leak()


def leak():
    if LEAK == "descriptor":
        LEAKED.append(os.open("/dev/null", os.O_RDONLY))
    elif LEAK == "thread":
        import threading

        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif LEAK == "memory":
        LEAKED.append(os.urandom(1_000_000))


def fault(number, cluster):
    """Make one of the faults that a session survives, on each rank in turn."""
    turn = number // FAULT_EVERY
    is_victim = turn % cluster.world_size == RANK
    kind = turn % 4
    if kind == 0 and is_victim:
        raise RuntimeError("planted")
    if kind == 1:
        import torch

        torch.distributed.all_reduce(torch.ones(1 << 16), group=cluster.group, async_op=is_victim)
        if is_victim:
            raise RuntimeError("planted inside")
    if kind == 2 and is_victim:
        time.sleep(600)
    if kind == 3 and is_victim:
        return  # finished without entering
    all_reduce(cluster)


@pytest.mark.deadline(3)
@pytest.mark.parametrize("number", range(FAULT_EVERY - 1, TESTS, FAULT_EVERY))
def test_fault(number, cluster):
    fault(number, cluster)


@pytest.mark.deadline(90)
@pytest.mark.parametrize("number", [n for n in range(TESTS) if n % FAULT_EVERY != FAULT_EVERY - 1])
def test_criterion(number, cluster, measure):
    if number % 2:
        result = matmul.measure_matmul(cluster.device, matmul.Shape.square(64), dtype="fp32", sampling=SAMPLING)
        measure("matmul.fp32.tflops", result.tflops, unit="TFLOPS", record_only=True, n=64)
    else:
        result = collectives.measure_collective(
            "all_reduce", cluster.group, cluster.device, payload_bytes=2**12, sampling=SAMPLING
        )
        measure("nccl.all_reduce.busbw", result.busbw, unit="B/s", record_only=True, size="4 kB", dtype="fp32")
    meet(cluster, "nothing")
