"""Lost nodes and lost launchers. Two launchers on this host, each with a host name of its own, stand for two nodes."""

import contextlib
import os
import signal

from times import DEATH, SIGNAL, lost_node
from torchrun import start, suite

HOSTS = ("node-a", "node-b")
DEAD = 3.0


def hang(tmp_path, ranks=1, **settings):
    run = start(
        tmp_path,
        suite("one_fault"),
        ranks=ranks,
        hosts=HOSTS,
        deadline=60.0,
        timeouts=f"stuck=2,dead={DEAD}",
        environment={"FAULT": "wait", "VICTIM": str(2 * ranks - 1)},
        **settings,
    )
    stamps = [run.wait_for_stamp("fault", rank) for rank in range(2 * ranks)]
    return run, stamps, max(stamp.at for stamp in stamps)


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_told(run, times, name, messages, since, goal):
    assert run.verdicts["test_first"] == "passed"
    assert any(message in run.verdicts["test_fault"] for message in messages), run.output
    assert run.verdicts["test_fault"].startswith("error: ")
    assert run.verdicts["test_next"].startswith("skipped: not run: ")
    assert run.end[:2] == ("BROKEN", 11)
    assert all(code != 0 for code in run.exits)
    assert run.left_over == []
    times.ended(name, run, since=since, goal=goal)


def test_a_lost_node_is_named_by_its_host(tmp_path, times):
    run, stamps, since = hang(tmp_path, ranks=2)
    kill(run.agents[1].pid, stamps[2].pid, stamps[3].pid)
    messages = [f"rank {rank} (node-b) is lost during call of test_one_fault.py::test_fault: " for rank in (2, 3)]
    is_told(run.wait(), times, "node lost", messages, since, lost_node(DEAD))


def test_a_rank_lost_beside_others_is_named_at_once(tmp_path, times):
    run, stamps, since = hang(tmp_path, ranks=2)
    kill(stamps[2].pid)
    message = "rank 2 (node-b) is lost during call of test_one_fault.py::test_fault: process"
    is_told(run.wait(), times, "death: kill, on the second node", [message], since, DEATH)


def test_a_lost_launcher_is_named_by_its_node(tmp_path, times):
    run, _, since = hang(tmp_path, forked=False)  # a real one
    kill(run.agents[1].pid)
    message = "the launcher's agent on node-b (node_rank 1) is gone"
    is_told(run.wait(), times, "launcher of the second node lost", [message], since, SIGNAL)


def test_the_lost_launcher_of_the_first_node_takes_the_store_with_it(tmp_path, times):
    run, _, since = hang(tmp_path)
    kill(run.agents[0].pid)
    messages = ["the rendezvous store at 127.0.0.1:", "the launcher's agent on node-a (node_rank 0) is gone"]
    is_told(run.wait(), times, "launcher of the first node lost", messages, since, SIGNAL)
