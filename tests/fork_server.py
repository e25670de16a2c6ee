"""Sessions of the tests as forks: one process has torch and pytest loaded, and each launcher and rank is a fork of it.

To load them costs 3 CPU seconds in each process, and a session over torchrun has three. The product starts its ranks as
ever: here torchrun's own agent runs, and only the place where it would start a new Python takes a fork made beforehand.

What a fork has not of its own: ``/proc/PID/cmdline`` and ``/proc/PID/environ`` are those of the server. So each process
of a session keeps a descriptor by which :func:`holders` finds it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import light_server
from execnet.gateway_base import Popen2IO
from execnet.gateway_io import Popen2IOMaster

_READY_SECONDS = 120.0
_MOST_BYTES = 1 << 20
_REWRITTEN = ("pytest_gpucluster", "pytest_gpucluster.short_fixtures", "xdist", "pytest_rerunfailures")
"""Plugins whose asserts pytest would rewrite at their import, and complains of where they are loaded already."""
_READ_AT_START = ("PYTHON", "LD_", "HF_", "TRANSFORMERS_")
"""What Python, the dynamic linker and the libraries read only once, when they are started or loaded."""
_OF_THIS_PROCESS = frozenset(name for name in os.environ if name.startswith(_READ_AT_START))
_RANKS = "--nproc-per-node="
_EXTRAS = "extras"


class Forked:
    """A session's first process, with what the tests use of ``subprocess.Popen``."""

    def __init__(self, reply: socket.socket) -> None:
        self._reply = reply
        self._said = b""
        self.returncode: int | None = None
        while b"\n" not in self._said:
            self._hear()
        self.pid = int(self._said.partition(b"\n")[0])

    def poll(self) -> int | None:
        """Return how it has ended, or None while it runs: its exit code, or less the number of a signal."""
        while self.returncode is None and _can_be_read(self._reply, 0.0):
            self._hear()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not come.
        """
        while self.returncode is None:
            if not _can_be_read(self._reply, timeout):
                raise subprocess.TimeoutExpired("a forked session", timeout or 0.0)
            self._hear()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _hear(self) -> None:
        heard = self._reply.recv(64)
        if not heard:
            raise RuntimeError("the fork server has ended")
        self._said += heard
        lines = self._said.split(b"\n")
        if len(lines) > 2:
            self.returncode = int(lines[1])
            self._reply.close()


def _can_be_read(waiting: socket.socket, timeout: float | None) -> bool:
    """Wait for something to read. Not by select: pytest may have more than the 1,024 descriptors that it takes."""
    poller = select.poll()
    poller.register(waiting, select.POLLIN)
    return bool(poller.poll(None if timeout is None else 1000 * timeout))


class ForkServer:
    """The server, as the tests see it. It ends with the process that has started it.

    Args:
        plain: another one, whose fork loads transformers and peft as well.
    """

    def __init__(self, plain: ForkServer | None = None) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | Forked
        with theirs:
            if plain is not None:
                where = {"cwd": Path.cwd(), "env": {}, "errors": 2, "token": "extras"}
                self._process = plain.start([_EXTRAS], output=theirs.fileno(), **where)  # type: ignore[arg-type]
            else:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for pytest, which ends its sessions itself
                )
        if not _can_be_read(self._socket, _READY_SECONDS) or self._socket.recv(64) != b"ready":
            raise RuntimeError("the fork server has not started")

    def start(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str | bytes], output: int, errors: int, token: str
    ) -> Forked:
        """Start ``python -m MODULE ...`` in a session of its own, without input.

        Args:
            command: of Python; options before ``-m`` but ``-u`` are not known here.
            cwd: where.
            env: its whole environment.
            output: the descriptor of its output.
            errors: that of its errors.
            token: by which :func:`holders` finds all its processes that were not started anew.
        """
        request = {
            "command": list(command),
            "cwd": str(cwd),
            "env": {name: os.fsdecode(value) for name, value in env.items()},
        }
        ours, theirs = socket.socketpair()
        marker = os.memfd_create(token)
        with theirs:
            descriptors = [theirs.fileno(), output, errors, marker]
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        os.close(marker)
        return Forked(ours)

    def close(self) -> None:
        """End the server; what it has started goes on."""
        self._socket.close()
        self._process.wait()


_servers: dict[bool, ForkServer] = {}
_turned_on: list[bool] = []
_starting = threading.Lock()


def turn_on() -> None:
    """Let sessions be forks from now on, as far as they can be. The server starts with the first one."""
    _turned_on.append(True)


def turn_off() -> None:
    """End the servers; sessions are started as ever from now on."""
    _turned_on.clear()
    while _servers:
        _servers.popitem()[1].close()


def server_for(env: Mapping[str, str | bytes], *, extras: bool = False) -> ForkServer | None:
    """Return the server for a session with this environment, or None where Python itself must be started for it.

    Args:
        env: the whole environment of the session.
        extras: the session uses transformers or peft.
    """
    if not _turned_on or any(name.startswith(_READ_AT_START) for name in env if name not in _OF_THIS_PROCESS):
        return None
    with _starting:
        if False not in _servers:
            _servers[False] = ForkServer()
        if extras not in _servers:
            _servers[True] = ForkServer(_servers[False])
    return _servers[extras]


def keep_shipped_limits() -> None:
    """Read the shipped limits once: it takes as long as all else that a short session does."""
    from pytest_gpucluster.judge import loader

    read, shipped = loader.load, loader.shipped_path()
    read_shipped = functools.cache(read)
    loader.load = lambda *paths: read_shipped() if paths in ((), (shipped,)) else read(*paths)


def holders(token: str) -> set[int]:
    """Return the processes that hold the descriptor of a session."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it has been closed meanwhile
                    if os.readlink(descriptor).startswith(f"/memfd:{token} "):
                        found.add(int(pid))
    return found


