"""``gpucluster runs compare``: its answers as exit codes."""

import json

import pytest
from written_runs import MATMUL, case, measured, write

from pytest_gpucluster.cli.main import main


@pytest.fixture
def runs(tmp_path):
    """Folders of runs: one that is the measure, and others."""
    for name, value, more in (
        ("old", 730, {}),
        ("copy", 730, {}),
        ("same", 729, {}),
        ("slow", 700, {}),
        ("rehearsal", 730, {"rehearsal": True}),
    ):
        write(tmp_path / name, case(MATMUL, "passed", measured([730, value])), **more)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["old", "same"], 0, "NO REGRESSION"),
        (["old", "slow"], 1, "REGRESSION: 1 "),
        (["old", "slow", "--fail", "5%"], 0, "NO REGRESSION"),
        (["old", "rehearsal"], 5, "REHEARSAL"),
    ],
)
def test_the_exit_code_is_the_answer(runs, capsys, arguments, code, message):
    old, new, *options = arguments
    assert main(["runs", "compare", str(runs / old), str(runs / new), *options]) == code
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    ("new", "options", "code", "message"),
    [
        ("none", [], 3, "no such journal"),
        ("old", [], 2, "the same run"),
        ("copy", [], 2, "the same run"),
        ("same", ["--json", "old/journal.jsonl/out.json"], 4, "old/journal.jsonl/out.json: "),
        ("same", ["--json", "old/journal.jsonl"], 2, "old/journal.jsonl: "),
        ("same", ["--html", "same/../same/journal.jsonl"], 2, "that is a journal"),
        ("same", ["--html", "out", "--json", "./out"], 2, "--json has the same output"),
        ("same", ["--html", "-", "--json", "/dev/stdout"], 2, "--json has the same output"),
        ("same", ["--html", ""], 2, "an empty text"),
    ],
)
def test_what_cannot_be_done_is_reported(runs, capsys, monkeypatch, new, options, code, message):
    monkeypatch.chdir(runs)
    assert main(["runs", "compare", str(runs / "old"), str(runs / new), *options]) == code
    assert message in capsys.readouterr().err


def test_json_alone_goes_to_the_standard_output(runs, capsys):
    assert main(["runs", "compare", str(runs / "old"), str(runs / "slow"), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["answer"], found["exit"]) == ("REGRESSION", 1)
    assert found["old"]["journal"] == str(runs / "old" / "journal.jsonl")


@pytest.mark.parametrize(("new", "tone"), [("same", "neutral"), ("slow", "bad"), ("rehearsal", "incomplete")])
def test_the_page_alone_goes_to_the_standard_output_in_the_colour_of_its_answer(runs, capsys, new, tone):
    main(["runs", "compare", str(runs / "old"), str(runs / new), "--html", "-"])
    page = capsys.readouterr().out
    assert page.startswith("<!DOCTYPE html>")
    assert page.endswith("</html>")
    assert f'class="verdict v-{tone}"' in page
