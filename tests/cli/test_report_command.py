"""``gpucluster report``: rendering again, and its exit codes."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from junit_files import require_junit

from pytest_gpucluster.cli.main import main
from pytest_gpucluster.journal import journal, run_directory

LINES = [
    {"type": "run", "schema_version": 1, "run_id": "r1", "started_at": "2026-01-02T03:04:05Z", "rehearsal": True},
    {"type": "collected", "tests": [{"nodeid": f"t.py::test_{name}"} for name in "ab"]},
    {"type": "start", "nodeid": "t.py::test_a"},
    {
        "type": "test",
        "nodeid": "t.py::test_a",
        "outcome": "passed",
        "sections": [["Captured stdout call", "OUT"]],
        "duration_seconds": 2.0,
        "call_seconds": 1.0,
        "line": 7,
    },
    {"type": "start", "nodeid": "t.py::test_b"},
]


@pytest.fixture
def run(tmp_path):
    directory = run_directory.new_run_directory(tmp_path / "reports")
    (directory / "journal.jsonl").write_bytes(b"".join(journal.encode(line) for line in LINES))
    return directory


@pytest.mark.parametrize("name", ["journal.jsonl", ".", "..", "../latest"])
def test_a_run_is_named_by_its_journal_its_folder_or_the_report_directory(run, tmp_path, capsys, name):
    out = tmp_path / "out.xml"
    assert main(["report", str(run / name), "--junitxml", str(out)]) == 0
    require_junit(str(out))
    error = ET.parse(out).getroot().find(".//error")
    assert error.get("message").endswith(": t.py::test_b")
    assert re.fullmatch(rf"gpucluster: REHEARSAL, BROKEN \(.* t\.py::test_b\): {out}\n", capsys.readouterr().err)


def test_a_truncated_journal_is_rendered_and_reported_as_truncated(run, tmp_path, capsys):
    path = run / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    assert main(["report", str(run), "--junitxml", str(tmp_path / "out.xml")]) == 0
    require_junit(str(tmp_path / "out.xml"))
    assert f"{path}: its last line " in capsys.readouterr().err


def test_a_missing_or_foreign_journal_is_exit_code_3(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none"), "--junitxml", "out.xml"]) == 3
    assert "no such journal" in capsys.readouterr().err
    (tmp_path / "foreign").write_text("hello\n")
    assert main(["report", str(tmp_path / "foreign"), "--junitxml", "out.xml"]) == 3
    assert str(tmp_path / "foreign") in capsys.readouterr().err


# ---- other formats, and several at once


def test_what_goes_to_the_standard_output_is_the_report_and_nothing_else(run, tmp_path, capfdbinary):
    assert main(["report", str(run), "--json", "-", "--markdown", str(tmp_path / "a.md")]) == 0
    printed = capfdbinary.readouterr()
    assert json.loads(printed.out)["verdict"]["word"] == "BROKEN"
    assert b"a.md" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "-", "--markdown", "-"], "--markdown -: --json has the same output; name another file"),
        (["--text", "--html", "-"], "--text -: --html has the same output"),
        (["--json", "{tmp}/a", "--html", "{tmp}/x/../a"], "--html has the same output"),
        (["--junitxml", "{run}/journal.jsonl"], "that is the journal itself; name another file"),
        (["--prometheus", "{tmp}/link"], "that is the journal itself; name another file"),
        (["--json", "-", "--text", "/dev/stdout"], "--json has the same output"),
        (["--json", "{tmp}/a", "--all", ""], "--junitxml: the output is an empty text; an empty variable?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_outputs_that_would_replace_something_are_refused(run, tmp_path, capsys, arguments, message):
    (tmp_path / "x").mkdir()
    (tmp_path / "link").symlink_to(run / "journal.jsonl")
    before = (run / "journal.jsonl").read_bytes()
    given = [each.format(tmp=tmp_path, run=run) for each in arguments]
    assert main(["report", str(run), *given]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert (run / "journal.jsonl").read_bytes() == before
    assert not (tmp_path / "a").exists()


def test_a_report_that_cannot_be_written_does_not_cost_the_others(run, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code = main(["report", str(run), "--json", str(tmp_path / "file" / "a"), "--markdown", str(tmp_path / "a.md")])
    assert code == 4
    printed = capsys.readouterr().err
    assert f"--json {tmp_path / 'file' / 'a'}: " in printed
    assert f": {tmp_path / 'a.md'}\n" in printed
    assert (tmp_path / "a.md").exists()


@pytest.mark.parametrize("out", ["-", "/dev/stdout"])
@pytest.mark.parametrize("redirected", ["| cat >> {}", ">> {}"])
def test_the_standard_output_is_appended_to_and_never_replaced(run, tmp_path, out, redirected):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    command = f"{sys.executable} -m pytest_gpucluster report {run} --markdown {out} {redirected.format(summary)}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert summary.read_text().startswith("before\n## ")
    assert done.stderr.endswith(": the standard output\n")


def test_a_standard_output_that_is_closed_is_no_success(run):
    command = f"{sys.executable} -m pytest_gpucluster report {run} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
