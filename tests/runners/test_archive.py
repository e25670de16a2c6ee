"""Reports on their way: packed, and unpacked without trust."""

import io
import tarfile

import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners import node_agent


def packed(*members, gz=True):
    """An archive of these: (TarInfo, content)."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz" if gz else "w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    made.seek(0)
    return made


def named(name, kind=tarfile.REGTYPE, link=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


def test_a_folder_comes_as_it_was(tmp_path):
    source = tmp_path / "a run"
    (source / "20260102-030405" / "artifacts" / "ünterordner").mkdir(parents=True)
    (source / "20260102-030405" / "journal.jsonl").write_bytes(b"x" * 300_000)
    (source / "20260102-030405" / "artifacts" / "ünterordner" / "a b.txt").write_text("text")
    (source / "latest").symlink_to("20260102-030405")
    (source / "empty").touch()
    archive = io.BytesIO()
    node_agent.pack(archive, source)
    archive.seek(0)
    target = tmp_path / "here"
    target.mkdir()
    assert node_agent.unpack(archive, target) == 3
    assert (target / "latest" / "journal.jsonl").read_bytes() == b"x" * 300_000
    assert (target / "latest" / "artifacts" / "ünterordner" / "a b.txt").read_text() == "text"
    assert (target / "empty").read_bytes() == b""


@pytest.mark.parametrize(
    "member",
    [
        named("../out"),
        named("a/../../out"),
        named("/etc/passwd"),
        named("latest", tarfile.SYMTYPE, "/etc"),
        named("latest", tarfile.SYMTYPE, ".."),
        named("hard", tarfile.LNKTYPE, "/etc/passwd"),
        named("pipe", tarfile.FIFOTYPE),
        named("disk", tarfile.BLKTYPE),
    ],
)
def test_nothing_is_taken_that_could_lie_outside_or_is_no_file(member, tmp_path):
    target = tmp_path / "here"
    target.mkdir()
    with pytest.raises(EnvironmentBroken):
        node_agent.unpack(packed((member, b"")), target)
    assert list(target.iterdir()) == []
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "here"
    target.mkdir()
    content = packed((named("a", tarfile.SYMTYPE, "b"), b""), (named("a"), b"first"), (named("b"), b"second"))
    assert node_agent.unpack(content, target) == 2
    assert ((target / "a").read_bytes(), (target / "a").is_symlink()) == (b"first", False)


def test_what_is_damaged_or_far_too_large_is_not_taken(tmp_path, monkeypatch):
    whole = packed((named("journal.jsonl"), bytes(range(256)) * 4000)).getvalue()
    for damaged in (whole[: len(whole) // 2], b"", b"x" * 999):
        with pytest.raises(EnvironmentBroken):
            node_agent.unpack(io.BytesIO(damaged), tmp_path)
    monkeypatch.setattr(node_agent, "MOST_BYTES", 1000)
    with pytest.raises(EnvironmentBroken):
        node_agent.unpack(packed((named("a"), b"x" * 600), (named("b"), b"x" * 600)), tmp_path)


def test_a_name_twice_is_an_error_and_never_a_mix(tmp_path):
    with pytest.raises(FileExistsError):
        node_agent.unpack(packed((named("a"), b"1"), (named("a"), b"2")), tmp_path)
