"""Resuming on one rank; with more, and with each fault, tests/acceptance/test_acceptance_checkpoint.py."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.storage import checkpoint, resume
from pytest_gpucluster.benchmarks.storage.resume import check_resume
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


@pytest.fixture
def check(group, tmp_path):
    """The check over a group of this process alone."""
    sizes = {"fewer": None, "batch": 2, "steps": 2}

    def run(save=checkpoint.save, **more):
        with patch.object(resume, "save", save):
            return check_resume(group, torch.device("cpu"), GEOMETRY, tmp_path, **sizes | more)

    return run


def test_one_rank_goes_on_as_if_nothing_had_happened(check, tmp_path):
    (tmp_path / "gpucluster-checkpoint-of-another-run").mkdir()
    assert check() == (0, 0, None)
    assert [path.name for path in tmp_path.iterdir()] == ["gpucluster-checkpoint-of-another-run"]
    assert check(fewer=dist.group.WORLD) == (0, 0, 0)


@pytest.mark.parametrize("fails", [False, True], ids=["passed", "failed"])
def test_nothing_of_the_training_stays_alive(check, fails):
    alive = []

    def save(folder, step, model, optimizer, **more):
        alive.append(weakref.ref(model))
        if fails:
            raise WrongResult("lost")
        return checkpoint.save(folder, step, model, optimizer, **more)

    kept = None
    try:
        check(save=save)
    except WrongResult as error:
        kept = error  # with its traceback, as a report keeps it
    assert (kept is not None) == fails
    gc.collect()  # FSDP's own objects refer to each other
    assert [one() for one in alive] == [None]


def test_too_little_memory_is_the_environment_s_fault(check, monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.device.backends.Cpu.free_bytes", lambda device: 1000)
    with pytest.raises(EnvironmentBroken, match=r"fsdp\.width=256"):
        check()
