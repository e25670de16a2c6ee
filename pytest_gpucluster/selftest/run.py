"""A self-test from its parent's side: processes with deadlines, what they have left, and the files of the archive."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pytest_gpucluster import __version__
from pytest_gpucluster.device import environment
from pytest_gpucluster.launch.detached_process import child_environment
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.node.fabric.nccl_log import own_settings
from pytest_gpucluster.node.processes import run_program
from pytest_gpucluster.selftest.report import SEND, Line, Redactor, Report, line

COMMAND = (sys.executable, "-m", "pytest_gpucluster.selftest.steps")
"""Runs a step: its name and its context are added."""
TOTAL_SECONDS = 175.0
"""Of all steps together."""
_PATIENCE_ON_CPU = 4.0
"""Deadlines are for an idle GPU node; on cpu they are longer by this factor: nothing waits for it there."""
ASSERT_EXIT = 43
"""Exit code of the process that a device-side assert has hit, where it ends in order."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One of ``steps.STEPS``. ``each``: what has a process of its own; ``seconds``: at most, on an idle GPU node."""

    name: str
    seconds: float
    each: Literal["run", "gpu", "rank"] = "run"


STEPS = (
    Step(name="software", seconds=40),
    Step(name="device", seconds=90, each="gpu"),
    Step(name="nccl", seconds=40, each="gpu"),
    Step(name="hang", seconds=60, each="rank"),
    Step(name="assert", seconds=40),
    Step(name="node", seconds=40),
)
PROGRAMS: Mapping[str, Sequence[str]] = {
    "nvidia-smi-q.txt": ("nvidia-smi", "-q"),
    "nvidia-smi-topo.txt": ("nvidia-smi", "topo", "-m"),
}


