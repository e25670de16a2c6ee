"""The journal: what its writer writes, its reader reads, whatever a kill left of it."""

import errno
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from each import of_each
from hypothesis import given
from hypothesis import strategies as st
from journal_lines import COLLECTED, RUN, end, journal_of, problem, result, start

from pytest_gpucluster.errors import JournalError, OptionError
from pytest_gpucluster.journal import journal, run_directory
from pytest_gpucluster.journal import run_directory as run_directory_module
from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.metrics.sampling import Series, Stopped


def built(*lines):
    return journal_of((RUN, *lines))


def written(path, *lines):
    path.write_bytes(b"".join(journal.encode(line) for line in lines))
    return path


ENDED = {
    "before": [],
    "before the first": [COLLECTED],
    "during t.py::test_a": [COLLECTED, start("a")],
    "GPU 3 is lost": [COLLECTED, start("a"), problem("GPU 3 is lost")],
    "between .* t.py::test_a": [COLLECTED, start("a"), result("a")],
    "after .* t.py::test_c, before": [COLLECTED, *(line for name in "abc" for line in (start(name), result(name)))],
    "during t.py::test_b": [COLLECTED, start("a"), result("a", "failed"), start("b")],  # which rejects all the same
}


@of_each("where", list(ENDED))
def test_a_journal_without_an_end_is_broken_and_says_how_far_it_came(where):
    read = built(*ENDED[where])
    assert (read.verdict, read.exit) == (("REJECTED", 1) if "test_b" in where else ("BROKEN", 11))
    assert re.search(where, read.reason)


def test_a_silence_holds_until_rank_0_is_heard():
    silence = {"type": "silence", "message": "rank 0 does not answer"}
    assert built(start("a"), silence).reason == "rank 0 does not answer"
    assert built(start("a"), silence, result("a")).silence is None
    assert built(start("a"), silence, {"type": "silence", "message": ""}).silence is None


def test_what_did_not_run_and_what_runs_again_is_known_without_the_end_saying_so():
    assert [test.name for test in built(COLLECTED, start("a"), result("a"), start("b")).not_run] == ["test_c"]
    assert built(COLLECTED, start("a"), result("a"), start("a")).running.nodeid == "t.py::test_a"


@of_each(
    "case",
    [
        (("failed", 1), ("passed", 2), "passed"),  # a later attempt replaces
        (("failed", 1), ("error", 1), "failed"),  # a failed body outweighs a bad teardown
        (("passed", 1), ("error", 1), "error"),  # a bad teardown outweighs a passed body
        (("failed", 1), ("passed", 1), "failed"),  # one attempt cannot take a failure back
    ],
)
def test_two_results_of_a_test_are_one(case):
    earlier, later, outcome = case
    read = built(*(result("a", each[0], attempts=each[1], text=each[0]) for each in (earlier, later)))
    assert [each.outcome for each in read.results] == [outcome]
    if earlier[1] == later[1]:
        assert read.results[0].text == f"{earlier[0]}\n\n{later[0]}"


SURE = Stopped(by="interval", samples=8, seconds=3.0, width_ratio=0.0027, allowed_ratio=0.01)


