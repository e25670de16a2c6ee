"""A node as JSON: the keys that are documented, null for what is not there, and the reason beside it."""

from __future__ import annotations

import json

from watched_nodes import HOSTILE, gpu, node, port

from pytest_gpucluster.cli.watch_screen import line, to_json
from pytest_gpucluster.node.health.node_state import Part


def test_it_is_one_line_of_strict_json_whatever_is_in_it() -> None:
    told = line(node(gpus=(gpu(name=HOSTILE, not_available={"power_watts": HOSTILE}),)), host="h", at="now")
    assert told.endswith("\n")
    assert told.count("\n") == 1
    assert json.loads(told)["gpus"][0]["name"] == HOSTILE


def test_what_is_not_there_is_null_and_never_zero() -> None:
    bare = Part(values={"index": 0, "uuid": "GPU-0", "not_available": {"power_watts": "why"}, "lost": ""})
    told = to_json(node(gpus=(bare,), ports=(Part(values={"name": "a/1"}),), host=Part(values={})), host="h", at="now")
    [found] = told["gpus"]
    assert {key for key, value in found.items() if value is not None} == {"index", "uuid", "not_available", "stale"}
    assert found["not_available"] == {"power_watts": "why"}
    assert {key for key, value in told["ports"][0].items() if value is not None} == {"name", "stale"}
    assert {key for key, value in told["load"].items() if value is not None} == {"stale"}


def test_without_gpus_the_reason_is_there_and_what_is_stale_says_so() -> None:
    told = to_json(node(gpus=(), why_no_gpus="no driver", silent_seconds=None), host="h", at="now")
    assert (told["gpus"], told["why_no_gpus"]) == ([], "no driver")
    stale = node(gpus=(gpu(age=9.04, stale=True),), ports=(port(stale=True),), silent_seconds=4.26)
    told = to_json(stale, host="h", at="now")
    assert told["nvml_silent_seconds"] == 4.3
    assert (told["gpus"][0]["stale"], told["gpus"][0]["age_seconds"], told["ports"][0]["stale"]) == (True, 9.0, True)
