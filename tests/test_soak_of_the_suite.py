"""perf/soak.py: ten rounds with faults drawn anew each time, and that each of its checks finds what it is for."""

from __future__ import annotations

import itertools
import multiprocessing.shared_memory
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torchrun

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import soak
    import soak_faults
    import soak_leftovers
    import soak_round
    import soak_session
finally:
    sys.path.remove(str(PERF))

PLAN = soak_faults.Plan(
    kind="raise",
    fault="raise_error",
    victim=1,
    test="test_matmul",
    moment="before",
    call=1,
    launcher="torchrun",
    captured=True,
)


@pytest.mark.extended
def test_ten_rounds_of_faults_are_survived(tmp_path, capsys):
    assert soak.main(["--rounds", "10", "--session", "0", "--at-once", "3", "--keep", str(tmp_path)]) == 0, (
        capsys.readouterr().out
    )
    out = capsys.readouterr().out
    assert out.startswith("seed ")
    for kind in soak_faults.KINDS:
        assert f"\n| {kind} | " in out
    assert "| together | 10 | 10 | 10 | 10 | 10 |" in out
    assert list(tmp_path.iterdir()) == []


# ---- what is drawn


def test_a_round_is_drawn_from_the_seed_and_its_number_alone():
    drawn = [soak_faults.draw(5, number) for number in range(1, 22)]
    assert drawn == [soak_faults.draw(5, number) for number in range(1, 22)]
    assert drawn != [soak_faults.draw(6, number) for number in range(1, 22)]
    assert len({plan.name for plan in drawn}) > 10
    kinds = len(soak_faults.KINDS)
    for first in (0, kinds):
        assert {plan.kind for plan in drawn[first : first + kinds]} == set(soak_faults.KINDS)
    assert {soak_faults.draw(5, number, ["kill", "stop"]).kind for number in range(1, 9)} == {"kill", "stop"}


def test_every_fault_has_an_expectation_in_which_only_what_is_harmless_passes():
    faults = {(kind, fault) for kind, faults in soak_faults.KINDS.items() for fault in faults}
    drawn = {}
    for seed, number in itertools.product(range(40), range(1, 15)):
        plan = soak_faults.draw(seed, number)
        must = soak_faults.expected(plan)
        drawn.setdefault((plan.kind, plan.fault), set()).add((must.verdict, must.exit))
        of_no_rank = plan.fault in ("drop_test", "leave_out_test")  # of all; of two ranks nothing tells which is right
        assert must.outcome == "passed" or of_no_rank or any(f"rank {plan.victim}" in words for words in must.says)
    assert set(drawn) == faults
    passing = {fault for (_, fault), found in drawn.items() if ("REHEARSED", 0) in found}
    assert passing == {"none", "pause", "print_garbage", "fill_disk_for_a_while"}


