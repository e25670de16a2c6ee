"""Names are looked up within their time, whatever the resolver does, and a missing answer is reported."""

import threading
import time

import pytest
from complaints import in_order

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.node import name_resolution
from pytest_gpucluster.node.name_resolution import (
    Answer,
    Question,
    SystemResolver,
    longest_seconds,
    look_up,
    require_known,
)


class Resolver:
    """Knows some names; waits for some, and for ever for others."""

    def __init__(self):
        self.never = threading.Event()

    def forward(self, name):
        if name == "silent":
            self.never.wait(30)
        if name == "slow":
            time.sleep(0.2)
        if name == "":
            raise UnicodeError("label empty or too long")
        if name == "unknown":
            raise OSError("no such name")
        return "10.0.0.1"

    def reverse(self, address):
        if address == "10.0.0.9":
            raise OSError("no name")
        return f"host-of-{address}"


def forward(*names):
    return [Question(kind="forward", node=node, name=name) for node, name in enumerate(names)]


def test_answers_come_in_the_order_of_the_questions(monkeypatch):
    questions = [
        *forward("slow", "a", "unknown", "b", "c", "d", ""),
        Question(kind="reverse", node=1, name="10.0.0.2"),
    ]
    monkeypatch.setattr(name_resolution, "SYSTEM", Resolver())
    answers = look_up(questions, deadline_seconds=20.0)
    assert [answer.question for answer in answers] == questions
    assert [bool(answer.found) for answer in answers] == [True, True, False, True, True, True, False, True]
    assert not any(answer.timed_out for answer in answers)
    assert answers[0].seconds >= 0.2
    assert answers[2].error == "no such name"
    assert answers[-1].found == "host-of-10.0.0.2"


def test_a_resolver_that_never_answers_is_given_up_and_the_others_are_asked_all_the_same(monkeypatch):
    resolver = Resolver()
    monkeypatch.setattr(name_resolution, "SYSTEM", resolver)
    try:
        answers = look_up(forward(*["silent"] * 6, "a", "b"), deadline_seconds=0.2)
    finally:
        resolver.never.set()
    assert [answer.timed_out for answer in answers] == [True] * 6 + [False, False]
    for answer in answers[:6]:
        assert answer.error == "no answer within 0.2 s"
        assert answer.seconds >= 0.2


def test_this_host_knows_its_loopback():
    [answer] = look_up(forward("localhost"), deadline_seconds=30.0)
    assert "127.0.0.1" in answer.found
    assert longest_seconds(9, 10.0) == 30.0
    assert look_up([], deadline_seconds=1.0) == ()


def test_the_address_that_the_store_looks_up_is_looked_up(monkeypatch):
    # A line for 10.0.0.1 in /etc/hosts answers for that form alone, and hides how slow DNS is with the other one.
    seen = []
    monkeypatch.setattr("socket.getnameinfo", lambda place, flags: seen.append(place[0]) or ("gpu-001", "0"))
    for address, dual in (("10.0.0.1", True), ("10.0.0.1", False), ("fd00::1", True)):
        monkeypatch.setattr("socket.has_dualstack_ipv6", lambda dual=dual: dual)
        assert SystemResolver().reverse(address) == "gpu-001"
    assert seen == ["::ffff:10.0.0.1", "10.0.0.1", "fd00::1"]


HOSTS = {0: "node-a", 1: "node-b"}


def answer(kind="forward", *, error="", seconds=0.01, timed_out=False):
    question = Question(kind=kind, node=1, name="gpu-2")
    return Answer(
        question=question, seconds=seconds, found="" if error else "10.0.0.2", error=error, timed_out=timed_out
    )


def test_a_name_without_an_address_is_an_error_that_says_who_asked(capsys):
    wrong = answer(error="no such name")
    with pytest.raises(EnvironmentBroken, match=r"dns\.unknown: node-a") as raised:
        require_known([answer(), wrong], HOSTS, me=0, in_pods=False)
    assert in_order(str(raised.value), "gpu-2, node-b no such name")
    require_known([wrong], HOSTS, me=0, in_pods=True)
    assert "dns.unknown (note)" in capsys.readouterr().out
    with pytest.raises(EnvironmentBroken, match="gpu-2, the name of node-b"):
        require_known([answer(error="Temporary failure", seconds=5.0)], HOSTS, me=0, in_pods=False)


def test_what_is_slow_and_addresses_without_a_name_are_listed(capsys):
    slow, late = answer(seconds=4.0), answer(error="no answer within 10 s", seconds=10.0, timed_out=True)
    require_known([slow, late, answer("reverse", error="no name"), answer()], HOSTS, me=0, in_pods=False)
    printed = capsys.readouterr().out
    assert in_order(printed, "node-a gpu-2 10.0.0.2 (4 s) node-a gpu-2 (10 s) node-a node-b gpu-2 (0.01 s)")
    assert printed.count("\n") == 3
