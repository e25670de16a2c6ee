"""The programs of perf/: each runs, a goal that is missed or not measured is no pass, and what broke is no figure.

What simulates the rules is in test_simulations.py, the noise in test_noise.py, the soak in test_soak_of_the_suite.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import example_runs
import pytest
from each import of_each
from sessions import DEADLINE_SECONDS, environment

from pytest_gpucluster import journal

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import collectives
    import faults
    import fidelity
    import overhead
    import overhead_stamps
    import pairs
    import reports
    import resolver
    import scale
    import tables
finally:
    sys.path.remove(str(PERF))

times = faults._times()


def run(script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program."""
    return subprocess.run(
        [sys.executable, str(PERF / script), *words],
        env=environment(more),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


# ---- each runs, on few ranks and for a short time

SMALL = {
    "agreement.py": ["--ranks=2", "--tests=4", "--pairs=1"],
    "collectives.py": ["--sizes=1M", "--window=0.01"],
    "fidelity.py": ["--only=matmul,rectangle,hbm", "--dtypes=bf16", "--n=64", "--mebibytes=1", "--window=0.01"],
    "loader.py": ["--side=16", "--pairs=6", "--images=16"],
    "overhead.py": ["--only=import", "--pairs=6"],
    "reports.py": ["--ranks=64", "--criteria=2", "--only=html"],
    "resolver.py": ["--ranks=2", "--only=as it is"],
    "sampler.py": ["--seconds=0.5", "--window=0.05", "--rows=judged", "--n=64"],
    "scale.py": ["--ranks=4", "--tests=2"],
}


@pytest.mark.extended
@pytest.mark.parametrize("script", SMALL)
def test_a_program_runs_to_its_end_and_prints_a_table(script: str) -> None:
    done = run(script, *SMALL[script])
    assert done.returncode in (0, 1), done.stdout + done.stderr  # so short it may miss its goal
    assert "Traceback" not in done.stderr
    assert re.search(r"\d", done.stdout)


def test_every_program_is_among_the_tables() -> None:
    programs = {path.name for path in PERF.glob("*.py") if "argparse.ArgumentParser(" in path.read_text()}
    assert programs - {"tables.py"} == {script for script, *_ in tables.PROGRAMS.values()}
    assert set(SMALL) <= programs


# ---- what is wrong with the arguments is said

WRONG = [
    ("collectives", "--pairs=19", "20 pairs"),
    ("collectives", "--sizes=64k,1M", "below 1 MiB"),
    ("collectives", "--sizes=1M:2M", "no range"),
    ("collectives", "--collectives=gather", "all_reduce"),
    ("faults", "--at-once=9", "1 to 8"),
    ("fidelity", "--n=2", "64 rows"),
    ("fidelity", "--only=matmul,hbn", "'matmul,hbn'"),
    ("noise", "--workload=nonsense", "KEY=VALUE"),
    ("reports", "--only=htm", "'htm'"),
    ("resolver", "--ranks=a", "'a'"),
    ("resolver", "--ranks=0", "'0'"),
    ("rules", "--trials=0", "--trials"),
    ("scale", "--tests=0", "--tests 0"),
    ("scale", "--ranks=64,100", "a multiple of 8"),
    ("tables", "--only=scales", "'overhead'"),
]


@of_each("wrong", WRONG, name=lambda wrong: " ".join(wrong[:2]))
def test_wrong_arguments_are_usage_errors_that_name_what_is_allowed(
    wrong: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, word, expected = wrong
    monkeypatch.setattr(sys, "argv", [f"{program}.py", word])
    monkeypatch.syspath_prepend(str(PERF))
    with pytest.raises(SystemExit) as error:
        importlib.import_module(program).main()
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


# ---- goals


@pytest.mark.parametrize(
    ("device", "ours", "spread", "good"),
    [
        ("cpu", 1.05, 0.1, True),
        ("cpu", 1.2, 0.1, False),
        ("cpu", 0.8, 0.1, False),
        ("cuda", 1.01, 0.005, True),
        ("cuda", 1.03, 0.005, False),
        ("cuda", 1.0, 0.2, False),
    ],
    ids=["inside", "slower", "too fast", "1 % on a GPU", "3 % on a GPU", "not sure on a GPU"],
)
def test_ours_is_good_inside_of_the_band_and_on_a_gpu_surely_above_the_least(
    device: str, ours: float, spread: float, good: bool
) -> None:
    noise = [1 + spread * (number - 9.5) / 9.5 for number in range(20)]
    taken = [{"bare": 1.0, "again": one, "ours": ours * one} for one in noise]
    text, told = collectives.row({"collective": "all_gather", "bytes": 2**20, "pairs": taken}, 2, device)
    assert (told, text.endswith("| MISSED |")) == (good, not good)
    text, told = fidelity.row("matmul", "TFLOPS", 4.0, taken, device)
    assert (told, text.endswith("| MISSED |")) == (good, not good)


def test_a_row_has_busbw_of_the_collective() -> None:
    taken = [{"bare": 1.0, "again": 1.0, "ours": 2.0}] * 20
    row, _ = collectives.row({"collective": "all_gather", "bytes": 4 * 10**9, "pairs": taken}, 4, "cpu")
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["3814.7 MiB", "3.000", "1.500"]


def test_each_way_is_taken_once_and_the_order_changes() -> None:
    orders = []
    for number in range(6):
        order: list[str] = []
        ours, bare = (lambda way=way, order=order: order.append(way) or 1.0 for way in ("ours", "bare"))
        pairs.in_turn(number, ours, bare)
        assert sorted(order) == ["bare", "bare", "ours"]
        orders.append(order.index("ours"))
    assert set(orders) == {0, 1, 2}


@pytest.mark.parametrize(("missing", "code"), [("", 0), ("no Triton here", 1)], ids=["whole", "a way is missing"])
def test_a_row_that_lacks_a_way_to_compare_with_is_not_good(
    missing: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = argparse.Namespace(name="HBM copy", unit="GB/s", each=1.0, missing=missing)
    subject.take = lambda number: {"ours": 1.0, "bare": 1.0, "again": 1.0}
    monkeypatch.setattr(fidelity, "makers", lambda arguments: [lambda: subject])
    assert fidelity.run(argparse.Namespace(pairs=20, device="cpu")) == code
    assert (f"NOT WHOLE: {missing}" in capsys.readouterr().out) == bool(missing)


@pytest.mark.parametrize(("milliseconds", "met"), [(14.9, True), (16.0, False)])
def test_an_import_that_takes_too_long_misses_its_goal(
    milliseconds: float, met: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"without": (0.5, 0.4), "installed": (0.6, 0.4 + milliseconds / 1e3)}
    monkeypatch.setattr(overhead, "import_pairs", lambda pairs: [pair] * pairs)
    assert overhead.show_import(20) == met
    out = capsys.readouterr().out
    assert ("MISSED" not in out) == met
    assert f"| {400 + milliseconds:.0f} ms | {milliseconds} ms" in out


def test_a_rehearsal_has_a_goal_without_training_and_one_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = [
        {"name": "test_quick", "training": False, "seconds": 40.0, "parts": {"warm_up": 1.0}},
        {"name": "test_trains", "training": True, "seconds": 125.0, "parts": {"agreeing": 0.5}},
    ]
    found = {"began": 0.0, "end": 181.0, "moments": {"first test": 10.0}, "tests": tests}
    monkeypatch.setattr(overhead, "run_suite", lambda folder, *options: found)
    assert not overhead.show_rehearsal("")
    out = capsys.readouterr().out
    assert re.search(r"^.*60 s.*: met \(56\.000 s\)$", out, re.MULTILINE)
    assert re.search(r"^.*180 s.*: MISSED \(181\.000 s\)$", out, re.MULTILINE)
    assert overhead.show_rehearsal("not training"), "of a selection the goal of all says nothing"
    assert "180 s" not in capsys.readouterr().out


def test_only_the_suites_own_parts_of_a_start_count() -> None:
    moments = dict(zip([end for _, _, end in overhead.START], range(10, 110, 10), strict=True))
    parts = overhead.start_parts({"began": 0.0, "moments": moments | {"torch begins": 30, "connecting begins": 50}})
    assert set(parts.values()) == {10.0}
    assert overhead.ours(parts) == 60.0  # of ten parts, four are torchrun's, torch's and waiting


GOOD_REPORT = {"name": "html", "read_seconds": 2.7, "render_seconds": 1.0, "peak_bytes": 9e7, "report_bytes": 1.2e6}


@pytest.mark.parametrize(
    ("change", "ranks", "expected"),
    [
        ({}, 1024, ""),
        ({}, 8, ""),
        ({"render_seconds": 2.3}, 1024, "5 s"),
        ({"read_seconds": float("nan")}, 1024, "5 s"),
        ({"peak_bytes": 500e6}, 1024, "500 MB"),
        ({"report_bytes": 2e6}, 1024, "2 MB"),
        ({"name": "json", "report_bytes": 6e6}, 1024, ""),
        ({"render_seconds": 17.0, "peak_bytes": 1.9e9, "report_bytes": 7.9e6}, 4096, ""),
        ({"render_seconds": 17.4}, 4096, "20 s"),
    ],
    ids=["good", "few ranks", "slow", "no time", "memory", "page", "no page", "more for more", "too much for them too"],
)
def test_a_report_that_takes_too_much_is_missed_by_what_it_takes(
    change: dict[str, Any], ranks: int, expected: str
) -> None:
    missed = reports.missed(GOOD_REPORT | change, ranks)
    assert missed.startswith(expected)
    assert bool(missed) == bool(expected)


# The largest ones; `make perf` makes all of them, of the whole run.
@pytest.mark.parametrize("name", ["json", pytest.param("html", marks=pytest.mark.extended)])
def test_a_report_of_1024_ranks_keeps_its_bounds(name: str, tmp_path: Path) -> None:
    path = example_runs.write_large(tmp_path / "large", criteria=1) / journal.FILE_NAME
    told = json.loads(run("reports.py", "--journal", str(path), "--one", name).stdout)
    # All criteria of a journal are never in memory at once, so that more of them hardly need more of it.
    assert told["peak_bytes"] < reports.MOST_BYTES
    assert told["report_bytes"] > 0
    assert name != "html" or told["report_bytes"] < reports.MOST_HTML_BYTES / 40 + 400_000


def test_what_cannot_be_made_is_no_report(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("no journal\n")
    with pytest.raises(SystemExit, match="reading alone"):
        reports.main(["--journal", str(tmp_path / "journal.jsonl")])


@pytest.mark.parametrize(
    ("seconds", "connected", "met"),
    [(0.9, 9.9, True), (1.1, 1.0, False), (0.5, 10.1, False)],
    ids=["good", "a slow test", "slow to connect"],
)
def test_a_slow_test_or_connection_at_1024_ranks_misses_a_goal(
    seconds: float, connected: float, met: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"ranks": 1024, "tests": [9.0, seconds, seconds, seconds], "cpu": 1.0, "connect_seconds": connected}
    found |= {"watched": scale.Watched(scale.Usage(1), scale.Usage(1))}
    found |= dict.fromkeys(("operations", "bytes", "journal_bytes"), 1.0)
    monkeypatch.setattr(scale, "measure", lambda *_, resolver: found)
    assert scale.passing(argparse.Namespace(ranks=[1024], tests=4, resolver=False)) == met
    assert ("MISSED" not in capsys.readouterr().out) == met


# ---- perf/faults.py

GOOD = [
    times.Row("death", times.Cell(0.5, times.DEATH)),
    times.Row("exception", times.Cell(1.1), times.Cell(1.2, times.SURVIVED)),
    times.Row("hang", times.Cell(0.5, times.HANG), times.Cell(0.6, times.SURVIVED)),
    times.Row("stuck", times.Cell(3.7, times.stuck(2.0))),
    times.Row("signal", times.Cell(0.7, times.SIGNAL)),
    times.Row("node", times.Cell(3.3, times.lost_node(3.0))),
]


def test_a_fault_that_takes_too_long_or_was_not_measured_misses_its_goal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(rows: Sequence[Any]) -> tuple[int, str]:
        monkeypatch.setattr(faults, "measured", lambda tests, folder, started: rows)
        return faults.main([]), capsys.readouterr().out

    code, out = told(GOOD)
    assert (code, out.count("\ngoal of "), "MISSED" in out) == (0, 6, False)
    for number, row in enumerate(GOOD):
        cells = [times.Cell(33.0 if cell.goal else cell.seconds, cell.goal) for cell in (row.report, row.next_test)]
        code, out = told([*GOOD[:number], times.Row(row.fault, *cells), *GOOD[number + 1 :]])
        assert (code, f"33.00 s: {row.fault})" in out) == (1, True)
    for number in (0, 3, 4, 5):  # of the others a second row has the goal
        code, out = told([*GOOD[:number], *GOOD[number + 1 :]])
        assert (code, out.count("MISSED")) == (1, 1)


def test_times_of_tests_that_fail_or_time_nothing_are_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="1 failed", stderr="")
    passed = subprocess.CompletedProcess([], 0, stdout="1 passed", stderr="")

    def popen(done: subprocess.CompletedProcess[str]) -> Callable[..., Any]:
        process = argparse.Namespace(returncode=done.returncode, poll=lambda: done.returncode)
        process.communicate = lambda timeout=None: (done.stdout, done.stderr)
        return lambda *_, **__: contextlib.nullcontext(process)

    monkeypatch.setattr(faults.subprocess, "Popen", popen(failed))
    assert faults.main([]) == 2
    assert "1 failed" in capsys.readouterr().err
    monkeypatch.setattr(faults.subprocess, "Popen", popen(passed))
    with pytest.raises(RuntimeError, match="ended with 0"):
        faults.measured(faults.TESTS, tmp_path / "times", [])


def test_the_faults_that_are_timed_are_tests_and_each_is_run_once_also_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for test in faults.TESTS:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (faults.FAULTS / file).read_text(encoding="utf-8")
    taken: list[tuple[str, ...]] = []

    def measured(tests: Sequence[str], folder: Path, started: object) -> list[Any]:
        taken.append(tuple(tests))
        return [row for row, test in zip(GOOD, faults.TESTS, strict=False) if test in tests]

    monkeypatch.setattr(faults, "measured", measured)
    assert faults.main(["--at-once", "3"]) == 0
    assert len(taken) == 3
    assert sorted(test for share in taken for test in share) == sorted(faults.TESTS)


# ---- what has failed is no figure


def test_the_time_of_what_has_failed_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3:\nbad"):
        overhead.seconds_of([sys.executable, "-c", "print('bad'); raise SystemExit(3)"], tmp_path)
    failed = subprocess.CompletedProcess([], 1, stdout="1 failed", stderr="")
    monkeypatch.setattr(overhead.subprocess, "run", lambda *arguments, **keywords: failed)
    with pytest.raises(RuntimeError, match="1 failed"):
        overhead.run_suite(tmp_path)


READY = "import sys; print('ready', flush=True); sys.stdin.read()"
PLAIN, ALL, LINE, OF_STORE = resolver.WAYS


@pytest.mark.parametrize(
    ("store", "clients", "expected"),
    [("raise SystemExit(3)", "", "ended with 3"), (READY, "raise SystemExit('3 of 4 lack one')", "3 of 4 lack one")],
    ids=["no store", "some have not connected"],
)
def test_what_has_not_connected_is_no_figure(
    store: str, clients: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "_STORE", store)
    monkeypatch.setattr(resolver, "_CLIENTS", clients)
    with pytest.raises(RuntimeError, match=expected):
        resolver.connect_seconds(4, PLAIN)


def test_resolver_options_are_given_to_the_processes_that_a_way_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RES_OPTIONS", raising=False)
    check = "import os; assert os.environ.get('RES_OPTIONS') == {!r}, os.environ.get('RES_OPTIONS')\n"
    everywhere = "timeout:1 attempts:1"
    for way, store, clients in ((PLAIN, None, None), (OF_STORE, "attempts:0", None), (ALL, everywhere, everywhere)):
        monkeypatch.setattr(resolver, "_STORE", check.format(store) + READY)
        monkeypatch.setattr(resolver, "_CLIENTS", check.format(clients) + "print(1.5)")
        assert resolver.connect_seconds(4, way) == 1.5


def test_a_resolver_that_cannot_be_made_up_here_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resolver, "connect_seconds", lambda ranks, way, servers: 2.0)
    found = resolver.table(["as it is", "slow"], [8], "must be superuser")
    assert "must be superuser" in capsys.readouterr().out
    assert [(one["resolver"], one["seconds"]) for one in found] == [("as it is", [2.0, 2.0, None, 2.0])]


def test_made_up_resolvers_answer_or_do_not_and_a_line_in_hosts_helps_in_one_form_alone(tmp_path: Path) -> None:
    if why_not := resolver.why_not_made_up():
        pytest.skip(f"no made-up resolvers here: {why_not}")

    def name_of(server: str, hosts: str = "", seconds: float = DEADLINE_SECONDS) -> str:
        command = resolver.seen_by(["getent", "hosts", "::ffff:127.0.0.1"], tmp_path, (server,), hosts)
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False).stdout

    with resolver.nameservers(answer_seconds=0.0):
        assert "node.example" in name_of(resolver._ANSWERS)
        # As /etc/hosts has it everywhere: it is not taken for the form in which the store looks it up.
        with pytest.raises(subprocess.TimeoutExpired):
            name_of(resolver._SILENT, "127.0.0.1 gpu-001", seconds=0.5)
        assert "gpu-001" in name_of(resolver._SILENT, LINE.hosts)


# ---- perf/scale.py and perf/overhead.py with real ranks


@of_each("ranks", [2, 8, 16, 1024])
def test_every_rank_but_the_real_one_is_simulated_in_one_process(ranks: int) -> None:
    simulated = [rank for first, last in scale.shares(ranks) for rank in range(first, last + 1)]
    assert simulated == list(range(1, ranks))


@pytest.mark.extended
def test_simulated_ranks_take_part_in_a_real_run_and_one_that_breaks_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "CROWD_PROCESSES", 1)
    for failing in ("", "equal", "different"):
        folder = tmp_path / f"failing {failing}"
        folder.mkdir()
        found = scale.measure(4, 2, failing, folder)
        assert len(found["tests"]) == 2
        assert found["failed"] == bool(failing)
        # 20 kB of each of three simulated ranks, or once.
        assert (found["junit_bytes"] > 50_000) == (failing == "different")
        assert (found["junit_bytes"] > 18_000) == bool(failing)
        # Of each simulated rank: collection, three phases of two tests, and the end; each is a set and a get at least.
        assert found["operations"] > 2 * 8
        assert 4 * 2_000 < found["bytes"] < 4 * 20_000  # four values of some 4 kB, once
        assert found["watched"].recorder is not None
    monkeypatch.setattr(scale, "_SUITE", scale._SUITE.replace("test_measures", "test_others"))
    with pytest.raises(RuntimeError, match="rank 0 collected something else"):
        scale.measure(2, 1, "", tmp_path)


