"""Report that the plugin is missing, before pytest complains about its options.

The plugin is loaded by its entry point (or by ``-p``), before any conftest, because NCCL reads its environment once.
So it is not named in ``pytest_plugins``: that would load it too late, and a second time.
"""

from __future__ import annotations

import pytest


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Refuse to run without the plugin: the criteria would measure nothing."""
    if not any(map(pluginmanager.has_plugin, ("gpucluster", "pytest_gpucluster.plugin"))):
        raise pytest.UsageError(
            "pytest-gpucluster is not loaded into this Python.\n"
            "what to do: install it with `python -m pip install -c constraints.txt -e .` on every node;"
            " where it is installed, drop `-p no:gpucluster`, and with PYTEST_DISABLE_PLUGIN_AUTOLOAD add"
            " `-p pytest_gpucluster.plugin`"
        )
