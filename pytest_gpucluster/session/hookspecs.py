"""What a site can add without changing this project."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_gpucluster.journal.verdict_record import VerdictRecord
    from pytest_gpucluster.metrics.catalogue import Metric


@pytest.hookspec
def pytest_gpucluster_metrics() -> Iterable[Metric]:  # type: ignore[empty-body]  # a specification is never called
    """Return metrics of your own, so that ``measure`` knows them.

    Example, in a conftest.py::

        from pytest_gpucluster import Metric


        def pytest_gpucluster_metrics():
            return [
                Metric(
                    name="site.scratch.bandwidth",
                    unit="GB/s",
                    better="higher",
                    scope="node",
                    peak=None,
                    doc="sequential write to the scratch file system",
                )
            ]
    """


@pytest.hookspec
def pytest_gpucluster_verdict(record: VerdictRecord) -> None:
    """Do what your site does when a run is over: drain a node, open a ticket, notify somebody.

    It is called once, on rank 0 (with ``-n N --dist each`` in the controller), when journal, JUnit file and the other
    reports are on disk, and before the process ends; also for a run that broke or was refused, as long as rank 0 lives.
    Keep it short, and give whatever it waits for a time limit: a launcher may end rank 0 soon after another rank.

    An exception in it is shown, and kept in ``hook-errors.txt`` in the run's folder. It changes neither the verdict nor
    the exit code, on which all ranks have agreed by then: what must be able to fail a run is a test.

    Example, in a conftest.py::

        def pytest_gpucluster_verdict(record):
            if record.verdict == "REJECTED" and not record.rehearsal:
                print(record.reason, record.excluded, record.directory / "report.html")
    """
