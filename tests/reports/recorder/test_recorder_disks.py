"""The recorder on disks that are full, unwritable or taken away, and in places that are no regular file."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from journal_lines import COLLECTED, RUN, result, start
from recordings import DEADLINE, END, verdicts, wait_until

from pytest_gpucluster.journal import journal
from pytest_gpucluster.reports.recorder import client
from pytest_gpucluster.reports.recorder.client import Recorder

FULL = """
import json, os, sys, tempfile, time
from pathlib import Path
from pytest_gpucluster.reports.recorder.client import Recorder
place, frees = Path(sys.argv[1]), sys.argv[2] == "frees"
(place / "run").mkdir()
run, collected, start, result, end = json.loads(sys.argv[3])
handle = Recorder.start(place / "run", place / "report.xml")
for line in (run, collected, start):
    handle.send(line)
while not (place / "report.xml").exists() or "ended here" not in (place / "report.xml").read_text():
    time.sleep(0.01)
filler = open(place / "filler", "wb", buffering=0)
try:
    while True:
        filler.write(b"x" * 4096)
except OSError:
    pass
before = (place / "report.xml").read_text()
handle.send(dict(result, text="x" * 9000))
while handle.failure is None:
    time.sleep(0.01)
same = (place / "report.xml").read_text() == before
if frees:
    filler.truncate(0)
