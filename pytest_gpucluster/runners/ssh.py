"""Connections to nodes over ssh: the command line, the request, one open connection, and one query to many nodes.

Source of all options: ssh(1) and ssh_config(5) of OpenSSH.

A request is one line, followed by heartbeats for as long as this process lives. The answer is the standard output of
the node's side after its mark, for a login shell may print a greeting before it, and its exit code, which ssh passes
on: if there is none, or it is ssh's own, the connection was lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners.hosts import Host
from pytest_gpucluster.text import one_line

MODULE = "pytest_gpucluster.runners.node_agent"
"""Started on a node. It reads its request from standard input, so nothing needs quoting."""
_OPTIONS = (
    # No password and no question about a host key: ssh fails and prints why.
    "BatchMode=yes",
    # A dead connection is noticed after a minute instead of TCP's two hours.
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    # Overrules settings of the user's configuration that would interfere.
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "RequestTTY=no",
    # A connection that is shared already may be used. Becoming a master would leave a process behind.
    "ControlMaster=no",
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """How nodes are reached.

    Attributes:
        python: the interpreter on the nodes that has this package.
        options: more options of ssh, put first: ssh uses the first value of an option.
        connect_seconds: deadline for connecting, including the handshake.
        program: ssh itself.
    """

    python: str
    options: tuple[str, ...] = ()
    connect_seconds: int = 10
    program: str = "ssh"


def ssh_command(host: Host, access: Access) -> list[str]:
    """Return the command that starts :data:`MODULE` on a node.

    The remote part is plain enough for the login shells sh, csh and fish.

    >>> ssh_command(Host(name="gpu-1", address="10.0.0.1", port=2222), Access(python="/opt/my env/python"))[-3:]
    ['--', '10.0.0.1', "exec '/opt/my env/python' -m pytest_gpucluster.runners.node_agent"]
    """
    command = [access.program, "-a", "-x", *access.options]
    for option in (*_OPTIONS, f"ConnectTimeout={access.connect_seconds}"):
        command += ["-o", option]
    command += ["-p", str(host.port)] if host.port is not None else []
    command += ["-l", host.user] if host.user is not None else []
    return [*command, "--", host.address, f"exec {shlex.quote(access.python)} -m {MODULE}"]


PROTOCOL = 3
"""Increased with every change that the other side could misunderstand."""
MARK = b"gpucluster-node: ready\n"
"""Precedes the answer."""
HEARTBEAT, INTERRUPT, TERMINATE = "beat", "interrupt", "terminate"
"""Sent to the node after the request, each on a line."""
HEARTBEAT_SECONDS = 5.0
HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Without a heartbeat for this long a node treats the connection as lost."""
FAILED, _LOST = 254, 255
"""Exit codes: the node could not do it, and the last line of its standard error states why; ssh failed. A run on a node
ends with neither."""


def request(do: str, **more: object) -> bytes:
    """Return the first line that is sent to a node."""
    return json.dumps({"protocol": PROTOCOL, "do": do, **more}).encode("ascii") + b"\n"


def read_request(line: bytes) -> Mapping[str, Any]:
    """Read that line, on the node.

    Raises:
        EnvironmentBroken: not a request, or one of another version.
    """
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("do"), str):
        raise EnvironmentBroken(
            "no request came over the connection; this program is started by `gpucluster run --hosts`"
        )
    if found.get("protocol") != PROTOCOL:
        raise EnvironmentBroken(
            f"the request is of protocol {found.get('protocol')!r}, but this node's version of pytest-gpucluster has "
            f"{PROTOCOL}: install one version everywhere"
        )
    return found


_STDERR_LINES, _CHARACTERS = 8, 300
_CLOSE_SECONDS = 5.0
_FILES_PER_NODE, _FILES_OF_THIS_PROCESS = 8, 64
"""At most: three pipes of ssh, a log, an archive, and files that are being opened or closed."""


