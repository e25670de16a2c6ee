"""Reports rendered in a process of their own: it may be slow, die or fail, and only its own report is missing."""

import errno
import os
import re
import signal
import time
from pathlib import Path

import example_runs
import pytest

from pytest_gpucluster.journal import journal
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.reports.recorder.client import wait_for_end
from pytest_gpucluster.reports.recorder.writer import render_in_child

# The product forks in a process that has one thread. The one that runs all tests may have more, which is harmless for
# a child that only renders.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
GENEROUS_SECONDS = 60.0


@pytest.fixture
def run(tmp_path):
    return example_runs.write(tmp_path / "run", "rehearsal")


def found(run):
    return journal.read(run / journal.JOURNAL_FILE, keep_samples=False)


def children():
    """This process's children; None if the kernel does not list them."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return path.read_text() if path.exists() else None


def slow(journal, folder, kinds):
    if kinds == ("html",):
        (folder / f".report.html.{os.getpid()}.tmp").write_text("half")
        time.sleep(600)
    return {}


def test_one_that_takes_too_long_is_killed_and_leaves_nothing_behind(run):
    begin = time.monotonic()
    missing = render_in_child(found(run), run, 1.0, write=slow)
    assert time.monotonic() - begin < GENEROUS_SECONDS
    assert re.match(f"report.html: .* 1 s; gpucluster report {run} --all DIR", missing)
    assert [name for name in os.listdir(run) if name.startswith(".")] == []


def test_it_ends_by_itself_if_its_parent_is_dead(run):
    def says_who_it_is(journal, folder, kinds):
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
        return {}

    if (recorder := os.fork()) == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # as a recorder does
            signal.pthread_sigmask(signal.SIG_BLOCK, detached_process.SHIELDED)  # as it inherits it
            render_in_child(found(run), run, 1.0, write=says_who_it_is)
        finally:
            os._exit(1)
    os.waitpid(recorder, 0)
    assert wait_for_end(int((run / "pid").read_text()), GENEROUS_SECONDS)


def test_one_that_fails_says_why_and_one_that_dies_costs_itself_and_those_after_it(run):
    def failing(journal, folder, kinds):
        return {"results.json": "cannot be rendered: ValueError: \x1b[31m\nmore"} if kinds == ("json",) else {}

    def dying(journal, folder, kinds):
        if kinds == ("prometheus",):
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def raising(journal, folder, kinds):
        raise MemoryError

    me = os.getpid()
    fails, dies, raises = (
        render_in_child(found(run), run, GENEROUS_SECONDS, write=write) or "" for write in (failing, dying, raising)
    )
    assert os.getpid() == me, "the child never comes back as a second parent"
    assert re.match("results.json: .*: ValueError: ", fails)
    assert "report.html" not in fails
    assert re.match("metrics.prom: .* process died; report.html: .* process died; gpucluster report ", dies)
    assert raises.count("process died") == 3


def test_without_memory_for_a_process_it_is_reported(run, monkeypatch):
    def no_fork():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_fork)
    before = len(os.listdir("/proc/self/fd"))
    missing = render_in_child(found(run), run, GENEROUS_SECONDS)
    assert missing.count(os.strerror(errno.EAGAIN)) == 3
    assert len(os.listdir("/proc/self/fd")) == before
