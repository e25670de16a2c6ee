"""``gpucluster lora reference-curve``: from the curves of runs to the file of --gpucluster-reference-curve."""

import re

import pytest

from pytest_gpucluster.benchmarks.lora import reference_curve
from pytest_gpucluster.cli.main import main
from pytest_gpucluster.journal import journal
from pytest_gpucluster.journal.run_directory import artifacts_name
from pytest_gpucluster.metrics.loss_curve import Curve, Point

NODEID = "acceptance/test_qwen2_lora.py::test_lora_tiny"
CONTEXT = {"model": "x", "seed": "x"}


def curve(loss, **context):
    points = tuple(
        Point(step=step, loss=loss / step, all_token_loss=1.0, gradient_norm=1.0, learning_rate=1e-3) for step in (1, 2)
    )
    return Curve(points=points, context={**CONTEXT, **context})


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "curve.csv"
    curve(2.0).write_csv(path)
    return path


def test_a_reference_curve_of_two_runs(tmp_path, csv, capsys):
    curve(2.04).write_csv(tmp_path / "other.csv")
    out = tmp_path / "reference.json"
    assert main(["lora", "reference-curve", str(csv), str(tmp_path / "other.csv"), "--out", str(out)]) == 0
    found = reference_curve.read(out)
    assert (found.runs, found.steps, found.loss) == (2, (1, 2), (2.02, 1.01))
    printed = capsys.readouterr().err
    assert re.findall(r"[\d.]+\d|\d", printed.removesuffix(f"{out}\n")) == ["2", "2", "2.02", "1.01", "0.085"]


OF_A_RUN = [("passed", 0), ("failed", 3), ("error", 3), ("skipped", 3), (None, 3), ("passed and rejected", 3)]


@pytest.mark.parametrize(("outcome", "code"), OF_A_RUN)
def test_a_curve_in_a_runs_folder_is_of_a_test_that_passed_in_a_run_that_was_not_rejected(tmp_path, outcome, code):
    outcome, rejected = (outcome or "").removesuffix(" and rejected"), (outcome or "").endswith("rejected")
    lines = [{"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"}]
    lines += [{"type": "test", "nodeid": NODEID, "outcome": outcome}] if outcome else []
    lines += [{"type": "test", "nodeid": "test_matmul.py::test", "outcome": "failed"}] if rejected else []
    (tmp_path / "journal.jsonl").write_bytes(b"".join(map(journal.encode, lines)))
    artifacts = tmp_path / "artifacts" / artifacts_name(NODEID)
    artifacts.mkdir(parents=True)
    curve(3.0).write_csv(artifacts / "curve.csv")
    out = tmp_path / "reference.json"
    assert main(["lora", "reference-curve", str(artifacts / "curve.csv"), "--out", str(out)]) == code
    assert out.exists() == (code == 0)


def test_runs_of_different_experiments_are_named(tmp_path, csv, capsys):
    other = tmp_path / "other.csv"
    curve(2.0, seed="8").write_csv(other)
    assert main(["lora", "reference-curve", str(csv), str(other), "--out", str(tmp_path / "reference.json")]) == 3
    assert re.search(rf"seed is 8 in run 2.* x in run 1.*1 is {csv}; run 2 is {other}\b", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(
            ["{csv}", "{csv}", "--out", "{tmp}/g"], 2, "curve.csv is given 2 times; a run counts once", id="twice"
        ),
        pytest.param(["{csv}", "--out", "{csv}"], 2, "that is one of the curves; name another file", id="over itself"),
        pytest.param(["{csv}", "--out", "{tmp}/no/g"], 4, "/no/g: No such file or directory", id="no folder for it"),
        pytest.param(["{tmp}/none.csv", "--out", "{tmp}/g"], 3, "none.csv", id="no such curve"),
        pytest.param(
            ["{tmp}/bad.csv", "--out", "{tmp}/g"], 3, "bad.csv:1: no loss curve of this version", id="no curve"
        ),
    ],
)
def test_what_cannot_work_is_reported(tmp_path, csv, capsys, arguments, code, message):
    (tmp_path / "bad.csv").write_text("a,b\n")
    before = csv.read_bytes()
    assert main(["lora", "reference-curve", *(each.format(csv=csv, tmp=tmp_path) for each in arguments)]) == code
    output = capsys.readouterr().err
    assert message in output
    assert output.startswith("gpucluster: ")
    assert "Traceback" not in output
    assert csv.read_bytes() == before
