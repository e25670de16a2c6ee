"""The name of the store's host is looked up first, for a few seconds at most, and what is not known is told."""

import re
import socket
import threading
import time
from dataclasses import replace

import pytest
from ranks import facts_of

from pytest_gpucluster.errors import LaunchError, UsageProblem
from pytest_gpucluster.launch import master_address

FACTS = facts_of(hostname="gpu-07", launcher="slurm", master_addr_from="the first of SLURM_STEP_NODELIST")
FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.6", 29500))]
UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
LATER = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


class Resolver:
    """Gives one answer after the other, the last one again and again."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.asked = []

    def __call__(self, *question, **_):
        self.asked.append(question)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer


@pytest.fixture
def resolver(monkeypatch):
    def put(*answers, seconds=20.0):
        made = Resolver(*answers)
        monkeypatch.setattr(socket, "getaddrinfo", made)
        monkeypatch.setattr(master_address, "LOOKUP_SECONDS", seconds)
        monkeypatch.setattr(master_address, "_RETRY_SECONDS", 0.01)
        monkeypatch.setattr(master_address, "_REPORT_SECONDS", 0.0)
        return made

    return put


@pytest.fixture
def hang():
    """What a resolver does that gives no answer, until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(60) and FOUND
    over.set()


def refused(facts=FACTS):
    with pytest.raises(LaunchError) as caught:
        master_address.require_known(facts)
    assert isinstance(caught.value, UsageProblem)
    return str(caught.value)


def test_a_name_is_looked_up_once_and_an_address_or_a_single_process_needs_no_resolver(resolver):
    for literal in ("10.0.0.6", "fd00::6"):
        master_address.require_known(replace(FACTS, master_addr=literal))
    answers = resolver(UNKNOWN)
    master_address.require_known(replace(FACTS, world_size=1, nnodes=1, launcher="single", master_addr=None))
    assert answers.asked == []
    answers = resolver(FOUND)
    master_address.require_known(FACTS)
    assert answers.asked == [("gpu-06", None)]


def test_a_name_that_does_not_resolve_is_told_at_once(resolver):
    answers = resolver(UNKNOWN)
    text = refused()
    assert len(answers.asked) == 1
    first = text.splitlines()[0]
    assert re.match(rf"rank 0 on gpu-07: gpu-06, .* SLURM_STEP_NODELIST\).*: {re.escape(str(UNKNOWN))}$", first)
    assert "found: slurm started 2 ranks on 2 nodes" in text
    assert "what to do: `export MASTER_ADDR=" in text
    assert "gpu..06, " in refused(replace(FACTS, master_addr="gpu..06"))


def test_a_temporary_failure_is_asked_again_until_the_time_is_over(resolver, hang):
    for answer, launcher in ((LATER, "slurm"), (UNKNOWN, "kubernetes")):  # a pod's name may be known later
        answers = resolver(answer, answer, FOUND)
        master_address.require_known(replace(FACTS, launcher=launcher))
        assert len(answers.asked) == 3
    answers = resolver(LATER, seconds=0.1)
    assert f"does not resolve: {LATER}" in refused()
    assert len(answers.asked) > 1
    resolver(LATER, hang, seconds=0.2)
    assert f"does not resolve: {LATER}" in refused()


def test_a_resolver_without_an_answer_is_not_waited_for(resolver, hang):
    resolver(hang, seconds=0.2)
    begin = time.perf_counter()
    assert "0.2 s" in refused()
    assert time.perf_counter() - begin < 20.0


def test_other_ranks_end_after_rank_0_which_has_a_report_to_write(resolver, monkeypatch):
    resolver(UNKNOWN)
    slept = []
    monkeypatch.setattr(master_address, "_REPORT_SECONDS", 3.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    refused()
    assert slept == []
    assert refused(replace(FACTS, rank=1)).startswith("rank 1 on gpu-07: ")
    assert slept == [3.0]
