"""Runs of pytest for tests: a project in a folder, a session over it, and what it left on disk.

A session runs in this process where it can: torch is imported once then. What needs processes of its own has a hard
deadline, after which all of them are killed.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType

import torch.distributed.fsdp  # noqa: F401  # sessions in this process must find it loaded: it cannot be imported twice
import yaml
from fork_server import be_an_ordinary_cpu, keep_shipped_limits, server_for
from junit_files import JunitFile
from light_server import recorders_are_forks

from pytest_gpucluster.device.environment import VARIABLES
from pytest_gpucluster.journal import journal
from pytest_gpucluster.session import session

DEADLINE_SECONDS = 120.0
"""Generous: nothing here should take a third of it."""

yaml.compose = lru_cache(maxsize=16)(yaml.compose)
keep_shipped_limits()
be_an_ordinary_cpu()
session._freeze_loaded_objects = lambda: None  # else each session in this process looks through all of torch first

CPU = "--gpucluster-device=cpu"
SHORT_FIXTURES = "pytest_gpucluster.short_fixtures"
PLUGINS = ("-p", "no:hypothesispytest", "-p", "no:anyio", "-p", SHORT_FIXTURES)
"""Others that are installed load half of a framework, in each session."""
_OF_A_LAUNCHER = (
    "TORCH",
    "PYTEST_",
    "GPUCLUSTER_",
    "SLURM_",
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MASTER_",
    "NCCL_",
    "JOB_",
    "PET_",
)
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")


def is_left_over(name):
    """Tell whether an environment variable could make a session something else than what the test says."""
    return name.startswith(_OF_A_LAUNCHER) or name in _OF_A_RANK


def environment(more=None):
    """Return an environment for a process, without what a launcher may have left in this one."""
    kept = {name: value for name, value in os.environ.items() if not is_left_over(name)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile all sources anew
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(more or {})}


@dataclass(kw_only=True)
class Left(JunitFile):
    """What a run printed, returned and left on disk."""

    directory: Path
    exit: int
    stdout: str
    stderr: str
    seconds: float = 0.0
    junit_path: Path = field(default=Path("report.xml"))

    @property
    def output(self):
        """Everything that was printed."""
        return f"{self.stdout}\n{self.stderr}"

    @property
    def last_line(self):
        """The last line of the terminal: verdict, exit code and reason. It says that this is a rehearsal."""
        line = self.stdout.splitlines()[-1]
        found = re.match(r"REHEARSAL, ([A-Z ]+?) \(no statement about hardware\), exit code (\d+): (.*)", line)
        assert found is not None, self.output
        return found[1], int(found[2]), found[3]

    @property
    def properties(self):
        """The properties of the testsuite."""
        return {
            p.get("name", ""): p.get("value", "")
            for p in ET.fromstring(self.document).iterfind(".//testsuite/properties/property")
        }

    def measured(self, name):
        """The measurements and properties of a testcase."""
        output = self.case(name).findtext("system-out") or ""
        return dict(re.findall(r"(?m)^\[\[PROPERTY\|([^={]*(?:\{.*?\})?(?:\.telemetry)?)=(.*)\]\]$", output))

    @cached_property
    def journal(self):
        """The journal of the latest run."""
        return journal.read(self.directory / "gpucluster-report" / "latest" / "journal.jsonl")

    @property
    def end(self):
        """The verdict and the exit code of the closing line, which rank 0 itself has written."""
        assert self.journal.end is not None, self.output
        assert self.journal.end.by == "rank 0"
        return self.journal.verdict, self.journal.exit


class Project:
    """A folder with a suite that turns the plugin on by its ini file."""

    def __init__(self, pytester, ini="gpucluster = true"):
        self.pytester = pytester
        self.path = pytester.path
        self.ini(ini)

    def ini(self, text):
        """Write the ini file."""
        self.pytester.makeini(f"[pytest]\n{text}")

    def suite(self, text="", **files):
        """Write test_it.py and other files."""
        self.pytester.makepyfile(**({"test_it": text} if text else {}), **files)

    def run(self, *options, device=CPU, junit=True):
        """Run a session in this process."""
        arguments = [*([device] if device else []), *(["--junitxml=report.xml"] if junit else []), *options]
        if not any("reruns" in option for option in options):
            arguments += ["-p", "no:rerunfailures"]  # it never closes its socket
        begin = time.monotonic()
        with recorders_are_forks():
            result = self.pytester.runpytest_inprocess(*PLUGINS, *arguments, no_reraise_ctrlc=True)
        _forget_unloaded_modules()
        return Left(
            directory=self.path,
            exit=int(result.ret),
            stdout=result.stdout.str(),
            stderr=result.stderr.str(),
            seconds=time.monotonic() - begin,
        )

    def spawn(self, *options, device=CPU, more=None, junit=True, forked=True):
        """Start a session in a process of its own: a fork of one that has torch loaded, or else a new Python."""
        command = [sys.executable, "-m", "pytest", *PLUGINS, *([device] if device else [])]
        command += ["--junitxml=report.xml"] if junit else []
        return Process([*command, *options], self.path, environment(more), forked=forked)

    def run_apart(self, *options, **settings):
        """Run a session in a process of its own to its end."""
        with self.spawn(*options, **settings) as process:
            return process.wait()


def _forget_unloaded_modules():
    """Take modules that a session in this process has loaded out of their packages, too.

    pytester takes them out of ``sys.modules`` only. Then ``from package import module`` gives the next session the old
    module and ``from package.module import Class`` a new one, whose classes are others.
    """
    for name, package in list(sys.modules.items()):
        if name.partition(".")[0] == "pytest_gpucluster" and hasattr(package, "__path__"):
            for attribute, value in list(vars(package).items()):
                whole = f"{name}.{attribute}"
                if isinstance(value, ModuleType) and value.__name__ == whole and sys.modules.get(whole) is not value:
                    delattr(package, attribute)


class Process:
    """A process with a hard deadline, in a session of its own, so that all it started can be killed with it."""

    _count = 0

    def __init__(self, command, directory, environ, *, forked=False):
        Process._count += 1
        self.directory = directory
        self._paths = [directory / f".{name}-{Process._count}" for name in ("stdout", "stderr")]
        self._started = time.monotonic()
        # In the folder that it shares with every session of this user it would at its end delete what they have left,
        # which takes minutes on a busy machine.
        environ = {"PYTEST_DEBUG_TEMPROOT": str(directory.parent), **environ}
        server = server_for(environ) if forked else None
        with self._paths[0].open("wb") as stdout, self._paths[1].open("wb") as stderr:
            if server is not None:
                output, errors = stdout.fileno(), stderr.fileno()
                self.popen = server.start(
                    command, cwd=directory, env=environ, output=output, errors=errors, token=f"session-{Process._count}"
                )
                return
            self.popen = subprocess.Popen(
                command,
                cwd=directory,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    @property
    def output(self):
        """What it has printed until now."""
        return "\n".join(path.read_text(errors="backslashreplace") for path in self._paths)

    def wait(self):
        """Wait for the end of the process."""
        left = self._started + DEADLINE_SECONDS - time.monotonic()
        try:
            self.popen.wait(timeout=left)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {DEADLINE_SECONDS:g} s:\n{self.output}") from None
        stdout, stderr = (path.read_text(errors="backslashreplace") for path in self._paths)
        return Left(
            directory=self.directory,
            exit=self.popen.wait(),
            stdout=stdout,
            stderr=stderr,
            seconds=time.monotonic() - self._started,
        )


def clean_environment(monkeypatch):
    """Take away what a launcher may have left, and take back what a session in this process sets for torch."""
    for name in filter(is_left_over, list(os.environ)):
        if name != "PYTEST_CURRENT_TEST":
            monkeypatch.delenv(name)
    for name, variable in VARIABLES.items():
        if variable.given == "always":
            monkeypatch.setenv(name, variable.value)
