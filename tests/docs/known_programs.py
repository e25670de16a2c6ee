"""Programs of which only the name is known, and the options of those that cannot be asked for them here.

A program that no page has shown before is added here; one whose arguments can be checked, to shown_programs.py.
"""

from __future__ import annotations

from collections.abc import Mapping

_PLAIN = """
. [ awk basename cat cd chmod chown chronyc column comm cp cpupower cut date dd df diff dig dirname dmesg du echo
env exit export false find findmnt free getconf getent getfacl grep gunzip gzip head hostname id install ip
journalctl jq less ln ls lsblk lscpu lsmod lsof lspci mkdir modprobe more mount mv nohup nproc nslookup numactl
openssl ping printf prlimit ps pwd read realpath reboot resolvectl rm rsync scp sed set sha256sum shutdown sleep
sort source ss ssh-copy-id ssh-keygen ssh-keyscan stat sysctl systemctl tail tar tee test timedatectl timeout tmux
touch tr trap true tuned-adm ulimit umask uname uniq unset vi vim wait watch wc which xargs yq zcat
"""
PLAIN = frozenset(_PLAIN.split())
"""Programs of any Linux. Their arguments are not looked at, but for those that name files of the repository."""

DIAGNOSTIC: Mapping[str, str] = {
    "nvidia-smi": "the driver",
    "nvidia-ctk": "nvidia-container-toolkit",
    "nvidia-bug-report.sh": "the driver",
    "nv-fabricmanager": "nvidia-fabricmanager",
    "dcgmi": "datacenter-gpu-manager",
    "ibstat": "infiniband-diags",
    "ibstatus": "infiniband-diags",
    "iblinkinfo": "infiniband-diags",
    "ibhosts": "infiniband-diags",
    "ibswitches": "infiniband-diags",
    "ibnetdiscover": "infiniband-diags",
    "ibdiagnet": "ibutils2, of MLNX_OFED or DOCA",
    "perfquery": "infiniband-diags",
    "sminfo": "infiniband-diags",
    "saquery": "infiniband-diags",
    "ibv_devinfo": "ibverbs-utils",
    "ibv_devices": "ibverbs-utils",
    "ibv_rc_pingpong": "ibverbs-utils",
    "ib_write_bw": "perftest",
    "ib_read_bw": "perftest",
    "ib_send_bw": "perftest",
    "ib_write_lat": "perftest",
    "rdma": "iproute2",
    "ethtool": "ethtool",
    "show_gids": "mlnx-tools, of MLNX_OFED or DOCA",
    "mlnx_qos": "mlnx-tools, of MLNX_OFED or DOCA",
    "cma_roce_mode": "mlnx-tools, of MLNX_OFED or DOCA",
    "mlxconfig": "mft",
    "mlxlink": "mft",
    "mst": "mft",
    "fi_info": "libfabric-bin",
    "lldpctl": "lldpd",
    "setpci": "pciutils",
    "ipmitool": "ipmitool",
    "iperf3": "iperf3",
    "nfsstat": "nfs-common",
    "mdtest": "ior",
    "ior": "ior",
    "lfs": "lustre-client-utils",
    "stress-ng": "stress-ng",
    "gpu_burn": "gpu-burn",
    "nvbandwidth": "nvbandwidth",
    "fio": "fio",
    "hwloc-ls": "hwloc",
    "lstopo": "hwloc",
    "lstopo-no-graphics": "hwloc",
    "all_reduce_perf": "nccl-tests",
    "all_gather_perf": "nccl-tests",
    "promtool": "prometheus",
    "crictl": "cri-tools",
    "ctr": "containerd",
    "containerd": "containerd",
    "enroot": "enroot",
    "skopeo": "skopeo",
    "ansible": "ansible",
    "pdsh": "pdsh",
    "clush": "clustershell",
    "apt-get": "apt",
    "apt": "apt",
    "dnf": "dnf",
    "hadolint": "hadolint",
    "actionlint": "actionlint",
    "shellcheck": "shellcheck",
    "yamllint": "yamllint",
    "npm": "npm",
    "gh": "gh",
    "kind": "kind",
    "minikube": "minikube",
    "kustomize": "kustomize",
    "sacct": "slurm-client",
    "sacctmgr": "slurm-client",
}
"""Program -> the package that it comes with. They look at nodes, or belong to the site: only their names are known."""

