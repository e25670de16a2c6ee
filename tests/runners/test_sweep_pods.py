"""kubectl's output is read strictly where a verdict depends on it, and is never taken for a pass."""

from __future__ import annotations

import json

import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners.sweep_kubernetes import job_end, parse_nodes, parse_pods


@pytest.mark.parametrize(
    "read", [parse_nodes, lambda text: parse_pods(text, "c"), job_end], ids=["nodes", "pods", "job"]
)
def test_anything_else_is_an_error(read):
    for text in ("", "null", "[]", '{"kind": "Status"}', '{"kind": "List"}', '{"kind": "List", "items": [1]}'):
        with pytest.raises(EnvironmentBroken, match="kubectl"):
            read(text)


def pod(status, **metadata):
    item = {"kind": "Pod", "metadata": {"name": "p", **metadata}, "status": status}
    [found] = parse_pods(json.dumps({"kind": "PodList", "items": [item]}), "suite")
    return found


def terminated(name="suite", **state):
    return {"name": name, "state": {"terminated": state}}


def test_without_the_end_of_its_container_a_pod_has_no_exit_code():
    for status in (
        {},
        {"phase": "Succeeded"},
        {"phase": "Succeeded", "containerStatuses": [terminated("sidecar", exitCode=0)]},
        {"phase": "Running", "containerStatuses": [terminated(exitCode=0)]},
        {"phase": "Failed", "containerStatuses": [terminated(reason="ContainerStatusUnknown")]},
    ):
        assert pod(status).exit is None


def test_a_pod_reports_why_it_does_not_start():
    waiting = {"name": "suite", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "none"}}}
    found = pod({"phase": "Pending", "containerStatuses": [waiting]})
    assert (found.problem, found.ended, found.index, found.node) == ("ImagePullBackOff: none", False, -1, "")


def test_an_end_without_times_has_no_duration():
    status = {"phase": "Failed", "containerStatuses": [terminated(exitCode=1, startedAt=None, finishedAt="today")]}
    assert (pod(status).exit, pod(status).seconds) == (1, None)


def test_a_job_is_over_when_it_says_so():
    def job(**condition):
        return job_end(json.dumps({"kind": "Job", "metadata": {"name": "j"}, "status": {"conditions": [condition]}}))

    assert job(type="Failed", status="True", reason="DeadlineExceeded") == "DeadlineExceeded"
    assert job(type="Complete", status="True") == "Complete"
    assert job(type="Failed", status="False") == job(type="SuccessCriteriaMet", status="True") == ""
