"""The figures of a test: from its measurements and the files it has left, also where these are damaged or missing."""

import os
import re
import shutil
import xml.etree.ElementTree as ET

import example_runs
import pytest
from each import of_each
from example_runs import ARTIFACTS, LINKS, LORA, artifacts_name

from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.reports.charts.figures import LARGEST_BYTES, figures_of


@pytest.fixture(scope="module")
def results():
    return {result.nodeid: result for result in example_runs.journal_of("cluster").results}


@pytest.fixture
def folder(example_folders, tmp_path):
    return shutil.copytree(example_folders["cluster"], tmp_path / "run")


def place_of(folder, nodeid):
    return folder / ARTIFACTS / artifacts_name(nodeid)


def shown(figures):
    """Return the figures by title, after looking that each is a chart or says why it is none."""
    for one in figures:
        if one.svg:
            ET.fromstring(str(one.svg))
            assert one.table is None or one.table.rows
        else:
            assert one.caption
    return {one.title: one for one in figures}


def test_a_sweep_marks_the_sizes_that_miss_their_limit():
    for status, caption in (("passed", ""), ("error", ""), ("failed", "Crosses miss their limit.")):
        measurements = tuple(
            JudgedMetric(metric="nccl.all_reduce.busbw", value=1.0, status=status, labels={"size": f"{number} GB"})
            for number in (1, 2, 3)
        )
        (figure,) = figures_of(TestResult(nodeid="a::b", outcome="failed", measurements=measurements), None)
        assert (figure.title, figure.caption) == ("nccl.all_reduce.busbw by size", caption)


def test_a_run_without_its_files_has_no_figures_of_them(results, tmp_path):
    assert figures_of(results[LINKS], tmp_path / "elsewhere") == ()


_READING = '{"schema_version": 1, "scope": "node", "nodes": [[0, 1]], "ranks": ["a", "b"], "readings": '
DAMAGED = {
    "empty": "",
    "cut off": '{"schema_version": 1, "readings": [[0, 1',
    "a list": "[]",
    "a number": "7",
    "another version": '{"schema_version": 2}',
    "no readings": '{"schema_version": 1, "nodes": [[0, 1]]}',
    "readings without values": _READING + "[[0, 1]]}",
    "values that are text": _READING + '[[0, 1, "fast"]]}',
    "ranks that are none": _READING + "[[-1, true, 5.0]]}",
    "nodes that are none": '{"schema_version": 1, "nodes": [7], "readings": []}',
    "too deep": "[" * 100_000,
    "not UTF-8": b"\xff\xfe\x00",
}


@of_each("damage", list(DAMAGED))
def test_a_damaged_matrix_is_named(folder, results, damage):
    content = DAMAGED[damage]
    path = place_of(folder, LINKS) / "links-node.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (figure,) = figures_of(results[LINKS], folder)
    assert not figure.svg
    assert figure.caption.startswith("Not shown: links-node.json: ")
    assert str(folder) not in figure.caption


BAD_FILES = {
    "damaged": (lambda path: path.write_text("what is this?\n1,2\n3"), "{name}:"),
    "too large": (lambda path: os.truncate(path, LARGEST_BYTES + 1), "16 MB"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "{name}: no regular file"),
    "a link to nowhere": (lambda path: (path.unlink(), path.symlink_to("gone")), "{name}: .*No such file"),
}
FILES = {LINKS: "links-node.json", LORA: "curve-group-0.csv"}


@of_each("bad", list(BAD_FILES))
def test_a_file_that_cannot_be_shown_is_named_and_not_waited_for(example_folders, tmp_path, results, bad):
    change, pattern = BAD_FILES[bad]
    folder = shutil.copytree(example_folders["cluster"], tmp_path / bad)
    for nodeid, name in FILES.items():
        change(place_of(folder, nodeid) / name)
        captions = " ".join(figure.caption for figure in figures_of(results[nodeid], folder))
        assert re.search(pattern.format(name=name), captions)
