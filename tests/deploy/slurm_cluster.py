#!/usr/bin/env python3
"""A real Slurm on this one host: a controller, and a slurmd for each node of a small cluster with fake GPUs.

    python tests/deploy/slurm_cluster.py up              # prints what to export; stays until `down`
    python tests/deploy/slurm_cluster.py run -- sinfo    # up, the command, down
    python tests/deploy/slurm_cluster.py down

It needs Debian's slurm-wlm and no root: every daemon runs as whoever starts it, and jobs do too. Nothing outside its
own folder is written, ports are chosen free, and SLURM_CONF is set for what is started here only, so that a Slurm which
this host may belong to is never asked anything. What was started is ended by process number, also after a failure.

The first node has the name of this host, for ranks meet on it by its name, and no name of the others is known here. The
nodes' tasks are told apart by GPUCLUSTER_HOSTNAME, which Slurm's TaskProlog sets from the node's name.

Sources: slurm.conf(5) and gres.conf(5); https://slurm.schedmd.com/faq.html ("How can I run multiple slurmd daemons on
one node"); https://slurm.schedmd.com/prolog_epilog.html (TaskProlog).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue", "scancel")
HOST = socket.gethostname().partition(".")[0]
NODES = (HOST, f"{HOST}-b", f"{HOST}-c")
GPUS_PER_NODE = 2
DEVICES = ("/dev/null", "/dev/zero")
"""Character devices that every Linux has, each a GPU as far as Slurm is concerned."""
KILL_WAIT_SECONDS = 8
UP_SECONDS, END_SECONDS, ASK_SECONDS = 60.0, 20.0, 30.0
_SBIN = os.pathsep.join(("/usr/sbin", "/usr/local/sbin", "/sbin"))
_POLL_SECONDS = 0.05
_WITHOUT_CGROUPS = (23, 2)
"""The first version that knows CgroupPlugin=disabled. Source: Slurm's RELEASE_NOTES of 23.02."""
_DEFAULT_FOLDER = Path(tempfile.gettempdir()) / f"gpucluster-slurm-{os.getuid()}"