def test_what_the_judge_puts_on_record_is_read_as_it_was():
    measured = {
        rank: [
            measurement.measurement(
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
        limits=loader.load(),
        sku="H100 SXM",
        gpu_name=None,
    ).measurements
    line = json.loads(journal.encode(result("a", measurements=[judged.to_json()])))
    [read] = built(line).results[0].measurements
    names = ("value", "worst_rank", "status", "mean", "median", "peak_ratio", "ratio_to_median")
    assert [getattr(read, name) for name in names] == [getattr(judged, name) for name in names]
    assert (read.interval, read.intervals) == ((730.0, 732.0), {0: (739.0, 741.0), 1: (730.0, 732.0)})
    assert (read.stopped, read.limit.source) == (SURE, judged.limit.source)
    assert read.telemetry == {rank: {"sm_clock_mhz": [1740, 1755, 1980]} for rank in (0, 1)}


@of_each("wrong", ["time", {"by": "boredom"}, {"by": "time", "samples": "many"}])
def test_why_sampling_stopped_is_never_guessed(wrong):
    line = {"metric": "m", "status": "passed", "value": 1.0, "stopped": wrong}
    with pytest.raises(JournalError):
        built(result("a", measurements=[line]))


@of_each("case", [("passed", {1}), ("recorded", {1}), ("failed", {0, 1}), ("error", {0, 1})])
def test_of_many_ranks_only_what_reports_show_is_kept(case):
    status, kept = case
    builder = journal.JournalBuilder(keep_samples=False)
    builder.add(RUN)
    by_rank = {"0": {"throttle": []}, "1": {"throttle": ["hw_thermal"]}}
    fields = {"intervals": {"0": [1.0, 2.0], "1": [0.5, 1.0]}, "interval": [0.5, 1.0], "telemetry": by_rank}
    builder.add(result("a", measurements=[{"metric": "m", "status": status, "value": 0.7, "worst_rank": 1, **fields}]))
    [judged] = builder.journal().results[0].measurements
    assert set(judged.telemetry) == kept
    assert set(judged.intervals) == (kept if len(kept) == 2 else set())
    assert judged.interval == (0.5, 1.0)


COMPLETE = [RUN, COLLECTED, start("a"), result("a"), start("b"), result("b", "failed"), end("REJECTED", 1)]


def test_a_journal_cut_at_any_byte_is_read_or_reported_as_cut_in_its_first_line(tmp_path):
    path = written(tmp_path / "journal.jsonl", *COMPLETE)
    content = path.read_bytes()
    first = content.index(b"\n")
    for length in range(len(content)):
        path.write_bytes(content[:length])
        if length < first:
            with pytest.raises(JournalError, match=r"cut off|empty"):
                journal.read(path)
            continue
        read = journal.read(path)
        assert (read.end is None) == (length < len(content) - 1)
        assert read.verdict in ("BROKEN", "REJECTED")


def test_a_tail_of_zero_bytes_counts_as_cut_off(tmp_path):
    path = written(tmp_path / "journal.jsonl", RUN, COLLECTED)
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    assert journal.read(path).cut


FIRST = journal.encode(RUN)
UNREADABLE = {
    "empty": (b"", "empty"),
    "xml": (b"<testsuites/>\n", "not a journal"),
    "other JSON": (b'{"a": 1}\n', "'run'"),
    "list": (b"[1]\n", "JSON object"),
    "no version": (b'{"type": "run"}\n', "no schema_version"),
    "newer": (b'{"type": "run", "schema_version": 2, "plugin_version": "9.1"}\n', "schema_version 2 .*9.1; .* 1"),
    "damaged": (FIRST + b"{\n" + journal.encode(COLLECTED), "jsonl:2: damaged"),
    "unknown outcome": (
        FIRST + journal.encode(result("a", "splendid")),
        "jsonl:2: outcome .*passed, failed, error, skipped, .*'splendid'",
    ),
    "no type": (FIRST + b'{"type": 3}\n', "jsonl:2: type must be text"),
    "wrong type": (FIRST + b'{"type": "test", "nodeid": 3, "outcome": "passed"}\n', "jsonl:2: nodeid .* 3"),
}


@of_each("case", list(UNREADABLE))
def test_what_is_no_readable_journal_is_an_error_that_says_where(tmp_path, case):
    content, message = UNREADABLE[case]
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=message) as error:
        journal.read(path)
    assert str(path) in str(error.value)


def test_a_journal_is_found_by_its_folder_and_by_the_latest_run(tmp_path):
    directory = run_directory_module.new_run_directory(tmp_path)
    path = written(directory / "journal.jsonl", RUN)
    assert journal.locate(path) == path
    assert journal.locate(directory) == path
    assert journal.locate(tmp_path).samefile(path)
    with pytest.raises(JournalError, match=r"neither a journal\.jsonl"):
        journal.locate(tmp_path.parent)


def test_lines_and_fields_of_a_later_version_within_the_schema_are_passed_over(tmp_path):
    path = written(tmp_path / "j", RUN, {"type": "weather", "is": "fine"}, {**result("a"), "colour": "green"}, end())
    assert journal.read(path).verdict == "ACCEPTED"


def test_numbers_and_objects_that_json_does_not_have_become_text():
    line = {"a": [math.nan, math.inf, -math.inf], 3: b"\xff", "path": Path("/x"), "set": {1}, "deep": {"b": math.nan}}
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


def test_a_writer_never_appends_to_another_runs_journal(tmp_path):
    path = written(tmp_path / "journal.jsonl", RUN)
    with pytest.raises(FileExistsError):
        journal.JournalWriter(path).append(b"mine\n")
    assert path.read_bytes() == journal.encode(RUN)


def test_what_a_full_disk_did_not_take_follows_when_there_is_room(tmp_path):
    # RLIMIT_FSIZE stands for the full disk: the kernel takes a part of the line, then nothing.
    script = f"""
import resource, pathlib
from pytest_gpucluster.journal.journal import JournalWriter
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


def test_two_runs_in_one_second_have_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory.time, "strftime", lambda *_: "20260102-030405")
    names = [run_directory_module.new_run_directory(tmp_path / "reports").name for _ in range(3)]
    assert names == ["20260102-030405", "20260102-030405-2", "20260102-030405-3"]
    assert os.readlink(tmp_path / "reports" / "latest") == names[-1]
    assert sorted(os.listdir(tmp_path / "reports")) == [*names, "latest"]


def test_a_real_folder_named_latest_does_not_stop_a_run(tmp_path):
    (tmp_path / "latest").mkdir()
    directory = run_directory_module.new_run_directory(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([directory.name, "latest"])


def test_a_file_in_the_way_is_named_with_the_way_out(tmp_path):
    (tmp_path / "reports").write_text("")
    with pytest.raises(OptionError) as error:
        run_directory_module.new_run_directory(tmp_path / "reports")
    assert f"{tmp_path / 'reports'}: " in str(error.value)
    assert "(File exists); " in str(error.value)


@pytest.mark.parametrize(
    ("options", "code"), [("size=16k", errno.ENOSPC), ("size=1m,ro", errno.EROFS)], ids=["full", "read-only"]
)
def test_an_unwritable_report_directory_is_named_before_anything_runs(tmp_path, options, code):
    script = f"""
import pathlib
from pytest_gpucluster.journal.run_directory import new_run_directory
try:
    new_run_directory(pathlib.Path({str(tmp_path)!r}))
except Exception as error:
    print(type(error).__name__, error)
"""
    mount = f'mount -t tmpfs -o {options} none "$0" && exec "$1" -c "$2"'
    command = ["unshare", "-Urm", "sh", "-c", mount, str(tmp_path), sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("OptionError ")
    assert f"{tmp_path}: " in done.stdout
    assert f"({os.strerror(code)}); " in done.stdout
