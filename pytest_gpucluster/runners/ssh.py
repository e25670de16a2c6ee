"""Connections to nodes over ssh: the command line, the request, one open connection, and one query to many nodes.

Source of all options: ssh(1) and ssh_config(5) of OpenSSH.

A request is one line, followed by heartbeats for as long as this process lives. The answer is the standard output of
the node's side after its mark, for a login shell may print a greeting before it, and its exit code, which ssh passes
on: if there is none, or it is ssh's own, the connection was lost. ssh writes its output to files, so that it never
waits for this process.
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
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
PROTOCOL = 3
"""Increased with every change that the other side could misunderstand."""
MARK = b"gpucluster-node: ready\n"
"""Precedes the answer."""
HEARTBEAT, INTERRUPT, TERMINATE = "beat", "interrupt", "terminate"
"""Sent to the node after the request, each on a line."""
HEARTBEAT_SECONDS = 5.0
HEARTBEAT_TIMEOUT_SECONDS = 60.0
"""Without a heartbeat for this long a node treats the connection as lost."""
FAILED = 254
"""Exit code: the node could not do it, and the last line of its standard error states why. A run on a node ends neither
with it nor with 255, which is ssh's own."""
_HINTS = (
    ("host key verification failed", ": connect once by hand, or add its key to ~/.ssh/known_hosts"),
    ("permission denied", ": install a key that needs no password (ssh-copy-id, or an agent)"),
    ("no module named", ": install this version of pytest-gpucluster on the node, or name its python with --python"),
    ("no such file or directory", ": name the python of the nodes with --python"),
    ("not found", ": name the python of the nodes with --python"),
)
_READ_BYTES, _STDERR_BYTES, _CHARACTERS = 1 << 20, 4096, 300
_POLL_SECONDS = 0.05
_MOST_CONNECTIONS = 64


@dataclass(frozen=True, kw_only=True)
class Access:
    """How nodes are reached, and what is the same on all of them.

    Attributes:
        python: the interpreter on the nodes that has this package.
        options: more options of ssh, put first: ssh uses the first value of an option.
        connect_seconds: deadline for connecting, including the handshake.
        answer_seconds: deadline for a node's first line, from the start of the connection.
        directory: the working directory on the nodes.
        report_dir: where they store their reports until these are copied.
        environ: variables for them.
    """

    python: str
    options: tuple[str, ...] = ()
    connect_seconds: int = 10
    answer_seconds: float = 70.0
    directory: str = "."
    report_dir: str = "gpucluster-report"
    environ: Mapping[str, str] = field(default_factory=dict)


def ssh_command(host: Host, access: Access) -> list[str]:
    """Return the command that starts :data:`MODULE` on a node.

    The remote part is plain enough for the login shells sh, csh and fish.

    >>> ssh_command(Host(name="gpu-1", address="10.0.0.1", port=2222), Access(python="/opt/my env/python"))[-3:]
    ['--', '10.0.0.1', "exec '/opt/my env/python' -m pytest_gpucluster.runners.node_agent"]
    """
    command = ["ssh", "-a", "-x", *access.options]
    for option in (*_OPTIONS, f"ConnectTimeout={access.connect_seconds}"):
        command += ["-o", option]
    command += ["-p", str(host.port)] if host.port is not None else []
    command += ["-l", host.user] if host.user is not None else []
    return [*command, "--", host.address, f"exec {shlex.quote(access.python)} -m {MODULE}"]


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


