"""Real runs for tests: a suite in a folder, torchrun over it, and what it left on disk.

Nothing here imports torch or replaces a part of the product. A run has a hard deadline, after which every process that
came of it is killed, found by a token in its environment: ranks and recorder have sessions of their own, so the process
group of the launcher does not hold them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from fork_server import server_for
from junit_files import JunitFile
from ports import free_port
from sessions import PLUGINS, environment

from pytest_gpucluster.journal import journal
from pytest_gpucluster.launch.forks import Forked, holders

HERE = Path(__file__).parent
SUITES = HERE / "faults" / "suites"
DEADLINE_SECONDS = 120.0
"""Generous: no run here should take a third of it."""
_POLL_SECONDS = 0.02
_LET_END_SECONDS = 3.0
_TOKEN = "GPUCLUSTER_TEST_TOKEN"


@dataclass(frozen=True)
class Stamp:
    """What a test of the suite wrote down on one rank."""

    name: str
    at: float
    pid: int


@dataclass(kw_only=True)
class Run(JunitFile):
    """A run that is going on or over."""

    directory: Path
    agents: list[subprocess.Popen[bytes] | Forked]
    token: str
    started: float
    deadline: float
    let_end: float = _LET_END_SECONDS
    """How long processes may take to end after the launchers, in seconds. What is left over then was left."""
    settled: dict[str, float] = field(default_factory=dict)
    """Testcase -> when the report on disk first said of it what it said in the end (wall clock)."""
    completed_at: float = 0.0
    """When the report on disk first said all that it said in the end (wall clock)."""
    exits: list[int] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    """Processes that stayed when every launcher had ended."""
    files_left: list[str] = field(default_factory=list)
    """Temporary files of ours that stayed. Only where somebody on the host outlived the dead can they be gone."""
    _said: dict[str, str] = field(default_factory=dict)
    _looked_at: int = 0
    _content: bytes = b""

    # ---- while it runs

    def wait(self):
        """Wait until every launcher has ended, noting when the report on disk changes; kill what is left."""
        try:
            while any(agent.poll() is None for agent in self.agents):
                self._go_on()
            self.exits = [agent.returncode for agent in self.agents]
            self._let_end()
        finally:
            self.kill()
        return self

    def wait_for(self, what, found):
        """Wait until something is so, which must be before the launchers end."""
        while not found():
            self._go_on()
            assert any(agent.poll() is None for agent in self.agents), f"ended before {what}\n{self.output}"

    def wait_for_stamp(self, name, rank):
        """Wait until a rank has written a stamp."""
        self.wait_for(f"the stamp {name} of rank {rank}", lambda: self.find_stamp(name, rank))
        return self.stamp(name, rank)

    def kill(self):
        """Kill every process of this run that still lives."""
        for pid in processes(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def _go_on(self):
        self._look()
        if time.monotonic() - self.started > self.deadline:
            self.kill()
            raise AssertionError(f"not over after {self.deadline:g} s\n{self.output}")
        time.sleep(_POLL_SECONDS)

    def _look(self):
        """Note what the report says by now. It must be well-formed at any moment."""
        with contextlib.suppress(FileNotFoundError):
            changed = self.junit_path.stat().st_mtime_ns
            if changed == self._looked_at:
                return
            self._looked_at = changed
            content = self.junit_path.read_bytes()
            if content != self._content:
                self._content = content
                self.completed_at = changed / 1e9
            for case in ET.fromstring(content).iter("testcase"):
                name = str(case.get("name"))
                said = "".join(f"{child.tag} {child.get('message')}" for child in case)
                if self._said.get(name) != said:
                    self._said[name] = said
                    self.settled[name] = changed / 1e9

    def _let_end(self):
        # A process that is just ending is no fault; what would stay is. To look through all of them takes CPU time.
        until = time.monotonic() + self.let_end
        left = processes(self.token)
        while left and time.monotonic() < until:
            self._look()
            time.sleep(_POLL_SECONDS)
            left = [pid for pid in left if _lives(pid)] or processes(self.token)
        self._look()
        self.left_over = [_command(pid) for pid in left]
        self.files_left = sorted(path.name for path in (self.directory / "tmp").glob("gpucluster-*"))

    # ---- what it left

    @property
    def junit_path(self):
        """Where --junitxml points."""
        return self.directory / "report.xml"

    @property
    def output(self):
        """What all launchers and ranks printed."""
        texts = [path.read_text(errors="backslashreplace") for path in sorted(self.directory.glob("output*.txt"))]
        return "\n".join(texts)

    @property
    def stamps(self):
        """Every rank's stamps in their order."""
        found = {}
        for path in sorted((self.directory / "stamps").glob("rank*.txt")):
            lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found[int(path.stem[4:])] = [Stamp(name, float(at), int(pid)) for name, at, pid in lines]
        return found

    def find_stamp(self, name, rank):
        """Return a rank's last stamp of a name, or None."""
        return next((s for s in reversed(self.stamps.get(rank, [])) if s.name == name), None)

    def stamp(self, name, rank):
        """Return a rank's last stamp of a name."""
        found = self.find_stamp(name, rank)
        assert found is not None, f"rank {rank} has not stamped {name}\n{self.output}"
        return found

    @cached_property
    def journal(self):
        """The journal of the latest run in the report directory."""
        return journal.read(self.directory / "reports" / "latest" / "journal.jsonl")

    @property
    def end(self):
        """Verdict, exit code and author of the journal's closing line."""
        assert self.journal.end is not None, self.output
        return self.journal.verdict, self.journal.exit, self.journal.end.by


