"""The command ``gpucluster``: its words, what it imports, and how it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pytest_gpucluster
from pytest_gpucluster import cli

HEAVY = ("torch", "pytest", "_pytest", "yaml", "pynvml", "numpy", "jinja2", "rich", "prometheus_client")


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        (["sweep", "slurm", "--expect=8xH100", "--", "-k", "a", "--", "b"], ["-k", "a", "--", "b"]),
        (["sweep", "slurm", "--expect=8xH100"], []),
        (["report", "--junitxml=x", "--", "journal"], []),
    ],
)
def test_what_follows_the_dashes_is_for_somebody_else_where_the_command_starts_something(words, passed_on):
    assert cli.parse(words).passed_on == passed_on


@pytest.mark.parametrize("arguments", [[], ["repot"]], ids=" ".join)
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert "usage: gpucluster" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_has_examples_that_it_takes_itself_and_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main([name, "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert f"gpucluster {name} " in text.partition("examples:\n")[2]
    assert "exit codes" in text


def test_help_names_every_command_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom pytest_gpucluster import cli\n"
        "try: cli.main(['--help'])\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("[]\n")
    for name in cli.COMMANDS:
        assert f"\n    {name} " in done.stdout


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpucluster", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"pytest-gpucluster {pytest_gpucluster.__version__}\n"


def test_a_reader_that_has_had_enough_is_no_error():
    command = f"{sys.executable} -m pytest_gpucluster verdict --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
