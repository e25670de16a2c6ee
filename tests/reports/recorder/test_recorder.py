"""The recorder as a real process: what it leaves on disk when rank 0 or everything fails."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from journal_lines import COLLECTED, RUN, problem, result, start
from recordings import DEADLINE, END, verdicts, wait_until

from pytest_gpucluster.journal import journal
from pytest_gpucluster.reports import junit
from pytest_gpucluster.reports.recorder import client
from pytest_gpucluster.reports.recorder.client import Recorder


class Released(BaseException):
    """What a signal handler raises to get a rank out of a hang."""


@pytest.fixture
def recording(place):
    handle = Recorder.start(place / "run", place / "report.xml")
    yield handle
    handle.finish(END, DEADLINE)
    with contextlib.suppress(ProcessLookupError):
        os.kill(handle.pid, signal.SIGKILL)
    handle._process.wait()


RANK_0 = """
import json, os, signal, sys, time
from pathlib import Path
from pytest_gpucluster.reports.recorder.client import Recorder
place = Path({place!r})
handle = Recorder.start(place / "run", place / "report.xml", quiet_seconds=0.5)
(place / "pid").write_text(str(handle.pid))
for line in json.loads((place / "lines").read_text()):
    handle.send(line)
"""


def rank_0_script(place, lines, then="time.sleep(600)"):
    (place / "lines").write_text(json.dumps(lines))
    return RANK_0.format(place=str(place)) + textwrap.dedent(then)


@contextlib.contextmanager
def rank_0(place, lines, then="time.sleep(600)", **more):
    """Run a rank 0 in a process of its own that sends lines and then does something."""
    process = subprocess.Popen([sys.executable, "-c", rank_0_script(place, lines, then)], **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
    pid = int((place / "pid").read_text())
    assert client.wait_for_end(pid, DEADLINE), "the recorder lingers"


# ---- a run that ends well


def test_a_finished_run_is_on_disk_when_finish_returns(place, recording):
    for line in (RUN, COLLECTED, *(line for name in "abc" for line in (start(name), result(name)))):
        recording.send(line)
    assert recording.finish(END, DEADLINE) is None
    assert recording.failure is None
    assert client.wait_for_end(recording.pid, DEADLINE)
    assert set(verdicts(place / "report.xml").values()) == {"passed"}
    read = journal.read(place / "run" / "journal.jsonl")
    assert (read.verdict, read.end.by, read.cut) == ("ACCEPTED", "rank 0", False)
    assert (place / "report.xml").read_text() == junit.render(read)
    assert sorted(os.listdir(place)) == ["report.xml", "run"]
    assert sorted(os.listdir(place / "run")) == ["journal.jsonl", "metrics.prom", "report.html", "results.json"]
    assert json.loads((place / "run" / "results.json").read_text())["verdict"]["word"] == "ACCEPTED"
    assert recording.missing is None


def test_a_report_that_cannot_be_written_is_named_and_the_record_is_complete_nonetheless(place, recording):
    (place / "run" / "report.html").mkdir()
    recording.send(RUN)
    assert recording.finish(END, DEADLINE) is None
    assert recording.missing.startswith("report.html: not written: ")
    assert f"gpucluster report {place / 'run'} --all DIR" in recording.missing
    assert {"journal.jsonl", "metrics.prom", "results.json"} <= set(os.listdir(place / "run"))


@pytest.mark.parametrize("ends", ["is killed", "takes too long"])
def test_what_happens_while_the_reports_are_rendered_is_no_failure_of_the_record(place, recording, ends):
    os.mkfifo(place / "run" / "results.json")  # without a reader: the first report waits here
    for line in (RUN, COLLECTED, start("a"), result("a")):
        recording.send(line)

    def kill():
        wait_until(lambda: b'"type":"end"' in (place / "run" / "journal.jsonl").read_bytes().replace(b" ", b""))
        wait_until(lambda: verdicts(place / "report.xml")["test_b"].startswith("skipped"))
        time.sleep(0.2)
        os.kill(recording.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    if ends == "is killed":
        killer.start()
    try:
        assert recording.finish(END, DEADLINE if ends == "is killed" else 5.0) is None
        if ends == "is killed":
            killer.join()
    finally:  # with a reader the process that waits goes on, and ends
        os.close(os.open(place / "run" / "results.json", os.O_RDONLY | os.O_NONBLOCK))
    assert "results.json, metrics.prom, report.html: unknown" in recording.missing
    assert f"gpucluster report {place / 'run'} --all DIR" in recording.missing
    assert journal.read(place / "run" / "journal.jsonl").verdict == "ACCEPTED"


def test_the_report_is_complete_and_pessimistic_at_every_step(place, recording):
    report = place / "report.xml"
    recording.send(RUN)
    assert wait_until(lambda: verdicts(report)) == {"run": "error: the run ended before the first test"}
    recording.send(COLLECTED)
    not_run = {f"test_{name}": "skipped: not run: the run ended before the first test" for name in "abc"}
    wait_until(lambda: verdicts(report) == {**not_run, "run": "error: the run ended before the first test"})
    recording.send(start("a"))
    wait_until(lambda: verdicts(report)["test_a"] == "error: the run ended here: t.py::test_a")
    recording.send(result("a", "failed"))
    wait_until(lambda: verdicts(report)["test_a"] == "failure: a is failed")
    recording.send(start("b"))
    wait_until(lambda: verdicts(report)["test_b"] == "error: the run ended here: t.py::test_b")
    assert (place / "run" / "journal.jsonl").read_bytes().count(b"\n") == 5


def test_a_run_is_running_as_long_as_its_recorder_is_alive(place, recording):
    def verdict():
        return journal.read(place / "run" / "journal.jsonl", live=True).verdict

    recording.send(RUN)
    assert wait_until(lambda: (place / "run" / "journal.jsonl").stat().st_size)
    assert verdict() == "RUNNING"
    os.kill(recording.pid, signal.SIGSTOP)
    assert verdict() == "RUNNING"
    os.kill(recording.pid, signal.SIGKILL)
    assert client.wait_for_end(recording.pid, DEADLINE)
    assert verdict() == "BROKEN"


def test_lines_of_many_threads_arrive_whole_and_in_the_order_of_each(place, recording):
    recording.send(RUN)
    text = "".join(chr(33 + i % 90) for i in range(5_000_000))
    recording.send(result("a", "failed", text=text))

    def speak(thread):
        for i in range(50):
            recording.send({"type": "property", "name": f"{thread}", "value": f"{i} " + "x" * 60_000})
            recording.beat()

    threads = [threading.Thread(target=speak, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recording.finish(END, DEADLINE) is None
    heard = {}
    read = journal.read(place / "run" / "journal.jsonl")
    assert read.results[0].text == text
    for name, value in read.properties:
        heard.setdefault(name, []).append(int(value.split()[0]))
    assert heard == {str(thread): list(range(50)) for thread in range(4)}


def test_exceptions_out_of_signal_handlers_neither_tear_nor_lose_nor_double_a_line(place, recording):
    recording.send(RUN)
    armed = False

    def handler(number, frame):
        if armed:
            raise Released

    gc.disable()  # packets that wait set it off; out of one of its callbacks, as hypothesis has one, nothing is raised
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
    interruptions = 0
    try:
        for i in range(300):
            try:
                armed = True
                recording.send({"type": "property", "name": str(i), "value": "x" * 100_000})
                armed = False
            except Released:
                armed = False
                interruptions += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert recording.finish(END, DEADLINE) is None
    assert interruptions > 5
    names = [int(name) for name, _ in journal.read(place / "run" / "journal.jsonl").properties]
    # A line whose encoding was interrupted was never sent; no other may be missing.
    assert names == sorted(set(names))
    assert len(names) >= 300 - interruptions


def test_a_packet_that_was_sent_when_a_signal_handler_raised_is_taken_once(place, recording):
    class Interrupted:
        """The worst moment: the kernel has the packet, and its sender does not know."""

        def __init__(self, channel):
            self.channel = channel
            self.is_next = False

        def send(self, *arguments):
            sent = self.channel.send(*arguments)
            self.is_next = not self.is_next
            if self.is_next:
                raise Released
            return sent

        def __getattr__(self, name):
            return getattr(self.channel, name)

    recording._channel = Interrupted(recording._channel)
    for line in (RUN, *({"type": "property", "name": str(i), "value": "x" * 100_000} for i in range(10))):
        with contextlib.suppress(Released):
            recording.send(line)
    recording._channel = recording._channel.channel
    assert recording.finish(END, DEADLINE) is None
    properties = journal.read(place / "run" / "journal.jsonl").properties
    assert properties == tuple((str(i), "x" * 100_000) for i in range(10))


def test_a_forked_child_of_rank_0_says_nothing(place, recording):
    recording.send(RUN)
    child = os.fork()
    if child == 0:
        recording.send(start("a"))
        recording.beat()
        recording.finish(END, 1.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert recording.finish(END, DEADLINE) is None
    assert journal.read(place / "run" / "journal.jsonl").running is None


def test_a_line_that_no_reader_would_accept_is_quoted_and_reported(place, recording):
    recording.send(RUN)
    recording.send({"type": "test", "nodeid": "t.py::test_a", "outcome": "splendid"})
    problem = recording.finish(END, DEADLINE)
    assert "outcome must be" in problem
    assert verdicts(place / "report.xml")["recorder"].startswith("error: ")


# ---- a rank 0 that ends


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", id="SIGKILL"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", id="SIGSEGV"),
        pytest.param("os._exit(0)", id="exit-0"),
        pytest.param("if os.fork(): os._exit(3)\ntime.sleep(5)", id="exit-with-a-forked-child-that-lives"),
    ],
)
def test_a_rank_0_that_ends_without_a_word_is_named_with_its_test(place, ending):
    with rank_0(place, [RUN, COLLECTED, start("a"), result("a"), start("b")], ending) as process:
        process.wait(DEADLINE)
        assert client.wait_for_end(int((place / "pid").read_text()), DEADLINE)
    lost = f"rank 0 (gpu-01, pid {process.pid}) exited without a message during t.py::test_b"
    assert verdicts(place / "report.xml") == {
        "test_a": "passed",
        "test_b": f"error: the run ended here: {lost}",
        "test_c": f"skipped: not run: {lost}",
        "rank lost": f"error: {lost}",
    }
    read = journal.read(place / "run" / "journal.jsonl")
    assert (read.verdict, read.exit, read.end.by, read.reason) == ("BROKEN", 11, "recorder", lost)
    assert (read.end.counts, read.end.not_run) == (
        {"passed": 1, "failed": 0, "error": 1, "skipped": 0},
        ("t.py::test_c",),
    )
    verdict = json.loads((place / "run" / "results.json").read_text())["verdict"]
    assert (verdict["word"], verdict["exit"], verdict["reason"]) == ("BROKEN", 11, lost)
    assert {"metrics.prom", "report.html"} <= set(os.listdir(place / "run"))


def test_what_rank_0_reported_of_its_end_is_the_reason_and_a_failure_before_it_rejects(place):
    lines = [RUN, COLLECTED, start("a"), result("a", "failed"), start("b"), problem("SIGTERM")]
    with rank_0(place, lines, "os._exit(1)") as process:
        process.wait(DEADLINE)
    found = verdicts(place / "report.xml")
    assert found["test_b"].endswith(": SIGTERM")
    assert "rank lost" not in found
    read = journal.read(place / "run" / "journal.jsonl")
    assert (read.verdict, read.exit) == ("REJECTED", 1)
    assert [each.message for each in read.problems] == ["SIGTERM"]


def test_the_faulthandlers_last_words_are_in_the_report(place):
    then = """
    import ctypes, faulthandler
    file = open(place / "fault", "w")
    handle.fault_file(place / "fault")
    file.write("earlier\\n"); file.flush()
    handle.send({"type": "start", "nodeid": "t.py::test_c", "at": "", "deadline_seconds": 300})
    report = place / "report.xml"
    while not report.exists() or "ended here" not in report.read_text(): time.sleep(0.01)
    faulthandler.enable(file)
    ctypes.string_at(0)
    """
    with rank_0(place, [RUN, COLLECTED], then) as process:
        process.wait(DEADLINE)
    text = journal.read(place / "run" / "journal.jsonl").problems[0].text
    assert re.search("^Fatal .*: Segmentation fault$", text, re.MULTILINE)
    assert "earlier" not in text
    assert "Segmentation fault" in (place / "report.xml").read_text()


def test_a_recorder_that_reads_the_last_lines_only_after_a_crash_has_its_reason(place):
    then = """
    import ctypes, faulthandler
    file = open(place / "fault", "w")
    handle.fault_file(place / "fault")
    faulthandler.enable(file)
    os.kill(handle.pid, signal.SIGSTOP)
    handle.send({"type": "start", "nodeid": "t.py::test_c", "at": "", "deadline_seconds": 300})
    ctypes.string_at(0)
    """
    with rank_0(place, [RUN, COLLECTED], then) as process:
        process.wait(DEADLINE)
        recorder = int((place / "pid").read_text())
        os.kill(recorder, signal.SIGCONT)
        assert client.wait_for_end(recorder, DEADLINE)
    assert verdicts(place / "report.xml")["test_c"].endswith("(Fatal Python error: Segmentation fault)")


def test_a_rank_0_that_ends_before_its_first_line_leaves_no_recorder(place):
    with rank_0(place, [], "os._exit(1)") as process:
        process.wait(DEADLINE)
    assert os.listdir(place / "run") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_to_everything_do_not_end_the_recorder(place, recording, number):
    # At once: also in its first moments, before it could have set anything itself.
    os.kill(recording.pid, number)
    assert os.getsid(recording.pid) == recording.pid, "it is in a session of its own"
    recording.send(RUN)
    wait_until(lambda: verdicts(place / "report.xml"))
    os.kill(recording.pid, number)
    assert recording.finish(END, DEADLINE) is None


def test_without_pidfds_the_end_of_rank_0_is_seen_too(place, monkeypatch):
    no_pidfd = place / "no_pidfd"
    no_pidfd.mkdir()
    (no_pidfd / "sitecustomize.py").write_text("import os\nif hasattr(os, 'pidfd_open'): del os.pidfd_open\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(no_pidfd), os.getcwd()])}
    with rank_0(place, [RUN, COLLECTED, start("a")], "os._exit(1)", env=environment) as process:
        process.wait(DEADLINE)
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        assert client.wait_for_end(int((place / "pid").read_text()), DEADLINE)
    assert "rank 0 (gpu-01" in verdicts(place / "report.xml")["test_a"]


# ---- a rank 0 that does not answer


def test_a_stopped_rank_0_is_reported_and_forgiven_when_it_goes_on(place):
    then = "while True:\n    handle.beat()\n    time.sleep(0.05)"
    lines = [RUN, COLLECTED, start("a", deadline=-20.0)]
    with rank_0(place, lines, then) as process:
        report = place / "report.xml"
        wait_until(lambda: verdicts(report)["test_a"] == "error: the run ended here: t.py::test_a")
        os.kill(process.pid, signal.SIGSTOP)
        stopped = wait_until(lambda: [v for v in verdicts(report).values() if "does not answer" in v])
        assert f"rank 0 (gpu-01, pid {process.pid})" in stopped[0]
        assert "process state T: " in stopped[0]
        assert report.read_text() == junit.render(journal.read(place / "run" / "journal.jsonl"))
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: verdicts(report)["test_a"] == "error: the run ended here: t.py::test_a")


def test_a_rank_0_that_works_within_its_deadline_may_be_silent(place):
    with rank_0(place, [RUN, COLLECTED, start("a", deadline=300.0)]):
        wait_until(lambda: "test_a" in verdicts(place / "report.xml"))
        time.sleep(1.5)  # past the quiet time and a look at it
        assert "does not answer" not in (place / "report.xml").read_text()


# ---- a recorder that ends


def test_the_death_of_the_recorder_is_reported_and_stops_nothing(place, recording):
    recording.send(RUN)
    recording.send(COLLECTED)
    wait_until(lambda: "test_a" in verdicts(place / "report.xml"))
    os.kill(recording.pid, signal.SIGKILL)
    assert client.wait_for_end(recording.pid, DEADLINE)
    recording.send(start("a"))
    recording.beat()
    problem = f"the recorder (pid {recording.pid}, killed by signal 9) has exited: nothing more is recorded"
    assert problem in recording.failure
    assert problem in recording.finish(END, DEADLINE)
    assert verdicts(place / "report.xml")["run"].startswith("error:")


def test_a_recorder_that_takes_nothing_does_not_hold_up_the_tests(place, recording, monkeypatch):
    monkeypatch.setattr(recording._process, "send_signal", lambda number: None)  # one that no signal wakes
    recording.send(RUN)
    wait_until(lambda: verdicts(place / "report.xml"))
    os.kill(recording.pid, signal.SIGSTOP)
    begin = time.monotonic()
    for i in range(50):
        recording.send({"type": "property", "name": str(i), "value": "x" * 100_000})
        recording.beat()
    assert time.monotonic() - begin < 30
    assert "accepts no lines" in recording.failure
    assert "within 0.1 s" in recording.finish({"type": "property"}, 0.1)
    os.kill(recording.pid, signal.SIGCONT)


def test_what_a_stopped_recorder_did_not_take_goes_along_later(place, recording):
    recording.send(RUN)
    os.kill(recording.pid, signal.SIGSTOP)
    for i in range(20):
        recording.send({"type": "property", "name": str(i), "value": "x" * 100_000})
    os.kill(recording.pid, signal.SIGCONT)
    assert recording.finish(END, DEADLINE) is None
    properties = journal.read(place / "run" / "journal.jsonl").properties
    assert [name for name, _ in properties] == [str(i) for i in range(20)]


# ---- everything ends


@contextlib.contextmanager
def container(place, lines):
    """Run a rank 0 in a pid namespace, and kill everything in it at the end."""
    command = ["unshare", "-Urp", "--fork", "--kill-child", "sh", "-c", '"$0" -c "$1"; true']
    process = subprocess.Popen([*command, sys.executable, rank_0_script(place, lines)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_when_the_whole_container_is_killed_the_report_is_valid_and_names_the_test(place):
    expected = "error: the run ended here: t.py::test_b"
    with container(place, [RUN, COLLECTED, start("a"), result("a"), start("b")]):
        wait_until(lambda: verdicts(place / "report.xml").get("test_b") == expected)
    assert verdicts(place / "report.xml")["test_b"] == expected
    read = journal.read(place / "run" / "journal.jsonl")
    assert (read.end, read.running.nodeid) == (None, "t.py::test_b")
    assert junit.render(read) == (place / "report.xml").read_text()


def test_killed_at_any_moment_a_valid_report_is_left(tmp_path):
    # The run line and many tests in quick succession; everything is killed after a different time each round.
    lines = [RUN, COLLECTED] + [line for _ in range(300) for name in "abc" for line in (start(name), result(name))]
    for round_ in range(6):
        place = tmp_path / str(round_)
        (place / "run").mkdir(parents=True)
        with container(place, lines):
            wait_until((place / "report.xml").exists)
            time.sleep(round_ * 0.013)
        assert any(verdict.startswith("error:") for verdict in verdicts(place / "report.xml").values())
        assert journal.read(place / "run" / "journal.jsonl").end is None


@pytest.mark.parametrize(("size", "seconds"), [(None, 7), (0, 7), (400_000, 11), (50_000_000, 15)])
def test_the_time_for_the_reports_follows_the_size_of_the_journal(size, seconds, tmp_path):
    if size is not None:
        with (tmp_path / journal.JOURNAL_FILE).open("wb") as file:
            file.truncate(size)
    assert client.reports_seconds(tmp_path) == seconds
