"""What the kernel lists as mounted is read as it is, and a folder is found on the mount that holds it."""

from pathlib import Path

import pytest

from pytest_gpucluster.files import mount_of, read_mounts

TEXT = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw,discard
23 22 0:21 / /dev/shm rw,nosuid shared:2 - tmpfs shm rw,size=65536k
31 22 0:44 /team\040a /mnt/my\040data ro,relatime shared:9 master:3 - nfs4 server:/export rw,vers=4.2,hard
32 22 0:45 / /mnt/fuse rw - fuse.juicefs JuiceFS:data rw
33 31 0:46 / /mnt/my\040data rw - lustre 10.0.0.1@o2ib:/scratch rw
34 22 0:47 / /broken rw nothing after this
"""


@pytest.fixture
def found(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_text(TEXT.strip() + "\n", encoding="utf-8")
    return read_mounts(path)


def test_type_source_folder_and_options_are_read(found):
    nfs = found[2]
    assert (nfs.point, nfs.kind, nfs.source, nfs.root) == ("/mnt/my data", "nfs4", "server:/export", "/team a")
    assert (nfs.option("vers"), nfs.option("soft"), found[1].option("size")) == ("4.2", None, "65536k")
    assert str(nfs) == "nfs4 server:/export (/team a) on /mnt/my data"
    assert [mount.kind for mount in found] == ["ext4", "tmpfs", "nfs4", "fuse.juicefs", "lustre"]
    assert [mount.read_only for mount in found] == [False, False, True, False, False], "itself, not its file system"
    assert [mount.is_network for mount in found] == [False, False, True, True, True]
    assert mount_of(Path("/a"), ()) is None


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/me", "ext4"),
        ("/dev/shm/x", "tmpfs"),
        ("/dev/shmem", "ext4"),
        pytest.param("/mnt/my data/run", "lustre", id="the later one of two at the same place"),
        ("/mnt/fuse", "fuse.juicefs"),
    ],
)
def test_a_folder_is_on_the_innermost_mount(found, folder, kind):
    held = mount_of(Path(folder), found)
    assert held.kind == kind
