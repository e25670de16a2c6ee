"""``gpucluster runs crosscheck``: the commands that it prints, and what its exit codes say."""

import sys
from pathlib import Path

import pytest
from written_runs import case, measured, write

from pytest_gpucluster.cli.main import main

sys.path.insert(0, str(Path(__file__).parent.parent / "analysis"))
from example_journals import collective, places
from nccl_tests import table

MB, GB = 1_000_000, 1_000_000_000
GOOD = {MB: 39.2, GB: 431.2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write(tmp_path / "run", collective({"1 MB": 40.0, "1 GB": 440.0}), ranks=places())
    (tmp_path / "good.txt").write_text(table(GOOD))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def crosscheck(*words, run="run"):
    return main(["runs", "crosscheck", run, *words])


def test_without_an_output_the_commands_are_printed_and_nothing_is_agreed(folder, capsys):
    assert crosscheck() == 5
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("all_reduce_perf -b 1000000 -e 1000000 -g 8 -d bfloat16 -c 1 > ")


@pytest.mark.parametrize(
    ("text", "name", "words", "code", "message"),
    [
        (table(GOOD), "{}", [], 0, "(2 agree)"),
        (table(GOOD | {GB: 300.0}), "{}", [], 1, "FINDING: busbw"),
        (table(GOOD, wrong=3), "{}", [], 1, "FINDING: nccl-tests"),
        (table(GOOD, hosts=("gpu-z",)), "{}", [], 5, "gpu-z; "),
        (table(GOOD, hosts=("gpu-z",)), "{}", ["--other-hosts"], 0, "AGREEMENT"),
        (table({MB: 39.2}), "{}", [], 5, "UNDECIDED"),
        (table({MB: 39.2}), "{}", ["--partial"], 0, "AGREEMENT"),
        (table({MB: 39.2}), "all_gather={}", [], 6, "all_gather"),
        (table({MB: 39.2}, program="x"), "{}", [], 6, "write COLLECTIVE="),
        (table({MB: 39.2}, program="x"), "all_reduce={}", ["--partial"], 0, "AGREEMENT"),
        (table({MB: 1.0}) * 2, "{}", [], 6, "MPI=1"),
        ("# TEST SKIPPED: no reason", "{}", [], 6, "no table"),
        (None, "{}", [], 6, "No such file"),
    ],
)
def test_the_exit_code_is_the_answer(folder, capsys, text, name, words, code, message):
    path = folder / "made=else where.txt"
    if text is not None:
        path.write_text(text)
    assert crosscheck("--output", name.format(path), *words) == code
    out, err = capsys.readouterr()
    assert message in " ".join((out + err).split())
    assert ("AGREEMENT" in out) == (code == 0)


def test_a_journal_with_nothing_to_compare_is_reported(folder, capsys):
    write(folder / "cpu", collective({"1 GB": 1.0}), ranks=places(), device="cpu", rehearsal=True)
    assert crosscheck(run="cpu") == 5
    assert "gloo" in capsys.readouterr().err
    write(folder / "matmul", case("acceptance/test_it.py::test_matmul", "passed", measured([700.0])))
    assert crosscheck(run="matmul") == 5
    assert "no busbw" in capsys.readouterr().err
    assert crosscheck(run="none") == 3
