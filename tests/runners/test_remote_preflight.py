"""Nodes before a run: who is ready, who is not like the others, who has not answered."""

from __future__ import annotations

from pytest_gpucluster.runners.hosts import parse_hosts
from pytest_gpucluster.runners.preflight import NO_ANSWER, NOT_READY, READY, counted, examine_nodes, preflight_table
from pytest_gpucluster.runners.ssh import Reply

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


def test_nodes_that_are_alike_are_ready_and_one_that_differs_is_named_with_what_differs():
    nodes = examine_nodes(HOSTS, replies(), "0.1.0")
    assert states(nodes) == [READY] * 4
    assert counted(nodes).startswith("4 of 4 nodes ")
    for key, most in ALIKE.items():
        if key != "problems":
            nodes = examine_nodes(HOSTS, replies(gpu_1={key: "other"}), "0.1.0")
            assert states(nodes) == [NOT_READY, READY, READY, READY]
            [told] = nodes[0].problems
            assert "other, " in told
            assert told.endswith(f" {most}")
    [first, *_] = examine_nodes(HOSTS, replies(gpu_1={"suite": ""}), "0.1.0")
    assert first.problems[0].endswith(" s")


def test_another_version_one_machine_twice_and_what_a_node_says_of_itself_make_it_not_ready():
    for changed, version, not_ready, parts in (
        ({}, "0.2.0", "1234", ("0.1.0", "0.2.0")),
        ({"gpu_2": {"host": "gpu-3"}}, "0.1.0", "23", ("twice",)),
        ({"gpu_4": {"problems": ["out: read-only"]}}, "0.1.0", "4", ("out: read-only",)),
    ):
        nodes = examine_nodes(HOSTS, replies(**changed), version)
        assert states(nodes) == [NOT_READY if number in not_ready else READY for number in "1234"]
        [told] = nodes[int(not_ready[0]) - 1].problems
        assert all(part in told for part in parts)


def test_a_node_without_an_answer_is_never_ready_and_makes_nobody_else_differ():
    for reply in (
        Reply(why="ssh: connect to host gpu-2 port 22: No route to host"),
        Reply(),
        Reply(answer={}),
        # Facts that came before the connection was lost: nobody knows what would have followed.
        Reply(answer=ALIKE, why="the connection was lost"),
    ):
        nodes = examine_nodes(HOSTS, replies(gpu_2=reply), "0.1.0")
        assert states(nodes) == [READY, NO_ANSWER, READY, READY]
        assert reply.why in nodes[1].problems[0]
        assert counted(nodes).startswith("3 of 4 nodes ")
        assert counted(nodes).endswith(": gpu-2")
    nobody = examine_nodes(HOSTS, {}, "0.1.0")
    assert states(nobody) == [NO_ANSWER] * 4
    assert ": gpu-1, " in counted(nobody)


def test_the_table_has_a_line_for_each_node_and_for_each_problem():
    text = preflight_table(
        examine_nodes(HOSTS[:2], {"gpu-1": replies()["gpu-1"], "gpu-2": Reply(why="no\nanswer\x1b[2J")}, "0.1.0")
    )
    assert text.splitlines() == [
        "node   state      host   suite  python  torch",
        "gpu-1  ready      gpu-1  0.1.0  3.11.7  2.13.0",
        "gpu-2  no answer  -      -      -       -",
        "  no answer#x1B[2J",
    ]
