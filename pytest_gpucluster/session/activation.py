"""Which session this process has, made before other plugins are configured; torch's environment is set first."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from pytest_gpucluster.agreement import release
from pytest_gpucluster.benchmarks import cublas
from pytest_gpucluster.errors import UsageProblem
from pytest_gpucluster.node.fabric import nccl_environment, nccl_log
from pytest_gpucluster.session import rejected_run
from pytest_gpucluster.session.run import RUN, Run, WorkerPlace
from pytest_gpucluster.session.session import Session, take_junit
from pytest_gpucluster.session.startup import run_line
from pytest_gpucluster.session.xdist import DIRECTORY, SAMPLER, Controller, Worker, worker_count
from pytest_gpucluster.text import first_line


def prepare_environment() -> None:
    """Set what torch reads once, at its import and its first product, and NCCL when it writes its first message."""
    os.environ.update(release.ENVIRONMENT)
    nccl_log.prepare_log(os.environ)
    nccl_environment.prepare_environment(os.environ)
    cublas.prepare(os.environ)


def configure(config: pytest.Config) -> tuple[Session | Controller, Controller | None]:
    """Make the session of this process, before other plugins are configured.

    Returns:
        The session, and the same again if it is the controller of local workers.

    Raises:
        pytest.UsageError: the launcher's variables contradict each other, or xdist would not use every GPU.
    """
    prepare_environment()
    worker = getattr(config, "workerinput", None)
    controller: Controller | None = None
    try:
        if worker is not None:
            index, count = int(worker["workerid"].removeprefix("gw")), int(worker["workercount"])
            place = WorkerPlace(index=index, count=count, directory=str(worker.get(DIRECTORY, "")))
            run = Run(config, place=place)
            run.monitor.use_sampler(worker.get(SAMPLER))
            session: Session | Controller = Worker(config, run)
        else:
            run = Run(config)
            workers = worker_count(config) if run.facts.launcher == "single" else 0
            if workers:
                session = controller = Controller(config, run, workers)
            else:
                take_junit(config, run)
                session = Session(config, run)
    except UsageProblem as error:
        if worker is None:
            _replace_junit(config, str(error))
        raise pytest.UsageError(str(error)) from None
    config.stash[RUN] = run
    return session, controller


def _replace_junit(config: pytest.Config, text: str) -> None:
    """Let no file of an earlier run pass for this one's. Which rank this is may be unknown: any rank says so."""
    path = getattr(config.option, "xmlpath", None)
    if not path:
        return
    junit_path = rejected_run.asked_path(path)
    first = run_line(config, os.environ.get("GPUCLUSTER_HOSTNAME") or socket.gethostname(), junit_path)
    problem = rejected_run.problem_line(message=first_line(text), text=text, exit=4)
    lost = rejected_run.write_junit(junit_path, first, problem, 4)
    if lost is not None:
        print(f"ERROR: {lost}", file=sys.stderr)
