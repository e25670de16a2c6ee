"""``gpucluster sweep``: which words are the sweep's and which are pytest's."""

from __future__ import annotations

import pytest

from pytest_gpucluster import cli
from pytest_gpucluster.commands import sweep as sweep_command


@pytest.mark.parametrize(
    "words", [["sweep", "--help"], ["sweep", "slurm", "--help"], ["sweep", "kubernetes", "--help"]]
)
def test_help_has_an_example_for_each_scheduler_and_the_exit_codes(words, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(words)
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert "salloc --nodes=64" in text
    assert "gpucluster sweep kubernetes --expect 8xH100" in text
    for line in ("0   every node passed alone", "1   REJECTED", "2   wrong usage", "10  INCOMPLETE", "11  BROKEN"):
        assert f"  {line}" in text


@pytest.mark.parametrize(
    "words", [["sweep"], ["sweep", "lsf"], ["sweep", "slurm"], ["sweep", "kubernetes", "--expect=8"]]
)
def test_wrong_usage_is_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(words)
    assert error.value.code == 2
    assert "usage: gpucluster sweep" in capsys.readouterr().err


def test_the_examples_are_understood():
    for line in sweep_command._EXAMPLES.splitlines():
        words = line.replace("'", "").split()
        assert cli.parse(words[words.index("gpucluster") + 1 :]).expect == "8xH100"