def processes(token):
    """Return the living processes with the token in their environment, or with the descriptor of forks."""
    needle = f"{_TOKEN}={token}".encode()
    forks = holders(token)
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (pid in forks or needle in Path(f"/proc/{pid}/environ").read_bytes()) and _lives(pid):
                found.append(pid)
    return found


def _lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _command(pid):
    with contextlib.suppress(OSError):
        return f"{pid}: " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return str(pid)


def suite(name):
    """Return the files of one of the suites for faults."""
    return {f"test_{name}.py": (SUITES / f"{name}.py").read_text(encoding="utf-8")}


def write_suite(directory, files, ini=""):
    """Write a suite that turns the plugin on by its ini file."""
    folder = directory / "suite"
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text(f"[pytest]\ngpucluster = true\n{textwrap.dedent(ini)}")
    (folder / "stamps.py").write_text((SUITES / "stamps.py").read_text(encoding="utf-8"))
    for name, content in files.items():
        (folder / name).write_text(textwrap.dedent(content), encoding="utf-8")


def start(
    directory,
    files,
    *options,
    ranks=2,
    hosts=("node-a",),
    timeouts="stuck=2",
    deadline=2.0,
    environment=None,
    launcher=(),
    before=(),
    other_folders=MappingProxyType({}),
    by_command=False,
    ini="",
    forked=True,
    extras=False,
):
    """Start torchrun over a suite.

    Args:
        directory: where the suite lies and all output goes.
        files: name -> content of the suite's files; None: as they lie there already.
        options: of pytest.
        ranks: on each node.
        hosts: what the nodes call themselves. Each has a launcher of its own, on this host.
        timeouts: for --gpucluster-timeouts.
        deadline: in seconds, for a phase of a test.
        environment: more variables, of all nodes or on call of one of the hosts.
        launcher: more options of torchrun.
        before: a command that runs the launcher.
        other_folders: host -> where it is started, if not in the suite.
        by_command: whether ``gpucluster run`` starts torchrun.
        ini: more lines of the suite's ini file.
        forked: the launcher and its ranks may be forks of one process that has torch loaded; else they start as ever.
        extras: the suite uses transformers or peft.
    """
    if files is not None:
        write_suite(directory, files, ini)
    for name in ("stamps", "tmp"):
        (directory / name).mkdir(exist_ok=True)
    token, port = uuid.uuid4().hex, free_port()
    agents = []
    for node, host in enumerate(hosts):
        module = ["pytest_gpucluster", "run"] if by_command else ["torch.distributed.run"]
        command = [*before, sys.executable, "-m", *module, f"--nproc-per-node={ranks}"]
        command += [f"--nnodes={len(hosts)}", f"--node-rank={node}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}", *launcher]
        command += ["--"] if by_command else ["-m", "pytest"]
        command += [".", *PLUGINS, "--gpucluster-device=cpu"]
        command += [f"--junitxml={directory / 'report.xml'}", f"--gpucluster-report-dir={directory / 'reports'}"]
        command += [f"--gpucluster-timeouts={timeouts}", f"--gpucluster-deadline={deadline}", *options]
        more = environment(host) if callable(environment) else environment or {}
        environ = {**_environment(directory, token), "GPUCLUSTER_HOSTNAME": host, **more}
        server = server_for(environ, extras=extras) if forked and not before else None
        where = other_folders.get(host, directory / "suite")
        with (directory / f"output{node}.txt").open("ab") as output:
            if server is not None:
                file = output.fileno()
                agents.append(server.start(command, cwd=where, env=environ, output=file, errors=file, token=token))
                continue
            agents.append(
                subprocess.Popen(
                    command,
                    cwd=where,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return Run(directory=directory, agents=agents, token=token, started=time.monotonic(), deadline=DEADLINE_SECONDS)


def torchrun(directory, files, *options, **settings):
    """Run torchrun over a suite to its end. Arguments as of :func:`start`."""
    return start(directory, files, *options, **settings).wait()


def with_one_fault(make_directory, cases, *, deadline, at_once, timeouts):
    """Run the suite of one fault for each fault and victim, some at once: most of each run is waiting."""

    def run(case):
        fault, victim = case
        environment = {"FAULT": fault, "VICTIM": str(victim)}
        directory = make_directory(f"{fault}-{victim}-")
        return torchrun(directory, suite("one_fault"), deadline=deadline, timeouts=timeouts, environment=environment)

    with ThreadPoolExecutor(max_workers=at_once) as pool:
        started = {case: pool.submit(run, case) for case in cases}
    return {case: future.result() for case, future in started.items()}


def _environment(directory, token):
    return environment({_TOKEN: token, "STAMPS": str(directory / "stamps"), "TMPDIR": str(directory / "tmp")})
