"""Real runs for tests: a suite in a folder, torchrun over it, and what it left on disk.

Nothing here imports torch or replaces a part of the product. A run has a hard deadline, after which every process that
came of it is killed, found by a token in its environment: ranks and recorder have sessions of their own, so the process
group of the launcher does not hold them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import junitparser
import xmlschema

from pytest_gpucluster import journal

SCHEMA = xmlschema.XMLSchema(str(Path(__file__).parent.parent / "data" / "junit-10.xsd"))
DEADLINE_SECONDS = 60.0
"""Generous: no run here should take a third of it."""
_TOKEN = "GPUCLUSTER_TEST_TOKEN"
_POLL_SECONDS = 0.02
_FROM_A_LAUNCHER = ("TORCH", "PYTEST_", "GPUCLUSTER_", "SLURM_", "OMPI_", "PMIX_", "MASTER_", "NCCL_")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")

CONFTEST = '''
import os, time
import pytest

RANK = int(os.environ.get("RANK", 0))

def stamp(name):
    """Write down when a fault was made, or what came after it: name and wall-clock time."""
    with open(os.path.join(os.environ["STAMPS"], f"rank{RANK}.txt"), "a") as file:
        file.write(f"{name} {time.time()} {os.getpid()}\\n")

def all_reduce(cluster, elements=4):
    import torch
    tensor = torch.ones(elements)
    torch.distributed.all_reduce(tensor, group=cluster.group)
    return tensor
'''


@dataclass(frozen=True)
class Stamp:
    """What a test of the suite wrote down on one rank."""

    name: str
    at: float
    pid: int


@dataclass(kw_only=True)
class Run:
    """A run that is going on or over."""

    directory: Path
    agents: list[subprocess.Popen[bytes]]
    token: str
    started: float
    deadline: float
    junit_path: Path
    settled: dict[str, float] = field(default_factory=dict)
    """Testcase -> when the report on disk first said what it said in the end (wall clock)."""
    exits: list[int] = field(default_factory=list)
    seconds: float = 0.0
    left_over: list[int] = field(default_factory=list)
    """Processes that were still there when every launcher had ended."""
    _seen: dict[str, str] = field(default_factory=dict)
    _looked: int = 0

    # ---- while it runs

    def wait(self) -> Run:
        """Wait until every launcher has ended, noting when the report on disk changes; kill what is left."""
        try:
            while any(agent.poll() is None for agent in self.agents):
                self.look()
                self.check_time()
                time.sleep(_POLL_SECONDS)
            self.seconds = time.monotonic() - self.started
            self.exits = [agent.returncode for agent in self.agents]
            self._let_end()
            self.look()
        finally:
            self.kill()
        return self

    def look(self) -> None:
        """Note what the report says by now."""
        with contextlib.suppress(FileNotFoundError):
            now = self.junit_path.stat().st_mtime_ns
            if now != self._looked:
                self._looked = now
                for case in ET.parse(self.junit_path).getroot().iter("testcase"):
                    said = "".join(f"{child.tag}{child.get('message')}" for child in case if child.tag != "properties")
                    name = str(case.get("name"))
                    if self._seen.get(name) != said:
                        self._seen[name] = said
                        self.settled[name] = now / 1e9

    def wait_for(self, what: str, found: Callable[[], object]) -> None:
        """Wait until something is so."""
        while not found():
            self.look()
            self.check_time()
            assert any(agent.poll() is None for agent in self.agents), f"ended before {what}\n{self.output}"
            time.sleep(_POLL_SECONDS)

    def wait_for_stamp(self, name: str, rank: int) -> Stamp:
        """Wait until a rank has written a stamp."""
        self.wait_for(f"the stamp {name} of rank {rank}", lambda: self.stamp(name, rank))
        found = self.stamp(name, rank)
        assert found is not None
        return found

    def check_time(self) -> None:
        """Fail once the run's time is up."""
        if time.monotonic() - self.started > self.deadline:
            self.kill()
            raise AssertionError(f"not over after {self.deadline:g} s\n{self.output}")

    def kill(self) -> None:
        """Kill every process of this run that still lives."""
        for pid in processes(self.token):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def _let_end(self) -> None:
        # A process that is ending is no fault: what counts is what would stay.
        until = time.monotonic() + 3.0
        while (left := processes(self.token)) and time.monotonic() < until:
            self.look()
            time.sleep(_POLL_SECONDS)
        self.left_over = left

    # ---- what it left

    @property
    def output(self) -> str:
        """What all launchers and ranks printed."""
        texts = [path.read_text(errors="backslashreplace") for path in sorted(self.directory.glob("output*.txt"))]
        return "\n".join(texts)

    @property
    def stamps(self) -> dict[int, list[Stamp]]:
        """Every rank's stamps in their order."""
        found: dict[int, list[Stamp]] = {}
        for path in sorted((self.directory / "stamps").glob("rank*.txt")):
            lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found[int(path.stem[4:])] = [Stamp(name, float(at), int(pid)) for name, at, pid in lines]
        return found

    def stamp(self, name: str, rank: int) -> Stamp | None:
        """Return a rank's last stamp of a name."""
        return next((s for s in reversed(self.stamps.get(rank, [])) if s.name == name), None)

    @cached_property
    def document(self) -> str:
        """The JUnit file, which must be valid."""
        text = self.junit_path.read_text(encoding="utf-8")
        SCHEMA.validate(text)
        return text

    @cached_property
    def cases(self) -> dict[str, junitparser.TestCase]:
        """Every testcase of the report by its name."""
        root = junitparser.JUnitXml.fromstring(self.document.encode())
        suites = list(root) if isinstance(root, junitparser.JUnitXml) else [root]
        return {case.name: case for suite in suites for case in suite}

    @cached_property
    def verdicts(self) -> dict[str, str]:
        """Every testcase as "passed" or "error: its message"."""
        return {name: _verdict(case) for name, case in self.cases.items()}

    def body(self, name: str) -> str:
        """Return the text of a testcase's failure."""
        return "".join(result.text or "" for result in self.cases[name].result)

    @cached_property
    def journal(self) -> journal.Journal:
        """The journal of the run."""
        return journal.read(self.directory / "reports" / "latest" / "journal.jsonl")

    @property
    def end(self) -> tuple[str, int]:
        """The verdict and the exit code of the closing line."""
        assert self.journal.end is not None, self.output
        return self.journal.verdict, self.journal.exit


