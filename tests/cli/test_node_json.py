"""A node as JSON: the keys that are documented, null for what is not there, and its reason."""

from __future__ import annotations

import json

from watched_nodes import HOSTILE, gpu, node, port

from pytest_gpucluster.cli.watch_screen import json_line, to_json
from pytest_gpucluster.node.health.node_state import Part


def test_it_is_one_line_of_strict_json_whatever_is_in_it() -> None:
    document = json_line(node(gpus=(gpu(name=HOSTILE, not_available={"power_watts": HOSTILE}),)), host="h", at="now")
    assert document.endswith("\n")
    assert document.count("\n") == 1
    assert json.loads(document)["gpus"][0]["name"] == HOSTILE


def test_what_is_not_there_is_null_and_never_zero() -> None:
    bare = Part(values={"index": 0, "uuid": "GPU-0", "not_available": {"power_watts": "why"}, "lost": ""})
    document = to_json(
        node(gpus=(bare,), ports=(Part(values={"name": "a/1"}),), host=Part(values={})), host="h", at="now"
    )
    [found] = document["gpus"]
    assert {key for key, value in found.items() if value is not None} == {"index", "uuid", "not_available", "stale"}
    assert found["not_available"] == {"power_watts": "why"}
    assert {key for key, value in document["ports"][0].items() if value is not None} == {"name", "stale"}
    assert {key for key, value in document["load"].items() if value is not None} == {"stale"}


def test_without_gpus_the_reason_is_there_and_what_is_stale_says_so() -> None:
    document = to_json(node(gpus=(), why_no_gpus="no driver", silent_seconds=None), host="h", at="now")
    assert (document["gpus"], document["why_no_gpus"]) == ([], "no driver")
    stale = node(gpus=(gpu(age=9.04, stale=True),), ports=(port(stale=True),), silent_seconds=4.26)
    document = to_json(stale, host="h", at="now")
    assert document["nvml_silent_seconds"] == 4.3
    assert (document["gpus"][0]["stale"], document["gpus"][0]["age_seconds"], document["ports"][0]["stale"]) == (
        True,
        9.0,
        True,
    )
