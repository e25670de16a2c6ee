"""The plugin's ``gpucluster_*`` fixtures by short names, for a suite that has no others of these names.

In its conftest.py: ``from pytest_gpucluster.short_fixtures import *``.
"""

from __future__ import annotations

import pytest

__all__ = ["board", "gpu", "inventory", "limits", "progress", "settings", "telemetry", "workload"]


board = pytest.fixture(lambda gpucluster_board: gpucluster_board, scope="session", name="board")
gpu = pytest.fixture(lambda gpucluster_gpu: gpucluster_gpu, scope="session", name="gpu")
inventory = pytest.fixture(lambda gpucluster_inventory: gpucluster_inventory, scope="session", name="inventory")
limits = pytest.fixture(lambda gpucluster_limits: gpucluster_limits, scope="session", name="limits")
progress = pytest.fixture(lambda gpucluster_progress: gpucluster_progress, scope="function", name="progress")
settings = pytest.fixture(lambda gpucluster_settings: gpucluster_settings, scope="session", name="settings")
telemetry = pytest.fixture(lambda gpucluster_telemetry: gpucluster_telemetry, scope="session", name="telemetry")
workload = pytest.fixture(lambda gpucluster_workload: gpucluster_workload, scope="session", name="workload")
