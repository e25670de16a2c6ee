"""The results of a fleet: verdicts, which nodes to drain, at any number of nodes and criteria."""

from __future__ import annotations

import json
import re

import pytest
from written_runs import HBM, MATMUL, case, measured, place, read

from pytest_gpucluster.analysis.fleet import (
    Matrix,
    NodeRun,
    drain_text,
    fleet,
    fleet_document,
    fleet_table,
    journals_below,
    outliers,
)
from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import expand_hostlist

EVIL = "<script>\x1b[31m\u202eevil\n" + "x" * 10_000


def answer(host, *tests, values=(730,), **more):
    tests = tests or (case(MATMUL, "passed", measured(list(values))), case(HBM, "passed"))
    return NodeRun(path=f"{host}.jsonl", journal=read(*tests, ranks=[place(0, host=host)], **more))


def picture(*answers, expected=()):
    known = fleet(answers, expected=expected)
    return Matrix.of(known, outliers(known))


def named(drained):
    return [each.node for each in drained]


BROKEN = {"end": {"verdict": "BROKEN", "exit": 11, "reason": "lost"}}


def test_every_node_is_good_to_be_drained_or_without_an_answer():
    found = picture(
        *(answer(f"gpu-{number}", values=[730 + number / 10]) for number in range(6)),
        answer("gpu-7", case(MATMUL, "failed", message="too slow"), case(HBM, "passed")),
        answer("gpu-8", values=[500]),
        answer("gpu-9", case(MATMUL, "error", message="lost"), case(HBM, "passed"), **BROKEN),
        answer("gpu-a", case(MATMUL, "passed", measured([730]))),
        expected=["gpu-0", "gpu-b"],
    )
    assert named(found.drained) == ["gpu-7", "gpu-8"]
    assert named(found.without_answer) == ["gpu-9", "gpu-a", "gpu-b"]
    shown = fleet_table(found)
    rows = [
        "gpu-7  REJECTED  1 failed, 1 passed\n    failed: test_matmul",
        "gpu-8  ACCEPTED  1 behind, 1 passed\n    behind: test_matmul",
        "gpu-9  BROKEN    1 error, 1 passed\n    error: test_matmul",
        "gpu-a  ACCEPTED  1 passed, 1 not in its run\n    not in its run: test_hbm",
        "gpu-0  ACCEPTED  2 passed",
    ]
    places = [shown.find(row) for row in rows]
    assert places == sorted(places)
    assert places[0] > 0
    assert re.search(r"gpu-a: .* test_hbm", shown)
    assert "rank 0 (gpu-8, GPU 0 GPU-gpu-8-0): test_matmul: matmul.bf16.tflops 500 TFLOPS" in " ".join(shown.split())
    assert re.findall(r"\d+", shown.splitlines()[-1]) == ["11", "6", "2", "3"]


def test_the_newest_run_of_a_node_counts_and_the_earlier_one_is_noted():
    slow = answer("gpu-1", case(MATMUL, "failed", message="slow"), started_at="2026-01-01T00:00:00+00:00")
    found = picture(answer("gpu-1"), slow)
    [note] = list(found.notes)
    assert (named(found.drained), note.startswith("gpu-1 "), note.endswith(": REJECTED")) == ([], True, True)
    again = answer("gpu-1", case(MATMUL, "failed", message="slow"), started_at="2027-01-01T00:00:00+00:00")
    assert named(picture(answer("gpu-1"), again).drained) == ["gpu-1"]


def test_a_run_on_several_nodes_is_noted_and_left_out():
    both = NodeRun(path="j", journal=read(case(MATMUL), ranks=[place(0, host="a"), place(1, host="b")]))
    found = picture(answer("gpu-1"), both)
    assert [node.name for node in found.fleet.nodes] == ["gpu-1"]
    assert any(note.startswith("j: ") and "2 nodes" in note for note in found.notes)


def test_nodes_that_should_be_alike_and_are_not_are_noted():
    found = picture(answer("gpu-1"), answer("gpu-2", sku="H200 SXM", digest="e" * 64))
    assert any("H100 SXM, H200 SXM" in note for note in found.notes)
    assert any("different limits" in note for note in found.notes)
    assert picture(answer("gpu-1"), answer("gpu-2", rehearsal=True)).mixed


def test_nothing_hostile_reaches_the_terminal_or_the_drain_file():
    found = picture(answer("gpu-1", case(MATMUL, "failed", message=EVIL)), answer(EVIL), expected=[EVIL + "2"])
    for text in (fleet_table(found), drain_text(found)):
        assert all(line.isprintable() for line in text.splitlines())
    assert max(map(len, fleet_table(found).splitlines())) <= 80
    json.loads(fleet_document(found, exit_code=1))
    with pytest.raises(LaunchError, match="Slurm"):
        drain_text(picture(answer(EVIL, case(MATMUL, "failed", message="slow"))))


def test_the_drain_file_is_what_schedulers_take():
    bad = [answer(f"gpu-00{number}", case(MATMUL, "failed", message="slow")) for number in (3, 4)]
    text = drain_text(picture(*bad, answer("gpu-005"), expected=["gpu-009"]))
    lines = text.splitlines()
    assert expand_hostlist(lines[lines.index("[slurm]") + 1]) == ["gpu-003", "gpu-004"]
    assert lines[lines.index("[kubernetes]") + 1 :] == ["gpu-003", "gpu-004"]
    assert "# gpu-003: REJECTED: test_matmul: slow" in lines
    assert any(line.startswith("# no answer") and line.endswith("gpu-009") for line in lines)
    assert "{n;p}' 'my drain.txt')" in drain_text(picture(*bad), file="'my drain.txt'")
    assert [line for line in drain_text(picture(answer("gpu-1"))).splitlines() if not line.startswith("#")] == []


def test_the_json_has_every_cell():
    found = picture(*(answer(f"gpu-{number}") for number in range(6)), answer("gpu-8", values=[500]))
    document = json.loads(fleet_document(found, exit_code=1))
    assert document["nodes"][-1]["cells"][MATMUL]["outcome"] == "outlier"
    assert document["nodes"][0]["cells"][MATMUL]["value"] == 730
    assert [each["node"] for each in document["drain"]] == ["gpu-8"]
    assert document["outliers"][0]["median"] == 730


def test_journals_are_found_below_a_folder_each_once(tmp_path):
    for name in ("a", "b/c"):
        (tmp_path / "real" / name).mkdir(parents=True)
        (tmp_path / "real" / name / "journal.jsonl").write_text("{}")
    (tmp_path / "real" / "latest").symlink_to("a")
    (tmp_path / "link").symlink_to("real")
    for place_ in (tmp_path / "real", tmp_path / "link"):
        assert [str(path.relative_to(place_)) for path in journals_below(place_)] == [
            "a/journal.jsonl",
            "b/c/journal.jsonl",
        ]


def test_a_journal_that_cannot_be_read_is_its_node_s_where_the_folder_says_whose():
    lost = (
        ("sweep/gpu-2/journal.jsonl", "sweep/gpu-2/journal.jsonl: empty"),
        ("x/journal.jsonl", "x/journal.jsonl: bad"),
    )
    known = fleet([answer("gpu-1")], expected=["gpu-1", "gpu-2", "gpu-3"], unreadable=lost)
    found = Matrix.of(known, ())
    assert {each.node: each.why for each in found.without_answer} == {
        "gpu-2": "sweep/gpu-2/journal.jsonl: empty",
        "x/journal.jsonl": "bad",
        "gpu-3": "no journal",
    }
