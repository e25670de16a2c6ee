"""A pytest plugin for perf/overhead.py: the moments of a rank's start, and the duration of each test.

    pytest -p overhead_stamps     # with perf/ on PYTHONPATH, and PERF_STAMPS a file that rank 0 writes at its end

All moments are of CLOCK_BOOTTIME, which all processes of a machine share, and in which /proc has the start of a
process. Two functions of the product are wrapped, and nothing is replaced.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def now() -> float:
    """Return seconds since the machine was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def began() -> float:
    """Return when this process began. Source: proc_pid_stat(5), starttime, in ticks after boot."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


MOMENTS: dict[str, float] = {"exec": began(), "plugin": now()}
PROCESSOR: dict[str, float] = {"plugin": time.process_time()}
TESTS: list[dict[str, Any]] = []


def stamp(name: str) -> None:
    """Record the first occurrence of a moment."""
    if name not in MOMENTS:
        MOMENTS[name] = now()
        PROCESSOR[name] = time.process_time()


def between(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that stamps before and after itself."""

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        stamp(f"{name} begins")
        try:
            return function(*arguments, **keywords)
        finally:
            stamp(f"{name} ends")

    return call


@pytest.hookimpl(trylast=True)
def pytest_load_initial_conftests() -> None:
    """Import torch here and nowhere else, so that its time is known; then stamp the startup."""
    stamp("torch begins")
    # The parts that the criteria import, which would be loaded during the collection.
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.parallel  # noqa: F401

    stamp("torch ends")
    from pytest_gpucluster.session import startup

    startup.connect = between(startup.connect, "connecting")  # type: ignore[attr-defined]
    startup.join = between(startup.join, "roll call")  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Stamp the end of the collection."""
    stamp("collected")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Measure the whole duration of a test."""
    stamp("first test")
    mark = item.get_closest_marker("training")
    TESTS.append({"nodeid": item.nodeid, "name": item.name, "training": mark is not None})
    begin = now()
    result = yield
    TESTS[-1]["seconds"] = now() - begin
    return result


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Write the stamps, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        stamps = {"moments": MOMENTS, "processor": PROCESSOR, "tests": TESTS, "end": now()}
        Path(os.environ["PERF_STAMPS"]).write_text(json.dumps(stamps), encoding="utf-8")
