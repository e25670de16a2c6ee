"""The criterion shared_filesystem itself, on two nodes: what it accepts, and how each fault fails it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# What the file system does on node-b. The file that a test is in says which fault it has.
FAULTS = """
import errno, os
from dataclasses import replace
from pytest_gpucluster.benchmarks.checkpoint import shared_folder
from pytest_gpucluster.benchmarks.shared_files import mounted, renames, small_files, visibility
from pytest_gpucluster.mounts import Mount

ON_B = os.environ["GPUCLUSTER_HOSTNAME"] == "node-b"
PIECES = {module: module.PIECES for module in (mounted, renames, small_files, visibility)}
OTHER = Mount(point="/", kind="nfs4", source="server:/other", root="/", options=("rw",))
GONE = Mount(point="/gone", kind="nfs4", source="server:/gone", root="/", options=("rw",))

kept, count = {}, [0]

def old(path):
    return kept.setdefault(path, path.read_bytes())

def elsewhere(path, content):
    visibility.write(path.with_suffix(".elsewhere"), content)

def flipped(path):
    content = path.read_bytes()
    return content[:9] + bytes([content[9] ^ 1]) + content[10:]

def sometimes_missing(path):
    count[0] += 1
    if count[0] % 3 == 0:
        raise FileNotFoundError(path)
    return path.read_bytes()

def stale(path):
    if path == "/gone":
        raise OSError(errno.ESTALE, "Stale file handle")
    return os.statvfs(path)

def full(path, content):
    raise OSError(errno.ENOSPC, "No space left on device")

def nearly_full(path):
    told = list(os.statvfs(path))
    told[3] = told[4] = 0
    return os.statvfs_result(told)

FAULTS = {
    "old": (visibility, {"read": old}),
    "unshared": (visibility, {"write": elsewhere}),
    "flipped": (visibility, {"read": flipped}),
    "missing": (renames, {"read": sometimes_missing}),
    "torn": (renames, {"read": lambda path: path.read_bytes()[:4096]}),
    "other": (mounted, {"mounts": lambda: (OTHER,)}),
    "stale": (mounted, {"mounts": lambda: (*PIECES[mounted].mounts(), GONE), "statvfs": stale}),
    "full": (small_files, {"make": full}),
    "space": (mounted, {"statvfs": nearly_full}),
}

def pytest_runtest_setup(item):
    shared_folder.SEEN_SECONDS = 0.5
    renames._MOST_SECONDS_EACH = 0.02
    fault = item.path.stem.removeprefix("test_shared_filesystem_")
    for module, pieces in PIECES.items():
        module.PIECES = pieces
    if ON_B and fault in FAULTS:
        module, broken = FAULTS[fault]
        module.PIECES = replace(PIECES[module], **broken)
"""

NAMES = ("none", "old", "unshared", "flipped", "missing", "torn", "other", "stale", "full", "space")
B = 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> torchrun.Run:
    """Two nodes of one rank each, and all faults one after the other."""
    text = (ACCEPTANCE / "test_shared_filesystem.py").read_text(encoding="utf-8")
    files = {f"test_shared_filesystem_{fault}.py": text for fault in NAMES} | {
        "workloads.yaml": (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8"),
        "conftest.py": FAULTS,
    }
    return torchrun.torchrun(
        tmp_path_factory.mktemp("shared"), files, ranks=1, hosts=("node-a", "node-b"), deadline=30.0
    )


def result(run, fault):
    [found] = [each for each in run.journal.results if f"shared_filesystem_{fault}.py" in each.nodeid]
    return found


def test_a_shared_folder_passes_with_everything_measured(run):
    found = result(run, "none")
    assert found.outcome == "passed", run.output
    values = {one.metric.removeprefix("shared_filesystem."): one for one in found.measurements}
    assert {"verified", "visible", "whole_reads", "small_files", "free"} <= set(values)
    assert all(set(one.values) == {0, B} for one in values.values())
    assert (values["verified"].value, values["whole_reads"].value) == (1, 100)
    assert values["visible"].status == "recorded"
    assert "shared_filesystem.mount" in dict(map(tuple, found.properties))


def test_nothing_is_left_in_the_folder(run):
    [folder] = (run.directory / "reports" / "latest" / "artifacts").glob("*shared_filesystem_none*")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("old", "node-00000.bin, written over by node-a: found what was there before"),
        ("flipped", "node-b reads something else than was written:"),
        ("missing", "renamed.bin missing "),
        ("torn", "4096 bytes that are no version"),
    ],
)
def test_a_node_that_reads_something_else_is_rejected_and_named(run, fault, told):
    found = result(run, fault)
    assert (found.outcome, list(found.culprits)) == ("failed", [B])
    assert "WrongResult" in found.text
    assert told in found.text


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("unshared", "node-00001.bin, written by node-b, is not there"),
        ("other", "nfs4 on node-b, where 1 of 2 hosts have "),
        ("stale", "- node-b: nfs4 server:/gone on /gone: stale file handle"),
        ("full", "rank 1: OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_file_system_that_is_not_there_is_an_error_that_names_the_node(run, fault, told):
    found = result(run, fault)
    assert found.outcome == "error"
    assert told in found.text


def test_too_little_room_misses_the_limit(run):
    found = result(run, "space")
    assert found.outcome == "failed"
    assert found.message.startswith("shared_filesystem.free 0 % < 0.01 %")
    assert "on rank 1 (node-b)" in found.message


def test_the_run_goes_on_after_each_fault_and_ends_as_it_should(run):
    assert len(run.journal.results) == len(NAMES)
    assert run.end[:2] == ("REJECTED", 1)
    assert run.left_over == []
