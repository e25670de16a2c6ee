"""The journal: what its writer writes, its reader reads, whatever a kill left of it."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster import journal, metrics, run_directory, thresholds
from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.judge import judge
from pytest_gpucluster.sampling import Series, Stopped

RUN = {"type": "run", "schema_version": 1, "run_id": "r1", "started_at": "2026-01-02T03:04:05+00:00"}
TESTS = [{"nodeid": f"t.py::test_{name}", "classname": "t", "name": f"test_{name}"} for name in "abc"]
COLLECTED = {"type": "collected", "tests": TESTS}


def start(name):
    return {"type": "start", "nodeid": f"t.py::test_{name}", "at": "", "deadline_seconds": 300.0}


def result(name, outcome="passed", **more):
    return {"type": "test", "nodeid": f"t.py::test_{name}", "outcome": outcome, **more}


def problem(message, outcome="error"):
    return {"type": "problem", "name": "preflight", "outcome": outcome, "message": message, "text": ""}


def end(verdict="ACCEPTED", code=0):
    return {"type": "end", "verdict": verdict, "exit": code, "reason": "all passed", "by": "rank 0"}


def built(*lines):
    builder = journal.JournalBuilder()
    for line in (RUN, *lines):
        builder.add(line)
    return builder.journal()


def written(path, *lines):
    path.write_bytes(b"".join(journal.encode(line) for line in lines))
    return path


# ---- meaning


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        pytest.param([], "before the first test", id="nothing"),
        pytest.param([COLLECTED], "before the first test", id="collected"),
        pytest.param([COLLECTED, start("a")], "during t.py::test_a", id="running"),
        pytest.param([COLLECTED, start("a"), result("a")], "between two tests, after t.py::test_a", id="between"),
        pytest.param(
            [COLLECTED, *(line for name in "abc" for line in (start(name), result(name)))],
            "after the last test, t.py::test_c, before its verdict",
            id="all-done",
        ),
    ],
)
def test_a_journal_without_an_end_is_broken_and_says_how_far_it_came(lines, where):
    read = built(*lines)
    assert (read.verdict, read.exit, read.reason) == ("BROKEN", 11, f"the run ended {where}")


def test_a_failure_before_the_run_broke_rejects():
    read = built(COLLECTED, start("a"), result("a", "failed"), start("b"))
    assert (read.verdict, read.exit) == ("REJECTED", 1)


def test_a_problem_told_since_the_last_step_is_the_reason():
    assert built(COLLECTED, start("a"), problem("GPU 3 fell off the bus")).reason == "GPU 3 fell off the bus"


def test_an_old_problem_is_not_the_reason():
    read = built(problem("old"), COLLECTED, start("a"))
    assert read.recent_problem is None
    assert "during t.py::test_a" in read.reason


def test_a_silence_holds_until_rank_0_is_heard():
    silence = {"type": "silence", "message": "rank 0 does not answer"}
    assert built(start("a"), silence).reason == "rank 0 does not answer"
    assert built(start("a"), silence, result("a")).silence is None
    assert built(start("a"), silence, {"type": "silence", "message": ""}).silence is None


def test_what_did_not_run_is_known_without_the_end_saying_so():
    assert [test.name for test in built(COLLECTED, start("a"), result("a"), start("b")).not_run] == ["test_c"]


def test_a_test_that_runs_again_is_running_whatever_it_said_before():
    read = built(COLLECTED, start("a"), result("a"), start("a"))
    assert read.running is not None
    assert read.running.nodeid == "t.py::test_a"


@pytest.mark.parametrize(
    ("earlier", "later", "outcome"),
    [
        pytest.param(("failed", 1), ("passed", 2), "passed", id="a later attempt replaces"),
        pytest.param(("failed", 1), ("error", 1), "failed", id="a failed body outweighs a bad teardown"),
        pytest.param(("passed", 1), ("error", 1), "error", id="a bad teardown outweighs a passed body"),
        pytest.param(("failed", 1), ("passed", 1), "failed", id="one attempt cannot take a failure back"),
    ],
)
def test_two_results_of_a_test_are_one(earlier, later, outcome):
    lines = [result("a", each[0], attempts=each[1], text=each[0]) for each in (earlier, later)]
    read = built(*lines)
    assert [each.outcome for each in read.results] == [outcome]
    if earlier[1] == later[1]:
        assert read.results[0].text == f"{earlier[0]}\n\n{later[0]}"


def test_measurements_are_read_with_their_types():
    line = {
        "metric": "nccl.all_reduce.busbw",
        "unit": "GB/s",
        "labels": {"size": "1 GB"},
        "status": "error",
        "value": "NaN",
        "worst_rank": 1,
        "limit": {"min": 400.0, "max": None, "source": "s", "origin": "thresholds.yaml:14:7"},
        "values": {"0": 442.1, "1": "NaN", "2": "-Infinity"},
        "samples": {"0": [442, "Infinity"]},
    }
    judged = built(result("a", measurements=[line])).results[0].measurements[0]
    assert math.isnan(judged.value)
    assert judged.values[0] == 442.1
    assert math.isnan(judged.values[1])
    assert judged.values[2] == -math.inf
    assert judged.samples == {0: (442.0, math.inf)}
    assert judged.limit == journal.JudgedLimit(min=400.0, source="s", origin="thresholds.yaml:14:7")


SURE = Stopped(by="interval", samples=8, seconds=3.0, width_ratio=0.0027, allowed_ratio=0.01)


def test_how_sure_a_value_is_and_what_the_gpu_did_are_read():
    line = {
        "metric": "nccl.all_reduce.busbw",
        "status": "failed",
        "value": 442.1,
        "interval": [440.2, 443.9],
        "intervals": {"3": [440.2, 443.9]},
        "inconclusive": "12 % wide",
        "stopped": {
            "by": "time",
            "samples": 40,
            "seconds": 20.1,
            "width_ratio": 0.12,
            "allowed_ratio": 0.01,
            "extended": True,
        },
        "mean": 445.0,
        "ratio_to_median": 0.71,
        "peak_ratio": 0.98,
        "telemetry": {"3": {"sm_clock_mhz": [1740, 1755, 1980], "throttle": ["sw_power_cap"]}},
        "limit": {"min": None, "source": "s", "min_ratio_to_median": 0.75, "expect_transport": ["NET/IB", "P2P"]},
    }
    judged = built(result("a", measurements=[line])).results[0].measurements[0]
    assert judged.interval == (440.2, 443.9)
    assert judged.intervals == {3: (440.2, 443.9)}
    assert judged.inconclusive == "12 % wide"
    assert judged.stopped == Stopped(
        by="time", samples=40, seconds=20.1, width_ratio=0.12, allowed_ratio=0.01, extended=True
    )
    assert (judged.mean, judged.ratio_to_median, judged.peak_ratio) == (445.0, 0.71, 0.98)
    assert judged.telemetry == {3: {"sm_clock_mhz": [1740, 1755, 1980], "throttle": ["sw_power_cap"]}}
    assert (judged.limit.min_ratio_to_median, judged.limit.expect_transport) == (0.75, ("NET/IB", "P2P"))


def test_what_the_judge_puts_on_record_is_read_as_it_was():
    measured = {
        rank: [
            metrics.measurement(
                "matmul.bf16.tflops",
                Series(samples=(value,) * 8, median=value, low=value - 1, high=value + 1, stopped=SURE),
                unit="TFLOPS",
                telemetry={"sm_clock_mhz": [1740, 1755, 1980]},
                labels={"n": 16384},
            )
        ]
        for rank, value in ((0, 740.0), (1, 731.0))
    }
    [judged] = judge(
        measured,
        world={0: "rank 0", 1: "rank 1"},
        node_of={0: 0, 1: 0},
        limits=thresholds.load(),
        sku="H100 SXM",
        gpu_name=None,
    ).measurements
    line = json.loads(journal.encode(result("a", measurements=[judged.to_json()])))
    [read] = built(line).results[0].measurements
    assert (read.value, read.worst_rank, read.status) == (judged.value, judged.worst_rank, judged.status)
    assert read.interval == (730.0, 732.0)
    assert read.intervals == {0: (739.0, 741.0), 1: (730.0, 732.0)}
    assert read.stopped == SURE
    assert read.telemetry == {rank: {"sm_clock_mhz": [1740, 1755, 1980]} for rank in (0, 1)}
    assert (read.mean, read.median, read.peak_ratio) == (judged.mean, judged.median, judged.peak_ratio)
    assert read.ratio_to_median == judged.ratio_to_median
    assert read.limit.source == judged.limit.source


def test_a_measurement_of_an_earlier_version_has_none_of_it():
    line = {"metric": "m", "status": "passed", "value": 1.0, "limit": {"min": 0.5, "source": "s", "origin": "o"}}
    judged = built(result("a", measurements=[line])).results[0].measurements[0]
    assert (judged.interval, judged.intervals, judged.inconclusive, judged.telemetry) == (None, {}, "", {})
    assert (judged.mean, judged.ratio_to_median, judged.peak_ratio) == (None, None, None)
    assert (judged.limit.min_ratio_to_median, judged.limit.expect_transport) == (None, None)
    assert judged.stopped is None


@pytest.mark.parametrize("wrong", ["time", {"by": "boredom"}, {"by": "time", "samples": "many"}], ids=repr)
def test_why_sampling_stopped_is_never_guessed(wrong):
    line = {"metric": "m", "status": "passed", "value": 1.0, "stopped": wrong}
    with pytest.raises(JournalError):
        built(result("a", measurements=[line]))


def test_what_was_run_is_known_with_where_it_was_set():
    line = {
        "type": "workload",
        "profile": "full",
        "file": "workloads.yaml",
        "values": {"matmul.sizes": "4096, 8192", "hbm.window": "3 s"},
        "origins": {"matmul.sizes": "--gpucluster-workload"},
    }
    workload = built(line).workload
    assert (workload.profile, workload.file) == ("full", "workloads.yaml")
    assert workload.values == {"matmul.sizes": "4096, 8192", "hbm.window": "3 s"}
    assert workload.origins == {"matmul.sizes": "--gpucluster-workload"}
    assert built().workload is None


def test_samples_can_be_left_out():
    builder = journal.JournalBuilder(keep_samples=False)
    builder.add(RUN)
    builder.add(result("a", measurements=[{"metric": "m", "status": "passed", "samples": {"0": [1.0]}}]))
    assert builder.journal().results[0].measurements[0].samples == {}


@pytest.mark.parametrize(
    ("status", "kept"), [("passed", {1}), ("recorded", {1}), ("failed", {0, 1}), ("error", {0, 1})]
)
def test_of_many_ranks_only_what_reports_show_is_kept(status, kept):
    builder = journal.JournalBuilder(keep_samples=False)
    builder.add(RUN)
    by_rank = {"0": {"throttle": []}, "1": {"throttle": ["hw_thermal"]}}
    told = {"intervals": {"0": [1.0, 2.0], "1": [0.5, 1.0]}, "interval": [0.5, 1.0], "telemetry": by_rank}
    builder.add(result("a", measurements=[{"metric": "m", "status": status, "value": 0.7, "worst_rank": 1, **told}]))
    [judged] = builder.journal().results[0].measurements
    assert set(judged.telemetry) == kept
    assert set(judged.intervals) == (kept if len(kept) == 2 else set())
    assert judged.interval == (0.5, 1.0)


@pytest.mark.parametrize(("outcome", "kept"), [("passed", {1}), ("failed", {0, 1}), ("error", {0, 1})])
def test_of_what_gpus_did_during_a_test_that_passed_the_most_telling_is_kept(outcome, kept):
    by_rank = {"0": {"temperature_celsius": [50, 60, 70]}, "1": {"throttle_share": {"hw_thermal": 0.5}}}
    for keep_samples in (True, False):
        builder = journal.JournalBuilder(keep_samples=keep_samples)
        builder.add(RUN)
        builder.add(result("a", outcome, telemetry=by_rank))
        told = builder.journal().results[0].telemetry
        assert set(told) == ({0, 1} if keep_samples else kept)
        assert told[1] == {"throttle_share": {"hw_thermal": 0.5}}


# ---- reading


COMPLETE = [RUN, COLLECTED, start("a"), result("a"), start("b"), result("b", "failed"), end("REJECTED", 1)]


def test_a_complete_journal_is_read(tmp_path):
    read = journal.read(written(tmp_path / "journal.jsonl", *COMPLETE))
    assert (read.verdict, read.exit, read.cut) == ("REJECTED", 1, False)


def test_a_journal_cut_at_any_byte_is_read_or_said_to_be_cut_in_its_first_line(tmp_path):
    path = written(tmp_path / "journal.jsonl", *COMPLETE)
    content = path.read_bytes()
    first = content.index(b"\n")
    for length in range(len(content)):
        path.write_bytes(content[:length])
        if length < first:
            with pytest.raises(JournalError, match=r"cut off in its first line|empty"):
                journal.read(path)
            continue
        read = journal.read(path)
        assert (read.end is None) == (length < len(content) - 1)
        assert read.verdict in ("BROKEN", "REJECTED")


def test_a_tail_of_zero_bytes_counts_as_cut_off(tmp_path):
    path = written(tmp_path / "journal.jsonl", RUN, COLLECTED)
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert journal.read(path).cut


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "empty", id="empty"),
        pytest.param(b"<testsuites/>\n", "not a journal of this project", id="xml"),
        pytest.param(b'{"a": 1}\n', "must begin with a line of type 'run'", id="other-json"),
        pytest.param(b"[1]\n", "expected a JSON object", id="list"),
        pytest.param(b'{"type": "run"}\n', "no schema_version", id="no-version"),
        pytest.param(
            b'{"type": "run", "schema_version": 2, "plugin_version": "9.1"}\n',
            "schema_version 2 by pytest-gpucluster 9.1; this version reads up to 1",
            id="newer",
        ),
        pytest.param(journal.encode(RUN) + b"{\n" + journal.encode(COLLECTED), "jsonl:2: damaged", id="damaged"),
        pytest.param(
            journal.encode(RUN) + journal.encode(result("a", "splendid")),
            "jsonl:2: 'outcome' must be one of passed, failed, error, skipped, found 'splendid'",
            id="unknown-outcome",
        ),
        pytest.param(
            journal.encode(RUN) + b'{"type": "test", "nodeid": 3, "outcome": "passed"}\n',
            "jsonl:2: 'nodeid' must be text, found 3",
            id="wrong-type",
        ),
    ],
)
def test_what_is_no_readable_journal_is_an_error_that_says_where(tmp_path, content, message):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(JournalError) as error:
        journal.read(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_journal_is_an_error_that_says_what_to_name(tmp_path):
    with pytest.raises(JournalError, match=r"no such journal; name a journal\.jsonl, or the folder of a run"):
        journal.read(tmp_path / "nothing.jsonl")


def test_a_journal_is_found_by_its_folder_and_by_the_latest_run(tmp_path):
    directory = journal.new_run_directory(tmp_path)
    path = written(directory / "journal.jsonl", RUN)
    assert journal.locate(path) == path
    assert journal.locate(directory) == path
    assert journal.locate(tmp_path).samefile(path)
    with pytest.raises(JournalError, match=r"neither a journal\.jsonl nor a latest"):
        journal.locate(tmp_path.parent)


def test_lines_and_fields_of_a_later_version_within_the_schema_are_passed_over(tmp_path):
    path = written(tmp_path / "j", RUN, {"type": "weather", "is": "fine"}, {**result("a"), "colour": "green"}, end())
    assert journal.read(path).verdict == "ACCEPTED"


# ---- writing


def test_numbers_and_objects_that_json_does_not_have_become_text():
    line = {
        "a": [math.nan, math.inf, -math.inf],
        3: b"\xff",
        "path": Path("/x"),
        "set": {1},
        "deep": {"b": math.nan},
    }
    assert json.loads(journal.encode(line)) == {
        "a": ["NaN", "Infinity", "-Infinity"],
        "3": "\\xff",
        "path": "/x",
        "set": [1],
        "deep": {"b": "NaN"},
    }


@given(st.dictionaries(st.text(), st.text(st.characters()) | st.floats() | st.binary()))
def test_any_line_is_one_line_of_utf_8(line):
    raw = journal.encode(line)
    assert raw.count(b"\n") == 1
    assert raw.endswith(b"\n")
    json.loads(raw.decode("utf-8"))


def test_a_lone_surrogate_comes_back_as_it_was():
    assert json.loads(journal.encode({"a": "\udcff"})) == {"a": "\udcff"}


def test_lines_are_on_disk_when_append_returns(tmp_path):
    writer = journal.JournalWriter(tmp_path / "journal.jsonl")
    writer.append(b"one\n")
    assert (tmp_path / "journal.jsonl").read_bytes() == b"one\n"
    writer.append(b"two\n")
    writer.sync()
    writer.close()
    assert (tmp_path / "journal.jsonl").read_bytes() == b"one\ntwo\n"


def test_a_writer_never_appends_to_another_runs_journal(tmp_path):
    path = written(tmp_path / "journal.jsonl", RUN)
    with pytest.raises(FileExistsError):
        journal.JournalWriter(path).append(b"mine\n")
    assert path.read_bytes() == journal.encode(RUN)


def test_what_a_full_disk_did_not_take_follows_when_there_is_room(tmp_path):
    # RLIMIT_FSIZE stands for the full disk: the kernel takes a part of the line, then nothing.
    script = f"""
