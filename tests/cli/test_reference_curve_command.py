"""``gpucluster lora reference-curve``: from the curves of runs to the file of --gpucluster-reference-curve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_gpucluster.benchmarks.lora import reference_curve
from pytest_gpucluster.cli.main import main
from pytest_gpucluster.journal import journal, run_directory
from pytest_gpucluster.journal.run_directory import artifacts_name
from pytest_gpucluster.metrics.loss_curve import Curve, Point

NODEID = "acceptance/test_qwen2_lora.py::test_lora_tiny"
CONTEXT = dict.fromkeys(reference_curve.REQUIRED, "x")


def curve(loss: float, **context: str) -> Curve:
    points = tuple(
        Point(step=step, loss=loss / step, all_token_loss=1.0, gradient_norm=1.0, learning_rate=1e-3) for step in (1, 2)
    )
    return Curve(points=points, context={**CONTEXT, **context})


def run_folder(report_dir: Path, *, outcome: str = "passed", curves: int = 1) -> Path:
    folder = run_directory.new_run_directory(report_dir)
    lines = [
        {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"},
        {"type": "test", "nodeid": NODEID, "outcome": outcome},
    ]
    (folder / "journal.jsonl").write_bytes(b"".join(map(journal.encode, lines)))
    artifacts = folder / "artifacts" / artifacts_name(NODEID)
    (artifacts / "data").mkdir(parents=True)
    (artifacts / "data" / "other.csv").write_text("a,b\n")
    for number in range(curves):
        curve(3.0).write_csv(artifacts / f"curve{number}.csv")
    return folder


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "curve.csv"
    curve(2.0).write_csv(path)
    return path


def test_a_reference_curve_of_a_file_and_of_a_run(
    tmp_path: Path, csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder(tmp_path / "reports")
    out = tmp_path / "reference.json"
    assert main(["lora", "reference-curve", str(csv), str(tmp_path / "reports"), "--out", str(out)]) == 0
    found = reference_curve.read(out)
    assert (found.runs, found.steps, found.loss) == (2, (1, 2), (2.5, 1.25))
    printed = capsys.readouterr().err
    assert re.findall(r"[\d.]+\d|\d", printed.removesuffix(f"{out}\n")) == ["2", "2", "2.5", "1.25", "2.1"]


@pytest.mark.parametrize("place", ["journal.jsonl", ".", ".."])
def test_a_run_is_named_by_its_journal_its_folder_or_the_report_directory(tmp_path: Path, place: str) -> None:
    folder = run_folder(tmp_path / "reports")
    assert main(["lora", "reference-curve", str(folder / place), "--out", str(tmp_path / "reference.json")]) == 0
    assert reference_curve.read(tmp_path / "reference.json").loss == (3.0, 1.5)


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped"])
def test_a_test_that_did_not_pass_leaves_nothing_to_go_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str
) -> None:
    folder = run_folder(tmp_path / "reports", outcome=outcome)
    assert main(["lora", "reference-curve", str(folder), "--out", str(tmp_path / "reference.json")]) == 3
    assert "curve0.csv: its test did not pass" in capsys.readouterr().err
    assert not (tmp_path / "reference.json").exists()


@pytest.mark.parametrize(("curves", "message"), [(0, ": no loss curves in "), (2, ": 2 loss curves in ")])
def test_a_run_must_have_one_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], curves: int, message: str
) -> None:
    folder = run_folder(tmp_path / "reports", curves=curves)
    assert main(["lora", "reference-curve", str(folder), "--out", str(tmp_path / "reference.json")]) == 3
    output = capsys.readouterr().err
    assert message in output


def test_of_several_curves_the_one_of_a_test_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path / "reports")
    other = NODEID.replace("tiny", "qwen2")
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(journal.encode({"type": "test", "nodeid": other, "outcome": "failed"}))
    (folder / "artifacts" / artifacts_name(other)).mkdir()
    curve(8.0).write_csv(folder / "artifacts" / artifacts_name(other) / "curve.csv")
    arguments = ["lora", "reference-curve", str(folder), "--out", str(tmp_path / "reference.json")]
    assert main([*arguments]) == 3
    assert "2 loss curves in " in capsys.readouterr().err
    assert main([*arguments, "--test", "lora_qwen2"]) == 3
    assert "curve.csv: " in capsys.readouterr().err
    assert main([*arguments, "--test", "other"]) == 3
    assert f"{folder}/artifacts of tests with 'other'" in capsys.readouterr().err
    assert main([*arguments, "--test", "lora_tiny"]) == 0
    assert reference_curve.read(tmp_path / "reference.json").loss == (3.0, 1.5)


def test_runs_of_different_experiments_are_named(tmp_path: Path, csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.csv"
    curve(2.0, seed="8").write_csv(other)
    assert main(["lora", "reference-curve", str(csv), str(other), "--out", str(tmp_path / "reference.json")]) == 3
    assert re.search(rf"seed is '8' in run 2.*'x' in run 1.*1 is {csv}; run 2 is {other}\b", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(
            ["{csv}", "{csv}", "--out", "{tmp}/g"], 2, "curve.csv is given 2 times; a run counts once", id="twice"
        ),
        pytest.param(["{csv}", "--out", "{csv}"], 2, "that is one of the curves; name another file", id="over itself"),
        pytest.param(["{csv}", "--out", "{tmp}/no/g"], 4, "/no/g: No such file or directory", id="no folder for it"),
        pytest.param(["{tmp}/none", "--out", "{tmp}/g"], 3, "none", id="nothing there"),
        pytest.param(["{tmp}/none.csv", "--out", "{tmp}/g"], 3, "none.csv", id="no such curve"),
        pytest.param(
            ["{tmp}", "--out", "{tmp}/g"], 3, "neither a journal.jsonl nor a latest/journal.jsonl", id="no run"
        ),
        pytest.param(
            ["{tmp}/bad.csv", "--out", "{tmp}/g"], 3, "bad.csv:1: no loss curve of this version", id="no curve"
        ),
        pytest.param(
            ["{tmp}/bad.txt", "--out", "{tmp}/g"], 3, "and it is not a loss curve, which begins with", id="neither"
        ),
    ],
)
def test_what_cannot_work_is_reported(
    tmp_path: Path, csv: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    for name in ("bad.csv", "bad.txt"):
        (tmp_path / name).write_text("a,b\n")
    before = csv.read_bytes()
    assert main(["lora", "reference-curve", *(each.format(csv=csv, tmp=tmp_path) for each in arguments)]) == code
    output = capsys.readouterr().err
    assert message in output
    assert output.startswith("gpucluster: ")
    assert "Traceback" not in output
    assert csv.read_bytes() == before