# ---- the server's own side -------------------------------------------------------------------------------------------


def _serve(requests: socket.socket, load: Callable[[], None]) -> None:
    load()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there in a fork, nor let go of its locks"
    replies: dict[int, socket.socket] = {}
    ended, woken = os.pipe()
    for end in (ended, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests.send(b"ready")
    while True:
        ready = select.select([requests, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
            _reap(replies)
        if requests in ready:
            asked, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            if not asked:
                return
            reply = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for other in (requests, reply, *replies.values()):
                    other.close()
                os.close(ended)
                os.close(woken)
                _become(json.loads(asked), *descriptors[1:])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            replies[pid] = reply
            with contextlib.suppress(OSError):
                reply.sendall(b"%d\n" % pid)


def _load() -> None:
    """Load what every session needs, and nothing that looks at the environment of a session when it is loaded."""
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import pytest_rerunfailures  # noqa: F401
    import torch._dynamo  # which every optimizer loads
    import torch.distributed.checkpoint
    import torch.distributed.run  # noqa: F401
    import xdist.plugin  # noqa: F401
    import yaml
    from _pytest.config import default_plugins
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    import pytest_gpucluster.judge.loader

    for module in pkgutil.iter_modules(pytest_gpucluster.__path__, "pytest_gpucluster."):
        if not module.name.endswith(("__main__", "_process")):
            importlib.import_module(module.name)
    light_server.load()
    yaml.compose = functools.lru_cache(maxsize=16)(yaml.compose)
    keep_shipped_limits()
    pytest_gpucluster.judge.loader.load()
    for name in _REWRITTEN:
        loaded = sys.modules[name]
        loaded.__doc__ = f"{loaded.__doc__}\nPYTEST_DONT_REWRITE"
    SubprocessHandler._popen = _start_rank  # type: ignore[method-assign]
    Popen2IOMaster.__init__ = _start_worker  # type: ignore[method-assign]


def _load_extras() -> None:
    import peft  # noqa: F401
    from transformers import (  # noqa: F401  # loaded when they are first asked for
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        ResNetConfig,
        ResNetForImageClassification,
    )


def _reap(replies: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with replies.pop(ended[0]) as reply, contextlib.suppress(OSError):
                reply.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))


def _become(request: Mapping[str, Any], output: int, errors: int, _marker: int) -> NoReturn:
    os.setsid()
    if request["command"] == [_EXTRAS]:
        _serve(socket.socket(fileno=output), _load_extras)
        os._exit(0)
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, errors)):
        os.dup2(descriptor, number)
    for descriptor in (nothing, output, errors):
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = request["command"]
    _take_environment(request["env"])
    ranks = next((int(word.removeprefix(_RANKS)) for word in command if word.startswith(_RANKS)), 0)
    if "torch.distributed.run" in command:
        _fork_spares(ranks, _become_rank)
    elif "pytest_gpucluster" in command:  # gpucluster run, whose agent has the ranks
        from pytest_gpucluster.cli import run

        _fork_spares(1, functools.partial(_become_agent, ranks))
        run.subprocess = types.SimpleNamespace(
            DEVNULL=subprocess.DEVNULL, Popen=lambda args, *, env, **more: _start_spare(args, env)
        )
    else:
        _fork_spares(int(command[command.index("-n") + 1]) if "-n" in command else 0, _become_worker)
        light_server.fork_recorder()
    _run(command)


