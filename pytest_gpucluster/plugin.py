"""pytest's entry point. The hooks of an active session are ``session.session.Session``.

Importing this module must stay cheap: it loads neither torch nor NVML nor YAML. In a project that does not use the
plugin only the four functions below are ever called, and they add nothing but options.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.session import options

if TYPE_CHECKING:
    from pytest_gpucluster.journal.run_directory import VerdictRecord
    from pytest_gpucluster.metrics.catalogue import Metric

_MARKERS = (
    "criterion(name): an acceptance criterion; it must measure something, on every rank, and meet its limits",
    "single_gpu: needs no other rank; also runs under pytest -n <GPUs> --dist each",
    "nccl: exercises collective communication",
    "training: trains a model",
    "needs_ranks(n): does not run with fewer than n ranks",
    "needs_nodes(n): does not run with fewer than n nodes",
    "needs_local_ranks(n): does not run with fewer than n ranks on each node",
    "needs_gpu: does not run in a rehearsal on cpu",
    "needs_hardware: does not run in a rehearsal on cpu, nor on a simulated cluster",
    "needs_peak(name): does not run where the data sheet of the GPU has no such peak, such as fp8_tflops",
    "needs_data(name): does not run without --gpucluster-data name=PATH",
    "needs_scheduler(name): does not run but in a job of this scheduler: slurm or kubernetes",
    "isolate: when it fails, find the faulty nodes, GPUs or links, by probes of smaller groups",
    "deadline(seconds): the longest that one phase of this test may take, instead of --gpucluster-deadline",
    "first(place): runs before every test without this marker, in the order of the numbers, without one after those",
    "soak: runs for a long time, after all tests without this marker",
    "last: runs after all others, soak included",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options and ini settings."""
    options.register(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add what sites can extend."""
    pluginmanager.add_hookspecs(HookSpecs)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None]:
    """Set torch's environment before any conftest can import torch; note a conftest that fails."""
    options.add_suite(early_config, args)
    if not options.asked_for(early_config, args):
        return (yield)
    from pytest_gpucluster.session import start_notes

    with start_notes.begun(early_config):  # first: what is imported next takes seconds, in which a rank may die
        from pytest_gpucluster.device import environment
        from pytest_gpucluster.journal import verdict
        from pytest_gpucluster.session import rejected_run

        verdict.guard_exit_code()
        environment.prepare(os.environ)
        rejected_run.replace_earlier(early_config.known_args_namespace)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Turn the plugin on, where it was asked for, before any other plugin is configured."""
    if not options.active(config):
        return
    from pytest_gpucluster.session import fixtures
    from pytest_gpucluster.session.xdist import make_session

    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(fixtures, "gpucluster-fixtures")
    config.pluginmanager.register(make_session(config), "gpucluster-session")


class HookSpecs:
    """What a site can add without changing this project."""

    @staticmethod
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

    @staticmethod
    @pytest.hookspec
    def pytest_gpucluster_verdict(record: VerdictRecord) -> None:
        """Do what your site does when a run is over: drain a node, open a ticket, notify somebody.

        It is called once, on rank 0 (with ``-n N --dist each`` in the controller), when journal, JUnit file and the
        other reports are on disk, and before the process ends; also for a run that broke or was refused, as long as
        rank 0 lives. Keep it short, and give whatever it waits for a time limit: a launcher may end rank 0 soon after
        another rank.

        An exception in it is shown with its traceback. It changes neither the verdict
        nor the exit code, on which all ranks have agreed by then: what must be able to fail a run is a test.

        Example, in a conftest.py::

            def pytest_gpucluster_verdict(record):
                if record.verdict == "REJECTED" and not record.kind:
                    print(record.reason, record.excluded, record.directory / "report.html")
        """
