"""Do all nodes see the same files?"""

import pytest

from pytest_gpucluster.benchmarks.storage.shared_filesystem import longest_seconds, survey

SETUP_SECONDS = 120.0


@pytest.fixture(autouse=True)
def deadline(request, cluster, workload):
    """Give the files the time that a slow file system needs."""
    config = workload.shared_filesystem
    seconds = SETUP_SECONDS + longest_seconds(config.renames, config.small_files)
    request.node.add_marker(pytest.mark.deadline(seconds))
    cluster.allow(seconds)


@pytest.mark.criterion("shared_filesystem")
def test_shared_filesystem(artifacts, cluster, inventory, measure, record_property, settings, workload):
    """Accepted: what one node writes every other node reads, also where it is written over. A file that is replaced by
    renames is never missing and never torn for any reader, and all come to see its last version. The folder is on the
    same kind of file system everywhere, there is room on it, and no node has a network file system that does not
    answer. The rate of small files is judged by a limit of the site. ``checkpoint.bandwidth`` measures large files.

    Why: checkpoints, logs and data sets are shared between nodes. A node that has another folder mounted there, or a
    stale one, loses or mixes up what it writes, without a message.

    When it fails: the message names the node and the file, and says what each node has mounted. A folder that other
    nodes do not see: pass one on a shared file system by ``--gpucluster-scratch``. "Stale file handle" or no answer:
    mount it again on the named node, and look at the server. Small files that are slower than your limit: on all nodes
    the server, on one its client or its network.

    On one node it has itself to read from.
    """
    config = workload.shared_filesystem
    result = survey(
        cluster.group,
        settings.scratch or artifacts,
        nodes=[who["node_rank"] for who in inventory],
        hosts=cluster.hosts,
        file_bytes=config.file_bytes,
        replaced=config.renames,
        small=config.small_files,
    )
    if result is None:
        return
    mounted, visibility, reads, small_files_per_second = result
    visibility.require_visible(cluster.hostname)
    record_property("shared_filesystem.mount", str(mounted.mount or "unknown"))
    labels = {"nnodes": cluster.nnodes, "file_system": mounted.mount.kind if mounted.mount else "unknown"}
    measure("shared_filesystem.verified", visibility.right / visibility.files, unit="ratio", **labels)
    measure("shared_filesystem.visible", visibility.slowest_seconds, unit="s", **labels)
    measure("shared_filesystem.whole_reads", 100 * reads.whole_ratio, unit="%", **labels)
    measure("shared_filesystem.small_files", small_files_per_second, unit="files/s", **labels)
    measure("shared_filesystem.free", 100 * mounted.free_ratio, unit="%", **labels)
    if mounted.free_inodes_ratio is not None:
        measure("shared_filesystem.free_inodes", 100 * mounted.free_inodes_ratio, unit="%", **labels)
    visibility.require_content(cluster.hostname)
    reads.require_whole(cluster.hostname)
