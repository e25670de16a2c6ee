"""What ``gpucluster doctor`` learns of a run from its collection: required tests, and why they would not run."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.judge.loader import load, shipped_path
from pytest_gpucluster.session import forecast
from pytest_gpucluster.session.selection import Room

ACCEPTANCE = Path(__file__).parents[2] / "acceptance"
TWO_NODES = Room(ranks=16, nodes=2, ranks_per_node=8)


def item(nodeid, **values):
    marks = {"criterion": nodeid.partition("::")[2], **values}
    named = {name: SimpleNamespace(args=(value,), kwargs={}) for name, value in marks.items()}
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=named.get)


def settings(**given):
    return SimpleNamespace(**{"model": None, "scratch": None, "report_dir": Path("/"), **given})


def skipped(nodeid, launched=TWO_NODES, given=None, **marks):
    [found] = forecast.required_tests([item(nodeid, **marks)], launched, TWO_NODES, given or settings())
    assert bool(found["skipped"]) == bool(found["remedy"]) or not found["skipped"]
    return str(found["skipped"])


def test_a_test_with_room_as_declared_but_not_as_launched_is_required_and_skipped():
    one = Room(ranks=8, nodes=1, ranks_per_node=8)
    assert skipped("test_links.py::test_x", one, needs_nodes=2) == "needs 2 nodes, and there is 1"
    found = forecast.required_tests([item("a::b", needs_nodes=3)], TWO_NODES, TWO_NODES, settings())
    assert found == []


def test_missing_packages_inputs_and_a_folder_that_is_not_shared_are_named(monkeypatch):
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


FORECAST = """
import sys
from pytest_gpucluster.session import forecast

class OtherGpus(forecast.VisibleGpus):
    def count(self):
        raise AssertionError("GPUs of this host do not count")

forecast.VisibleGpus = OtherGpus
sys.exit(forecast.main(sys.argv[1:]))
"""


def test_elsewhere_ranks_and_sku_are_those_ordered_and_limits_that_only_record_are_deviations(tmp_path):
    file, own = tmp_path / "forecast.json", tmp_path / "own.yaml"
    own.write_text("schema_version: 1\nskus:\n  H100 SXM:\n    limits:\n      matmul.fp32.tflops: {record_only: off}\n")
    words = ["-m", "pytest", "acceptance/", "--gpucluster-expect=2x8xH100", f"--gpucluster-thresholds={own}"]
    command = [sys.executable, "-c", FORECAST, str(file), "2", "0", "elsewhere", *words]
    subprocess.run(command, cwd=ACCEPTANCE.parent, check=True, capture_output=True)
    found = json.loads(file.read_text())
    assert (found["ranks_per_node"], found["sku"], found["gpus"]) == (8, "H100 SXM", [])
    assert "matmul.fp32.tflops is recorded only" in found["part"]
    assert found["part"].count("recorded only") == 1


def test_shipped_limits_are_no_deviation_and_conditions_that_do_not_hold_are_none(tmp_path):
    own, known = tmp_path / "own.yaml", {"world_size": "8", "nnodes": "1"}
    assert forecast.recorded_only(load(shipped_path()), "H100 SXM", known, list(CRITERIA)) == []
    for nodes, count in (("1", 1), ("2", 0)):
        entry = f"matmul.fp32.tflops: [{{record_only: off, when: {{nnodes: {nodes}}}}}]"
        own.write_text(f"schema_version: 1\nskus:\n  H100 SXM:\n    limits:\n      {entry}\n")
        limits = load(shipped_path(), own)
        assert len(forecast.recorded_only(limits, "H100 SXM", known, list(CRITERIA))) == count


def test_the_packages_are_those_that_the_suite_asks_for():
    asked = set()
    for path in ACCEPTANCE.glob("test_*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("importorskip"):
                asked.add((path.name, ast.literal_eval(call.args[0])))
        if "find_spec" in path.read_text():
            asked |= {(path.name, "transformers"), (path.name, "peft")}
    assert asked == {(tests.partition("::")[0], name) for tests, names in forecast.NEEDS.items() for name in names}
