"""Connections to nodes over ssh: the command line, the protocol, one open connection, and one query to many nodes.

Source of all options: ssh(1) and ssh_config(5) of OpenSSH.

The protocol is a request, then heartbeats in one direction for as long as this process lives, and lines of JSON in the
other. A login shell may print a greeting before them, or a program something in between. So each line of the protocol
has a mark, and the last one is of its own kind: if it is missing, the connection was lost.
"""

from __future__ import annotations

import base64
import binascii
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
from dataclasses import dataclass, field
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


PROTOCOL = 2
"""Increased with every change that the other side could misunderstand."""
MARK = b"gpucluster-node:"
HEARTBEAT, INTERRUPT, TERMINATE = "beat", "interrupt", "terminate"
"""Sent to the node after the request, each on a line."""
HEARTBEAT_SECONDS = 5.0
HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Without a heartbeat for this long a node treats the connection as lost."""
HELLO, OUT, ERR, PART, FACTS, END = "hello", "out", "err", "part", "facts", "end"
"""Kinds of lines from a node: its name; a program's standard output and error; a part of an archive; facts; the end."""
_KINDS: Mapping[str, type] = {OUT: str, ERR: str, PART: bytes, HELLO: dict, FACTS: dict, END: dict}


@dataclass(frozen=True)
class Frame:
    """One line from a node."""

    kind: str
    value: Any


def encode(kind: str, value: object) -> bytes:
    """Return a line of a node. Bytes become base64."""
    plain = base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
    return MARK + json.dumps({kind: plain}).encode("ascii") + b"\n"


def decode(line: bytes) -> Frame | None:
    """Read a line of a node; None for a line that is not of the protocol."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        [(kind, value)] = json.loads(text).items()
        if kind == PART:
            value = base64.b64decode(value, validate=True)
    except (ValueError, AttributeError, TypeError, binascii.Error, RecursionError):
        return None
    return Frame(kind, value) if kind in _KINDS and isinstance(value, _KINDS[kind]) else None


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
        """The node has sent a line."""
        self.finished = False
        """The node has sent its last line. Without it the answer is incomplete."""
        self._frames: SimpleQueue[Frame] = SimpleQueue()
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._send(request)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_frames, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for thread in [*self._readers, threading.Thread(target=self._send_heartbeats, daemon=True)]:
            thread.start()

    def drain(self) -> list[Frame]:
        """Return the lines that have come since the last call."""
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._frames.get_nowait())
        for frame in found:
            self.answered = self.answered or frame.kind == HELLO
            self.finished = self.finished or frame.kind == END
        return found

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
    def problem(self) -> str:
        """Why there is no complete answer: the last message of ssh or of the node's shell, with what to do about it."""
        lines = [line for line in self._stderr if line]
        code = self._process.poll()
        message = one_line(lines[-1], _CHARACTERS) if lines else f"ssh ended with exit code {code} and no message"
        hint = next((hint for words, hint in _HINTS if words in message.lower()), "")
        return f"{'the connection was lost: ' if self.answered else ''}{message}{hint}"

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

    def _read_frames(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                frame = decode(line)
                if frame is not None:
                    self._frames.put(frame)

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


@dataclass(kw_only=True)
class Reply:
    """The answer of a node.

    Attributes:
        facts: its facts; None if there are none.
        problem: why there is no answer, or the error that the node reports; empty if there is none.
        text: standard output of a program on it.
        exit: exit code of that program; None if it did not end.
        answered: the node has sent a line.
    """

    facts: Mapping[str, Any] | None = None
    problem: str = ""
    text: str = ""
    exit: int | None = None
    answered: bool = False
    _output: list[str] = field(default_factory=list)

    def add(self, frame: Frame) -> None:
        """Add a line of the node."""
        if frame.kind == FACTS:
            self.facts = frame.value
        elif frame.kind == OUT:
            self._output.append(frame.value)
        elif frame.kind == END:
            code = frame.value.get("exit")
            self.exit = code if isinstance(code, int) else None
            self.problem = one_line(str(frame.value.get("error") or ""), 400)

    def finish(self, channel: Channel, timeout: str = "") -> None:
        """Complete the reply when the connection is closed or, with ``timeout``, given up."""
        self.text = "".join(self._output)
        self.answered = channel.answered
        if timeout or not channel.finished:
            self.facts, self.problem = None, timeout or channel.problem


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
    waiting, open_channels = deque(hosts), dict[str, tuple[Channel, float]]()
    try:
        while (waiting or open_channels) and not stop():
            while waiting and len(open_channels) < _MOST_CONNECTIONS:
                host = waiting.popleft()
                channel = Channel(ssh_command(host, access), request_of(host))
                open_channels[host.name] = channel, time.monotonic() + within_seconds
            for name, (channel, until) in list(open_channels.items()):
                closed = channel.closed
                for frame in channel.drain():
                    replies[name].add(frame)
                late = not closed and time.monotonic() > until
                if closed or late:
                    del open_channels[name]
                    replies[name].finish(channel, f"no answer within {within_seconds:g} s" if late else "")
                    channel.kill()
            time.sleep(_POLL_SECONDS)
    finally:
        for channel, _ in open_channels.values():
            channel.kill()
    return replies


def require_ssh(access: Access) -> None:
    """Require ssh on the PATH.

    Raises:
        EnvironmentBroken: it is not there.
    """
    if shutil.which(access.program) is None:
        raise EnvironmentBroken(f"{access.program} is not on the PATH: install OpenSSH's client")