def _verdict(case: junitparser.TestCase) -> str:
    for result in case.result:
        kind = {"Failure": "failure", "Error": "error", "Skipped": "skipped"}[type(result).__name__]
        assert "\n" not in (result.message or "")
        return f"{kind}: {result.message}"
    return "passed"


def processes(token: str) -> list[int]:
    """Return the living processes with the token in their environment."""
    found = []
    needle = f"{_TOKEN}={token}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "environ").read_bytes() and "Z" != _state(entry):
                    found.append(int(entry.name))
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_suite(directory: Path, files: Mapping[str, str], ini: str = "") -> None:
    """Write a suite that turns the plugin on by its ini file."""
    suite = directory / "suite"
    suite.mkdir(exist_ok=True)
    (suite / "pytest.ini").write_text(f"[pytest]\ngpucluster = true\n{textwrap.dedent(ini)}")
    (suite / "conftest.py").write_text(CONFTEST + textwrap.dedent(files.get("conftest.py", "")))
    for name, content in files.items():
        if name != "conftest.py":
            (suite / name).write_bytes(textwrap.dedent(content).encode("utf-8", "surrogateescape"))


def start(
    directory: Path,
    files: Mapping[str, str] | str | None,
    *options: str,
    ranks: int = 2,
    nodes: int = 1,
    timeouts: str = "stuck=2",
    deadline: float = 2.0,
    environment: Mapping[str, str | bytes] | None = None,
    hosts: Sequence[str] = (),
    launcher: Sequence[str] = (),
    before: Sequence[str] = (),
    ini: str = "",
    hard_deadline: float = DEADLINE_SECONDS,
) -> Run:
    """Start torchrun over a suite.

    Args:
        directory: where the suite lies and all output goes.
        files: name -> content of the suite's files, or the one test file; None: as they lie there already.
        options: of pytest.
        ranks: a node.
        nodes: as many launchers on this host stand for as many nodes.
        deadline: seconds for a phase of a test.
        hosts: what the nodes call themselves.
        launcher: more options of torchrun.
        before: a command that runs the launcher.
    """
    if files is not None:
        write_suite(directory, {"test_it.py": files} if isinstance(files, str) else files, ini)
    for name in ("stamps", "tmp"):
        (directory / name).mkdir(exist_ok=True)
    token, port = uuid.uuid4().hex, free_port()
    junit_path = directory / "report.xml"
    agents: list[subprocess.Popen[bytes]] = []
    for node in range(nodes):
        command = [*before, sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *launcher]
        if nodes > 1:
            command += [f"--nnodes={nodes}", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        else:
            command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        # hypothesis, if it is installed, loads itself at the end of every session that does not use it: half a second.
        command += ["-m", "pytest", ".", "-p", "no:hypothesispytest", "--gpucluster-device=cpu", f"--junitxml={junit_path}"]
        command += [f"--gpucluster-report-dir={directory / 'reports'}", f"--gpucluster-timeouts={timeouts}"]
        command += [f"--gpucluster-deadline={deadline}", *options]
        with (directory / f"output{node}.txt").open("ab") as output:
            agents.append(
                subprocess.Popen(
                    command,
                    cwd=directory / "suite",
                    env=_environment(directory, token, environment, hosts[node] if hosts else None),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return Run(
        directory=directory,
        agents=agents,
        token=token,
        started=time.monotonic(),
        deadline=hard_deadline,
        junit_path=junit_path,
    )


def torchrun(directory: Path, files: Mapping[str, str] | str | None, *options: str, **settings: object) -> Run:
    """Run torchrun over a suite to its end. Arguments as of :func:`start`."""
    return start(directory, files, *options, **settings).wait()  # type: ignore[arg-type]  # passed through


def _environment(
    directory: Path, token: str, more: Mapping[str, str | bytes] | None, host: str | None
) -> dict[str, str | bytes]:
    environment: dict[str, str | bytes] = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FROM_A_LAUNCHER) and name not in _OF_A_RANK
    }
    environment |= {
        _TOKEN: token,
        "OMP_NUM_THREADS": "1",
        "STAMPS": str(directory / "stamps"),
        "TMPDIR": str(directory / "tmp"),
        "COLUMNS": "200",
    }
    if host is not None:
        environment["GPUCLUSTER_HOSTNAME"] = host
    return {**environment, **(more or {})}
