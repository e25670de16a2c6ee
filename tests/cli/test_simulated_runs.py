"""A run on a simulated cluster says so wherever its verdict is shown, and nothing makes an accepted one of it."""

import functools
import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import example_runs
import pytest

from pytest_gpucluster.analysis.certificate import certificate_content, read_certificate
from pytest_gpucluster.cli import main
from pytest_gpucluster.journal.journal import JOURNAL_FILE, encode, read
from pytest_gpucluster.journal.run_directory import VerdictRecord
from pytest_gpucluster.journal.verdict import VERDICTS
from pytest_gpucluster.reports import registry
from pytest_gpucluster.runners.run_result import RunResult, conclusion
from pytest_gpucluster.runners.sweep_outcome import PASSES

LINES = functools.cache(lambda: example_runs.lines("accepted"))
ENDS = [*((word, 0) for word in VERDICTS), ("PASSED WITH DEVIATIONS", 12), ("REJECTED", 1), ("INCOMPLETE", 10)]


def write(folder, *, device="simulated", end=None, has_end=True):
    """Write a run of which every test has passed, and whatever its closing line states."""
    first, *between, last = LINES()
    lines = [{**first, "device": device, "run_id": folder.name}, *between]
    if has_end:
        lines.append(last | (dict(zip(("verdict", "exit"), end, strict=True)) if end else {}))
    folder.mkdir()
    (folder / JOURNAL_FILE).write_bytes(b"".join(map(encode, lines)))
    return folder


@pytest.fixture(params=[*ENDS, None], ids=str)
def run(request, tmp_path):
    return write(tmp_path / "run", end=request.param, has_end=request.param is not None)


def rendered(run):
    journal = read(run / JOURNAL_FILE, keep_samples=False)
    return {kind: registry.render(kind, journal, folder=run) for kind in registry.FILES}


def test_no_report_of_it_accepts_and_each_says_that_it_is_simulated(run):
    reports = rendered(run)
    verdict = json.loads(reports["json"])["verdict"]
    assert (verdict["accepted"], verdict["simulated"], verdict["rehearsal"]) == (False, True, False)
    samples = dict(line.rsplit(" ", 1) for line in reports["prometheus"].splitlines() if line[0] != "#")
    assert (samples["gpucluster_run_accepted"], samples["gpucluster_run_simulated"]) == ("0.0", "1.0")
    assert samples['gpucluster_run_verdict{verdict="ACCEPTED"}'] == "0.0"
    assert {value for name, value in samples.items() if name.startswith("gpucluster_criterion_passed")} == {"0.0"}
    suite = ET.fromstring(reports["junitxml"].encode())[0]
    properties = {each.get("name"): each.get("value") for each in suite.iterfind("properties/property")}
    assert (properties["verdict"] in PASSES[:2], properties["simulated"]) == (False, "true")
    assert suite.findtext("system-out").startswith("SIMULATED cluster: no statement")
    first, *_, last = reports["text"].strip().split("\n\n")
    assert "SIMULATED: no" in first
    assert last.startswith("SIMULATED")
    assert reports["markdown"].split()[:3][2].strip(",") == "SIMULATED"
    assert "\N{WHITE HEAVY CHECK MARK}" not in reports["markdown"].splitlines()[0]
    assert "<title>SIMULATED" in reports["html"]
    assert "<b>SIMULATED cluster</b>" in reports["html"]
    assert 'class="verdict v-good"' not in reports["html"]


def test_no_command_accepts_it_and_the_exit_code_stays(run, capsys):
    journal = read(run / JOURNAL_FILE)
    assert main.main(["verdict", str(run)]) == journal.exit
    assert capsys.readouterr().out.startswith("gpucluster: SIMULATED")
    main.main(["report", str(run), "--html", str(run / "page.html")])
    assert capsys.readouterr().err.startswith("gpucluster: SIMULATED")
    assert conclusion(journal.verdict, journal.exit, "", kind=RunResult.of(journal, "").kind).line.startswith(
        "SIMULATED"
    )
    words = {"verdict": journal.verdict, "exit": journal.exit, "reason": ""}
    for forged in (words, {**words, "verdict": "ACCEPTED", "exit": 0}):
        assert not VerdictRecord.of(journal, run, **forged).is_accepted


def test_there_is_no_certificate_of_it(run, tmp_path, capsys):
    out = tmp_path / "certificate.json"
    assert main.main(["certificate", "create", str(run), "--out", str(out)]) == 1
    assert not out.exists()
    assert "SIMULATED cluster" in capsys.readouterr().err
    assert main.main(["certificate", "create", str(run), "--out", str(out), "--even-though-not-accepted"]) == 0
    certificate = read_certificate(out)
    content = replace(
        certificate.content, accepted=True, not_accepted_because=(), verdict={"word": "ACCEPTED", "exit": 0}
    )
    assert not replace(certificate, content=content).is_accepted
    assert main.main(["certificate", "verify", str(out)]) != 0


def test_it_is_compared_with_another_simulated_run_alone(tmp_path, capsys):
    real = write(tmp_path / "real", device="cuda")
    simulated = [write(tmp_path / name, end=("SIMULATED", 0)) for name in ("one", "two")]
    compare = ["runs", "compare"]
    assert main.main([*compare, *map(str, simulated)]) == 0
    assert "SIMULATED, 2x8" not in (printed := capsys.readouterr().out)
    assert printed.count("SIMULATED, ") == 2
    assert main.main([*compare, str(real), str(simulated[0])]) == 5
    assert "SIMULATED cluster" in capsys.readouterr().out
    assert main.main(["runs", "merge", str(real), str(simulated[0]), "--out", str(tmp_path / "merged")]) != 0
    assert not (tmp_path / "merged").exists()
    assert main.main(["thresholds", "calibrate", *map(str, simulated), "--out", str(tmp_path / "floors")]) != 0
    assert not (tmp_path / "floors").exists()


def test_only_the_device_makes_the_difference(tmp_path):
    real = write(tmp_path / "real", device="cuda")
    assert json.loads(rendered(real)["json"])["verdict"]["accepted"]
    assert certificate_content(read(real / JOURNAL_FILE), sha256="0" * 64)["accepted"]
