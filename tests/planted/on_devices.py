"""The conftest.py of a suite in which devices and links compute, copy and send wrongly, or slowly.

Time is planted: a product, a copy, a collective takes as long as is written here, however busy the machine is. A fault
is the word for it, on rank 1; ``WORD@RANK`` on another one. ``slow:2-3``, ``slow-node:2`` and ``wrong:3>1`` are faults
of links.
"""

import os
import random
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from planted import criterion_of, fault_of, pytest_collection_modifyitems  # noqa: F401  # a hook

from pytest_gpucluster.benchmarks import collectives, fingerprint, host_link, links, memory_patterns
from pytest_gpucluster.device.backends import BACKENDS, Cpu
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.node.fabric.nccl_log import NcclLog
from pytest_gpucluster.node.host_checks import Place

RANK = int(os.environ.get("RANK") or os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
USUAL_SECONDS, SLOW_SECONDS = 0.001, 0.1
FP8_SECONDS = 0.0125
"""Enough samples in a window, and not many products: on a CPU each of them takes long."""
FASTEST = {0: (32, 32), 1: (64, 16)}
"""Rank -> rows and columns of the product that its device takes least time for, in the search."""


class Time(ManualClock):
    """Time that goes on only where a device works."""

    regions = 0

    @contextmanager
    def region(self):
        self.regions += 1
        with super().region():
            yield


TIME = Time()


honest_nodes = host_link.nodes_of
FAULT, CRITERION, CALLS, MADE, SINCE = "", "", 0, 0, 0.0


def pytest_runtest_setup(item):
    global FAULT, CRITERION, CALLS, MADE, SINCE
    fault, _, rank = fault_of(item).partition("@")
    FAULT = fault if ":" in fault or int(rank or 1) == RANK else ""
    CRITERION, CALLS, MADE, SINCE = criterion_of(item), 0, 0, TIME.now_seconds
    if CRITERION == "test_host_link":
        far = FAULT == "far"  # the memory is on node 0, and the GPU is near node 7
        host_link.nodes_of = (lambda address, maps: {0: 1.0}) if far else honest_nodes
        place = Place(cpus=frozenset(), nodes=frozenset({7})) if far else None
        item.module.place_of_gpu = lambda pci: place


def take_time(usual=USUAL_SECONDS, *, elements=0):
    """Let the device work as long as its fault says."""
    if FAULT == "noisy":
        seconds = random.Random(TIME.regions).uniform(usual, 5 * usual)
    elif FAULT == "fades":
        seconds = usual if TIME.now_seconds - SINCE < 0.3 else 1000 * usual
    else:
        slow = FAULT == "slow" or (FAULT == "slow128" and elements == 128 * 128)
        seconds = SLOW_SECONDS if slow else usual
    TIME.advance(seconds)


def spoil(target, *, call=7, usual=USUAL_SECONDS):
    """Change one element of what one of the calls has made."""
    global CALLS
    CALLS += 1
    take_time(usual, elements=target.numel())
    if FAULT == "bit" and call == CALLS:
        target.view(torch.uint8)[5] ^= 16
    elif FAULT == "nan" and call == CALLS:
        target[5] = float("nan")


# ---- products, memory, copies ----------------------------------------------------------------------------------------


def multiplied(a, b, out, usual=USUAL_SECONDS):
    if CRITERION != "test_matmul_search":
        spoil(out.view(-1), call=100 if CRITERION == "test_burn_in" else 7, usual=usual)
        return
    TIME.advance(usual if tuple(out.shape) == FASTEST[RANK] else 4 * usual)
    if "".join("n" if x.stride(1) == 1 else "t" for x in (a, b)) == FAULT:  # the layout that is multiplied wrongly
        out[3, 5] = float("nan")


class Faulty(Cpu):
    def clock(self):
        TIME.read()  # what a work that failed has left
        return TIME

    def now(self):
        return TIME.now_seconds

    def free_bytes(self):
        return 1000 if FAULT == "full" else super().free_bytes()

    def product(self, *, scaled, of=None):
        multiply = super().product(scaled=scaled)

        def spoilt(a, b, out):
            multiply(a, b, out)
            multiplied(a, b, out, FP8_SECONDS if scaled else USUAL_SECONDS)

        return spoilt

    def copy(self, source, target):
        super().copy(source, target)
        spoil(target)

    def read(self, source, total):
        super().read(source, total)
        spoil(total.view(-1))

    def write(self, target, value):
        super().write(target, value)
        spoil(target)

    def copy_over_link(self, direction, source, target):
        global CALLS
        super().copy_over_link(direction, source, target)
        CALLS += 1
        take_time()
        if FAULT == "bit" and CALLS == 5:
            target.view(torch.uint8)[40] ^= 16


BACKENDS["cpu"] = Faulty


def write_part(target, words):
    target.copy_(words)
    if FAULT == "stuck":
        target[1000] |= 1 << 40


honest_softmax = fingerprint._softmax


def softmax(a, b):
    global MADE
    MADE += 1
    result = honest_softmax(a, b)
    if FAULT == "deviates" or (FAULT == "unsteady" and MADE == 2):
        result[1, 2] *= 2
    return result


memory_patterns.write_part, fingerprint._softmax = write_part, softmax


# ---- collectives, links ----------------------------------------------------------------------------------------------


def faulty(call):
    def carried_out(sent, received, group):
        before = received.clone() if FAULT == "nothing" else None
        call(sent, received, group)
        take_time(USUAL_SECONDS * (1 + RANK / 100))  # what all ranks take on average is not what each of them takes
        if FAULT == "bit":
            received.view(torch.uint8)[3] ^= 16
        elif FAULT == "nan":
            received[1] = float("nan")
        elif FAULT == "nothing":
            received.copy_(before)

    return carried_out


for name, honest_call in collectives.CALLS.items():
    collectives.CALLS[name] = faulty(honest_call)
honest_exchange = links._exchange


def exchange(group, outgoing, incoming, peer):
    honest_exchange(group, outgoing, incoming, peer)
    kind, _, who = FAULT.partition(":")
    slow = kind == "slow" and {RANK, peer} == set(map(int, who.split("-")))
    slow |= kind == "slow-node" and int(who) in (RANK, peer)
    TIME.advance(4 * SLOW_SECONDS if slow else USUAL_SECONDS)
    if kind == "wrong" and incoming is not None and outgoing is None and f"{peer}>{RANK}" == who:
        incoming[17] ^= 1


links._exchange = exchange


@pytest.fixture(autouse=True)
def log_as_of_nccl(request):
    if CRITERION == "test_nccl":
        path = Path(os.environ["TMPDIR"], f"{os.getpid()}.log")
        path.write_text("NCCL INFO something\n" * 3)
        request.getfixturevalue("cluster").nccl_log = NcclLog(path)
