"""The vision criteria themselves, run by torchrun over gloo: what they accept, and how each fault fails them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import image_files
import pytest
import torchrun

pytest.importorskip("transformers")
pytest.importorskip("PIL")

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"
DEADLINE_SECONDS = 300.0
"""Generous: ResNets on the CPU, of machines that do other things as well."""

# The faults that a training can have, each put in the place of one of the product's own pieces. The file that a test is
# in says which one. Beside a fault the network is a small one, for speed.
FAULTS = """
import math, os, signal, sys, time
from dataclasses import replace
from functools import partial
import pytest
import torch
from torch import nn
from pytest_gpucluster.benchmarks.vision import image_rate
from pytest_gpucluster.benchmarks.vision.batches import Batches
from pytest_gpucluster.benchmarks.vision.rate_setup import PIECES, class_mean
from pytest_gpucluster.benchmarks.vision.shared_memory import Room

ON_RANK_1 = os.environ["RANK"] == "1"

def small(name, device, *, classes, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes)).to(device)

class Images:
    def __init__(self, images):
        self.images, self.read = images, 0
        self.name, self.classes, self.shape = images.name, images.classes, images.shape
    def __len__(self):
        return len(self.images)
    def __getitem__(self, row):
        self.read += 1
        self.happens()
        return self.images[row]

class Slow(Images):
    def happens(self):
        time.sleep(0.05)

class Dying(Images):
    def happens(self):
        if ON_RANK_1 and self.read == 20:
            os.kill(os.getpid(), signal.SIGBUS)

def of(kind, images, **more):
    return Batches(kind(images), **more)

def nan(logits, labels, seen=[0]):
    seen[0] += 1
    return class_mean(logits, labels) * (math.nan if ON_RANK_1 and seen[0] == 5 else 1.0)

def unsynchronized(model, device, group):
    replica = PIECES.replicate(model, device, group)
    replica.require_backward_grad_sync = False
    return replica

def little():
    return Room(total_bytes=2**26, free_bytes=2**20 if ON_RANK_1 else 2**16, device=1)

SMALL = replace(PIECES, make=small)
PARTS = {
    "nan": replace(SMALL, loss=nan),
    "nosync": replace(SMALL, replicate=unsynchronized),
    "slow": replace(SMALL, batches=partial(of, Slow)),
    "death": replace(SMALL, batches=partial(of, Dying)),
    "shm": replace(SMALL, look=little),
    "broken": SMALL,
}

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    fault = item.path.stem.removeprefix("test_vision_")
    image_rate.PIECES = PARTS.get(fault, PIECES)
    if fault == "missing":
        sys.modules["transformers"] = None
"""


def files(*faults):
    text = (ACCEPTANCE / "test_vision.py").read_text(encoding="utf-8")
    workloads = (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8")
    return {f"test_vision_{fault}.py": text for fault in faults} | {"workloads.yaml": workloads, "conftest.py": FAULTS}


RUNS = {
    "faults": (("none", "nan", "nosync", "slow", "death", "shm"), "resnet18 and (throughput or none)"),
    "broken": (("broken",), "data and resnet18"),
    "missing": (("missing",), "resnet18"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All faults one after the other: after each the ranks go on. Apart from them a run on data of which one image is
    broken, and one without transformers, for their verdicts."""

    def run(name):
        faults, keyword = RUNS[name]
        directory = tmp_path_factory.mktemp(name)
        if name == "faults":
            data = [f"--gpucluster-data=images={image_files.write_idx(directory / 'data', rows=30, suffix='.gz')}"]
        elif name == "broken":
            folder = image_files.write_image_folder(directory / "data", classes=2, images=8)
            (folder / "n0001" / "3.png").write_bytes(b"<html>not found</html>")
            data = [f"--gpucluster-data=images={folder}"]
        else:
            data = []
        options = (f"-k={keyword}", *data)
        ranks = 2 if name == "faults" else 1
        settings = {"deadline": 120.0, "timeouts": "stuck=20", "extras": True}
        started = torchrun.start(directory, files(*faults), *options, ranks=ranks, **settings)
        started.deadline = DEADLINE_SECONDS
        return started.wait()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def result(runs, fault, test="throughput"):
    nodeid = f"test_vision_{fault}.py::test_vision_{test}[resnet18]"
    [found] = [each for run in runs.values() for each in run.journal.results if each.nodeid == nodeid]
    return found


@pytest.mark.parametrize(("test", "data"), [("throughput", "synthetic"), ("data", "idx")])
def test_a_right_training_passes_beside_the_wrong_ones(runs, test, data):
    found = result(runs, "none", test)
    assert (found.outcome, found.culprits, found.message) == ("passed", (), "")
    assert {one.metric: one.status for one in found.measurements} == {
        "vision.images_per_second": "passed",
        "vision.data_wait": "recorded",
        "vision.loss_ratio": "passed",
    }
    for one in found.measurements:
        assert len(one.values) == 2
        assert one.labels == {"model": "resnet18", "data": data, "batch": "4", "workers": "2", "prefetch": "2"}


def test_a_slow_loader_shows_as_data_wait(runs):
    found = {one.metric: one for one in result(runs, "slow").measurements}
    # The rank that gets its batch first waits for the other one's gradients instead.
    assert max(found["vision.data_wait"].values.values()) > 40


def test_a_network_that_does_not_learn_misses_the_limit_of_the_loss(runs):
    found = result(runs, "slow")  # the small network, which 16 steps do not teach much
    assert (found.outcome, found.culprits) == ("failed", (0, 1))
    assert found.message.startswith("vision.loss_ratio ")
    assert "> 0.9 ratio (model=resnet18, data=synthetic" in found.message


@pytest.mark.parametrize(
    ("fault", "outcome", "culprits", "told"),
    [
        ("nan", "failed", (1,), "WrongResult: rank 1 has a loss of nan in step 5, and it must be finite"),
        (
            "nosync",
            "failed",
            (0, 1),
            "has other weights at the end than other ranks: 2 ranks have 2 kinds, none of them",
        ),
        ("death", "error", (1,), "died of SIGBUS, as a rule because shared memory is full. /dev/shm has "),
        (
            "shm",
            "error",
            (0, 1),
            "rank 0: /dev/shm has 6.1e-05 GiB free of 0.0625 GiB, and the DataLoader workers of the 2",
        ),
    ],
)
def test_each_fault_is_told_with_the_ranks_at_fault(runs, fault, outcome, culprits, told):
    found = result(runs, fault)
    assert (found.outcome, found.culprits) == (outcome, culprits)
    assert told in found.text


def test_a_broken_image_is_an_error_that_names_its_file(runs):
    found, run = result(runs, "broken", "data"), runs["broken"]
    assert found.outcome == "error"
    assert f"{run.directory / 'data' / 'n0001' / '3.png'}: cannot be decoded: UnidentifiedImageError" in found.text
    assert run.end[:2] == ("BROKEN", 11)


def test_without_transformers_the_verdict_is_incomplete_and_says_what_to_install(runs):
    found, run = result(runs, "missing"), runs["missing"]
    assert found.outcome == "skipped"
    assert found.message == "transformers is not installed: pip install -c constraints.txt -e '.[vision]'"
    assert run.end[:2] == ("INCOMPLETE", 10)
    # Without --gpucluster-data its criterion does not apply, and nothing is missing.
    assert result(runs, "missing", "data").message == "needs --gpucluster-data images=PATH, and it was not given"
    assert "vision.data" not in run.journal.end.reason


def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(runs):
    assert runs["faults"].end[:2] == ("REJECTED", 1)
    assert [run.left_over for run in runs.values()] == [[], [], []]
