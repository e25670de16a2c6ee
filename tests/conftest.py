"""What tests of whole pytest sessions share."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

import fork_server
import hypothesis
import pytest

if TYPE_CHECKING:
    from sessions import Project

# How long an example takes says something about the machine only: other tests, and what is first imported in it.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


fork_server.turn_on()


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A folder with a suite that turns the plugin on by its ini file, in a clean environment."""
    import sessions  # imports torch, which other tests do without

    sessions.clean_environment(monkeypatch)
    return sessions.Project(pytester)


def pytest_unconfigure() -> None:
    """End the fork servers, say what CPU time the tests took, and let go of batches from a DataLoader's workers.

    Once pytest has put modules back that a test had changed, torch's own references to them complain at the end of the
    interpreter, each in five lines, behind pytest's summary.
    """
    fork_server.turn_off()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"CPU: {sum(each.ru_utime + each.ru_stime for each in used):.0f} s, of all processes but orphans")
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is not None:
        reductions.shared_cache.clear()
