"""``gpucluster node nccl-env``: on planted nodes, and on this machine, whatever it has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_nodes import azure, infiniband, pod

from pytest_gpucluster.cli import main
from pytest_gpucluster.node.fabric import nccl_facts

FORMATS = ("text", "shell", "json")


@pytest.fixture
def planted(monkeypatch):
    def plant(node):
        sources = node.sources()
        monkeypatch.setattr(nccl_facts, "Sources", lambda: sources)

    return plant


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_prints_what_is_advised(form, planted, tmp_path, capsys):
    planted(azure(tmp_path))
    assert main.main(["node", "nccl-env", "--format", form]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "NCCL_IB_HCA" in out
    assert "/opt/microsoft" in out


@pytest.mark.parametrize(
    ("make", "environ", "code"),
    [
        (infiniband, {}, 0),
        (infiniband, {"NCCL_IB_TIMEOUT": "22"}, 0),
        (infiniband, {"NCCL_IB_DISABLE": "1"}, 1),
        (azure, {}, 1),
        (azure, {"NCCL_IB_HCA": "mlx5_ib"}, 0),
        (azure, {"NCCL_IB_HCA": "mlx5"}, 1),
        (pod, {}, 3),
        (pod, {"NCCL_CHECK_POINTERS": "1"}, 1),
    ],
)
def test_a_check_ends_with_what_it_has_found_and_unknown_is_no_good_end(make, environ, code, planted, tmp_path, capsys):
    node = make(tmp_path)
    node.environ.update(environ)
    planted(node)
    assert main.main(["node", "nccl-env", "--check"]) == code
    assert main.main(["node", "nccl-env"]) == 0, "without --check it only prints"
    assert capsys.readouterr().err == ""


def test_json_has_the_node_and_the_advice(planted, tmp_path, capsys):
    planted(azure(tmp_path))
    assert main.main(["node", "nccl-env", "--format=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["host"], document["provider"]) == (1, "gpu-001", "Azure")
    assert list(document["fabric"]["outside"]) == ["mlx5_an0:1"]
    assert len(document["gpus"]) == 8
    page = (Path(__file__).parent.parent.parent / "docs/network.md").read_text(encoding="utf-8")
    assert [key for key in document if f"`{key}`" not in page] == [], "docs/network.md names every key"
    parts = [
        key
        for part in ("fabric", "set", "steps")
        for key in (document[part] if part == "fabric" else document[part][0])
    ]
    assert [key for key in parts if f"`{key}`" not in page] == []


def test_the_lines_of_this_machine_are_taken_by_a_shell():
    command = [sys.executable, "-m", "pytest_gpucluster", "node", "nccl-env", "--format", "shell"]
    subprocess.run(["bash", "-euc", 'eval "$("$@")"', "bash", *command], capture_output=True, timeout=60, check=True)
