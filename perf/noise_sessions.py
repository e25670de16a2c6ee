"""Sessions of acceptance/ on CPU, one after the other from one process, and what is kept busy beside them."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

# There is one way to get a port, and it is the tests'.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from ports import free_port

if TYPE_CHECKING:
    from pytest_gpucluster.journal.journal import Journal

_LOADED = ("torch", "torch.distributed", "pytest", "pytest_gpucluster.journal.journal")
ROOT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 120.0
"""Generous: a session takes a few seconds."""
_WHILE_WANTED = """\
import os, random, sys, time
random.seed(20260)
while os.getppid() == int(sys.argv[1]):
    until = time.perf_counter() + {busy}
    while time.perf_counter() < until: pass
    time.sleep({idle})
"""
"""Works and rests by turns, and ends by itself where its parent, whose id it is told, was killed: it would spoil all
that is measured afterwards."""
BUSY: Mapping[str, str] = {
    "steady": _WHILE_WANTED.format(busy="1.0", idle="0"),
    "bursts": _WHILE_WANTED.format(busy="random.uniform(0.004, 0.020)", idle="random.uniform(0.004, 0.020)"),
    "light": _WHILE_WANTED.format(busy="random.uniform(0.002, 0.006)", idle="random.uniform(0.020, 0.052)"),
}
"""Kind -> what the process does until it is killed."""


@dataclass(kw_only=True)
class Session:
    """What a session left."""

    folder: Path
    exits: tuple[int, ...]

    @property
    def said(self) -> str:
        """What its ranks printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("rank-*.txt")))

    @cached_property
    def journal(self) -> Journal:
        """Its journal.

        Raises: RuntimeError if there is none; it has what was printed.
        """
        from pytest_gpucluster.errors import JournalError
        from pytest_gpucluster.journal import journal

        try:
            return journal.read(self.folder / "report" / "latest" / journal.JOURNAL_FILE, keep_samples=False)
        except (JournalError, OSError) as error:
            raise RuntimeError(f"the session left no journal: {error}\n{self.said}") from error


def session(options: Sequence[str], *, ranks: int, folder: Path) -> Session:
    """Run pytest with these options in this checkout, on so many ranks of this host; return what it left.

    Raises: RuntimeError if it does not end in time.
    """
    for module in _LOADED:  # once, for all sessions
        importlib.import_module(module)
    folder.mkdir(parents=True)
    port, run = free_port(), f"noise-{os.getpid()}-{time.monotonic_ns()}"
    processes = [_forked(options, _place(rank, ranks, port, run), folder) for rank in range(ranks)]
    until = time.monotonic() + DEADLINE_SECONDS
    exits = {}
    try:
        while len(exits) < ranks:
            for pid in processes:
                if pid not in exits:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        exits[pid] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                raise RuntimeError(f"the session has not ended after {DEADLINE_SECONDS:g} s")
            time.sleep(0.02)
    finally:
        for pid in set(processes) - set(exits):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return Session(folder=folder, exits=tuple(exits[pid] for pid in processes))


def _place(rank: int, ranks: int, port: int, run: str) -> dict[str, str]:
    """Return what torchrun tells a rank on one node. One rank alone needs no launcher."""
    if ranks == 1:
        return {}
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank)
    numbers |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), ranks)
    numbers |= {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1, "MASTER_PORT": port}
    numbers |= {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    texts = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**{name: str(number) for name, number in numbers.items()}, **texts}


def _forked(options: Sequence[str], place: Mapping[str, str], folder: Path) -> int:
    """Start a rank; return its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.chdir(ROOT)
        to = os.open(folder / f"rank-{place.get('RANK', '0')}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(to, 1)
        os.dup2(to, 2)
        os.environ.update({"OMP_NUM_THREADS": "1", **place})
        import pytest
        import torch

        # torch was imported before, and no longer asks the environment. Two threads on 2 cores wait for each other
        # as soon as there is a third one: a product of matrices then took 2.5 times as long.
        torch.set_num_threads(1)

        arguments = ["--gpucluster-device=cpu", f"--gpucluster-report-dir={folder / 'report'}"]
        code = int(pytest.main([*arguments, "-q", "-p", "no:cacheprovider", *options]))
    except BaseException:
        # Nothing may go on in this process as if it were the one that forks.
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


@contextmanager
def beside(kind: str) -> Iterator[None]:
    """Keep one busy process beside what is done meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", BUSY[kind], str(os.getpid())])
    try:
        yield
    finally:
        process.kill()
        process.wait()
