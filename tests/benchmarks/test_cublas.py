from __future__ import annotations

import os

import pytest

from pytest_gpucluster.benchmarks import cublas
from pytest_gpucluster.session import cluster


def test_a_session_chooses_the_workspace_before_anybody_can_multiply_on_a_gpu(monkeypatch):
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    cluster.prepare_environment()
    assert environment[cublas.NAME] == ":4096:8"
    assert cublas.not_reproducible(environment) == ""
    assert environment["NCCL_DEBUG"] == "INFO", "and NCCL's log"


@pytest.mark.parametrize(("chosen", "hinders"), [(":16:8", False), (":4096:2:16:8", True)])
def test_what_the_operator_has_chosen_stays(chosen, hinders):
    environment = {cublas.NAME: chosen}
    cublas.prepare(environment)
    assert environment == {cublas.NAME: chosen}
    assert bool(cublas.not_reproducible(environment)) is hinders
