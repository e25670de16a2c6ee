"""``gpucluster thresholds``: check, explain, calibrate; of judge see ``test_published_evidence``."""

import re

import pytest
from example_runs import write

from pytest_gpucluster.cli import main
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics import measurement

MINE = """\
schema_version: 1
skus:
  H100 SXM:
    limits:
      matmul.bf16.tflops: {min: 650 TFLOPS, source: we}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("accepted", "cluster", "rehearsal", "hostile"):
        write(folder / name, name)
    return folder


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return path


# ---- check -------------------------------------------------------------------------------------------------------


def test_the_shipped_limits_have_no_problem(capsys):
    assert main.main(["thresholds", "check"]) == 0
    assert capsys.readouterr().out.startswith("no problem: ")


def test_only_the_limits_of_the_named_files_are_counted(mine, capsys):
    mine.write_text("schema_version: 1\nevery_sku:\n  limits:\n    gpu.findings: {max: 0 findings, source: we}\n")
    assert main.main(["thresholds", "check", str(mine)]) == 0
    assert capsys.readouterr().out == "no problem: 1 limit\n"


def test_every_problem_of_every_file_is_named_with_its_place(mine, tmp_path, capsys):
    mine.write_text(MINE.replace("650 TFLOPS", "650").replace(", source: we", ""))
    (tmp_path / "other.yaml").write_text("schema_version: 2\n")
    assert main.main(["thresholds", "check", str(mine), str(tmp_path / "other.yaml")]) == 1
    out = capsys.readouterr().out
    assert f"{mine}:5:27: source is missing" in out
    assert f"{mine}:5:33: min: '650' has no unit" in out
    assert f"{tmp_path / 'other.yaml'}:1:17: schema_version is '2'" in out
    assert out.endswith("problems\n")


def test_a_floor_above_what_healthy_gpus_show_is_noted_in_ones_own_file(mine, capsys):
    mine.write_text(MINE.replace("650 TFLOPS", "660 TFLOPS"))
    assert main.main(["thresholds", "check", str(mine)]) == 0
    assert re.search(rf"{mine}:5:\d+: note: matmul.*evidence.tsv:\d+", capsys.readouterr().out)


def test_metrics_that_a_site_declares_are_known_to_the_check(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measurement, "_REGISTRY", dict(measurement._REGISTRY))
    mine, plugin = tmp_path / "mine.yaml", tmp_path / "conftest.py"
    mine.write_text("schema_version: 1\nevery_sku: {limits: {site.scratch: {min: 3 GB/s, source: the order}}}\n")
    assert main.main(["thresholds", "check", str(mine)]) == 1
    assert "site.scratch" in capsys.readouterr().out
    plugin.write_text(
        "from pytest_gpucluster.metrics.catalogue import Metric\n"
        "def pytest_gpucluster_metrics():\n"
        "    return [Metric(name='site.scratch', unit='GB/s', better='higher', doc='files')]\n"
    )
    assert main.main(["thresholds", "check", str(mine), "--plugin", str(plugin)]) == 0
    plugin.write_text("import no_such_module\n")
    assert main.main(["thresholds", "check", str(mine), "--plugin", str(plugin)]) == 3
    assert "no_such_module" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_exit_code_3(tmp_path, capsys):
    assert main.main(["thresholds", "check", str(tmp_path / "none.yaml")]) == 3
    assert "none.yaml: " in capsys.readouterr().err


# ---- explain -----------------------------------------------------------------------------------------------------


def test_the_entry_that_decides_is_reported_with_its_line_and_the_others_with_why_not(capsys):
    words = ["--sku", "H100 SXM", "--world-size", "16", "--nnodes", "2", "--label", "size=1 GB"]
    assert main.main(["thresholds", "explain", *words, "nccl.all_reduce.busbw"]) == 0
    out = capsys.readouterr().out
    flat = " ".join(out.split())
    limit = loader.load().limit(
        "nccl.all_reduce.busbw", sku="H100 SXM", world_size=16, nnodes=2, labels={"size": "1 GB"}
    )
    assert f"{limit.origin} decides: >= 415 GB/s, over NET/IB" in flat
    assert "world_size is 16, nnodes is 2: >= 400 GB/s" in flat
    assert "434.99 observed" in flat
    assert max(map(len, out.splitlines())) <= 80


def test_a_transport_is_a_label_like_others(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    entry = "      link.bandwidth: {when: {transport: NET/IB}, min: 40 GB/s, source: we}\n"
    path.write_text(MINE + entry)
    words = ["--sku", "H100 SXM", "--thresholds", str(path), "link.bandwidth", "--label"]
    assert main.main(["thresholds", "explain", *words, "transport=NET/IB"]) == 0
    assert f"{path}:6:23decides:>=40GB/s" in "".join(capsys.readouterr().out.split())
    assert main.main(["thresholds", "explain", *words, "transport=NET/Socket"]) == 0
    assert "transport is NET/Socket" in " ".join(capsys.readouterr().out.split())


def test_without_a_metric_all_that_decides_is_reported(capsys):
    assert main.main(["thresholds", "explain", "--sku", "H100 SXM", "--world-size", "8", "--nnodes", "1"]) == 0
    out = capsys.readouterr().out
    for metric in ("gpu.findings", "matmul.bf16.tflops", "nccl.all_reduce.busbw", "lora.final_loss"):
        assert f"\n{metric}\n" in out
    assert "does not apply" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_metric_that_nothing_decides_about_is_exit_code_1(capsys):
    words = ["--sku", "H100 SXM", "--label", "precision=fp64", "lora.reload_error"]
    assert main.main(["thresholds", "explain", *words]) == 1
    assert "lora.reload_error" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--sku", "H900"], "no such SKU; known are "),
        (["--sku", "H100 SXM", "matmul.bf16.tflop"], "did you mean 'matmul.bf16.tflops'?"),
        (["--sku", "H100 SXM", "--world-size", "0"], "not a whole number from 1 to 1000000"),
        (["--sku", "H100 SXM", "--label", "size"], "is not KEY=VALUE"),
        (["matmul.bf16.tflops"], "the following arguments are required: --sku"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_of_explain_says_what_is_known(words, why, capsys):
    try:
        code = main.main(["thresholds", "explain", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert why in capsys.readouterr().err


def test_a_broken_file_of_limits_is_exit_code_3(mine, capsys):
    mine.write_text(MINE.replace("650 TFLOPS", "650"))
    assert main.main(["thresholds", "explain", "--sku", "H100 SXM", "--thresholds", str(mine)]) == 3
    assert f"gpucluster: {mine}:5:33: min: '650' has no unit" in capsys.readouterr().err


# ---- calibrate ---------------------------------------------------------------------------------------------------


def test_floors_of_an_accepted_run_are_written_and_pass_the_check(runs, tmp_path, capsys):
    out = tmp_path / "floors.yaml"
    assert main.main(["thresholds", "calibrate", str(runs / "accepted"), "--out", str(out)]) == 0
    err = capsys.readouterr().err
    assert re.search(rf"\d floors .*H100 SXM, 0 .*: {out}$", err, re.MULTILINE)
    assert main.main(["thresholds", "check", str(out)]) == 0
    limits = loader.load(loader.shipped_path(), out)
    for size in ("1 GB", "8 GB"):
        labels = {"size": size, "dtype": "bf16", "world_size": "16", "nnodes": "2"}
        limit = limits.limit("nccl.all_reduce.busbw", sku="H100 SXM", world_size=16, nnodes=2, labels=labels)
        assert limit.origin.startswith(str(out))
        assert limit.min > 350
        assert limit.expect_transport == ("NET/IB",)
    # What was not measured so keeps the limit it had.
    other = limits.limit("matmul.bf16.tflops", sku="H100 SXM", world_size=16, nnodes=2, labels={"n": "4096"})
    assert other.origin.startswith("thresholds.yaml:")


@pytest.mark.parametrize(
    ("name", "why"),
    [("cluster", "its verdict is REJECTED"), ("rehearsal", "REHEARSAL on cpu"), ("hostile", "its verdict is")],
)
def test_a_run_that_was_not_accepted_is_no_basis(runs, tmp_path, capsys, name, why):
    out = tmp_path / "floors.yaml"
    assert main.main(["thresholds", "calibrate", str(runs / name), "--out", str(out)]) == 3
    err = capsys.readouterr().err
    assert why in err
    assert all(line.isprintable() for line in err.splitlines())
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["{0}/accepted", "{0}/accepted"], 3, "a run counts once"),
        (["{0}/none"], 3, "cannot be read: No such file"),
        (["{0}/accepted", "--spreads", "99.9"], 1, "no floor can be proposed:"),
    ],
    ids=["twice", "missing", "nothing left"],
)
def test_what_no_floor_can_be_made_of_is_reported(runs, tmp_path, capsys, words, code, why):
    out = tmp_path / "floors.yaml"
    words = [word.format(runs) for word in words]
    assert main.main(["thresholds", "calibrate", *words, "--out", str(out)]) == code
    assert why in capsys.readouterr().err
    assert not out.exists()


def test_a_file_or_a_journal_is_never_written_over_by_mistake(runs, mine, capsys):
    assert main.main(["thresholds", "calibrate", str(runs / "accepted"), "--out", str(mine)]) == 4
    assert str(mine) in capsys.readouterr().err
    assert mine.read_text() == MINE
    assert main.main(["thresholds", "calibrate", str(runs / "accepted"), "--out", str(mine), "--force"]) == 0
    assert "calibrated: " in mine.read_text()
    journal = runs / "accepted" / "journal.jsonl"
    kept = journal.read_bytes()
    for place in (journal, loader.shipped_path()):
        assert main.main(["thresholds", "calibrate", str(runs / "accepted"), "--out", str(place), "--force"]) == 2
    assert journal.read_bytes() == kept
