"""``gpucluster runs crosscheck``: what is run, and what its exit codes say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from written_runs import case, measured, write

from pytest_gpucluster.cli.main import main

sys.path.insert(0, str(Path(__file__).parent.parent / "analysis"))
from example_journals import collective, places
from nccl_tests import install, table

GOOD = {"1000000": 39.2, "1000000000": 431.2}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A run of ours, and programs that stand in for nccl-tests; calling it sets their behaviour."""
    write(tmp_path / "run", collective({"1 MB": 40.0, "1 GB": 440.0}), ranks=places())
    install(tmp_path / "bin dir", "all_reduce_perf", "all_gather_perf")
    monkeypatch.setenv("FAKE_NCCL_TESTS_LOG", str(tmp_path / "log"))
    monkeypatch.chdir(tmp_path)

    def behave(**settings):
        monkeypatch.setenv("FAKE_NCCL_TESTS", json.dumps({"busbw": GOOD, **settings}))
        return tmp_path

    return behave


def crosscheck(*words, run="run", more=()):
    return main(["runs", "crosscheck", run, "--binaries", "bin dir", *words, *(["--", *more] if more else [])])


def started(folder):
    return (folder / "log").read_text().splitlines()


def test_agreement_is_0(bench, capsys):
    folder = bench()
    assert crosscheck() == 0
    assert re.search(r"^AGREEMENT: .* 5 % .*\(2 agree\)", capsys.readouterr().out, re.MULTILINE)
    [line] = started(folder)
    assert line == "all_reduce_perf -b 1000000 -e 1000000000 -f 1000 -g 8 -d bfloat16 -c 1"


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"busbw": GOOD | {"1000000000": 300.0}}, 1, "FINDING: busbw"),
        ({"wrong": 3}, 1, "FINDING: nccl-tests"),
        ({"wrong": 3, "exit": 0}, 1, "FINDING: nccl-tests"),
        ({"bounds": 1}, 1, "FINDING: nccl-tests"),
        ({"wrong": "N/A"}, 5, "run it without -c 0"),
        ({"busbw": {"": 0.0}}, 5, "nccl-tests reports 0 GB/s"),
        ({"host": "gpu-z"}, 5, "gpu-z; "),
        ({"exit": 3}, 6, "ended with exit code 3"),
        ({"prints": "# TEST SKIPPED: no reason"}, 6, "no table"),
        ({"prints": "gpu-a: Test CUDA failure common.cu:1 'no CUDA-capable device is detected'", "exit": 3}, 6,
         "no usable GPU"),
        ({"prints": table({1_000_000: 1.0}) * 2}, 6, "MPI=1"),
        ({"program": "all_gather_perf"}, 6, "all_gather, not all_reduce"),
        ({"hangs": True}, 6, " 1 s"),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_answer(bench, capsys, settings, code, message):
    bench(**settings)
    assert crosscheck(*(["--timeout", "1"] if "hangs" in settings else [])) == code
    out, err = capsys.readouterr()
    assert message in " ".join((out + err).split())
    assert "AGREEMENT" not in out


def test_gpus_that_are_not_there_are_no_agreement_although_nothing_was_run(bench, capsys):
    bench()
    assert crosscheck("-g", "4") == 5
    assert re.search(r"4 ranks on 1 nodes, .*all_reduce bf16 by 8 ranks on 1", capsys.readouterr().err)


def test_no_program_is_an_error_of_its_own(bench, capsys, monkeypatch):
    folder = bench()
    assert crosscheck("--binaries", "nowhere") == 6
    assert "nowhere or nowhere/build; " in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("pytest_gpucluster.analysis.nccl_tests.USUAL_FOLDERS", (folder / "usual",))
    assert main(["runs", "crosscheck", "run"]) == 6
    assert f"PATH, {folder / 'usual'}; " in capsys.readouterr().err
    (folder / "bin dir" / "all_reduce_perf").chmod(0o644)
    assert crosscheck() == 6


def test_a_program_is_found_on_the_path_and_in_a_build_folder(bench, capsys, monkeypatch):
    folder = bench()
    monkeypatch.setenv("PATH", f"{folder / 'bin dir'}:{os.environ['PATH']}")
    assert main(["runs", "crosscheck", "run"]) == 0
    install(folder / "made" / "build", "all_reduce_perf")
    assert crosscheck("--binaries", "made") == 0


