"""``gpucluster certificate create``: only an accepted run is accepted, and a changed record is noticed."""

import json

import pytest
from example_runs import write

from pytest_gpucluster.analysis.certificate import digest, read_certificate
from pytest_gpucluster.cli import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("accepted", "cluster", "rehearsal", "broken", "hostile"):
        write(folder / name, name)
    return folder


@pytest.fixture
def accepted(runs, tmp_path, capsys):
    path = tmp_path / "accepted.json"
    words = ["--out", str(path), "--by", "J. Doe", "--note", "order 4711"]
    assert main.main(["certificate", "create", str(runs / "accepted"), *words]) == 0
    capsys.readouterr()
    return path


def test_an_accepted_run_gives_a_record_that_is_verified_next_to_its_journal(runs, accepted, capsys):
    known = read_certificate(accepted).digest
    words = ["certificate", "verify", str(accepted), "--journal", str(runs / "accepted"), "--sha256", known.upper()]
    assert main.main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"intact, ACCEPTED: {accepted}\nsha256 {known}\n")
    assert "2 nodes, 16 ranks" in out
    assert "by J. Doe\n- note: order 4711\n" in out
    assert "sealed again" not in out


def test_the_record_goes_to_the_standard_output_and_what_is_unknown_next_to_it(runs, capsys):
    assert main.main(["certificate", "create", str(runs / "accepted")]) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)["record"]
    assert record["accepted"] is True
    assert "gpucluster: accepted: 2 nodes, 16 GPUs" in printed.err
    assert all(name in printed.err for name in record["missing"])


@pytest.mark.parametrize("name", ["cluster", "rehearsal", "broken", "hostile"])
def test_a_run_that_was_not_accepted_gives_no_record_or_one_that_says_so(runs, tmp_path, capsys, name):
    path = tmp_path / "x.json"
    words = ["certificate", "create", str(runs / name), "--out", str(path)]
    assert main.main(words) == 1
    assert not path.exists()
    assert main.main([*words, "--even-though-not-accepted"]) == 0
    assert main.main(["certificate", "verify", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "gpucluster: NOT ACCEPTED (" in err
    assert "NOT ACCEPTED: " in out.splitlines()[0]
    for text in (out, err):
        assert "its verdict is" in text
        assert all(line.isprintable() for line in text.splitlines())


def test_a_changed_record_is_not_intact_and_is_not_compared(accepted, tmp_path, capsys):
    forged = tmp_path / "forged.json"
    forged.write_text(accepted.read_text().replace("gpu-01", "gpu-99"))
    assert main.main(["certificate", "verify", str(forged)]) == 1
    assert f"NOT INTACT: {forged}\n" in capsys.readouterr().out
    assert main.main(["certificate", "diff", str(accepted), str(forged)]) == 3
    assert str(forged) in capsys.readouterr().err


def test_a_record_that_was_sealed_anew_is_noticed_by_the_digest_that_was_kept(accepted, capsys):
    known = read_certificate(accepted).digest
    document = json.loads(accepted.read_text())
    document["record"]["made"]["by"] = "another person"
    document["sha256"] = digest(document["record"])
    accepted.write_text(json.dumps(document))
    assert main.main(["certificate", "verify", str(accepted)]) == 0
    # Alone it cannot be noticed, so that is message.
    assert "sealed again" in " ".join(capsys.readouterr().out.split())
    assert main.main(["certificate", "verify", str(accepted), "--sha256", known]) == 1
    assert "NOT INTACT" in capsys.readouterr().out


def test_parts_that_were_swapped_are_reported_within_80_columns(accepted, tmp_path, capsys):
    other = tmp_path / "later.json"
    document = json.loads(accepted.read_text())
    here, there = (node["gpus"][2] for node in document["record"]["nodes"])
    for key in ("uuid", "serial"):
        here[key], there[key] = there[key], here[key]
    document["record"]["limits"]["sku"] = "H200"
    document["sha256"] = digest(document["record"])
    other.write_text(json.dumps(document))
    assert main.main(["certificate", "diff", str(accepted), str(accepted)]) == 0
    assert capsys.readouterr().out == "the same parts\n"
    assert main.main(["certificate", "diff", str(accepted), str(other)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("moved         gpu-01 GPU 2 (00000000:3D:00.0) -> gpu-02 GPU 2")
    assert out.endswith("\n2 differences\n"), "other limits are no change of the parts"
    assert max(map(len, out.splitlines())) <= 80


def test_a_record_is_never_written_over_a_file_or_its_journal_by_mistake(runs, accepted, capsys):
    before = accepted.read_text()
    assert main.main(["certificate", "create", str(runs / "accepted"), "--out", str(accepted)]) == 4
    assert str(accepted) in capsys.readouterr().err
    assert accepted.read_text() == before
    assert main.main(["certificate", "create", str(runs / "accepted"), "--out", str(accepted), "--force"]) == 0
    journal = runs / "accepted" / "journal.jsonl"
    kept = journal.read_bytes()
    assert main.main(["certificate", "create", str(runs / "accepted"), "--out", str(journal), "--force"]) == 2
    assert journal.read_bytes() == kept


@pytest.mark.parametrize("words", ["create {}/none", "verify {}/none", "diff {}/none {}/none"])
def test_what_is_missing_is_exit_code_3(tmp_path, capsys, words):
    assert main.main(["certificate", *(word.format(tmp_path) for word in words.split())]) == 3
    assert "gpucluster: " in capsys.readouterr().err
