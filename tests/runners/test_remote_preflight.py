"""Nodes before a run: which are ready, differ from the others, or have not answered."""

import pytest

from pytest_gpucluster.runners import preflight
from pytest_gpucluster.runners.hosts import parse_hosts
from pytest_gpucluster.runners.preflight import (
    NO_ANSWER,
    NOT_READY,
    READY,
    check_nodes,
    preflight_table,
    readiness_text,
)

HOSTS = parse_hosts("gpu-[1-4]", "hosts")
ALIKE = {"version": "0.1.0", "package": "p", "suite": "s", "torch": "2.13.0", "problems": []}


@pytest.fixture(autouse=True)
def version_here(monkeypatch):
    monkeypatch.setattr(preflight, "__version__", ALIKE["version"])


def replies(**changed):
    found = {host.name: {**ALIKE, "host": host.name} for host in HOSTS}
    for name, reply in changed.items():
        name = name.replace("_", "-")
        found[name] = {**ALIKE, "host": name, **reply} if reply and not isinstance(reply, str) else reply
    return found


def states(nodes):
    return [node.state for node in nodes]


def test_nodes_that_are_alike_are_ready_and_one_that_differs_is_named_with_what_differs():
    nodes = check_nodes(HOSTS, replies())
    assert states(nodes) == [READY] * 4
    assert readiness_text(nodes).startswith("4 of 4 nodes ")
    for key, most in ALIKE.items():
        if key != "problems":
            nodes = check_nodes(HOSTS, replies(gpu_1={key: "other"}))
            assert states(nodes) == [NOT_READY, READY, READY, READY]
            [problem] = nodes[0].problems
            assert "other, " in problem
            assert problem.endswith(f" {most}")
    [first, *_] = check_nodes(HOSTS, replies(gpu_1={"suite": ""}))
    assert first.problems[0].endswith(" s")


@pytest.mark.parametrize("place", ["thresholds.yaml", "pytest_gpucluster/thresholds.yaml"])
def test_a_node_with_other_limits_is_named_in_a_checkout_and_of_a_wheel(place, tmp_path, monkeypatch):
    (tmp_path / "pytest_gpucluster").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "__file__", str(tmp_path / "pytest_gpucluster" / "runners" / "preflight.py"))
    request = {"directory": ".", "report_dir": "report", "arguments": [], "master": "", "port": None}
    package = []
    for text in ("hbm: 3", "hbm: 2"):
        (tmp_path / place).write_text(text)
        package.append(preflight.collect_facts(request)["package"])
    alike, other = ({"package": digest} for digest in package)
    nodes = check_nodes(HOSTS, replies(gpu_1=alike, gpu_2=other, gpu_3=alike, gpu_4=alike))
    assert states(nodes) == [READY, NOT_READY, READY, READY]
    assert "(with the limits)" in nodes[1].problems[0]


def test_another_version_one_machine_twice_and_problems_of_a_node_make_it_not_ready(monkeypatch):
    for changed, version, not_ready, parts in (
        ({}, "0.2.0", "1234", ("0.1.0", "0.2.0")),
        ({"gpu_2": {"host": "gpu-3"}}, "0.1.0", "23", ("twice",)),
        ({"gpu_4": {"problems": ["out: read-only"]}}, "0.1.0", "4", ("out: read-only",)),
    ):
        monkeypatch.setattr(preflight, "__version__", version)
        nodes = check_nodes(HOSTS, replies(**changed))
        assert states(nodes) == [NOT_READY if number in not_ready else READY for number in "1234"]
        [problem] = nodes[int(not_ready[0]) - 1].problems
        assert all(part in problem for part in parts)


def test_a_node_without_an_answer_is_never_ready_and_makes_no_other_node_differ():
    for reply in ("ssh: connect to host gpu-2 port 22: No route to host", "", {}):
        nodes = check_nodes(HOSTS, replies(gpu_2=reply))
        assert states(nodes) == [READY, NO_ANSWER, READY, READY]
        assert (reply or "sent no facts") in nodes[1].problems[0]
        assert readiness_text(nodes).startswith("3 of 4 nodes ")
        assert readiness_text(nodes).endswith(": gpu-2")
    unanswered = check_nodes(HOSTS, {})
    assert states(unanswered) == [NO_ANSWER] * 4
    assert ": gpu-1, " in readiness_text(unanswered)


def test_the_table_has_a_line_for_each_node_and_for_each_problem():
    text = preflight_table(check_nodes(HOSTS[:2], {"gpu-1": replies()["gpu-1"], "gpu-2": "no\nanswer\x1b[2J"}))
    assert text.splitlines() == [
        "node   state      host   suite  torch",
        "gpu-1  ready      gpu-1  0.1.0  2.13.0",
        "gpu-2  no answer  -      -      -",
        "  no answer#x1B[2J",
    ]