@pytest.mark.parametrize(("launcher", "name"), [(None, "all_reduce_perf"), (sys.executable, "all_reduce_perf_mpi")])
def test_a_launcher_takes_the_program_that_was_built_with_mpi(bench, launcher, name):
    folder = bench(**({} if launcher is None else {"gpus": 8}))
    install(folder / "both", "all_reduce_perf", "all_reduce_perf_mpi")
    words = [] if launcher is None else ["--launcher", launcher]
    assert crosscheck("--binaries", "both", *words) == 0
    [line] = started(folder)
    assert line.split()[0] == name
    (folder / "both" / name).unlink()
    assert crosscheck("--binaries", "both", *words) == 0, "or else the other one"


def test_each_collective_and_dtype_is_run_once_for_each_range_and_can_be_chosen(bench, capsys):
    folder = bench(busbw={"": 440.0})
    tests = [collective({"1 GB": 445.0}, name=name, dtype=dtype) for name, dtype in
             (("all_reduce", "bf16"), ("all_reduce", "fp32"), ("all_gather", "bf16"))]  # fmt: skip
    write(folder / "several", *tests, ranks=places())
    assert crosscheck(run="several") == 0
    assert [line.split()[0] + " " + line.split()[8] for line in started(folder)] == [
        "all_reduce_perf bfloat16", "all_reduce_perf float", "all_gather_perf bfloat16"
    ]  # fmt: skip
    (folder / "log").unlink()
    assert crosscheck("--collective", "all_reduce", "--dtype", "fp32", run="several", more=("-n", "50")) == 0
    [line] = started(folder)
    assert " -d float -c 1 -n 50" in line
    assert crosscheck("--collective", "broadcast", run="several") == 5
    assert re.search(r"no broadcast by 8 .*all_reduce bf16", capsys.readouterr().err)


def test_several_nodes_are_run_by_a_launcher(bench, capsys):
    folder = bench(busbw={"": 432.0}, host="gpu-a,gpu-b", gpus=8)
    write(folder / "two", collective({"1 GB": 440.0}, hosts=2), collective({"1 GB": 440.0}), ranks=places(2))
    launcher = f"env 'A B=1' {sys.executable}"
    assert crosscheck("--launcher", launcher, run="two") == 0
    [line] = started(folder)
    assert line.endswith("-b 1000000000 -e 1000000000 -g 1 -d bfloat16 -c 1"), "one process a GPU, and the table"
    assert "    16  " in capsys.readouterr().out
    bench(busbw={"": 440.0})
    assert crosscheck(run="two") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ": all_reduce bf16 by 16 ranks on 2" in printed
    bench(busbw={"": 432.0}, host="gpu-a", gpus=1)
    assert crosscheck("--launcher", launcher, run="two") == 5
    out = " ".join(capsys.readouterr().out.split())
    assert "all_reduce in bfloat16 by 1 rank on 1 node: " in out


def test_a_launcher_that_starts_programs_without_mpi_is_noticed(bench, capsys):
    folder = bench(busbw={"": 432.0})
    write(folder / "two", collective({"1 GB": 440.0}, hosts=2), ranks=places(2))
    assert crosscheck(run="two") == 5
    assert "several" in capsys.readouterr().err
    twice = folder / "twice"
    twice.write_text('#!/bin/sh\n"$@"\n"$@"\n')
    twice.chmod(0o755)
    assert crosscheck("--launcher", "./twice", run="two") == 6
    assert "2 tables" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        (
            ["--collective", "allreduce"],
            (),
            "--collective 'allreduce' .*did you mean 'all_reduce'",
        ),
        (["--dtype", "float"], (), "--dtype 'float' is none of bf16"),
        (["--launcher", ""], (), "--launcher is empty"),
        (["--launcher", "mpirun 'x"], (), "--launcher .*: No closing quotation"),
        ([], ("-b", "8"), "'-b' after -- "),
        ([], ("-c0",), "'-c0' after -- "),
        ([], ("--ngpus=2",), "'--ngpus=2' after -- "),
        (["--output", "x"], (), "--output .*: leave --binaries out"),
        (["--json", "run/journal.jsonl"], (), "run/journal.jsonl: "),
    ],
)
def test_wrong_usage_is_2_and_nothing_is_run(bench, capsys, words, more, message):
    folder = bench()
    assert crosscheck(*words, more=more) == 2
    found = capsys.readouterr().err
    assert re.search(message, found), found
    assert not (folder / "log").exists()


