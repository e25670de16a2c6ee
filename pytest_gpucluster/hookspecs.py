"""What a site can add without changing this project."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpucluster.metric_catalogue import Metric


@pytest.hookspec
def pytest_gpucluster_metrics() -> Iterable[Metric]:  # type: ignore[empty-body]  # a specification is never called
    """Return metrics of your own, so that ``measure`` knows them.

    Example, in a conftest.py::

        from pytest_gpucluster.metric_catalogue import Metric

        def pytest_gpucluster_metrics():
            return [Metric(name="site.scratch.bandwidth", unit="GB/s", better="higher", scope="node", peak=None,
                           doc="sequential write to the scratch file system")]
    """
