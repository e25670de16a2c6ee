"""The vision criteria themselves, run by torchrun over gloo: what they accept, and how each fault fails them."""

import sys

import image_files
import planted_runs
import pytest
from planted_runs import assert_failed
from programs import needs_modules
from torch import nn

from pytest_gpucluster.benchmarks.vision import throughput

pytestmark = needs_modules("transformers", "PIL")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return planted_runs.fine_tuning(tmp_path_factory)


def result(run, fault, test="throughput"):
    return planted_runs.result(run, f"vision::test_vision_{test}[resnet18]", fault)


@pytest.mark.parametrize(
    ("test", "fault", "data"), [("throughput", "none", "synthetic"), ("data", "small", "idx")], ids=["synthetic", "idx"]
)
def test_a_right_training_passes_beside_the_wrong_ones(run, test, fault, data):
    found = result(run, fault, test)
    assert (found.outcome, found.culprits, found.message) == ("passed", (), "")
    assert {one.metric: one.status for one in found.measurements} == {
        "vision.images_per_second": "passed",
        "vision.data_wait": "recorded",
        "vision.loss_ratio": "passed",
    }
    for one in found.measurements:
        assert len(one.values) == 2
        assert one.labels == {"model": "resnet18", "data": data, "batch": "4", "workers": "1", "prefetch": "2"}


def test_a_slow_loader_shows_as_data_wait(run):
    """Of 1.2 s of a step 1.1 s."""
    [waits] = [one for one in result(run, "slow").measurements if one.metric == "vision.data_wait"]
    assert waits.values == pytest.approx(dict.fromkeys((0, 1), 100 * 1.1 / 1.2))


def test_a_network_that_does_not_learn_misses_the_limit_of_the_loss(run):
    found = result(run, "slow")  # the small network, which 16 steps do not teach much
    assert (found.outcome, found.culprits) == ("failed", (0, 1))
    assert found.message.startswith("vision.loss_ratio ")
    assert "> 0.9 ratio (model=resnet18, data=synthetic" in found.message


@pytest.mark.parametrize(
    ("fault", "culprits", "fields"),
    [("nan", (1,), ("rank 1", "nan in step 5,")), ("nosync", (0, 1), ("2 kinds on 2 ranks",))],
)
def test_each_fault_rejects_and_names_the_ranks_at_fault(run, fault, culprits, fields):
    assert_failed(result(run, fault), culprits, *fields)


@pytest.mark.parametrize(
    ("fault", "culprits", "fields"),
    [
        ("death", (1,), ("died of SIGBUS", "shared memory is full")),
        ("shm", (), ("rank 0: /dev/shm", "6.1e-05 GiB free of 0.0625 GiB", "the 2 ranks")),
    ],
)
def test_too_little_shared_memory_is_an_error_of_the_rank_that_died_of_it_or_of_the_node(run, fault, culprits, fields):
    found = result(run, fault)
    assert (found.outcome, found.culprits) == ("error", culprits)
    assert [field for field in fields if field not in found.text] == []


@pytest.fixture
def suite(project):
    """The tests of one rank, in this process."""
    for name in ("test_vision.py", "workloads.yaml"):
        (project.path / name).write_text(planted_runs.acceptance_file(name), encoding="utf-8")
    return project


def test_a_broken_image_is_an_error_that_names_its_file(suite, monkeypatch):
    folder = image_files.write_image_folder(suite.path / "data", classes=2, images=8)
    (folder / "n0001" / "3.png").write_bytes(b"<html>not found</html>")
    small = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2))
    monkeypatch.setattr(throughput, "make_resnet", lambda *given, **more: small)
    options = (f"--gpucluster-data=images={folder}", "--gpucluster-workload=vision.workers=0")
    left = suite.run("-k=data and resnet18", *options)
    [found] = left.journal.results
    assert found.outcome == "error"
    assert f"{folder / 'n0001' / '3.png'}: " in found.text
    assert "UnidentifiedImageError" in found.text
    assert left.end == ("BROKEN", 11)


def test_without_transformers_the_verdict_is_incomplete_and_says_what_to_install(suite, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    left = suite.run("-k=resnet18")
    found = {each.nodeid.partition("_vision_")[2]: each for each in left.journal.results}
    assert {each.outcome for each in found.values()} == {"skipped"}
    assert "pip install -c constraints.txt -e '.[vision]'" in found["throughput[resnet18]"].message
    # Without --gpucluster-data its criterion does not apply, and nothing is missing.
    assert "--gpucluster-data images=PATH" in found["data[resnet18]"].message
    assert left.end == ("INCOMPLETE", 10)
    assert "vision.data" not in left.journal.end.reason