failure, problem = handle.failure, handle.finish(end, 60)
rescued = [str(path) for path in Path(tempfile.gettempdir()).glob("gpucluster-*/*")]
print(json.dumps({
    "failure": failure, "problem": problem, "same": same, "rescued": rescued,
    "files": {path.name: path.read_text() for path in (place / "report.xml", place / "run" / "journal.jsonl")},
    "names": sorted(os.listdir(place)),
}))
"""


def on_a_small_disk(tmp_path, frees):
    disk, temporary = tmp_path / "disk", tmp_path / "tmp"
    disk.mkdir()
    temporary.mkdir()
    lines = json.dumps([RUN, COLLECTED, start("a"), result("a"), END])
    mount = 'mount -t tmpfs -o size=64k none "$0" && exec "$1" -c "$2" "$0" "$3" "$4"'
    command = ["unshare", "-Urm", "sh", "-c", mount, disk, sys.executable, FULL, frees, lines]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_full_disk_keeps_the_former_report_and_the_complete_ones_are_put_elsewhere(tmp_path):
    seen = on_a_small_disk(tmp_path, "stays full")
    assert f"journal.jsonl: not written: {os.strerror(errno.ENOSPC)}" in seen["failure"]
    assert seen["same"], "the report on the full disk was touched"
    assert seen["names"] == ["filler", "report.xml", "run"]
    (tmp_path / "kept.xml").write_text(seen["files"]["report.xml"])
    assert verdicts(tmp_path / "kept.xml")["test_a"].startswith("error: ")
    rescue = tmp_path / "tmp" / "gpucluster-r1"
    assert f" in {rescue}" in seen["problem"]
    assert os.strerror(errno.ENOSPC) in seen["problem"]
    assert verdicts(rescue / "report.xml")["test_a"] == "passed"
    read = journal.read(rescue / "journal.jsonl")
    assert (read.verdict, read.cut, read.results[0].text) == ("ACCEPTED", False, "x" * 9000)


def test_when_there_is_room_again_everything_is_where_it_belongs(tmp_path):
    seen = on_a_small_disk(tmp_path, "frees")
    assert seen["problem"] is None
    assert seen["rescued"] == []
    (tmp_path / "report.xml").write_text(seen["files"]["report.xml"])
    (tmp_path / "journal.jsonl").write_text(seen["files"]["journal.jsonl"])
    read = journal.read(tmp_path / "journal.jsonl")
    assert (read.verdict, read.cut, read.results[0].text) == ("ACCEPTED", False, "x" * 9000)
    assert verdicts(tmp_path / "report.xml")["test_a"] == "passed"


def test_a_failure_that_is_over_is_none_at_the_end(place, monkeypatch):
    # Nothing was recorded since there is space again, so it was not noticed.
    monkeypatch.setenv("TMPDIR", str(place))
    (place / "file").write_text("")
    handle = Recorder.start(place / "run", place / "file" / "report.xml")
    assert handle.failure_now(DEADLINE) is None
    for line in (RUN, COLLECTED):
        handle.send(line)
    wait_until(lambda: handle.failure)
    assert "report.xml: not written: " in handle.failure_now(DEADLINE)
    (place / "file").unlink()
    time.sleep(1.0)  # the recorder does not look by itself
    assert "report.xml: not written: " in handle.failure
    assert handle.failure_now(DEADLINE) is None
    assert handle.finish(END, DEADLINE) is None
    assert verdicts(place / "file" / "report.xml")


def test_a_junit_path_that_stays_unwritable_is_reported_at_the_end_and_without_one_nothing_fails(place, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(place))
    (place / "file").write_text("")
    (place / "other").mkdir()
    handles = [Recorder.start(place / "run", place / "file" / "report.xml"), Recorder.start(place / "other", None)]
    for handle in handles:
        handle.send(RUN)
    found = [handle.finish(END, DEADLINE) for handle in handles]
    assert f" in {place / 'gpucluster-r1'}" in found[0]
    assert found[1] is None
    for run in ("run", "other"):
        assert journal.read(place / run / "journal.jsonl").verdict == "ACCEPTED"


def test_asking_a_recorder_that_does_not_answer_or_is_dead_takes_no_longer_than_allowed(place, monkeypatch):
    (place / "file").write_text("")
    handle = Recorder.start(place / "run", place / "file" / "report.xml")
    handle.send(RUN)
    wait_until(lambda: handle.failure)
    os.kill(handle.pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert "report.xml: not written: " in handle.failure_now(0.2)
    # As if there were space again for the waiting packets: it is not confirmed that they were written.
    handle._failure, handle._stuck = None, "stuck"
    assert handle.failure_now(0.2) == "stuck"
    assert time.monotonic() - begin < 10
    os.kill(handle.pid, signal.SIGKILL)
    assert client.wait_for_end(handle.pid, DEADLINE)
    assert f"(pid {handle.pid}" in handle.failure_now(DEADLINE)
    handle._process.wait()


def test_a_pipe_gets_the_last_report_only(place):
    os.mkfifo(place / "pipe")
    reader = os.open(place / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    handle = Recorder.start(place / "run", place / "pipe")
    for line in (RUN, COLLECTED, start("a"), result("a")):
        handle.send(line)
    assert handle.finish(END, DEADLINE) is None
    (place / "report.xml").write_bytes(os.read(reader, 100_000))
    os.close(reader)
    assert verdicts(place / "report.xml")["test_a"] == "passed"


def test_another_runs_journal_is_never_touched(place, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(place))
    (place / "run" / "journal.jsonl").write_text("evidence")
    handle = Recorder.start(place / "run", place / "report.xml")
    handle.send(RUN)
    assert "File exists" in handle.finish(END, DEADLINE)
    assert (place / "run" / "journal.jsonl").read_text() == "evidence"
    assert os.listdir(place / "run") == ["journal.jsonl"]
    # Neither is it mixed into the copy of this one.
    assert journal.read(place / "gpucluster-r1" / "journal.jsonl").verdict == "ACCEPTED"


TAKEN_AWAY = {
    "removed": shutil.rmtree,
    "put aside": lambda run: run.rename(run.with_name("aside")),
    "replaced": lambda run: ((run / "journal.jsonl").unlink(), (run / "journal.jsonl").write_text("another\n")),
}


@pytest.mark.parametrize("change", TAKEN_AWAY.values(), ids=TAKEN_AWAY)
def test_a_journal_that_is_removed_is_reported_and_put_elsewhere(place, monkeypatch, change):
    monkeypatch.setenv("TMPDIR", str(place))
    handle = Recorder.start(place / "run", place / "report.xml")
    for line in (RUN, COLLECTED, start("a")):
        handle.send(line)
    wait_until(lambda: verdicts(place / "report.xml"))
    change(place / "run")
    for line in (result("a"), start("b"), result("b"), start("c"), result("c")):
        handle.send(line)
    wait_until(lambda: handle.failure)  # in time for a verdict on which all ranks agree
    problem = handle.finish(END, DEADLINE)
    assert problem is not None
    assert f"{place / 'run' / 'journal.jsonl'}: not written: " in problem
    assert f" in {place / 'gpucluster-r1'}" in problem
    read = journal.read(place / "gpucluster-r1" / "journal.jsonl")
    assert (read.verdict, len(read.results)) == ("ACCEPTED", 3)
    assert not (place / "run" / "report.html").exists()
