"""Nodes before a run: who is ready, who is not like the others, who has not answered."""

from __future__ import annotations

import pytest

from pytest_gpucluster.remote.asking import Reply
from pytest_gpucluster.remote.hosts import parse_hosts
from pytest_gpucluster.remote.preflight import NO_ANSWER, NOT_READY, READY, counted, examine, table

HOSTS = parse_hosts("gpu-[1-4]", "hosts")
ALIKE = {"version": "0.1.0", "package": "p", "limits": "l", "suite": "s", "python": "3.11.7", "torch": "2.13.0"}
ALIKE |= {"pytest": "9.0", "problems": []}


def replies(**changed):
    found = {host.name: Reply(answer={**ALIKE, "host": host.name}) for host in HOSTS}
    for name, reply in changed.items():
        name = name.replace("_", "-")
        found[name] = reply if isinstance(reply, Reply) else Reply(answer={**ALIKE, "host": name, **reply})
    return found


def states(nodes):
    return [node.state for node in nodes]


def test_nodes_that_are_alike_and_have_nothing_to_say_against_it_are_ready():
    nodes = examine(HOSTS, replies(), "0.1.0")
    assert states(nodes) == [READY] * 4
    assert counted(nodes) == "4 of 4 nodes are ready"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("python", "python: other, where most have 3.11.7"),
        ("torch", "torch: other, where most have 2.13.0"),
        ("pytest", "pytest: other, where most have 9.0"),
        ("version", "pytest-gpucluster: other, where most have 0.1.0"),
        ("package", "the files of pytest-gpucluster: other, where most have p"),
        ("limits", "the limits (thresholds.yaml): other, where most have l"),
        ("suite", "the files of the suite: other, where most have s"),
    ],
)
def test_a_node_that_differs_is_named_with_what_differs(key, told):
    nodes = examine(HOSTS, replies(gpu_1={key: "other"}), "0.1.0")
    assert states(nodes) == [NOT_READY, READY, READY, READY]
    assert nodes[0].problems == (told,)


def test_a_node_that_lacks_the_suite_differs_too():
    [first, *_] = examine(HOSTS, replies(gpu_1={"suite": ""}), "0.1.0")
    assert first.problems == ("the files of the suite: none, where most have s",)


def test_all_nodes_must_have_the_version_that_asks():
    nodes = examine(HOSTS, replies(), "0.2.0")
    assert states(nodes) == [NOT_READY] * 4
    assert nodes[0].problems == ("pytest-gpucluster: 0.1.0, where this machine has 0.2.0",)


def test_one_machine_twice_is_found_by_its_name():
    nodes = examine(HOSTS, replies(gpu_2={"host": "gpu-3"}), "0.1.0")
    assert states(nodes) == [READY, NOT_READY, NOT_READY, READY]
    assert "one machine twice" in nodes[1].problems[0]


def test_problems_of_a_node_itself_are_kept():
    nodes = examine(HOSTS, replies(gpu_4={"problems": ["the report directory out: cannot be written to"]}), "0.1.0")
    assert nodes[3].problems == ("the report directory out: cannot be written to",)
    assert states(nodes)[3] == NOT_READY


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (Reply(why="ssh: connect to host gpu-2 port 22: No route to host"), "No route to host"),
        (Reply(), "it has said nothing of itself"),
        (Reply(answer={}), "it has said nothing of itself"),
        # Facts that came before the connection was lost: nobody knows what would have followed.
        (Reply(answer=ALIKE, why="the connection was lost"), "the connection was lost"),
    ],
)
def test_a_node_without_an_answer_is_never_ready_and_makes_nobody_else_differ(reply, told):
    nodes = examine(HOSTS, replies(gpu_2=reply), "0.1.0")
    assert states(nodes) == [READY, NO_ANSWER, READY, READY]
    assert told in nodes[1].problems[0]
    assert counted(nodes) == "3 of 4 nodes are ready; no answer: gpu-2"


def test_without_any_reply_nobody_is_ready():
    nodes = examine(HOSTS, {}, "0.1.0")
    assert states(nodes) == [NO_ANSWER] * 4
    assert counted(nodes).startswith("none of 4 nodes is ready; no answer: gpu-1, ")


def test_the_table_has_a_line_for_each_node_and_for_each_problem():
    text = table(examine(HOSTS[:2], {"gpu-1": replies()["gpu-1"], "gpu-2": Reply(why="no\nanswer\x1b[2J")}, "0.1.0"))
    assert text.splitlines() == [
        "node   state      host   suite  python  torch",
        "gpu-1  ready      gpu-1  0.1.0  3.11.7  2.13.0",
        "gpu-2  no answer  -      -      -       -",
        "  no answer#x1B[2J",
    ]