def raise_open_files_limit(nodes: int) -> None:
    """Raise this process's limit of open files to what this number of nodes needs. The usual 1,024 serve 120 nodes.

    Raises:
        EnvironmentBroken: the hard limit is lower.
    """
    needed = _FILES_OF_THIS_PROCESS + nodes * _FILES_PER_NODE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise EnvironmentBroken(
            f"{nodes} nodes need up to {needed} open files here, but the limit is {hard}: raise it (ulimit -Hn), or "
            "select fewer nodes (--nodes)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Channel:
    """A process of ssh, in a session of its own: Ctrl-C on the terminal must not cut the connection.

    When this process ends for any reason, its end of the pipe is closed; ssh passes that on, and the node ends what it
    had started. If even that is lost, the heartbeats stop, with the same effect.
    """

    def __init__(self, command: Sequence[str], request: bytes) -> None:
        """Start it and send the request.

        Raises:
            EnvironmentBroken: ssh cannot be started.
        """
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentBroken(
                f"{command[0]} cannot be started: {error.strerror or error}; install OpenSSH's client"
            ) from None
        self.answered = False
        """The node's side has been started."""
        self._output: SimpleQueue[bytes] = SimpleQueue()
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._send(request)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_output, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for thread in [*self._readers, threading.Thread(target=self._send_heartbeats, daemon=True)]:
            thread.start()

    def drain(self) -> bytes:
        """Return the node's output since the last call."""
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._output.get_nowait())
        return b"".join(found)

    @property
    def closed(self) -> bool:
        """Whether ssh has ended and all its output is in :meth:`drain`."""
        if self._process.poll() is None:
            return False
        self._stop.set()
        # A process of the user's own ssh configuration may keep the pipes open without writing to them.
        for thread in self._readers:
            thread.join(timeout=_CLOSE_SECONDS)
        return True

    @property
    def exit(self) -> int | None:
        """Exit code of the node's side, once :attr:`closed`; None if the answer is incomplete, or there is none."""
        code = self._process.poll()
        return code if self.answered and code is not None and 0 <= code < FAILED else None

    @property
    def problem(self) -> str:
        """Why there is no complete answer: the last message of ssh or of the node, with what to do about it."""
        lines = [line for line in self._stderr if line]
        code = self._process.poll()
        message = one_line(lines[-1], _CHARACTERS) if lines else f"ssh ended with exit code {code} and no message"
        hint = next((hint for words, hint in _HINTS if words in message.lower()), "")
        lost = "the connection was lost: " if self.answered and code != FAILED else ""
        return f"{lost}{message}{'' if self.answered else hint}"

    def send(self, command: str) -> None:
        """Send HEARTBEAT, INTERRUPT or TERMINATE to the node."""
        self._send(command.encode("ascii") + b"\n")

    def hang_up(self) -> None:
        """Close our end: the node ends what it has started, and then the connection."""
        self._stop.set()
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # ssh may have ended already
            self._process.stdin.close()

    def kill(self) -> None:
        """End ssh at once. The node notices it by itself."""
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # ValueError: closed on our side. OSError: ssh has ended, which :attr:`closed` reports.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self.send(HEARTBEAT)

    def _read_output(self, pipe: IO[bytes]) -> None:
        greeting = b""
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                if not self.answered:
                    greeting += data
                    _, mark, data = greeting.partition(MARK)
                    self.answered = bool(mark)
                self._output.put(data)

    def _read_stderr(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._stderr.append(line.decode("utf-8", "backslashreplace").strip())


_HINTS = (
    ("host key verification failed", ": connect once by hand, or add its key to ~/.ssh/known_hosts"),
    ("permission denied", ": install a key that needs no password (ssh-copy-id, or an agent)"),
    ("no module named", ": install this version of pytest-gpucluster on the node, or name its python with --python"),
    ("no such file or directory", ": name the python of the nodes with --python"),
    ("not found", ": name the python of the nodes with --python"),
)
_POLL_SECONDS = 0.05
_MOST_CONNECTIONS = 64


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of a node.

    Attributes:
        text: its output.
        problem: why there is no answer, or the error that the node reports; empty if there is none.
        exit: exit code of a program on it; None if there is no answer.
        answered: the node's side has been started.
    """

    text: str = ""
    problem: str = ""
    exit: int | None = None
    answered: bool = False

    @property
    def facts(self) -> Mapping[str, Any]:
        """The answer as a JSON object; empty if it is none."""
        try:
            found = json.loads(self.text) if self.exit == 0 else {}
        except ValueError:
            found = {}
        return found if isinstance(found, dict) else {}


def query_nodes(
    hosts: Sequence[Host],
    request_of: Callable[[Host], bytes],
    access: Access,
    *,
    within_seconds: float,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Reply]:
    """Send every host a request, to at most 64 at a time, and return name -> reply in their order.

    Args:
        hosts: the nodes.
        request_of: host -> its request.
        access: how they are reached.
        within_seconds: deadline for each.
        stop: whether to give up; the remaining nodes have no answer then.

    Raises:
        EnvironmentBroken: ssh cannot be started.
    """
    replies = {host.name: Reply() for host in hosts}
    waiting, open_channels = deque(hosts), dict[str, tuple[Channel, list[bytes], float]]()
    try:
        while (waiting or open_channels) and not stop():
            while waiting and len(open_channels) < _MOST_CONNECTIONS:
                host = waiting.popleft()
                channel = Channel(ssh_command(host, access), request_of(host))
                open_channels[host.name] = channel, [], time.monotonic() + within_seconds
            for name, (channel, output, until) in list(open_channels.items()):
                closed = channel.closed
                output.append(channel.drain())
                late = not closed and time.monotonic() > until
                if closed or late:
                    del open_channels[name]
                    code = channel.exit if closed else None
                    problem = f"no answer within {within_seconds:g} s" if late else channel.problem
                    replies[name] = Reply(
                        text=b"".join(output).decode("utf-8", "backslashreplace"),
                        problem=problem if code is None else "",
                        exit=code,
                        answered=channel.answered,
                    )
                    channel.kill()
            time.sleep(_POLL_SECONDS)
    finally:
        for channel, *_ in open_channels.values():
            channel.kill()
    return replies


def require_ssh(access: Access) -> None:
    """Require ssh on the PATH.

    Raises:
        EnvironmentBroken: it is not there.
    """
    if shutil.which(access.program) is None:
        raise EnvironmentBroken(f"{access.program} is not on the PATH: install OpenSSH's client")