def test_a_journal_with_nothing_to_compare_is_reported(bench, capsys):
    folder = bench()
    write(folder / "cpu", collective({"1 GB": 1.0}), ranks=places(), device="cpu", rehearsal=True)
    assert crosscheck(run="cpu") == 5
    assert "gloo" in capsys.readouterr().err
    write(folder / "matmul", case("acceptance/test_it.py::test_matmul", "passed", measured([700.0])))
    assert crosscheck(run="matmul") == 5
    assert "no busbw" in capsys.readouterr().err
    assert crosscheck(run="none") == 3


def test_what_went_before_a_failure_is_shown_and_a_finding_counts_more(bench, capsys):
    folder = bench(busbw={"": 440.0})
    (folder / "bin dir" / "all_gather_perf").write_text("#!/bin/sh\necho broken; exit 7\n")
    tests = [collective({"1 GB": value}, name=name) for name, value in (("all_reduce", 445.0), ("all_gather", 445.0))]
    write(folder / "good", *tests, ranks=places())
    assert crosscheck(run="good") == 6
    out, err = capsys.readouterr()
    assert re.search(r"exit code 7.*: broken", err)
    assert "UNDECIDED" in out
    write(folder / "slow", collective({"1 GB": 300.0}), tests[1], ranks=places())
    assert crosscheck("--json", "out.json", run="slow") == 1
    assert json.loads((folder / "out.json").read_text())["exit"] == 1


def test_what_nccl_tests_has_printed_can_be_kept(bench, capsys):
    folder = bench()
    assert crosscheck("--keep", "kept/here") == 0
    [kept] = (folder / "kept" / "here").iterdir()
    assert kept.name == "all_reduce_perf-bf16-1000000.txt"
    capsys.readouterr()
    assert main(["runs", "crosscheck", "run", "--output", str(kept)]) == 0, "and be compared again"
    (folder / "a-file").write_text("")
    assert crosscheck("--keep", "a-file") == 6
    assert "--keep a-file: " in capsys.readouterr().err


def test_the_output_of_a_program_before_it_hung_is_not_lost(bench, capsys):
    folder = bench(hangs=True)
    assert crosscheck("--timeout", "2", "--keep", "kept") == 6
    assert re.search(r" 2 s.*: NCCL WARN", " ".join(capsys.readouterr().err.split()))
    assert [path.read_text()[:9] for path in (folder / "kept").iterdir()] == ["NCCL WARN"]


@pytest.mark.parametrize(
    ("text", "name", "words", "code", "message"),
    [
        (table({1_000_000: 39.2, 1_000_000_000: 440.0}), "{}", [], 0, "AGREEMENT"),
        (table({1_000_000: 39.2}), "{}", [], 5, "UNDECIDED"),
        (table({1_000_000: 39.2}), "{}", ["--partial"], 0, "AGREEMENT"),
        (table({1_000_000: 30.0}), "{}", ["--partial"], 1, "FINDING"),
        (table({1_000_000: 39.2}), "all_gather={}", [], 6, "all_gather"),
        (table({1_000_000: 39.2}, program="x"), "{}", [], 6, "write all_reduce="),
        (table({1_000_000: 39.2}, program="x"), "all_reduce={}", ["--partial"], 0, "AGREEMENT"),
        ("", "{}", [], 6, "no table"),
        (None, "{}", [], 6, "No such file"),
    ],
)
def test_an_output_that_was_made_elsewhere_can_be_compared(bench, capsys, text, name, words, code, message):
    folder = bench()
    path = folder / "made=else where.txt"
    if text is not None:
        path.write_text(text)
    assert main(["runs", "crosscheck", "run", "--output", name.format(path), *words]) == code
    out, err = capsys.readouterr()
    assert message in out + err
    assert not (folder / "log").exists(), "nothing is run"


def test_the_json_has_all_of_it(bench, capsys):
    bench()
    assert crosscheck("--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["answer"], document["exit"], document["beyond_ratio"]) == ("agreement", 0, 0.05)
    assert [(size["size"], size["kind"]) for size in document["sizes"]] == [("1 MB", "agrees"), ("1 GB", "agrees")]
    assert document["outputs"][0]["hosts"] == ["gpu-a"]


def test_what_cannot_be_written_is_4(bench, capsys):
    bench()
    assert crosscheck("--json", "bin dir") == 4


def test_ctrl_c_ends_the_program_and_is_no_agreement(bench):
    folder = bench(hangs=True)
    command = [sys.executable, "-m", "pytest_gpucluster", "runs", "crosscheck", "run", "--binaries", "bin dir"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not (folder / "log").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 6
    assert "interrupted" in err
