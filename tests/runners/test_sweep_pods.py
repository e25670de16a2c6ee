"""kubectl's output is read strictly where a verdict depends on it, and is never taken for a pass."""

import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners.sweep_kubernetes import is_over, parse_items, parse_pod


@pytest.mark.parametrize("kind", ["Node", "Pod", "Job"])
def test_anything_else_is_an_error(kind):
    for text in ("", "null", "[]", '{"kind": "Status"}', '{"kind": "List"}', '{"kind": "List", "items": [1]}'):
        with pytest.raises(EnvironmentBroken, match="kubectl"):
            parse_items(text, kind)


def pod(status):
    return parse_pod({"kind": "Pod", "metadata": {"name": "p"}, "status": status}, "suite")


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


def test_a_job_is_over_when_it_says_so():
    def job(**condition):
        return is_over({"status": {"conditions": [condition]}})

    assert job(type="Failed", status="True", reason="DeadlineExceeded")
    assert job(type="Complete", status="True")
    assert not job(type="Failed", status="False")
    assert not job(type="SuccessCriteriaMet", status="True")
    assert not is_over({})
