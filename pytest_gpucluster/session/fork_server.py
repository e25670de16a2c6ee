"""A process that has torch and pytest loaded, and forks itself for each launcher and each rank that is asked for.

``python -m pytest_gpucluster.session.fork_server DESCRIPTOR`` serves a
:class:`~pytest_gpucluster.launch.forks.ForkServer` and ends with it. A fork does what ``python -m MODULE ...`` does. In
one that becomes torchrun's agent only the place where torch would start a new Python for a rank takes a fork made
beforehand, while the agent has no thread yet.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.metadata
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
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

_MOST_BYTES = 1 << 20
_RANKS = "--nproc-per-node="

# ---- the server ------------------------------------------------------------------------------------------------------


def load() -> None:
    """Load what every session needs, and nothing that looks at the environment of a session when it is loaded."""
    import pytest  # noqa: F401
    import torch._dynamo  # which every optimizer loads
    import torch.distributed.checkpoint
    import torch.distributed.run  # noqa: F401
    from _pytest.config import default_plugins
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    import pytest_gpucluster
    from pytest_gpucluster.judge import loader

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    for module in pkgutil.walk_packages(pytest_gpucluster.__path__, "pytest_gpucluster."):
        if not module.name.endswith(("__main__", __name__)):
            importlib.import_module(module.name)
    loader.load()
    SubprocessHandler._popen = _start_rank  # type: ignore[method-assign, assignment]


def load_extras() -> None:
    """Load transformers and peft, which some criteria use."""
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


def _keep_unrewritten() -> None:
    """Keep pytest from complaining that it cannot rewrite the asserts of plugins that are loaded already."""
    plugins = {plugin.module.partition(".")[0] for plugin in importlib.metadata.entry_points(group="pytest11")}
    for name in {*plugins, "pytest_gpucluster.short_fixtures"} & set(sys.modules):
        sys.modules[name].__doc__ = f"{sys.modules[name].__doc__}\nPYTEST_DONT_REWRITE"


def serve(requests: socket.socket, become: Callable[[Sequence[str]], NoReturn]) -> None:
    """Fork for each request until the other end is closed.

    Args:
        requests: the server's end.
        become: called in each fork with its command, once environment, folder and streams are the request's.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be there in a fork, nor let go of its locks"
    _keep_unrewritten()
    gc.collect()
    gc.freeze()  # else the first collection of each fork copies the pages of all that is loaded
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # of torch's operators: they would take 0.1 s at the end of each fork
    replies: dict[int, socket.socket] = {}
    ended, woken = os.pipe()
    for end in (ended, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests.send(b"ready")
    watched: list[Any] = [requests, ended]
    while True:
        ready = select.select(watched, [], [])[0]
        if ended in ready:
            os.read(ended, 4096)
            _reap(replies)
        if requests in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            if not request:
                return
            reply = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for other in (requests, reply, *replies.values()):
                    other.close()
                os.close(ended)
                os.close(woken)
                _take_request(json.loads(request), *descriptors[1:])
                become(json.loads(request)["command"])
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            replies[pid] = reply
            with contextlib.suppress(OSError):
                reply.sendall(b"%d\n" % pid)


def _reap(replies: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with replies.pop(ended[0]) as reply, contextlib.suppress(OSError):
                reply.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))


def _take_request(request: Mapping[str, Any], output: int, errors: int, _marker: int) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((nothing, output, errors)):
        os.dup2(descriptor, number)
    for descriptor in (nothing, output, errors):
        os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _take_environment(request["env"])


def _take_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # of the session's TMPDIR


# ---- what a fork becomes ---------------------------------------------------------------------------------------------


def become_agent(command: Sequence[str], become_rank: Callable[..., NoReturn] | None = None) -> NoReturn:
    """Become a launcher whose ranks are forks.

    Args:
        command: of Python, with ``--nproc-per-node=N`` for N of them.
        become_rank: called in each of them with its command; by default :func:`become_program`.
    """
    ranks = next((int(word.removeprefix(_RANKS)) for word in command if word.startswith(_RANKS)), 0)
    fork_spares(ranks, become_rank or _become_rank)
    become_program(command)


def become_program(command: Sequence[str]) -> NoReturn:
    """Do what Python does with ``-m MODULE ...``, and end as it does."""
    at = command.index("-m") + 1
    sys.argv = list(command[at:])
    sys.path.insert(0, os.getcwd())
    if not hasattr(sys.modules.get(command[at]), "__path__"):  # a module: runpy warns of one that is loaded
        sys.modules.pop(command[at], None)
    exit_as_python(lambda: runpy.run_module(command[at], run_name="__main__", alter_sys=True))


def exit_as_python(call: Callable[[], object]) -> NoReturn:
    """Call something as a Python of its own would, and end this process as that would."""
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
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
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


def _become_rank(command: Sequence[str]) -> NoReturn:
    os.setsid()
    become_program(command)


# ---- forks that wait for what they are to be -------------------------------------------------------------------------

_spares: list[tuple[int, socket.socket]] = []


def fork_spares(count: int, become: Callable[..., NoReturn]) -> None:
    """Fork processes that wait for :func:`start_spare`. This one must have no other thread yet.

    Args:
        count: how many.
        become: called in each with its command and descriptors.
    """
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in _spares:
                other.close()
            _spares.clear()
            with theirs:
                request, descriptors, _, _ = socket.recv_fds(theirs, _MOST_BYTES, 2)
            if not request:  # the parent has ended without starting it
                os._exit(0)
            words = json.loads(request)
            _take_environment(words["env"])
            become(words["command"], *descriptors)
        theirs.close()
        _spares.append((pid, ours))


def start_spare(command: Sequence[str], env: Mapping[str, str], *descriptors: int) -> Any:
    """Give a waiting fork its command, environment and descriptors; return it as a ``subprocess.Popen``."""
    pid, spare = _spares.pop(0)
    process: Any = subprocess.Popen.__new__(subprocess.Popen)
    process.args, process.pid, process.returncode = command, pid, None
    process.stdin = process.stdout = process.stderr = None
    process._waitpid_lock, process._child_created = threading.Lock(), True
    with spare:
        request = json.dumps({"command": list(command), "env": dict(env)}).encode()
        socket.send_fds(spare, [request], list(descriptors))
    return process


def _start_rank(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank in place of ``SubprocessHandler._popen``: as a fork, or else, as at a restart, as a new process."""
    if not _spares or handler._stdout or handler._stderr:
        return subprocess.Popen(args, env=env, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True)
    return start_spare(args, env)  # type: ignore[no-any-return]


if __name__ == "__main__":
    load()
    with contextlib.suppress(Exception):  # the criteria that need them say so themselves
        load_extras()
    serve(socket.socket(fileno=int(sys.argv[1])), become_agent)
    os._exit(0)  # at once: what is loaded has nothing to close
