"""What ``gpucluster doctor`` learns of a run from its collection: required tests, and why they would not run."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.session import forecast
from pytest_gpucluster.session.selection import Room

ACCEPTANCE = Path(__file__).parents[2] / "acceptance"
TWO_NODES = Room(ranks=16, nodes=2, ranks_per_node=8)


def item(nodeid: str, **values: Any) -> Any:
    marks = {"criterion": nodeid.partition("::")[2], **values}
    named = {name: SimpleNamespace(args=(value,), kwargs={}) for name, value in marks.items()}
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=named.get)


def settings(**given: Any) -> Any:
    return SimpleNamespace(**{"model": None, "scratch": None, "report_dir": Path("/"), **given})


def skipped(nodeid: str, launched: Room = TWO_NODES, given: Any = None, **marks: Any) -> str:
    [found] = forecast.required_tests([item(nodeid, **marks)], launched, TWO_NODES, given or settings())
    assert bool(found["skipped"]) == bool(found["remedy"]) or not found["skipped"]
    return str(found["skipped"])


def test_a_test_with_room_as_declared_but_not_as_launched_is_required_and_skipped() -> None:
    one = Room(ranks=8, nodes=1, ranks_per_node=8)
    assert skipped("test_links.py::test_x", one, needs_nodes=2) == "needs 2 nodes, and there is 1"
    found = forecast.required_tests([item("a::b", needs_nodes=3)], TWO_NODES, TWO_NODES, settings())
    assert found == []


def test_missing_packages_inputs_and_a_folder_that_is_not_shared_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "were not given" in skipped("acceptance/test_qwen2_lora.py::test_qwen2_lora")
    given = Room(ranks=16, nodes=2, ranks_per_node=8, data=frozenset({"function_calls"}))
    assert skipped("test_qwen2_lora.py::test_qwen2_lora", given, settings(model="x")) == ""
    assert "do not share" in skipped("test_checkpoint.py::test_checkpoint")
    mount = SimpleNamespace(is_network=True)
    monkeypatch.setattr(forecast.files, "mount_of", lambda *_: mount)
    assert skipped("test_checkpoint.py::test_checkpoint") == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert skipped("test_qwen2_lora.py::test_lora_tiny") == "not installed: transformers, peft"
    assert skipped("test_vision.py::test_vision_data[resnet18]") == "not installed: transformers, PIL"
    assert skipped("test_hbm.py::test_hbm[copy]") == ""


def test_the_packages_are_those_that_the_suite_asks_for() -> None:
    asked = set()
    for path in ACCEPTANCE.glob("test_*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("importorskip"):
                asked.add((path.name, ast.literal_eval(call.args[0])))
        if "find_spec" in path.read_text():
            asked |= {(path.name, "transformers"), (path.name, "peft")}
    assert asked == {(tests.partition("::")[0], name) for tests, names in forecast.NEEDS.items() for name in names}
