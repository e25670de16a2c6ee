"""``gpucluster node diff``: exit codes, who gave no answer, and what cannot be read."""

import json

import pytest
from node_info_files import node_info, write

from pytest_gpucluster.cli import main


@pytest.fixture(autouse=True)
def columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_nodes_that_are_alike_end_with_0(tmp_path, capsys):
    write(tmp_path, n_1=node_info(), n_2=node_info())
    assert main.main(["node", "diff", str(tmp_path), "--nodes", "n-[1-2]"]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[-1].startswith("2 nodes ")
    assert "differ in" not in output


def test_a_difference_is_reported_with_the_node_s_name(tmp_path, capsys):
    write(tmp_path, n_1=node_info(), n_2=node_info(), n_3=node_info(system__kernel="5.4\x1b[31m"))
    assert main.main(["node", "diff", str(tmp_path), "--json", str(tmp_path / "out")]) == 1
    output = capsys.readouterr().out
    assert "  kernel\n" in output
    assert "      1  5.4#x1B[31m\n         n-3\n" in output
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 80
    kept = json.loads((tmp_path / "out").read_text())
    [kernel] = [fact for fact in kept["facts"] if fact["name"] == "kernel"]
    assert (kept["exit"], kernel["alike"], kernel["groups"][1]["nodes"]) == (1, False, ["n-3"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "no answer"),
        ("", "is no JSON"),
        ('{"schema_version": 1', "is no JSON"),
        ("[" * 100000, "is no JSON"),
        ("[1]", "was not written by"),
        ('{"schema_version": 9, "host": "x", "view": "all"}', "version 9"),
        ('{"schema_version": 1, "host": "x", "view": "gpu"}', "view 'gpu'"),
    ],
    ids=["missing", "empty", "cut off", "deep", "a list", "newer", "another view"],
)
def test_a_node_without_an_answer_is_never_alike(tmp_path, capsys, text, why):
    write(tmp_path, n_1=node_info(), n_2=node_info(), **({} if text is None else {"n_3": text}))
    assert main.main(["node", "diff", str(tmp_path), "--nodes", "n-[1-3]"]) == 5
    output = " ".join(capsys.readouterr().out.split())
    assert "n-3: " in output
    assert why in output
    assert "no answer: n-3" in output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--nodes", "n-["], 2, "--nodes: "),
        (["--json", "/dev/null/x"], 4, "--json /dev/null/x: Not a directory"),
        (["--nodes", "n-1"], 0, ""),
        ([], 5, ""),
    ],
    ids=["no host list", "no place", "one node, as asked", "one node"],
)
def test_wrong_usage_and_single_nodes(tmp_path, capsys, words, code, message):
    write(tmp_path, n_1=node_info())
    assert main.main(["node", "diff", str(tmp_path), *words]) == code
    printed = capsys.readouterr()
    assert message in printed.err
    assert "are alike" not in printed.out


def test_nothing_to_compare_is_an_error(tmp_path, capsys):
    assert main.main(["node", "diff", str(tmp_path)]) == 3
    assert str(tmp_path) in capsys.readouterr().err
    assert main.main(["node", "diff", str(tmp_path / "none")]) == 3
    (tmp_path / ".n-1.json").write_text("{}")  # half written
    assert main.main(["node", "diff", str(tmp_path), "--nodes", "n-1"]) == 3
