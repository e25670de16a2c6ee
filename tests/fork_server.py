"""Sessions of the tests as forks of one process that has torch and pytest loaded: which are, and what tests add to it.

The product has the server (:mod:`pytest_gpucluster.session.fork_server`) for ``gpucluster demo``. Here it also becomes
``gpucluster run``, the workers of pytest-xdist and recorders, so that the only thing that is not as ever is how a
process is started.
"""

import functools
import os
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import light_server
from execnet.gateway_base import Popen2IO
from execnet.gateway_io import Popen2IOMaster

from pytest_gpucluster.launch.forks import ForkServer, start_server
from pytest_gpucluster.session import fork_server as shipped

_READ_AT_START = ("PYTHON", "LD_", "HF_", "TRANSFORMERS_")
"""What Python, the dynamic linker and the libraries read only once, when they are started or loaded."""
_OF_THIS_PROCESS = frozenset(name for name in os.environ if name.startswith(_READ_AT_START))
_EXTRAS = "extras"
_servers = {}
_turned_on = []
_starting = threading.Lock()


def turn_on():
    """Let sessions be forks from now on, as far as they can be. The server starts with the first one."""
    _turned_on.append(True)


def turn_off():
    """End the servers; sessions are started as ever from now on."""
    _turned_on.clear()
    while _servers:
        _servers.popitem()[1].close()


def server_for(env, *, extras=False):
    """Return the server for a session with this environment, or None where Python itself must be started for it.

    Args:
        env: the whole environment of the session.
        extras: the session uses transformers or peft.
    """
    if not _turned_on or any(name.startswith(_READ_AT_START) for name in env if name not in _OF_THIS_PROCESS):
        return None
    with _starting:
        if False not in _servers:
            _servers[False] = ForkServer(functools.partial(start_server, program=[__file__]))
        if extras not in _servers:
            start = functools.partial(_servers[False].start, [_EXTRAS], cwd=Path.cwd(), env=os.environ)
            _servers[True] = ForkServer(lambda theirs: start(output=theirs, errors=2, token=_EXTRAS))
    return _servers[extras]


def keep_shipped_limits():
    """Read the shipped limits once: it takes as long as all else that a short session does."""
    from pytest_gpucluster.judge import loader

    read, shipped = loader.load, loader.shipped_path()
    read_shipped = functools.cache(read)
    loader.load = lambda *paths: read_shipped() if paths in ((), (shipped,)) else read(*paths)


def be_an_ordinary_cpu():
    """Let no deadline and no limit of a rehearsal depend on how busy this machine is."""
    from pytest_gpucluster.session import run

    run._MOST_SLOWDOWN, run._CALIBRATION_SECONDS = 1.0, 0.0


# ---- the server's own side -------------------------------------------------------------------------------------------


def _load():
    import numpy  # noqa: F401
    import pytest_rerunfailures  # noqa: F401
    import xdist.plugin  # noqa: F401
    import yaml

    from pytest_gpucluster.judge import loader

    shipped.load()
    light_server.load()
    yaml.compose = functools.lru_cache(maxsize=16)(yaml.compose)
    keep_shipped_limits()
    be_an_ordinary_cpu()
    loader.load()
    Popen2IOMaster.__init__ = _start_worker


def _become(command):
    if command == [_EXTRAS]:  # another server, whose socket is its standard output
        requests = socket.socket(fileno=os.dup(1))
        os.dup2(2, 1)
        shipped.load_extras()
        shipped.serve(requests, _become)
        os._exit(0)
    elif "torch.distributed.run" in command:
        shipped.become_agent(command, _become_rank)
    elif "pytest_gpucluster" in command:  # gpucluster run, whose agent has the ranks
        from pytest_gpucluster.cli import run

        shipped.fork_spares(1, _become_agent)
        run.subprocess = types.SimpleNamespace(
            DEVNULL=subprocess.DEVNULL, Popen=lambda args, *, env, **more: shipped.start_spare(args, env)
        )
    else:
        shipped.fork_spares(int(command[command.index("-n") + 1]) if "-n" in command else 0, _become_worker)
        light_server.fork_recorder()
    shipped.become_program(command)


def _become_agent(command):
    os.setsid()
    shipped.become_agent(command, _become_rank)


def _become_rank(command):
    os.setsid()
    if os.environ.get("RANK") == "0":
        light_server.fork_recorder()
    shipped.become_program(command)


def _become_worker(command, stdin, stdout):
    for number, descriptor in enumerate((stdin, stdout)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    shipped.exit_as_python(lambda: exec(command[command.index("-c") + 1], {"__name__": "__main__"}))


def _start_worker(master, args, execmodel):
    """Start a worker in place of ``Popen2IOMaster.__init__``."""
    if not shipped._spares:
        _new_worker(master, args, execmodel)
        return
    stdin, to_worker = os.pipe()
    from_worker, stdout = os.pipe()
    master.popen = shipped.start_spare(args, os.environ, stdin, stdout)
    for descriptor in (stdin, stdout):
        os.close(descriptor)
    master.popen.stdin, master.popen.stdout = os.fdopen(to_worker, "wb"), os.fdopen(from_worker, "rb")
    Popen2IO.__init__(master, master.popen.stdin, master.popen.stdout, execmodel=execmodel)


_new_worker = Popen2IOMaster.__init__


if __name__ == "__main__":
    _load()
    shipped.serve(socket.socket(fileno=int(sys.argv[1])), _become)
    os._exit(0)