OF_PYXIS = {
    "--container-image": True,
    "--container-mounts": True,
    "--container-workdir": True,
    "--container-name": True,
    "--container-save": True,
    "--container-mount-home": False,
    "--no-container-mount-home": False,
    "--container-remap-root": False,
    "--no-container-remap-root": False,
    "--container-entrypoint": False,
    "--no-container-entrypoint": False,
    "--container-writable": False,
    "--container-readonly": False,
    "--container-env": True,
}
"""Source: pyxis, README.md, "Usage" (https://github.com/NVIDIA/pyxis)."""
OF_MPIRUN = {
    **dict.fromkeys(("-n", "-np", "--np", "-c", "-H", "--host", "--hostfile", "-hostfile", "-x", "-N", "--wdir"), True),
    **dict.fromkeys(("--map-by", "--rank-by", "--bind-to", "--prefix", "--display", "--output", "--npernode"), True),
    **dict.fromkeys(("--allow-run-as-root", "--oversubscribe", "--tag-output", "--report-bindings"), False),
}
"""Source: Open MPI, mpirun(1). ``--mca`` takes two values and stands apart."""
OF_SSH = {
    **dict.fromkeys(("-i", "-l", "-p", "-o", "-F", "-J", "-L", "-R", "-S", "-W", "-b", "-c", "-e", "-m"), True),
    **dict.fromkeys(("-t", "-tt", "-T", "-n", "-N", "-q", "-v", "-A", "-C", "-4", "-6", "-f", "-x", "-X", "-G"), False),
}
"""Source: ssh(1)."""
OF_DOCKER_BUILD = {
    **dict.fromkeys(("-f", "--file", "-t", "--tag", "--build-arg", "--target", "--platform", "--label", "-o"), True),
    **dict.fromkeys(("--progress", "--secret", "--network", "--cache-from", "--cache-to", "--output"), True),
    **dict.fromkeys(("--no-cache", "--pull", "--push", "--load", "-q", "--quiet"), False),
}
OF_DOCKER_RUN = {
    **dict.fromkeys(("--gpus", "--shm-size", "--ulimit", "-v", "--volume", "-e", "--env", "-w", "--workdir"), True),
    **dict.fromkeys(("--name", "--network", "--net", "--ipc", "--user", "-u", "--cap-add", "--cap-drop"), True),
    **dict.fromkeys(("--device", "--entrypoint", "--mount", "--hostname", "-h", "--env-file", "--security-opt"), True),
    **dict.fromkeys(("--memory", "-m", "--cpus", "--tmpfs", "--pull", "--platform", "-p", "--runtime"), True),
    **dict.fromkeys(
        ("--rm", "-i", "-t", "-it", "-ti", "--init", "--read-only", "-d", "--detach", "--privileged"), False
    ),
}
"""Source: docker's reference, https://docs.docker.com/reference/cli/docker/."""
DOCKER_VERBS = frozenset(
    (
        "pull",
        "push",
        "tag",
        "login",
        "logout",
        "images",
        "image",
        "inspect",
        "manifest",
        "rm",
        "rmi",
        "ps",
        "logs",
        "cp",
        "load",
        "save",
    )
)
GIT_VERBS = frozenset(
    (
        "clone",
        "checkout",
        "pull",
        "fetch",
        "log",
        "status",
        "diff",
        "describe",
        "tag",
        "push",
        "add",
        "commit",
        "switch",
        "submodule",
    )
)
PIP_VERBS = frozenset(
    ("install", "uninstall", "list", "show", "freeze", "check", "download", "wheel", "config", "index")
)
BEFORE_PYTEST_S_ARGUMENTS = {
    "deploy/slurm/acceptance.sbatch": 0,
    "deploy/slurm/array-nodes.sbatch": 0,
    "deploy/slurm/rerun.sbatch": 1,
}
"""Script -> how many arguments of its own it takes before those of pytest: `rerun` takes the job that is run again."""
OF_NCCL_TESTS = frozenset(
    (
        *("-t", "-g", "-b", "-e", "-i", "-f", "-o", "-d", "-r", "-n", "-m", "-w", "-p", "-c", "-z", "-G", "-a"),
        *("-C", "-N", "-R", "-T", "-J"),
        *("--nthreads", "--ngpus", "--minbytes", "--maxbytes", "--stepbytes", "--stepfactor", "--op", "--datatype"),
        *("--root", "--iters", "--agg_iters", "--warmup_iters", "--parallel_init", "--check", "--blocking"),
        *("--cudagraph", "--average", "--report_cputime", "--run_cycles", "--local_register", "--timeout"),
    )
)
"""Source: nccl-tests, README.md, "Arguments" (https://github.com/NVIDIA/nccl-tests)."""
