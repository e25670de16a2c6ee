from __future__ import annotations

import os

import pytest

from pytest_gpucluster import plugin
from pytest_gpucluster.benchmarks import dtypes


def test_a_session_chooses_the_workspace_before_anybody_can_multiply_on_a_gpu(monkeypatch):
    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    plugin.prepare_environment()
    assert environment[dtypes.NAME] == ":4096:8"
    assert dtypes.cublas_hindrance(environment) == ""
    assert environment["NCCL_DEBUG"] == "INFO", "and NCCL's log"


@pytest.mark.parametrize(("chosen", "hinders"), [(":16:8", False), (":4096:2:16:8", True)])
def test_what_the_operator_has_chosen_stays(chosen, hinders):
    environment = {dtypes.NAME: chosen}
    dtypes.prepare_cublas(environment)
    assert environment == {dtypes.NAME: chosen}
    assert bool(dtypes.cublas_hindrance(environment)) is hinders
