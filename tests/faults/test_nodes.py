"""Lost nodes and lost launchers. Two launchers on this host, each with a host name of its own, stand for two nodes."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from torchrun import start, suite

HOSTS = ("node-a", "node-b")


def hang(tmp_path, ranks=1):
    run = start(
        tmp_path,
        suite("one_fault"),
        ranks=ranks,
        hosts=HOSTS,
        deadline=60.0,
        timeouts="stuck=2,dead=3",
        environment={"FAULT": "wait", "VICTIM": str(2 * ranks - 1)},
    )
    stamps = [run.wait_for_stamp("fault", rank) for rank in range(2 * ranks)]
    return run, stamps, max(stamp.at for stamp in stamps)


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_told(run, times, name, messages, since, case="test_fault"):
    assert run.verdicts["test_first"] == "passed"
    assert any(message in run.verdicts[case] for message in messages), run.output
    assert run.verdicts["test_fault"].startswith("error: ")
    assert run.verdicts["test_next"].startswith("skipped: not run: ")
    assert run.end[:2] == ("BROKEN", 11)
    assert all(code != 0 for code in run.exits)
    assert run.left_over == []
    times.add(name, run, "test_fault", since=since, over=True)


def test_a_lost_node_is_named_by_its_host(tmp_path, times):
    run, stamps, since = hang(tmp_path)
    kill(run.agents[1].pid, stamps[1].pid)
    message = "rank 1 (node-b) is lost during call of test_one_fault.py::test_fault: "
    is_told(run.wait(), times, "node lost (dead=3)", [message], since)