# A slurmd asks for the CPUs that the host has; with config_overrides it takes what stands here. Memory is not handed
# out (CR_CPU), for all nodes are the same host.
_CONF = """\
ClusterName=gpucluster
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=20000
ReturnToService=2
KillWait={kill_wait}
MailProg=/bin/true
TaskProlog={folder}/task_prolog.sh
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
{more}
{nodes}
PartitionName=acceptance Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NODE = "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus}"
_TASK_PROLOG = '#!/bin/sh\necho "export GPUCLUSTER_HOSTNAME=$SLURMD_NODENAME"\n'


class SlurmError(Exception):
    """Slurm does not come up, or gives no answer."""


@dataclass(kw_only=True)
class SlurmCluster:
    """A Slurm that may be up.

    Attributes:
        folder: of its configuration, state and logs. Short, for paths of sockets are in it.
        more: lines for slurm.conf, such as HealthCheckProgram.
        pids: of the daemons, by name.
    """

    folder: Path
    nodes: Sequence[str] = NODES
    more: Sequence[str] = ()
    pids: dict[str, int] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        """slurm.conf."""
        return self.folder / "slurm.conf"

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return an environment in which Slurm's commands speak with this Slurm, and no job of another one is known."""
        kept = {name: value for name, value in environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC"))}
        return {**kept, "SLURM_CONF": str(self.conf), "PATH": f"{environ.get('PATH', os.defpath)}{os.pathsep}{_SBIN}"}

    def up(self) -> None:
        """Start it, and wait until every node is idle.

        Raises:
            SlurmError: a program is missing, or a node does not come.
        """
        missing = [name for name in PROGRAMS if find(name) is None]
        if missing:
            raise SlurmError(f"not installed: {', '.join(missing)}; Debian has them in slurm-wlm")
        self._configure()
        try:
            self._start("slurmctld", "-c", "-D")  # -c: a Slurm that was here before is forgotten
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node)
            (self.folder / "pids.json").write_text(json.dumps(self.pids))
            self._wait_for_nodes()
        except BaseException:
            self.down()
            raise

    def configure(self, *more: str) -> None:
        """Let it go on with these lines in slurm.conf, instead of those of the last time."""
        marker = "# --- for a while"
        kept = self.conf.read_text().partition(marker)[0]
        beside = self.conf.with_suffix(".new")
        beside.write_text("\n".join([f"{kept}{marker}", *more, ""]))
        beside.replace(self.conf)  # whoever reads it meanwhile finds a whole one
        self.ask("scontrol", "reconfigure")

    def down(self) -> None:
        """End its jobs, its daemons, and whatever is left of them."""
        # Daemons, steps and tasks: all of them know this slurm.conf, and there is no state worth keeping.
        for number in (signal.SIGTERM, signal.SIGKILL):
            pids = [*self.pids.values(), *self._processes()]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until = time.monotonic() + END_SECONDS / 2
            while self._processes() and time.monotonic() < until:
                self._reap()
                time.sleep(_POLL_SECONDS)
        self._reap()
        (self.folder / "pids.json").unlink(missing_ok=True)
        if self._processes():
            raise SlurmError(f"processes that do not end: {self._processes()}")

    def ask(self, *command: str, within_seconds: float = ASK_SECONDS) -> str:
        """Run one of Slurm's commands and return what it says.

        Raises:
            SlurmError: it failed, or gave no answer.
        """
        try:
            done = subprocess.run(
                command,
                env=self.environment(os.environ),
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=within_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{command[0]} gave no answer within {within_seconds:g} s") from None
        if done.returncode:
            raise SlurmError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def left(self) -> list[str]:
        """Return the command lines of what is left of it: nothing, when it is down."""
        found = []
        for pid in self._processes():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    def logs(self) -> str:
        """Return the last lines that the daemons have written."""
        paths = sorted(path for path in self.folder.glob("*.log") if not path.name.endswith(".out.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def _configure(self) -> None:
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        ports = _free_ports(1 + len(self.nodes))
        nodes = [
            _NODE.format(name=name, port=port, cpus=os.cpu_count(), gpus=GPUS_PER_NODE)
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        self.conf.write_text(
            _CONF.format(
                host=HOST,
                port=ports[0],
                user=pwd.getpwuid(os.getuid()).pw_name,
                kill_wait=KILL_WAIT_SECONDS,
                folder=self.folder,
                more="\n".join(self.more),
                nodes="\n".join(nodes),
            )
        )
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in DEVICES))
        if _version() >= _WITHOUT_CGROUPS:
            # Since then slurmd looks for control groups, which a container may not have.
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        prolog = self.folder / "task_prolog.sh"
        prolog.write_text(_TASK_PROLOG)
        prolog.chmod(0o755)

    def _start(self, program: str, *words: str) -> None:
        name = f"{program}-{words[-1]}" if program == "slurmd" else program
        with (self.folder / f"{name}.out.log").open("wb") as output:
            daemon = subprocess.Popen(
                [str(find(program)), "-f", str(self.conf), *words],
                env=self.environment(os.environ),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pids[name] = daemon.pid
        _CHILDREN[daemon.pid] = daemon

    def _wait_for_nodes(self) -> None:
        until = time.monotonic() + UP_SECONDS
        said = ""
        while time.monotonic() < until:
            with contextlib.suppress(SlurmError):  # the controller is not there yet
                said = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t")
                states = dict(line.split() for line in said.splitlines())
                if states == dict.fromkeys(self.nodes, "idle"):
                    return
            dead = [name for name, pid in self.pids.items() if _CHILDREN[pid].poll() is not None]
            if dead:
                raise SlurmError(f"ended at once: {', '.join(dead)}\n{self.logs()}")
            time.sleep(_POLL_SECONDS)
        raise SlurmError(f"not up within {UP_SECONDS:g} s; sinfo says {said!r}\n{self.logs()}")

    def _processes(self) -> list[int]:
        """Return everything that has this slurm.conf in its environment, or on its command line, but this process."""
        needle, found = os.fsencode(self.conf), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                # It has ended meanwhile, is another user's, or is a zombie, which has neither.
                with contextlib.suppress(OSError):
                    told = (entry / "environ").read_bytes().split(b"\0")
                    if b"SLURM_CONF=" + needle in told or needle in (entry / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return [pid for pid in found if pid not in _ancestors()]

    def _reap(self) -> None:
        for pid in self.pids.values():
            if pid in _CHILDREN:
                _CHILDREN[pid].poll()


_CHILDREN: dict[int, subprocess.Popen[bytes]] = {}


def find(program: str) -> str | None:
    """Return the path of a program of Slurm's; its daemons lie where only root looks."""
    return shutil.which(program) or shutil.which(program, path=_SBIN)


@contextlib.contextmanager
def cluster(folder: Path, *, nodes: Sequence[str] = NODES, more: Sequence[str] = ()) -> Iterator[SlurmCluster]:
    """A Slurm for as long as the block lasts."""
    slurm = SlurmCluster(folder=folder, nodes=nodes, more=more)
    slurm.up()
    try:
        yield slurm
    finally:
        slurm.down()


def _ancestors() -> set[int]:
    """Return this process and those above it: a shell in which SLURM_CONF is exported is not to be ended."""
    pid, found = os.getpid(), set()
    while pid > 1:
        found.add(pid)
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
    return found


def _version() -> tuple[int, ...]:
    """Return Slurm's version, such as (22, 5)."""
    said = subprocess.run([str(find("slurmd")), "-V"], capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    return tuple(int(part) for part in re.findall(r"\d+", said.stdout)[:2])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring a Slurm up or down, or run a command in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("up", "down", "run"))
    parser.add_argument("--folder", type=Path, default=_DEFAULT_FOLDER, help="default: %(default)s")
    parser.epilog = "What follows two dashes is what `run` runs; sinfo without it."
    words = list(sys.argv[1:] if arguments is None else arguments)
    at = words.index("--") if "--" in words else len(words)
    options, command = parser.parse_args(words[:at]), words[at + 1 :]
    folder = options.folder.absolute()
    try:
        if options.do == "down":
            return _down(folder)
        if (folder / "pids.json").exists():
            raise SlurmError(f"{folder}: a Slurm is up here; end it with: {sys.argv[0]} down --folder {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        if options.do == "up":
            SlurmCluster(folder=folder).up()
            print(f"export SLURM_CONF={folder / 'slurm.conf'}")
            return 0
        with cluster(folder) as slurm:
            code = subprocess.run(command or ["sinfo"], env=slurm.environment(os.environ), check=False)
        return code.returncode
    except SlurmError as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return 1


def _down(folder: Path) -> int:
    pids = folder / "pids.json"
    if not pids.exists():
        raise SlurmError(f"{folder}: no Slurm was brought up here")
    slurm = SlurmCluster(folder=folder)
    # A number may be another process's by now: only those that know this slurm.conf are ended.
    known = set(slurm._processes())
    slurm.pids = {name: pid for name, pid in json.loads(pids.read_text()).items() if pid in known}
    slurm.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
