"""Lets the criteria ask for ``gpu`` or ``workload`` instead of ``gpucluster_gpu`` and ``gpucluster_workload``."""

from pytest_gpucluster.short_fixtures import *  # noqa: F403  # pytest finds fixtures among a conftest's names
