"""What tests of whole pytest sessions share."""

import contextlib
import gc
import os
import resource
import signal
import sys

import fork_server
import programs
import pytest

with contextlib.suppress(
    ImportError
):  # pytest loads this file to say of any path that it is wrong, in a rehearsal, too
    import hypothesis

    # How long an example takes says something about the machine only: other tests, and what is first imported in it.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")

# Before torch is loaded: several threads that wait for each other take far more CPU time for such small products.
os.environ.setdefault("OMP_NUM_THREADS", "1")
fork_server.turn_on()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in its background
    signal.signal(signal.SIGINT, signal.default_int_handler)


_only_in_all = []
"""Tests that this run leaves to ``make test-all``."""


def pytest_deselected(items):
    """Note what is left to the larger tier."""
    _only_in_all.extend(item.nodeid for item in items if item.get_closest_marker("extended"))


def pytest_collection_finish():
    """Keep the garbage collector from looking through what is loaded and collected."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Skip a test of a GPU where there is none. Torch is asked only where such a test is to run."""
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def pytest_terminal_summary(terminalreporter):
    """Say what has not been run, and what it takes."""
    skipped = terminalreporter.stats.get("skipped", [])
    without_gpu = sum("needs a GPU" in str(report.longrepr) for report in skipped)
    lines = programs.missing_programs()
    lines += [f"{without_gpu} tests need a GPU"] if without_gpu else []
    lines += [f"{len(_only_in_all)} tests of real services and long series: make test-all"] if _only_in_all else []
    if lines:
        terminalreporter.section("not run")
        for line in lines:
            terminalreporter.line(line)


@pytest.fixture
def project(request, monkeypatch):
    """A folder with a suite that turns the plugin on by its ini file, in a clean environment."""
    # It imports torch, which other tests do without. Pytester comes later: at its end it forgets what came after it.
    import sessions

    sessions.clean_environment(monkeypatch)
    return sessions.Project(request.getfixturevalue("pytester"))


def pytest_unconfigure():
    """End the fork servers, say what CPU time the tests took, and let go of batches from a DataLoader's workers.

    Once pytest has put modules back that a test had changed, torch's own references to them complain at the end of the
    interpreter, each in five lines, behind pytest's summary.
    """
    for server in ("fork_server", "light_server", "fake_ssh"):
        if server in sys.modules:
            sys.modules[server].turn_off()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"CPU: {sum(each.ru_utime + each.ru_stime for each in used):.0f} s, of all processes but orphans")
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is not None:
        reductions.shared_cache.clear()
