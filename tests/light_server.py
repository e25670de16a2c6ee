"""The recorders of the tests' sessions as forks: one process without torch and pytest has loaded what they need.

To load it costs a recorder most of its CPU time. The product starts its recorder as ever: only the place where a new
Python would start takes a fork in its place. It is a child of the process that asked for it, as the recorder must be,
and has no more of it than the descriptors that were passed on.
"""

import contextlib
import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

_MODULE = "pytest_gpucluster.reports.recorder.process"
_MOST_BYTES = 1 << 20
_CLONE_PARENT = 0x8000
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""The number of the system call: os.fork cannot make a child of the parent."""
_popen = subprocess.Popen


class LightServer:
    """A process that becomes recorders. It ends with the process that has started it.

    Args:
        only: a process that waits to become the one recorder of this process, with its end of a socket; else a server
            is started.
    """

    def __init__(self, only=None):
        self._lock = threading.Lock()
        self._process = None
        self._pid = 0
        if only is not None:
            self._pid, self._socket = only
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, command, environ, stderr, channel):
        """Start a recorder with these descriptors; return its process."""
        request = {"command": list(command), "env": dict(environ), "cwd": os.getcwd()}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [stderr, channel])
            if self._pid:
                self._socket.close()
                return self._pid
            return int(self._socket.recv(64))

    def close(self):
        """End the server; what it has started goes on."""
        self._socket.close()
        if self._process is not None:
            self._process.wait()


class _LightPopen(subprocess.Popen):
    """``subprocess.Popen`` that starts a recorder as a fork, and everything else as ever."""

    def __init__(self, args, *more, **settings):
        if not isinstance(args, list) or _MODULE not in args or not _servers:
            super().__init__(args, *more, **settings)
            return
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock, self._child_created = threading.Lock(), True
        stderr = 2 if settings["stderr"] is None else settings["stderr"]
        server = _servers[-1] if _servers[-1]._process is not None else _servers.pop()  # that is only one recorder
        self.pid = server.start(args, settings["env"], stderr, *settings["pass_fds"])


_servers = []


@contextlib.contextmanager
def recorders_are_forks():
    """Let sessions in this process take forks for recorders."""
    if _CLONE is None:
        yield
        return
    if not _servers:
        _servers.append(LightServer())
    subprocess.Popen = _LightPopen
    try:
        yield
    finally:
        subprocess.Popen = _popen


def turn_off():
    """End the server."""
    while _servers:
        _servers.pop().close()


def fork_recorder():
    """Fork the recorder that this process may want later. It must have no other thread yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _take_and_become(theirs)
    theirs.close()
    _servers.append(LightServer((pid, ours)))
    subprocess.Popen = _LightPopen


# ---- the other side --------------------------------------------------------------------------------------------------


def load():
    """Load what a recorder needs."""
    from pytest_gpucluster.reports.recorder import process

    process.reports.prepare()


def _take(requests):
    asked, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 8)
    if not asked:
        os._exit(0)
    return json.loads(asked), descriptors


def _take_and_become(requests):
    request, descriptors = _take(requests)
    requests.close()
    _become(request, *descriptors)


def _serve(requests):
    load()
    api = ctypes.pythonapi
    call = ctypes.PyDLL(None).syscall  # which keeps the GIL
    while True:
        request, descriptors = _take(requests)
        api.PyOS_BeforeFork()
        pid = call(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            api.PyOS_AfterFork_Child()
            requests.close()
            _become(request, *descriptors)
        api.PyOS_AfterFork_Parent()
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"%d" % pid)


def _become(request, stderr, channel):
    try:
        from pytest_gpucluster.launch import detached_process
        from pytest_gpucluster.reports.recorder import process

        signal.pthread_sigmask(signal.SIG_BLOCK, detached_process.SHIELDED)  # as it would inherit it
        os.setsid()
        os.chdir(request["cwd"])
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, descriptor in enumerate((nothing, nothing, stderr)):
            os.dup2(descriptor, number)
        for descriptor in (nothing, stderr):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["env"])
        command = request["command"]
        command[command.index("--channel") + 1] = str(channel)
        sys.argv = command[command.index("-m") + 1 :]
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        process.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
