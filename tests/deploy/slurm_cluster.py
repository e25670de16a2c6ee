#!/usr/bin/env python3
"""A real Slurm on this one host: a controller, and a slurmd for each node of a small cluster with fake GPUs.

    python tests/deploy/slurm_cluster.py run -- sinfo    # up, the command, down

It needs Debian's slurm-wlm and no root: every daemon runs as whoever starts it, and jobs do too. Nothing outside its
own folder is written, ports are chosen free, and SLURM_CONF is set for what is started here only, so that a Slurm which
this host may belong to is never asked anything. What was started is ended by process number, also after a failure.

The first node has the name of this host, for ranks meet on it by its name, and no name of the others is known here. The
nodes' tasks are told apart by GPUCLUSTER_HOSTNAME, which Slurm's TaskProlog sets from the node's name.

Sources: slurm.conf(5) and gres.conf(5); https://slurm.schedmd.com/faq.html ("How can I run multiple slurmd daemons on
one node"); https://slurm.schedmd.com/prolog_epilog.html (TaskProlog).
"""

import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ports import free_port
from shell import finished

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
{nodes}
PartitionName=acceptance Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
_NODE = "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=1000 Gres=gpu:{gpus}"
_TASK_PROLOG = '#!/bin/sh\necho "export GPUCLUSTER_HOSTNAME=$SLURMD_NODENAME"\n'


class SlurmError(Exception):
    """Slurm does not come up, or gives no answer."""


@dataclass(kw_only=True)
class SlurmCluster:
    """A Slurm that may be up, in a folder with a short path: those of its sockets are in it."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self):
        """slurm.conf."""
        return self.folder / "slurm.conf"

    def environment(self, environ):
        """Return an environment in which Slurm's commands speak with this Slurm, and no job of another one is known."""
        kept = {name: value for name, value in environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC"))}
        return {**kept, "SLURM_CONF": str(self.conf), "PATH": f"{environ.get('PATH', os.defpath)}{os.pathsep}{_SBIN}"}

    def up(self):
        """Start it, and wait until every node is idle."""
        missing = [name for name in PROGRAMS if find(name) is None]
        if missing:
            raise SlurmError(f"not installed: {', '.join(missing)}; Debian has them in slurm-wlm")
        self._configure()
        try:
            self._start("slurmctld", "-c", "-D")  # -c: a Slurm that was here before is forgotten
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            self._wait_for_nodes()
        except BaseException:
            self.down()
            raise

    def configure(self, *more):
        """Let it go on with these lines in slurm.conf, instead of those of the last time."""
        marker = "# --- for a while"
        kept = self.conf.read_text().partition(marker)[0]
        beside = self.conf.with_suffix(".new")
        beside.write_text("\n".join([f"{kept}{marker}", *more, ""]))
        beside.replace(self.conf)  # whoever reads it meanwhile finds a whole one
        self.ask("scontrol", "reconfigure")

    def down(self):
        """End its jobs, its daemons, and whatever is left of them."""
        # Daemons, steps and tasks: all of them know this slurm.conf, and there is no state worth keeping.
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until = time.monotonic() + END_SECONDS / 2
            while self._processes() and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
        if left := self._processes():
            raise SlurmError(f"processes that do not end: {left}")
        for daemon in self.daemons.values():
            daemon.wait(END_SECONDS / 2)  # one that is ending has given up its environment before it can be waited for

    def ask(self, *command):
        """Run one of Slurm's commands and return what it says; it must not fail."""
        try:
            done = finished(command, env=self.environment(os.environ), seconds=ASK_SECONDS)
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{command[0]} gave no answer within {ASK_SECONDS:g} s") from None
        if done.returncode:
            raise SlurmError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def logs(self):
        """Return the last lines that the daemons have written."""
        paths = sorted(path for path in self.folder.glob("*.log") if not path.name.endswith(".out.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def _configure(self):
        (self.folder / "state").mkdir(parents=True, exist_ok=True)
        ports = [free_port() for _ in range(1 + len(NODES))]
        nodes = [
            _NODE.format(name=name, port=port, cpus=os.cpu_count(), gpus=GPUS_PER_NODE)
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        self.conf.write_text(
            _CONF.format(
                host=HOST,
                port=ports[0],
                user=pwd.getpwuid(os.getuid()).pw_name,
                kill_wait=KILL_WAIT_SECONDS,
                folder=self.folder,
                nodes="\n".join(nodes),
            )
        )
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in DEVICES))
        said = subprocess.run([str(find("slurmd")), "-V"], capture_output=True, text=True, check=True).stdout
        if tuple(map(int, re.findall(r"\d+", said)[:2])) >= (23, 2):
            # Since then slurmd looks for control groups, which a container may not have. Source: its RELEASE_NOTES.
            (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        prolog = self.folder / "task_prolog.sh"
        prolog.write_text(_TASK_PROLOG)
        prolog.chmod(0o755)

    def _start(self, program, *words):
        name = f"{program}-{words[-1]}" if program == "slurmd" else program
        with (self.folder / f"{name}.out.log").open("wb") as output:
            self.daemons[name] = subprocess.Popen(
                [str(find(program)), "-f", str(self.conf), *words],
                env=self.environment(os.environ),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_for_nodes(self):
        until = time.monotonic() + UP_SECONDS
        said = ""
        while time.monotonic() < until:
            with contextlib.suppress(SlurmError):  # the controller is not there yet
                said = self.ask("sinfo", "--noheader", "--Node", "--format=%N %t")
                states = dict(line.split() for line in said.splitlines())
                if states == dict.fromkeys(NODES, "idle"):
                    return
            dead = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if dead:
                raise SlurmError(f"ended at once: {', '.join(dead)}\n{self.logs()}")
            time.sleep(_POLL_SECONDS)
        raise SlurmError(f"not up within {UP_SECONDS:g} s; sinfo says {said!r}\n{self.logs()}")

    def _processes(self):
        """Return everything that has this slurm.conf in its environment, or on its command line, but this process."""
        needle, found = os.fsencode(self.conf), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                # It has ended meanwhile, is another user's, or is a zombie, which has neither.
                with contextlib.suppress(OSError):
                    told = (entry / "environ").read_bytes().split(b"\0")
                    if b"SLURM_CONF=" + needle in told or needle in (entry / "cmdline").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found


def find(program):
    """Return the path of a program of Slurm's; its daemons lie where only root looks."""
    return shutil.which(program) or shutil.which(program, path=_SBIN)


@contextlib.contextmanager
def cluster(folder):
    """A Slurm for as long as the block lasts."""
    slurm = SlurmCluster(folder=folder)
    slurm.up()
    try:
        yield slurm
    finally:
        slurm.down()


def main(arguments):
    """Run a command in a Slurm."""
    if arguments[:2] != ["run", "--"]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory(prefix="gpucluster-slurm-") as folder, cluster(Path(folder)) as slurm:
            return subprocess.run(arguments[2:], env=slurm.environment(os.environ), check=False).returncode
    except SlurmError as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
