"""The file systems of a node that hold data. None of them is looked into: a server that is gone would never answer."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster.host.tree import Tree

OF_THE_KERNEL = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs"),
        *("squashfs", "sysfs", "tracefs"),
    )
)
"""Types of file systems that hold nothing of anybody's. Source: filesystems(5) and the kernel's documentation."""


def read(tree: Tree) -> list[dict[str, Any]]:
    """Tell of each mount: ``point``, ``kind``, ``source``, ``network``, ``read_only``. A later one at the same place
    hides the earlier one."""
    seen = {mount.point: mount for mount in tree.mounts() if mount.kind not in OF_THE_KERNEL}
    return [
        {
            "point": mount.point,
            "kind": mount.kind,
            "source": mount.source,
            "network": mount.is_network,
            "read_only": mount.read_only,
        }
        for mount in seen.values()
    ]