def require_ssh() -> None:
    """Require ssh on the PATH, and raise this process's limit of open files as far as it may: of the usual 1,024 a
    node needs up to 8.

    Raises:
        EnvironmentBroken: there is no ssh.
    """
    if shutil.which("ssh") is None:
        raise EnvironmentBroken("ssh is not on the PATH: install OpenSSH's client")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Channel:
    """A process of ssh, in a session of its own: Ctrl-C on the terminal must not cut the connection.

    When this process ends for any reason, its end of the pipe is closed; ssh passes that on, and the node ends what it
    had started. If even that is lost, the heartbeats stop, with the same effect.
    """

    def __init__(self, host: Host, access: Access, request: bytes, output: IO[bytes] | None = None) -> None:
        """Start it and send the request. Its output goes to an open file, by default to a temporary one.

        Raises:
            EnvironmentBroken: ssh cannot be started.
        """
        # Both are closed by close().
        self._output = output or tempfile.TemporaryFile(prefix="gpucluster-")  # noqa: SIM115
        self._stderr = tempfile.TemporaryFile(prefix="gpucluster-")  # noqa: SIM115
        self._position = 0
        try:
            self._process = subprocess.Popen(
                ssh_command(host, access),
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=self._stderr,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            self._stderr.close()
            raise EnvironmentBroken(
                f"ssh cannot be started: {error.strerror or error}; install OpenSSH's client"
            ) from None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._send(request)
        threading.Thread(target=self._send_heartbeats, daemon=True).start()

    @property
    def closed(self) -> bool:
        """Whether ssh has ended, and has written all its output."""
        return self._process.poll() is not None

    @property
    def answered(self) -> bool:
        """Whether the node's side has been started."""
        if not self._position:
            before, mark, _ = os.pread(self._output.fileno(), _READ_BYTES, 0).partition(MARK)
            self._position = len(before + mark) if mark else 0
        return self._position > 0

    def drain(self) -> bytes:
        """Return the node's output since the last call."""
        found = b""
        while self.answered and (data := os.pread(self._output.fileno(), _READ_BYTES, self._position)):
            self._position += len(data)
            found += data
        return found

    def answer(self) -> IO[bytes]:
        """Return the file of the output, at the beginning of the answer. Only once :attr:`closed`."""
        self._output.seek(self._position if self.answered else 0)
        return self._output

    @property
    def exit(self) -> int | None:
        """Exit code of the node's side, once :attr:`closed`; None if the answer is incomplete, or there is none."""
        code = self._process.poll()
        return code if self.answered and code is not None and 0 <= code < FAILED else None

    @property
    def problem(self) -> str:
        """Why there is no complete answer: the last message of ssh or of the node, with what to do about it."""
        size = os.fstat(self._stderr.fileno()).st_size
        tail = os.pread(self._stderr.fileno(), _STDERR_BYTES, max(0, size - _STDERR_BYTES))
        lines = [line for line in tail.decode("utf-8", "backslashreplace").splitlines() if line.strip()]
        code = self._process.poll()
        message = one_line(lines[-1], _CHARACTERS) if lines else f"ssh ended with exit code {code} and no message"
        if self.answered:
            return message if code == FAILED else f"the connection was lost: {message}"
        return message + next((hint for words, hint in _HINTS if words in message.lower()), "")

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

    def close(self) -> None:
        """End ssh at once, and close its files."""
        if not self._output.closed:
            self.kill()
            self._output.close()
            self._stderr.close()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # ValueError: closed on our side. OSError: ssh has ended, which :attr:`closed` reports.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            self.send(HEARTBEAT)


Reply = Mapping[str, Any] | str
"""The answer of a node: a JSON object, or why there is none."""


def query_nodes(
    hosts: Sequence[Host], requests: Mapping[str, bytes], access: Access, *, stop: Callable[[], bool]
) -> dict[str, Reply]:
    """Send every host its request, to at most 64 at a time, and return name -> reply in their order.

    Args:
        hosts: the nodes.
        requests: name -> request.
        access: how they are reached.
        stop: whether to give up; the remaining nodes have no answer then.

    Raises:
        EnvironmentBroken: ssh cannot be started.
    """

    def query(host: Host) -> Reply:
        if stop():
            return ""
        until = time.monotonic() + access.answer_seconds
        with contextlib.closing(Channel(host, access, requests[host.name])) as channel:
            while not channel.closed:
                if stop():
                    return ""
                if time.monotonic() > until:
                    return f"no answer within {access.answer_seconds:g} s"
                time.sleep(_POLL_SECONDS)
            if channel.exit is None:
                return channel.problem
            try:
                facts = json.loads(channel.drain()) if channel.exit == 0 else None
            except ValueError:
                facts = None
            return facts if isinstance(facts, dict) and facts else f"ended with exit code {channel.exit} and no JSON"

    with ThreadPoolExecutor(_MOST_CONNECTIONS) as pool:
        return dict(zip((host.name for host in hosts), pool.map(query, hosts), strict=True))