SUITE = """
import pytest, time

@pytest.fixture
def slow():
    time.sleep(0.1)

@pytest.mark.training
def test_slow(slow):
    from pytest_gpucluster.time_spent import counted
    with counted("verifying"):
        time.sleep(0.2)
"""


@pytest.mark.extended
def test_a_start_leaves_its_moments_in_their_order_and_the_parts_of_its_tests(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    stamps = tmp_path / "stamps.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "overhead_stamps", *overhead.LEFT_OUT, str(tmp_path)]
    command += ["--gpucluster-device=cpu", f"--gpucluster-report-dir={tmp_path / 'reports'}"]
    began = overhead_stamps.now()
    environ = environment({"PYTHONPATH": str(PERF), "PERF_STAMPS": str(stamps)})
    subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, timeout=DEADLINE_SECONDS, check=True)
    found = {**overhead.told(stamps, tmp_path / "reports"), "began": began}
    parts = overhead.start_parts(found)
    # A process begins at a tick of 10 ms, which may lie before the moment in which it was asked for.
    assert all(seconds >= -0.02 for seconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(found["moments"]["first test"] - began)
    assert 0 < overhead.ours(parts) < sum(parts.values()) - parts[overhead._TORCH] + 0.02
    [test] = found["tests"]
    assert (test["name"], test["training"]) == ("test_slow", True)
    assert test["parts"]["set_up"] >= 0.1
    assert test["parts"]["verifying"] >= 0.2
    assert sum(test["parts"].values()) <= test["seconds"]


# ---- perf/tables.py


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the tables be made by other programs: name -> source."""

    def make(**sources: str) -> None:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setattr(tables, "FOLDER", tmp_path)
        monkeypatch.setattr(tables, "PROGRAMS", {name: (f"{name}.py", "words") for name in sources})

    return make


def test_programs_that_miss_break_or_do_not_end_do_not_keep_the_others_from_running(
    programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs(
        endless="import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)",
        bad="print('table of bad'); raise SystemExit(1)",
        broken="print('table of broken'); raise SystemExit(3)",
        torn="print('table of torn'); 1 / 0",
        resolver="import sys; print('table of', *sys.argv[1:])",
        good="print('table of good')",
    )
    monkeypatch.setattr(tables, "LONGEST_SECONDS", 2.0)
    monkeypatch.setattr(tables, "FAREWELL_SECONDS", 0.2)
    assert tables.main([]) == 1
    out = capfd.readouterr().out
    assert set(re.findall(r"^table of (\w+)$", out, re.MULTILINE)) == {"bad", "broken", "torn", "words", "good"}
    judged = dict(re.findall(r"^\| (\w+) \| \d+ \| (.*) \|$", out, re.MULTILINE))
    assert judged == {
        "endless": "BROKE, not ended after 2 s",
        "bad": "MISSED",
        "broken": "BROKE, exit code 3",
        "torn": "BROKE, exit code 70",
        "resolver": "none",
        "good": "met",
        "together": "900 s: met",
    }
    assert tables.main(["--only", "good"]) == 0
    monkeypatch.setattr(tables, "GOAL_SECONDS", 0.0)
    assert tables.main(["--only", "good"]) == 1


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "SIGTERM", "hung up"])
def test_a_program_may_end_what_it_has_started_and_a_second_signal_kills_it(
    sent: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\n"
        f"again = {sent == signal.SIGINT}\n"
        "if again: signal.signal(signal.SIGINT, lambda *_: print('told', flush=True))\n"
        "try:\n    print('started', os.getpid(), flush=True)\n    for _ in range(600): time.sleep(1)\n"
        "finally: print('ended', flush=True)\n"
    )
    driver = "import pathlib, sys, tables; tables.FOLDER = pathlib.Path(sys.argv[1]); tables.FAREWELL_SECONDS = 600.0; "
    driver += "tables.PROGRAMS = {'slow': ('slow.py',)}; tables.main([])"
    command = [sys.executable, "-c", driver, str(tmp_path)]
    with subprocess.Popen(command, cwd=PERF, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            pid = int(next(line for line in lines if line.startswith("started")).split()[1])
            process.send_signal(sent)
            if sent == signal.SIGINT:  # which the program does not end at: it is killed at a second one
                assert "told\n" in lines
                process.send_signal(sent)
            else:
                assert "ended\n" in lines
            process.wait(DEADLINE_SECONDS)
        finally:
            process.kill()
    assert process.returncode != 0
    until = time.monotonic() + DEADLINE_SECONDS
    while not has_ended(pid):
        assert time.monotonic() < until
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    """Tell whether a process is gone. Process 1 of a container may leave it as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_only_what_measures_no_speed_runs_at_the_same_time_and_is_shown_one_after_the_other(
    programs: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = tables.groups(list(tables.PROGRAMS))
    assert sorted(name for group in told for name in group) == sorted(tables.PROGRAMS)
    assert told[-1] == list(tables.UNHURRIED)
    assert all(len(group) == 1 for group in told[:-1])
    both = ("first", "second")
    programs(
        **{name: f"import time\nprint('> {name}', flush=True); time.sleep(0.2); print('< {name}')" for name in both}
    )
    monkeypatch.setattr(tables, "UNHURRIED", both)
    assert tables.main([]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if line[:2] in ("> ", "< ")]
    assert said == ["> first", "< first", "> second", "< second"]