def _take_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # of the session's TMPDIR


def _run(command: Sequence[str]) -> NoReturn:
    """Do what Python does with ``-m MODULE ...``, and end as it does."""
    at = command.index("-m") + 1
    sys.argv = list(command[at:])
    sys.path.insert(0, os.getcwd())
    _as_python(lambda: runpy.run_module(command[at], run_name="__main__", alter_sys=True))


def _as_python(call: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        code = as_python(call)
    finally:
        os._exit(code)


def as_python(call: Callable[[], object]) -> int:
    """Call something as a Python of its own would, with its streams anew; return its exit code at its end."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  # until the process ends
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    code = 0
    try:
        call()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as Python waits for its threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code & 0xFF


# ---- the ranks of an agent, and the workers of pytest-xdist ----------------------------------------------------------

_spares: list[tuple[int, socket.socket]] = []
"""Processes that wait for what they are to be. They are forked before this one has any thread."""


def _fork_spares(count: int, become: Callable[..., NoReturn]) -> None:
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in _spares:
                other.close()
            _spares.clear()
            with theirs:
                asked, descriptors, _, _ = socket.recv_fds(theirs, _MOST_BYTES, 2)
            if not asked:  # the parent has ended without starting it
                os._exit(0)
            request = json.loads(asked)
            _take_environment(request["env"])
            become(request["command"], *descriptors)
        theirs.close()
        _spares.append((pid, ours))


def _become_rank(command: Sequence[str]) -> NoReturn:
    os.setsid()
    if os.environ.get("RANK") == "0":
        light_server.fork_recorder()
    _run(command)


def _become_agent(ranks: int, command: Sequence[str]) -> NoReturn:
    os.setsid()
    _fork_spares(ranks, _become_rank)
    _run(command)


def _become_worker(command: Sequence[str], stdin: int, stdout: int) -> NoReturn:
    for number, descriptor in enumerate((stdin, stdout)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    _as_python(lambda: exec(command[command.index("-c") + 1], {"__name__": "__main__"}))


def _start_spare(args: Sequence[str], env: Mapping[str, str], *descriptors: int) -> Any:
    pid, spare = _spares.pop(0)
    process: Any = subprocess.Popen.__new__(subprocess.Popen)
    process.args, process.pid, process.returncode = args, pid, None
    process.stdin = process.stdout = process.stderr = None
    process._waitpid_lock, process._child_created = threading.Lock(), True
    with spare:
        request = json.dumps({"command": list(args), "env": dict(env)}).encode()
        socket.send_fds(spare, [request], list(descriptors))
    return process


def _start_rank(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank in place of ``SubprocessHandler._popen``: as a fork, or else, as at a restart, as a new process."""
    if not _spares or handler._stdout or handler._stderr:
        return subprocess.Popen(args, env=env, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True)
    return _start_spare(args, env)  # type: ignore[no-any-return]


def _start_worker(master: Any, args: Sequence[str], execmodel: Any) -> None:
    """Start a worker in place of ``Popen2IOMaster.__init__``."""
    if not _spares:
        _new_worker(master, args, execmodel)
        return
    stdin, to_worker = os.pipe()
    from_worker, stdout = os.pipe()
    master.popen = _start_spare(args, os.environ, stdin, stdout)
    for descriptor in (stdin, stdout):
        os.close(descriptor)
    master.popen.stdin, master.popen.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")
    Popen2IO.__init__(master, master.popen.stdin, master.popen.stdout, execmodel=execmodel)


_new_worker = Popen2IOMaster.__init__


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), _load)