import resource, pathlib
from pytest_gpucluster.journal import JournalWriter
writer = JournalWriter(pathlib.Path({str(tmp_path / "journal.jsonl")!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
writer.append(b"a" * 900 + b"\\n")
for letter in (b"b", b"c"):
    try:
        writer.append(letter * 900 + b"\\n")
    except OSError as error:
        print(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.append(b"d\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(errno.EFBIG)] * 2
    lines = (tmp_path / "journal.jsonl").read_bytes().split(b"\n")
    assert lines == [b"a" * 900, b"b" * 900, b"c" * 900, b"d", b""]


# ---- the folder of a run


def test_two_runs_in_one_second_have_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory.time, "strftime", lambda *_: "20260102-030405")
    names = [journal.new_run_directory(tmp_path / "reports").name for _ in range(3)]
    assert names == ["20260102-030405", "20260102-030405-2", "20260102-030405-3"]
    assert os.readlink(tmp_path / "reports" / "latest") == names[-1]
    assert sorted(os.listdir(tmp_path / "reports")) == [*names, "latest"]


def test_a_real_folder_named_latest_does_not_stop_a_run(tmp_path):
    (tmp_path / "latest").mkdir()
    directory = journal.new_run_directory(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([directory.name, "latest"])


def test_a_file_in_the_way_is_named_with_the_way_out(tmp_path):
    (tmp_path / "reports").write_text("")
    with pytest.raises(OptionError) as error:
        journal.new_run_directory(tmp_path / "reports")
    assert str(error.value) == (
        f"the report directory {tmp_path / 'reports'}: cannot be written to (File exists); "
        "a file is in the way: move it, or name another directory"
    )


@pytest.mark.parametrize(
    ("options", "reason", "way_out"),
    [
        pytest.param("size=16k", "No space left on device", "free some space there", id="full"),
        pytest.param("size=1m,ro", "Read-only file system", "make it writable", id="read-only"),
    ],
)
def test_an_unwritable_report_directory_is_named_before_anything_runs(tmp_path, options, reason, way_out):
    script = f"""
import pathlib
from pytest_gpucluster.journal import new_run_directory
try:
    new_run_directory(pathlib.Path({str(tmp_path)!r}))
except Exception as error:
    print(type(error).__name__, error)
"""
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$1" -c "$2"'
    command = ["unshare", "-Urm", "sh", "-c", mount, str(tmp_path), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"OptionError the report directory {tmp_path}: cannot be written to ({reason}); ")
    assert way_out in done.stdout