class _Child:
    """A process of a step. Its lines are read from its file when it has ended."""

    def __init__(self, step: Step, context: Mapping[str, Any], tag: str, environ: Mapping[str, str]) -> None:
        self.log = Path(context["log"])
        self.tag = tag
        command = [*COMMAND, step.name, json.dumps(context)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environ), start_new_session=True
            )
        self.ended_at = 0.0

    def wait(self, deadline: float) -> int | None:
        """Return the exit code, or None where it was killed at the deadline."""
        try:
            code: int | None = self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        self.ended_at = time.monotonic()
        self.end()
        return code

    def end(self) -> None:
        """Kill what is left of it. What is blocked in the driver cannot be killed, and is not waited for."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=3)
        self._process.returncode = self._process.returncode or 0

    def lines(self) -> list[Line]:
        """Return what it has found so far; a line that is cut off is left out."""
        found: list[Line] = []
        with contextlib.suppress(OSError, ValueError):
            for text in self.log.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines():
                found.append(codec.read(Line, json.loads(text), self.tag))
        return found


class SelfTest:
    """One self-test.

    Args:
        device: "cuda" or "cpu".
        every_gpu: all visible GPUs; else the first one.
        say: called with each line at once.
    """

    def __init__(self, device: str, *, every_gpu: bool = False, say: Callable[[Line], None]) -> None:
        self._device, self._every_gpu, self._say = device, every_gpu, say
        self._gpus = 1
        self.lines: list[Line] = []

    def run(self) -> tuple[Report, dict[str, str]]:
        """Run all steps; return the report, and the files of the archive by name, without what identifies the node."""
        begin, at = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
        patience = 1.0 if self._device == "cuda" else _PATIENCE_ON_CPU
        redact = Redactor(_identifying())
        with tempfile.TemporaryDirectory(prefix="gpucluster-selftest-") as name:
            folder = Path(name)
            for step in STEPS:
                left = begin + patience * TOTAL_SECONDS - time.monotonic()
                for found in self._lines_of(step, folder, min(left, patience * step.seconds)):
                    self._keep(codec.read(Line, json.loads(redact(json.dumps(codec.to_json(found)))), step.name))
                if step.name == "software" and self._device == "cuda" and not self._gpus:
                    todo = "look at `nvidia-smi`; `gpucluster node selftest --device cpu` rehearses without a GPU"
                    self._keep(line("GPUs", False, "none was found, so nothing else was tried", todo))
                    break
            files = {
                path.name: path.read_text(encoding="utf-8", errors="replace")
                for path in sorted(folder.iterdir())
                if path.suffix in (".log", ".json", ".txt")
            }
        files |= {name: output.text for name, command in PROGRAMS.items() if (output := run_program(command)).text}
        files = {redact(name): redact(text) for name, text in files.items()}
        seconds = time.monotonic() - begin
        report = Report(version=__version__, at=at, device=self._device, seconds=seconds, lines=tuple(self.lines))
        return report, {**files, "report.txt": report.text(), "report.json": report.json()}

    def _keep(self, found: Line) -> None:
        self.lines.append(found)
        self._say(found)

    def _lines_of(self, step: Step, folder: Path, seconds: float) -> Iterator[Line]:
        if seconds < 1:
            yield line(step.name, None, "no time is left for it", "run it on an idle node")
            return
        children: list[_Child] = []
        deadline = time.monotonic() + seconds
        try:
            for context, environ in self._contexts(step, folder, seconds):
                children.append(_Child(step, context, Path(context["log"]).stem, environ))
            for child in children:
                code = child.wait(deadline)
                lines = child.lines()
                if step.name == "software":
                    self._gpus = next((int(each.values["gpus"]) for each in lines if "gpus" in each.values), 0)
                several = len(children) > 1 and step.each == "gpu"
                for found in (*lines, *_ending(step, child, code, lines, seconds)):
                    number = f"{child.tag.rpartition('-')[2]} " if several else ""
                    yield replace(found, what=f"{number}{found.what}")
        except OSError as error:
            yield line(step.name, None, f"no process can be started: {error.strerror}", "free memory and processes")
        finally:
            for child in children:
                child.end()

    def _contexts(self, step: Step, folder: Path, seconds: float) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """Yield what each process of a step gets: its context and its environment."""
        gpu, gpus = self._device == "cuda", self._gpus if self._every_gpu else 1
        count = {"run": 1, "gpu": gpus if gpu else 1, "rank": max(2, gpus)}[step.each]
        shared = gpu and step.each == "rank" and self._gpus < count
        with socket.socket() as one:  # a free port
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
        for index in range(count):
            device = f"cuda:{0 if shared else index}" if gpu else "cpu"
            log = str(folder / f"{step.name}-{index}.log")
            context = {"device": device, "folder": str(folder), "log": log, "seconds": seconds}
            if step.each == "rank":
                context |= {"rank": index, "world": count, "port": port, "shared": shared}
            yield context, _environment(folder, index if shared else None)


def _environment(folder: Path, host: int | None) -> dict[str, str]:
    """Return a step's environment, with its ranks on one GPU as NCCL's different hosts, if ``host`` is a number.

    NCCL refuses two ranks of one host on one GPU. Source: NCCL, src/init.cc, "Duplicate GPU detected", and
    src/misc/utils.cc, getHostHash, which reads NCCL_HOSTID.
    """
    found = child_environment()
    environment.prepare(found)
    if own_settings(found):
        found["NCCL_DEBUG_FILE"] = str(folder / "NCCL.%p.log")
    found |= {"TORCH_CPP_LOG_LEVEL": "INFO", "GLOO_SOCKET_IFNAME": "lo"}
    if host is not None:
        found |= {
            "NCCL_HOSTID": f"gpucluster-{host}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_NET": "Socket",
            "NCCL_P2P_DISABLE": "1",
        }
    return found


def _ending(step: Step, child: _Child, code: int | None, lines: Sequence[Line], seconds: float) -> Iterator[Line]:
    """Yield what a process's end shows: nothing where it ended in order."""
    send = f"{SEND}: its output and stack are in the log"
    how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    if code is None:
        good = False if step.name in ("hang", "assert") and lines else None
        yield line(f"{step.name} ended", good, f"{child.tag}: killed, not done in {seconds:.0f} s", send)
    elif step.name == "assert" and lines and "at" in lines[-1].values:
        took = child.ended_at - float(lines[-1].values["at"])
        text = f"{took:.2f} s after the assert by {how}"
        yield line("its end", code == ASSERT_EXIT, f"{text}, in order" if code == ASSERT_EXIT else text, send)
    elif code < 0 or (code and not lines):
        yield line(f"{step.name} ended", False, f"{child.tag}: {how}", send)


def _identifying() -> dict[str, str]:
    """Return what names this node or its user -> what replaces it."""
    host = socket.gethostname()
    whole = run_program(("hostname", "--fqdn"), 2.0).text.strip()  # a name server may not answer
    found = {host: "HOST", host.partition(".")[0]: "HOST", whole: "HOST", str(Path.home()): "~"}
    with contextlib.suppress(OSError, KeyError):
        found[getpass.getuser()] = "USER"
    return {name: word for name, word in found.items() if name not in ("", "localhost", "root", "/")}
