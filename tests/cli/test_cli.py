"""The command ``gpucluster``: its words, what it imports, and how it ends."""

import io
import os
import subprocess
import sys
from dataclasses import replace

import example_runs
import pytest
from each import of_each

import pytest_gpucluster
from pytest_gpucluster.cli import main, node
from pytest_gpucluster.cli.command import Group

HEAVY = ("torch", "pytest", "_pytest", "yaml", "pynvml", "numpy", "jinja2", "prometheus_client")


@pytest.mark.parametrize(
    ("words", "forwarded"),
    [
        (["sweep", "slurm", "--expect=8xH100", "--", "-k", "a", "--", "b"], ["-k", "a", "--", "b"]),
        (["sweep", "slurm", "--expect=8xH100"], []),
        (["report", "--junitxml=x", "--", "journal"], []),
    ],
)
def test_what_follows_the_dashes_is_for_somebody_else_where_the_command_starts_something(words, forwarded):
    assert main.parse(words).forwarded == forwarded


@of_each(
    "line",
    [
        *("", "repot", "info", "report", "report x --pdf y", "verdict", "sweep", "sweep lsf", "sweep slurm"),
        *("sweep kubernetes --expect=8", "runs", "runs crosscheck run -g 8"),
        *(f"runs {words} much" for words in ("compare a b --fail", "fleet a --behind", "crosscheck a --beyond")),
        *(f"node {words}" for words in ("", "info gpus", "nccl-env --format toml")),
        *(f"lora reference-curve {words}" for words in ("", "x.csv", "--out x")),
        *(f"certificate {words}" for words in ("", "create a b", "create a --sha256 x", "verify", "verify a b")),
        *(f"certificate {words}" for words in ("verify a --out x", "verify a --even-though-not-accepted", "diff a")),
        "certificate diff a b --journal x",
        *(f"run --hosts h {words}" for words in ("--within=0s", "--port=80", "--check --info", "--nproc-per-node=0")),
        *(f"thresholds calibrate x --out - --spreads={text}" for text in ("0", "-1", "nan", "many", "100")),
    ],
)
def test_wrong_usage_is_exit_code_2_and_the_usage_is_shown(line, capsys):
    try:
        code = main.main(line.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert "usage: gpucluster" in capsys.readouterr().err


NODE = node.COMMAND.commands
GROUPS = {name: found.commands for name in main.COMMANDS if isinstance(found := main.load(name), Group)}
NAMES = [name for name in main.COMMANDS if name not in GROUPS]
NAMES += ["run --hosts x", *(f"{group} {name}" for group, commands in GROUPS.items() for name in commands)]


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_examples_that_it_takes_itself_and_exit_codes(name, capsys):
    with pytest.raises(SystemExit) as error:
        main.main([*name.split(), "--help"])
    assert error.value.code == 0
    text = capsys.readouterr().out
    assert f"gpucluster {name.removesuffix(' x')} " in text.partition("examples:\n")[2]
    assert "exit codes" in text


def test_help_names_every_command_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom pytest_gpucluster.cli import main\n"
        "try: main.main(['--help'])\n"
        f"finally: print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("[]\n")
    for name in main.COMMANDS:
        assert f"\n  {name} " in done.stdout
        assert " ".join(main.COMMANDS[name].split()) in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "line",
    [
        *("report run", "verdict run", "runs compare run run", "runs merge run run --out merged", "runs fleet run"),
        *("certificate create run --out c.json", "thresholds explain hbm.copy.bandwidth --sku H100"),
        *("thresholds judge run", "thresholds check", "node nccl-env", "init limits"),
    ],
)
def test_a_command_of_reports_and_limits_works_where_torch_cannot_be_imported(line, tmp_path):
    example_runs.write(tmp_path / "run", "accepted")
    script = (
        "import sys\nsys.modules['torch'] = None\n"
        f"from pytest_gpucluster.cli import main\nsys.exit(main.main({line.split()!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    assert "torch" not in done.stderr


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "pytest_gpucluster", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"pytest-gpucluster {pytest_gpucluster.__version__}\n"


def run_into(stdout, tmp_path, body):
    """Run a command that does this, and return its exit code and what it has complained of."""
    script = f"""
import sys
from pytest_gpucluster.cli import main
def run(options):
    {body}
main.load = lambda name: main.cli.Command(run=run)
sys.exit(main.main(["verdict"]))
"""
    (tmp_path / "script.py").write_text(script)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], stdout=stdout, stderr=subprocess.PIPE, env=environ, timeout=60
    )
    return done.returncode, done.stderr


def run_into_a_closed_pipe(tmp_path, body):
    """Do so where no process reads its output any more."""
    read, write = os.pipe()
    os.close(read)
    try:
        return run_into(write, tmp_path, body)
    finally:
        os.close(write)


def test_a_reader_that_is_gone_makes_no_answer_better(tmp_path):
    assert run_into_a_closed_pipe(tmp_path, "print('REJECTED'); return 1") == (1, b"")
    assert run_into_a_closed_pipe(tmp_path, "print('x' * 100_000, flush=True); return 1") == (main.READER_GONE, b"")
    body = "print('a table'); raise main.cli.CommandError(3, 'no journal')"
    assert run_into_a_closed_pipe(tmp_path, body) == (3, b"gpucluster: no journal\n")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("print('ACCEPTED'); return 0", 4),
        ("print('REJECTED'); return 1", 1),
        ("print('x' * 100_000, flush=True); return 0", 4),
    ],
)
def test_an_output_that_takes_no_more_is_named_and_makes_no_answer_better(tmp_path, body, code):
    with open("/dev/full", "wb") as full:
        left, output = run_into(full, tmp_path, body)
    assert left == code
    assert output == b"gpucluster: the standard output cannot be written to: No space left on device\n"


def test_any_other_error_of_a_file_is_not_taken_for_that(monkeypatch):
    def fail(options):
        raise OSError(28, "No space left on device", "a file of its own")

    monkeypatch.setitem(NODE, "info", replace(NODE["info"], run=fail))
    with pytest.raises(OSError, match="a file of its own"):
        main.main(["node", "info"])


def test_what_the_locale_has_no_character_for_is_shown_by_its_number(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding="ascii"))
    monkeypatch.setitem(NODE, "info", replace(NODE["info"], run=lambda options: print("caf\u00e9 \u2026") or 0))
    assert main.main(["node", "info"]) == 0
    assert output.getvalue() == b"caf\\xe9 \\u2026\n"


def test_a_reader_that_has_had_enough_is_no_error():
    command = f"{sys.executable} -m pytest_gpucluster verdict --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
