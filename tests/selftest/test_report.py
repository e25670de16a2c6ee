"""The report of a self-test: its lines, what it hides, and its archive."""

import json
import tarfile

import pytest

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.selftest.report import Redactor, Report, line, render, write_archive


def report(*lines):
    return Report(version="1", at="2026-11-27T13:00:00+00:00", device="cuda", seconds=99.6, lines=lines)


def test_only_what_was_shown_is_ok_and_only_the_rest_needs_action():
    states = [line("it", good, "text", "act") for good in (True, False, None)]
    assert [(each.state, each.todo) for each in states] == [("OK", ""), ("WRONG", "act"), ("UNPROVEN", "act")]
    assert [report(each).is_wrong for each in states] == [False, True, False]
    assert (
        report(*states, states[0]).summary().startswith("2 OK, 1 WRONG, 1 UNPROVEN; 100 s on cuda. This is no verdict")
    )
    assert render(states[1]).splitlines()[1].strip() == "do: act"


def test_a_report_is_read_as_it_was_written():
    written = report(line("versions", True, "text", driver="580.1", torch="2.11.0+cu130", nccl="2.28.9", gpus=1))
    assert codec.read(Report, json.loads(written.json()), "here") == written
    with pytest.raises(JournalError):
        codec.read(Report, {"lines": []}, "here")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("gpu-07.example.org:775:775 [0] NCCL INFO", "HOST:775:775 [0] NCCL INFO"),
        ("gpu-077 gpu-07", "gpu-077 HOST"),
        ("/home/alice/.venv/lib", "~/.venv/lib"),
        ("eth0:10.1.2.3<0>, lo:127.0.0.1, 10.0.0.2, 10.1.2.3", "eth0:192.0.2.1<0>, lo:127.0.0.1, 192.0.2.2, 192.0.2.1"),
        ("GPU-4a5fe89e-65a1-357d-0c12-2b0f09db32ae", "GPU-00000000-0000-0000-0000-000000000001"),
        ("    Serial Number      : 1652823", "    Serial Number      : (removed)"),
        ("    Serial Number      : N/A", "    Serial Number      : N/A"),
        ("link fe80::ff:fe00:1%eth0 ether 02:42:ac:11:00:02", "link 2001:db8--removed%eth0 ether MAC"),
    ],
)
def test_what_names_a_machine_or_a_person_is_replaced(text, left):
    names = {"gpu-07": "HOST", "gpu-07.example.org": "HOST", "/home/alice": "~"}
    assert Redactor(names)(text) == left


@pytest.mark.parametrize(
    "text",
    [
        "driver 580.159.04, NVML 13.580.159.04, vbios 96.00.DA.00.0C and 96.00.74.00.01, NCCL 2.28.9",
        "GPU at 0000:3b:00.0 and 00000000:00:06.0, c10d::Group, std::string, 2026-11-27T13:08:46+00:00",
    ],
)
def test_versions_places_and_times_stay(text):
    assert Redactor({})(text) == text


def test_the_archive_is_one_folder(tmp_path):
    write_archive(tmp_path / "it.tar.gz", {"b.log": "two\n", "a.txt": "one \udcff"})
    with tarfile.open(tmp_path / "it.tar.gz") as archive:
        assert archive.getnames() == ["it/a.txt", "it/b.log"]
        assert archive.extractfile("it/b.log").read() == b"two\n"
