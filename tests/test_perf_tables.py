"""perf/tables.py: every program is run, whatever the others say, and what was missed or broke is told."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sessions import DEADLINE_SECONDS

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import tables
finally:
    sys.path.remove(str(PERF))


def test_programs_that_miss_or_break_do_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = {"good": "0", "bad": "1", "broken": "3", "wordy": "'no such thing'"}
    for name, code in ends.items():
        (tmp_path / f"{name}.py").write_text(f"print('table of {name}'); raise SystemExit({code})")
    (tmp_path / "torn.py").write_text("print('table of torn'); 1 / 0")
    (tmp_path / "resolver.py").write_text("import sys; print('table of', *sys.argv[1:])")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    programs = {name: (f"{name}.py",) for name in ("bad", "broken", "wordy", "torn", "good")}
    monkeypatch.setattr(tables, "PROGRAMS", {**programs, "resolver": ("resolver.py", "names")})
    assert tables.main([]) == 1
    out = capfd.readouterr().out
    for name in (*programs, "names"):
        assert f"table of {name}" in out
    judged = dict(re.findall(r"^\| (\w+) \| \d+ \| (.*) \|$", out, re.MULTILINE))
    assert judged.pop("together") == "900 s: met"
    assert judged == {
        "good": "met",
        "bad": "MISSED",
        "broken": "BROKE, exit code 3",
        "wordy": "BROKE, exit code 70",
        "torn": "BROKE, exit code 70",
        "resolver": "none",
    }
    assert tables.main(["--only", "good"]) == 0
    monkeypatch.setattr(tables, "GOAL_SECONDS", 0.0)
    assert tables.main(["--only", "good"]) == 1
    assert "| 0 s: MISSED |" in capfd.readouterr().out


def test_at_a_second_signal_what_goes_on_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import os, signal, time\nsignal.signal(signal.SIGINT, lambda *_: print('told', flush=True))\n"
        "print('started', os.getpid(), flush=True)\nwhile True: time.sleep(1)\n"
    )
    driver = "import pathlib, sys, tables; tables.FOLDER = pathlib.Path(sys.argv[1]); tables.FAREWELL_SECONDS = 600.0; "
    driver += "tables.PROGRAMS = {'endless': ('endless.py',)}; tables.main([])"
    with subprocess.Popen(
        [sys.executable, "-c", driver, str(tmp_path)],
        cwd=PERF,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            pid = int(next(line for line in lines if line.startswith("started")).split()[1])
            process.send_signal(signal.SIGINT)
            assert "told\n" in lines
            process.send_signal(signal.SIGINT)
            process.wait(DEADLINE_SECONDS)
        finally:
            process.kill()
    assert process.returncode != 0
    assert not Path(f"/proc/{pid}").exists()


def test_what_does_not_end_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endless.py").write_text(
        textwrap.dedent("""\
            import signal, time
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(600)
        """)
    )
    (tmp_path / "next.py").write_text("print('table of next')")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "PROGRAMS", {"endless": ("endless.py",), "next": ("next.py",)})
    monkeypatch.setattr(tables, "LONGEST_SECONDS", 2.0)
    monkeypatch.setattr(tables, "FAREWELL_SECONDS", 0.5)
    assert tables.main([]) == 1
    out = capfd.readouterr().out
    assert "| BROKE, not ended after 2 s |" in out
    assert "table of next" in out


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "SIGTERM", "hung up"])
def test_a_program_may_end_what_it_has_started(sent: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        textwrap.dedent("""\
            import pathlib, time
            try:
                print("started", flush=True)
                time.sleep(600)
            finally:
                time.sleep(0.5)  # longer than subprocess.run grants
                pathlib.Path(__file__).with_name("ended").touch()
        """)
    )
    driver = "import pathlib, sys, tables; tables.FOLDER = pathlib.Path(sys.argv[1]); "
    driver += "tables.PROGRAMS = {'slow': ('slow.py',)}; tables.main([])"
    process = subprocess.Popen(
        [sys.executable, "-c", driver, str(tmp_path)],
        cwd=PERF,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "started":
            assert process.poll() is None
        process.send_signal(sent)
        process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0
    assert (tmp_path / "ended").exists()


def test_a_program_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tables.main(["--only", "scales"])
    assert "--only 'scales': allowed are 'overhead'" in capsys.readouterr().err


def test_only_what_measures_no_speed_runs_at_the_same_time() -> None:
    assert set(tables.UNHURRIED) <= set(tables.PROGRAMS)
    told = tables.groups(list(tables.PROGRAMS))
    assert sorted(name for group in told for name in group) == sorted(tables.PROGRAMS)
    assert told[-1] == list(tables.UNHURRIED)
    assert all(len(group) == 1 for group in told[:-1])
    assert tables.groups(["rules"]) == [["rules"]]
    assert tables.groups(["noise", "soak"]) == [["noise"], ["soak"]]


def test_programs_that_run_at_the_same_time_are_shown_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second"):
        lines = f"import time\nprint('begin of {name}', flush=True); time.sleep(0.2); print('end of {name}')"
        (tmp_path / f"{name}.py").write_text(lines)
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "PROGRAMS", {name: (f"{name}.py",) for name in ("first", "second")})
    monkeypatch.setattr(tables, "UNHURRIED", ("first", "second"))
    assert tables.main([]) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if " of " in line]
    assert said == ["begin of first", "end of first", "begin of second", "end of second"]


def test_every_program_here_is_run() -> None:
    scripts = {script for script, *_ in tables.PROGRAMS.values()}
    programs = {path.name for path in PERF.glob("*.py") if "argparse.ArgumentParser(" in path.read_text()}
    assert programs - {"tables.py"} == scripts


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("noise.py", "--workload", "nonsense"), "--workload 'nonsense': KEY=VALUE is needed"),
        (("resolver.py", "--ranks", "a"), "'a' is not numbers of ranks"),
        (("resolver.py", "--ranks", "0"), "'0' is not numbers of ranks"),
        (("scale.py", "--tests", "0"), "--tests 0: 1 or more are needed"),
        (("fidelity.py", "--n", "2"), "--n 2: 64 rows or more are needed"),
        (("faults.py", "--at-once", "9"), "--at-once 9: 1 to 8 are allowed"),
        (("reports.py", "--only", "htm"), "'htm': allowed are 'reading alone'"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_a_program_says_what_is_wrong_with_its_arguments(words: tuple[str, ...], told: str) -> None:
    script, *arguments = words
    done = subprocess.run(
        [sys.executable, str(PERF / script), *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
