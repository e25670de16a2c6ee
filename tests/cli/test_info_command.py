"""``gpucluster node info``: on this machine, whatever it has."""

import json

import pytest

from pytest_gpucluster.cli import main
from pytest_gpucluster.node.info import VIEWS


@pytest.mark.parametrize("view", ["cpu", "ib"])
def test_a_view_is_plain_text_of_80_columns_without_a_terminal(view, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main.main(["node", "info", view]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_all_of_it_is_one_json_object(capsys):
    assert main.main(["node", "info", "all", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert set(VIEWS["all"]) <= set(document)
