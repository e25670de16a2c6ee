"""The plugin's ``gpucluster_*`` fixtures by short names, for a suite that has no others of these names.

In its conftest.py: ``from pytest_gpucluster.short_fixtures import *``.
"""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["board", "gpu", "inventory", "limits", "progress", "settings", "telemetry", "workload"]


@pytest.fixture(scope="session")
def board(gpucluster_board: Any) -> Any:
    """``gpucluster_board``."""
    return gpucluster_board


@pytest.fixture(scope="session")
def gpu(gpucluster_gpu: Any) -> Any:
    """``gpucluster_gpu``."""
    return gpucluster_gpu


@pytest.fixture(scope="session")
def inventory(gpucluster_inventory: Any) -> Any:
    """``gpucluster_inventory``."""
    return gpucluster_inventory


@pytest.fixture(scope="session")
def limits(gpucluster_limits: Any) -> Any:
    """``gpucluster_limits``."""
    return gpucluster_limits


@pytest.fixture
def progress(gpucluster_progress: Any) -> Any:
    """``gpucluster_progress``."""
    return gpucluster_progress


@pytest.fixture(scope="session")
def settings(gpucluster_settings: Any) -> Any:
    """``gpucluster_settings``."""
    return gpucluster_settings


@pytest.fixture(scope="session")
def telemetry(gpucluster_telemetry: Any) -> Any:
    """``gpucluster_telemetry``."""
    return gpucluster_telemetry


@pytest.fixture(scope="session")
def workload(gpucluster_workload: Any) -> Any:
    """``gpucluster_workload``."""
    return gpucluster_workload
