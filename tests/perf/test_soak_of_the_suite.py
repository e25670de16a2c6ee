"""perf/soak.py: ten rounds with faults drawn anew each time, and that each of its checks finds what it is for."""

import dataclasses
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

PERF = Path(__file__).parents[2] / "perf"
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
    assert "| total | 10 | 10 | 10 | 10 | 10 |" in out
    assert list(tmp_path.iterdir()) == []


# ---- what is drawn


def test_every_fault_has_an_expectation_in_which_only_what_is_harmless_passes():
    faults = {(kind, fault) for kind, faults in soak_faults.KINDS.items() for fault in faults}
    drawn = {}
    for seed, number in itertools.product(range(40), range(1, 15)):
        plan = soak_faults.draw(seed, number)
        must = soak_faults.expected(plan)
        drawn.setdefault((plan.kind, plan.fault), set()).add((must.verdict, must.exit))
        of_no_rank = plan.fault in ("drop_test", "leave_out_test")  # of all; of two ranks either may be right
        assert must.outcome == "passed" or of_no_rank or any(f"rank {plan.victim}" in words for words in must.words)
    assert set(drawn) == faults
    passing = {fault for (_, fault), found in drawn.items() if ("REHEARSED", 0) in found}
    assert passing == {"none", "pause", "print_garbage", "fill_disk_for_a_while"}


# ---- the result of a round


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"victim": 0}, "test_matmul should be failure rank 0 (node-a): RuntimeError, and is failure: rank 1"),
        ({"test": "test_all_reduce"}, "test_all_reduce should be failure"),
        ({"test": "test_all_reduce"}, "test_matmul should be 'passed', and is"),
        ({"kind": "kill", "fault": "kill"}, "test_all_reduce should be 'skipped: not run: ', and is 'passed'"),
        ({"kind": "kill", "fault": "kill", "launcher": "gpucluster run"}, "gpucluster run ended with 1, not 11"),
        ({"kind": "kill", "fault": "kill"}, "the journal has REJECTED, 1, not BROKEN, 11"),
        ({"kind": "none", "fault": "none"}, "the terminal does not have REHEARSED"),
    ],
    ids=["another rank", "another test", "an innocent test", "went on", "exit code", "journal", "terminal"],
)
def test_a_report_without_the_planted_fault_is_a_problem(good, changes, words):
    found = judged(good, dataclasses.replace(PLAN, **changes))
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


# ---- what is left behind


HOLDS = """
import os, subprocess, sys
from multiprocessing import resource_tracker, shared_memory

os.setsid()
held = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
resource_tracker.unregister(held._name, "shared_memory")
# One that has lost its environment, in the session of the other.
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], env={})
print("ready", flush=True)
input()
"""


def test_processes_sockets_and_shared_memory_that_stay_are_found(tmp_path, monkeypatch):
    token, name = uuid.uuid4().hex, f"soak-{uuid.uuid4().hex[:8]}"
    observer = soak_leftovers.Observer(token)
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, name],
            env={**os.environ, "GPUCLUSTER_TEST_TOKEN": token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[server.fileno()],
        )
        try:
            assert process.stdout.readline() == "ready\n"
            observer.sample()
            found = observer.leftovers(tmp_path)
            assert any(left.startswith(f"process {process.pid}: ") for left in found)
            assert any(left.startswith("process ") and left.endswith("sys.stdin.read()") for left in found)
            with monkeypatch.context() as patched:
                patched.setattr(soak_leftovers, "_ENDING_SECONDS", 0.0)
                patched.setattr(soak_leftovers, "_command", lambda pid: "")
                assert f"process {process.pid}: no command line" in observer.leftovers(tmp_path)
        finally:
            process.communicate("\n")
        left = observer.leftovers(tmp_path)  # other tests' files may be among them, by the number in their names
        [socket_left] = [one for one in left if one.startswith("socket ")]
        assert socket_left.startswith(f"socket {os.fstat(server.fileno()).st_ino}: tcp")
        assert f"file: /dev/shm/{name}" in left
    held = multiprocessing.shared_memory.SharedMemory(name)
    held.close()
    held.unlink()
    assert not [one for one in observer.leftovers(tmp_path) if one.startswith(("socket ", "process ")) or name in one]


# ---- the long session


def samples(**growing):
    """Thirty samples of rank 0, rank 1 and the recorder; what is named grows by this amount a test on rank 1."""
    held = {"descriptors": 20, "threads": 5, "memory": 100_000}
    steady = [{"number": n, **held} for n in range(8, 308, 10)]
    grown = [{"number": n, **{what: held[what] + growing.get(what, 0) * n for what in held}} for n in range(8, 308, 10)]
    return {"rank 0": steady, "rank 1": grown, "recorder": steady}


def test_a_session_that_grows_is_wrong_and_one_that_does_not_is_not():
    assert soak_session.growth_problems(soak_session.growths(samples())) == []
    assert soak_session.growth_problems(soak_session.growths(samples(memory=soak_session.ALLOWED_KB))) == []
    for what, a_test in {"descriptors": 0.1, "threads": 0.1, "memory": soak_session.ALLOWED_KB + 1}.items():
        [wrong] = soak_session.growth_problems(soak_session.growths(samples(**{what: a_test})))
        assert wrong.startswith(f"rank 1: {what} grow from ")
    missing = {name: held for name, held in samples().items() if name != "recorder"}
    assert soak_session.growth_problems(soak_session.growths(missing)) == ["recorder: fewer than 6 samples"]


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["rank 1: threads grow"], 1)])
def test_what_the_long_session_finds_decides_too(problems, code, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "soak", lambda numbers, **_: [])
    monkeypatch.setattr(soak_session, "run", lambda tests, folder: soak_session.Session(tests=tests, problems=problems))
    assert soak.main(["--rounds", "1", "--session", "40", "--keep", str(tmp_path)]) == code


@pytest.mark.extended
def test_a_long_session_with_faults_holds_no_more_at_its_end(tmp_path):
    session = soak_session.run(120, tmp_path)
    growing = [growth for growth in session.growths if not growth.is_allowed and growth.what != "memory"]
    assert growing == []
    # What a test adds to memory shows only after more tests than this, when everything has been loaded.
    assert [wrong for wrong in session.problems if ": memory grow" not in wrong] == []
    assert {growth.process for growth in session.growths} >= {"rank 0", "rank 1", "recorder"}


@pytest.mark.extended
def test_a_rank_that_leaks_is_found_in_a_session(tmp_path):
    session = soak_session.run(60, tmp_path, leak="descriptor")
    assert any(wrong.startswith("rank 1: descriptors grow from ") for wrong in session.problems)
    assert not any(wrong.startswith(("rank 0: descriptors", "recorder")) for wrong in session.problems)