# ---- what a round says


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A round that is as it should be; its ranks are forks here."""
    start = torchrun.start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchrun, "start", lambda *given, **named: start(*given, **{**named, "forked": True}))
        return soak_round.run(1, PLAN, tmp_path_factory.mktemp("round"))


def judged(good, plan=PLAN):
    """Look again at what a round has left, as if something else had been planted."""
    found = soak_round.Round(number=1, plan=plan, directory=good.directory)
    run = torchrun.Run(directory=good.directory, agents=[], token="", started=0.0, deadline=0.0, exits=[1])
    soak_round.judge(found, run, [])
    return found


def test_a_round_that_is_good_says_so(good):
    assert good.is_good, good.complaint
    assert good.said == "failure: rank 1 (node-a): RuntimeError: planted"
    assert judged(good).is_good
    assert "| ok  | failure: rank 1 (node-a): RuntimeError: planted" in soak.line_of(good)


def replaced(plan, **changes):
    import dataclasses

    return dataclasses.replace(plan, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"victim": 0}, "test_matmul should be failure rank 0 (node-a): RuntimeError, and is failure: rank 1"),
        ({"test": "test_all_reduce"}, "test_all_reduce should be failure"),
        ({"test": "test_all_reduce"}, "test_matmul should be 'passed', and is"),
        ({"kind": "kill", "fault": "kill"}, "test_all_reduce should be 'skipped: not run: ', and is 'passed'"),
        ({"kind": "kill", "fault": "kill", "launcher": "gpucluster run"}, "gpucluster run ended with 1, not 11"),
        ({"kind": "kill", "fault": "kill"}, "the journal says REJECTED, 1, not BROKEN, 11"),
        ({"kind": "none", "fault": "none"}, "the terminal does not say REHEARSED"),
    ],
    ids=["another rank", "another test", "an innocent test", "went on", "exit code", "journal", "terminal"],
)
def test_a_report_that_tells_something_else_than_what_was_planted_is_wrong(good, changes, words):
    found = judged(good, replaced(PLAN, **changes))
    assert words in found.complaint
    assert not found.is_good
    assert "| BAD | " in soak.line_of(found)


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("report.xml", lambda text: text[: len(text) // 2], "ParseError"),
        ("report.xml", lambda text: text.replace("<testsuites", "<testsuites bogus='1'", 1), "Validat"),
        ("reports/latest/journal.jsonl", lambda text: "{}\n" + text, "JournalError"),
        ("reports/latest/journal.jsonl", lambda text: text[: text.rindex('{"type":"end"')], "the journal has no end"),
        ("reports/latest/results.json", lambda text: text.replace('"', "", 1), "JSONDecodeError"),
        ("reports/latest/results.json", lambda text: "{}", "results.json: "),
        ("reports/latest/report.html", lambda text: text[:-20], "report.html is cut off"),
        ("reports/latest/metrics.prom", None, "missing: metrics.prom"),
    ],
    ids=["torn XML", "invalid XML", "journal", "no end", "no JSON", "invalid JSON", "page", "missing"],
)
def test_a_report_that_is_malformed_or_missing_is_wrong(good, name, spoil, words):
    path = good.directory / name
    before = path.read_text()
    try:
        if spoil is None:
            path.unlink()
        else:
            path.write_text(spoil(before))
        assert words in judged(good).complaint
    finally:
        path.write_text(before)
    assert judged(good).is_good


def test_a_round_that_does_not_end_is_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(soak_round, "DEADLINE_SECONDS", 1.0)
    found = soak_round.run(1, PLAN, tmp_path)
    assert not found.in_time
    assert "not over after 1 s" in found.complaint


def test_a_bad_round_is_kept_with_the_way_to_repeat_it(tmp_path, capsys):
    def run(number, plan, directory):
        wrong = ["nobody was named"] if number == 2 else []
        return soak_round.Round(number=number, plan=plan, directory=directory, is_named=not wrong, wrong=wrong)

    rounds = soak.soak([1, 2], seed=7, kinds=["kill"], folder=tmp_path, run=run)
    out = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["round-2"]
    assert f"kept: {tmp_path / 'round-2'}" in out
    assert "again: python perf/soak.py --seed 7 --round 2 --only kill" in out
    assert "| kill | 2 | 2 | 1 | 2 | 1 |" in soak.table(rounds)


# ---- what is left behind


@pytest.fixture
def leaver(tmp_path):
    """Start a process of a run that leaves something behind; it lives until it is told to end."""
    started = []

    def start(script, token):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{script}\nprint('ready', flush=True)\ninput()"],
            env={**os.environ, "GPUCLUSTER_TEST_TOKEN": token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_process_that_stays_is_found_by_its_token_and_by_its_session(tmp_path, leaver):
    token = uuid.uuid4().hex
    observer = soak_leftovers.Observer(token)
    # One that has lost its environment, in the session of the other.
    script = (
        "import os, subprocess, sys\nos.setsid()\n"
        "subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], env={})"
    )
    process = leaver(script, token)
    assert observer.leftovers(tmp_path)[0].startswith(f"process {process.pid}: ")
    observer.look()
    assert len([left for left in observer.leftovers(tmp_path) if left.startswith("process ")]) == 2


def test_a_socket_that_somebody_still_holds_is_found(tmp_path, leaver):
    token = uuid.uuid4().hex
    observer = soak_leftovers.Observer(token)
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)
        process = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            env={**os.environ, "GPUCLUSTER_TEST_TOKEN": token},
            stdin=subprocess.PIPE,
            pass_fds=[server.fileno()],
        )
        observer.look()
        process.communicate(b"\n")
        [left] = observer.leftovers(tmp_path)
        assert left.startswith(f"socket {os.fstat(server.fileno()).st_ino}: tcp")
    assert observer.leftovers(tmp_path) == []


def test_shared_memory_that_stays_is_found(tmp_path, leaver):
    token = uuid.uuid4().hex
    observer = soak_leftovers.Observer(token)
    name = f"soak-{uuid.uuid4().hex[:8]}"
    script = (
        "from multiprocessing import resource_tracker, shared_memory\n"
        f"held = shared_memory.SharedMemory({name!r}, create=True, size=4096)\n"
        "resource_tracker.unregister(held._name, 'shared_memory')"
    )
    process = leaver(script, token)
    observer.look()
    process.communicate("\n")
    assert f"file: /dev/shm/{name}" in observer.leftovers(tmp_path)
    held = multiprocessing.shared_memory.SharedMemory(name)
    held.close()
    held.unlink()
    assert observer.leftovers(tmp_path) == []


def test_temporary_files_that_stay_are_found_and_what_was_promised_is_none(tmp_path):
    token = uuid.uuid4().hex
    observer = soak_leftovers.Observer(token, pids=[os.getpid()])
    observer.sessions.clear()
    (tmp_path / "gpucluster-x").mkdir()
    (tmp_path / "torchelastic_x").mkdir()
    assert observer.leftovers(tmp_path, ["torchelastic_x"]) == ["file in TMPDIR: gpucluster-x"]
    named = Path("/tmp", f"of-{token}")
    try:
        named.touch()
        assert f"file: {named}" in observer.leftovers(tmp_path)
    finally:
        named.unlink()


# ---- the long session


def samples(**growing):
    """Thirty samples of rank 0, rank 1 and the recorder; what is named grows by so much a test on rank 1."""
    held = {"descriptors": 20, "threads": 5, "memory": 100_000}
    steady = [{"number": n, **held} for n in range(8, 308, 10)]
    grown = [{"number": n, **{what: held[what] + growing.get(what, 0) * n for what in held}} for n in range(8, 308, 10)]
    return {"rank 0": steady, "rank 1": grown, "recorder": steady}


def test_a_session_that_grows_is_wrong_and_one_that_does_not_is_not():
    assert soak_session.wrong_with_growths(soak_session.growths(samples())) == []
    assert soak_session.wrong_with_growths(soak_session.growths(samples(memory=soak_session.ALLOWED_KB))) == []
    for what, a_test in {"descriptors": 0.1, "threads": 0.1, "memory": soak_session.ALLOWED_KB + 1}.items():
        [wrong] = soak_session.wrong_with_growths(soak_session.growths(samples(**{what: a_test})))
        assert wrong.startswith(f"rank 1: {what} grow from ")
    missing = {name: held for name, held in samples().items() if name != "recorder"}
    assert soak_session.wrong_with_growths(soak_session.growths(missing)) == ["recorder: fewer than 6 samples"]


@pytest.mark.extended
def test_a_long_session_with_faults_holds_no_more_at_its_end(tmp_path):
    session = soak_session.run(80, tmp_path)
    growing = [growth for growth in session.growths if not growth.is_allowed and growth.what != "memory"]
    assert growing == []
    # What a test adds to memory shows only after more tests than this, when everything has been loaded.
    assert [wrong for wrong in session.wrong if ": memory grow" not in wrong] == []
    assert {growth.process for growth in session.growths} >= {"rank 0", "rank 1", "recorder"}


@pytest.mark.extended
def test_a_rank_that_leaks_is_found_in_a_session(tmp_path):
    session = soak_session.run(60, tmp_path, leak="descriptor")
    assert any(wrong.startswith("rank 1: descriptors grow from ") for wrong in session.wrong)
    assert not any(wrong.startswith(("rank 0: descriptors", "recorder")) for wrong in session.wrong)
