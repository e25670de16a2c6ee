"""A host for tests: the files that the kernel shows, planted below a folder."""

from pytest_gpucluster.node.host import collect_node
from pytest_gpucluster.node.sysfs import Tree

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max processes             {nproc}              {nproc}              processes
Max open files            {nofile}             1048576              files
Max locked memory         {memlock}            {memlock}            bytes
"""

MOUNTS = """\
22 1 0:20 / /proc rw - proc proc rw
25 1 0:23 / /dev/shm rw,nosuid,nodev shared:3 - tmpfs tmpfs rw,size=1056784056k
30 1 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
"""


def limits(*, nofile=1048576, memlock="unlimited", nproc=8255000):
    """Write /proc/self/limits."""
    return LIMITS.format(nofile=nofile, memlock=memlock, nproc=nproc)


def status(capabilities=0):
    """Write the lines of /proc/self/status that matter."""
    return f"Name:\tpython\nCapEff:\t{capabilities:016x}\nMems_allowed_list:\t0-1\n"


HEALTHY = {
    "/proc/self/limits": limits(),
    "/proc/self/status": status(),
    "/proc/self/uid_map": "         0          0 4294967295\n",
    "/proc/self/mountinfo": MOUNTS,
    "/proc/self/cgroup": "0::/system.slice/job\n",
    "/proc/meminfo": "MemTotal:       2113568112 kB\nMemFree:        1 kB\nHugePages_Total:       0\n",
    "/proc/sys/fs/nr_open": "1048576\n",
    "/proc/sys/kernel/threads-max": "16511000\n",
    "/proc/sys/kernel/pid_max": "4194304\n",
    "/proc/sys/kernel/numa_balancing": "0\n",
    "/sys/fs/cgroup/memory.max": "max\n",
    "/sys/fs/cgroup/system.slice/job/memory.max": "max\n",
    "/sys/fs/cgroup/system.slice/job/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/system.slice/job/pids.max": "max\n",
    "/sys/fs/cgroup/system.slice/job/cpuset.cpus.effective": "0-127\n",
    "/sys/devices/system/cpu/online": "0-127\n",
    "/sys/devices/system/cpu/offline": "\n",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    "/sys/devices/system/cpu/cpu127/cpufreq/scaling_governor": "performance\n",
    "/sys/devices/system/node/online": "0-1\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
"""A host with 128 CPUs on two NUMA nodes and 2 TiB, in a control group that allows all of it."""


def plant(root, files, *, healthy=True):
    """Write files below a folder; with ``healthy`` also those of a healthy host. None leaves one out."""
    for name, text in {**(HEALTHY if healthy else {}), **files}.items():
        if text is not None:
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return Tree(root=root)


def space(total=10**12, free=10**12):
    """Return a function with this size for every file system."""
    return lambda path: (total, free)


def who(rank=0, *, node_rank=0, host="gpu-07", pci=None):
    """What a rank says of itself; with ``pci`` it has a GPU there."""
    gpu = {"index": rank, "uuid": f"GPU-{rank}", "serial": None, "pci_bus_id": pci} if pci else None
    return {"rank": rank, "host": host, "node_rank": node_rank, "gpu": gpu}


def facts(root, files=None, *, ranks=1, **others):
    """Collect the facts of a healthy host with these changes."""
    tree = plant(root, files or {})
    inventory = others.pop("inventory", [who(rank) for rank in range(ranks)])
    return collect_node(
        inventory, rank=0, environ=others.pop("environ", {}), tree=tree, space=others.pop("space", space())
    )
