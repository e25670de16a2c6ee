"""Connections to nodes over ssh: the command line, the protocol, one open connection, and one query to many nodes.

Source of all options: ssh(1) and ssh_config(5) of OpenSSH.

The protocol is a request, then heartbeats one way, for as long as this process lives, and lines of JSON the other way.
A login shell may print a greeting in front of it, or a program something in between. So each of our lines has a mark,
and the last one is marked as the last: where it is missing, the connection was broken. A query has a deadline for each
node.
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

MODULE = "pytest_gpucluster.runners.remote_node"
"""What is started on a node. It takes its request from the standard input, so nothing but its own name is quoted."""
_OPTIONS = (
    # Nobody is there to be asked for a password or whether a host key is right: then it fails, and says so.
    "BatchMode=yes",
    # A connection that is dead is noticed after a minute, and not after the two hours of TCP.
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
    # What a user's configuration may ask for, and what would stand in the way here.
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "RequestTTY=no",
    # A connection that is shared already may be used. To become a shared one would leave a process behind.
    "ControlMaster=no",
)


@dataclass(frozen=True, kw_only=True)
class Access:
    """How nodes are reached.

    Attributes:
        python: the interpreter on the nodes, in which this package is installed.
        options: more options of ssh. They come first, because ssh takes the first value that it is told.
        connect_seconds: how long a node may take until it has let us in, the handshake included.
        program: ssh itself.
    """

    python: str
    options: tuple[str, ...] = ()
    connect_seconds: int = 10
    program: str = "ssh"


def ssh_command(host: Host, access: Access) -> list[str]:
    """Return the command that starts our side on a node.

    >>> ssh_command(Host(name="gpu-1", address="10.0.0.1", port=2222), Access(python="/opt/my env/python"))[-3:]
    ['--', '10.0.0.1', "exec '/opt/my env/python' -m pytest_gpucluster.runners.remote_node"]
    """
    command = [access.program, "-a", "-x", *access.options]
    for option in (*_OPTIONS, f"ConnectTimeout={access.connect_seconds}"):
        command += ["-o", option]
    command += ["-p", str(host.port)] if host.port is not None else []
    command += ["-l", host.user] if host.user is not None else []
    return [*command, "--", host.address, remote_command(access.python)]


def remote_command(python: str) -> str:
    """Return what the login shell of a node gets: plain enough for sh, csh and fish."""
    return f"exec {shlex.quote(python)} -m {MODULE}"


PROTOCOL = 1
"""Raised when either side could misunderstand the other one."""
MARK = b"gpucluster-node:"
BEAT, INTERRUPT, TERMINATE = "beat", "interrupt", "terminate"
"""What is said after the request, each on a line."""
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""After so long without a beat a node takes the connection for lost."""
HELLO, OUT, ERR, PART, ANSWER, END = "hello", "out", "err", "part", "answer", "end"
"""Kinds of lines of a node: who it is; what a program prints, in two ways; a piece of an archive; facts; the end."""
_KINDS = (HELLO, OUT, ERR, PART, ANSWER, END)


@dataclass(frozen=True)
class Frame:
    """One line of a node."""

    kind: str
    value: Any


def encode(kind: str, value: object) -> bytes:
    """Return a line of a node. Bytes become base64."""
    plain = base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
    return MARK + json.dumps({kind: plain}).encode("ascii") + b"\n"


def decode(line: bytes) -> Frame | None:
    """Read a line of a node; None for a line that is somebody else's."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        told = json.loads(text)
        [(kind, value)] = told.items()
        if kind == PART:
            value = base64.b64decode(value, validate=True)
    except (ValueError, AttributeError, TypeError, binascii.Error, RecursionError):
        return None
    wanted = {OUT: str, ERR: str, PART: bytes, HELLO: dict, ANSWER: dict, END: dict}.get(kind)
    return Frame(kind, value) if kind in _KINDS and wanted is not None and isinstance(value, wanted) else None


def request(do: str, **more: object) -> bytes:
    """Return the line that a node gets first."""
    return json.dumps({"protocol": PROTOCOL, "do": do, **more}).encode("ascii") + b"\n"


def read_request(line: bytes) -> Mapping[str, Any]:
    """Read that line, on the node.

    Raises:
        EnvironmentBroken: it is none, or of another version.
    """
    try:
        told = json.loads(line)
    except ValueError:
        told = None
    if not isinstance(told, dict) or not isinstance(told.get("do"), str):
        raise EnvironmentBroken(
            "no request came over the connection; this program is started by `gpucluster run --hosts`"
        )
    if told.get("protocol") != PROTOCOL:
        raise EnvironmentBroken(
            f"the request is of protocol {told.get('protocol')!r}, and this node's version of pytest-gpucluster speaks "
            f"{PROTOCOL}: install one version everywhere"
        )
    return told


_LAST_WORDS = 8
_CHARACTERS = 300
_CLOSE_SECONDS = 5.0
_FILES_OF_A_NODE, _FILES_OF_OURS = 8, 64
"""At most: three pipes of ssh, a log, an archive, and what is being started or closed."""
SSH_FAILED = 255
"""What ssh itself ends with where it could not connect, or has lost the connection. Source: ssh(1), EXIT STATUS."""


def make_room(nodes: int) -> None:
    """Let this process have as many open files as so many nodes take. 1,024, the usual limit, is 120 nodes.

    Raises:
        EnvironmentBroken: it may not have them.
    """
    needed = _FILES_OF_OURS + nodes * _FILES_OF_A_NODE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise EnvironmentBroken(
            f"{nodes} nodes take up to {needed} open files here, and at most {hard} are allowed: raise the limit "
            "(ulimit -Hn), or choose fewer nodes (--nodes)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Channel:
    """A process of ssh, in a session of its own: Ctrl-C on the terminal must not cut the connection.

    If this process ends, however it does, its end of the pipe is closed; ssh passes that on, and the node ends what it
    had started. Where not even that comes through, the beats stop, with the same effect.
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
        self.greeted = False
        """Whether the node has answered at all."""
        self.ended = False
        """Whether it has said that it is done. Without that its silence says nothing."""
        self._frames: SimpleQueue[Frame] = SimpleQueue()
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._say(request)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True),
        ]
        for thread in [*self._readers, threading.Thread(target=self._beat, daemon=True)]:
            thread.start()

    def drain(self) -> list[Frame]:
        """Return what the node has said since the last time."""
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._frames.get_nowait())
        for frame in found:
            self.greeted = self.greeted or frame.kind == HELLO
            self.ended = self.ended or frame.kind == END
        return found

    @property
    def closed(self) -> bool:
        """Whether ssh has ended and all that it had to say is in :meth:`drain`."""
        if self._process.poll() is None:
            return False
        self._stop.set()
        # A process of the user's own ssh configuration may hold the pipes; it has nothing to say.
        for thread in self._readers:
            thread.join(timeout=_CLOSE_SECONDS)
        return True

    @property
    def why(self) -> str:
        """What ssh, or the shell on the node, said last; or else what ssh ended with."""
        code = self._process.poll()
        said = [words for words in self._words if words]
        if said:
            return one_line(said[-1], _CHARACTERS)
        return "no word of it" if code is None else f"ssh ended with exit code {code} and said nothing"

    @property
    def exit(self) -> int | None:
        """What ssh ended with; None while it runs."""
        return self._process.poll()

    def tell(self, word: str) -> None:
        """Say something to the node: INTERRUPT or TERMINATE."""
        self._say(word.encode("ascii") + b"\n")

    def hang_up(self) -> None:
        """Close our end: the node ends what it has started, and then the connection."""
        self._stop.set()
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(OSError):  # ssh may be gone already
            self._process.stdin.close()

    def kill(self) -> None:
        """End ssh at once. The node notices it by itself."""
        self.hang_up()
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # ValueError: closed on our side. OSError: ssh is gone, as the end of its output tells better.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self.tell(BEAT)

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                frame = decode(line)
                if frame is not None:
                    self._frames.put(frame)

    def _listen(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._words.append(line.decode("utf-8", "backslashreplace").strip())


_POLL_SECONDS = 0.05
AT_ONCE = 64


@dataclass(kw_only=True)
class Reply:
    """What a node has answered.

    Attributes:
        answer: its facts; None where it gave none.
        why: what is wrong: it did not answer, or it answered that it cannot; empty where nothing is.
        text: what a program on it has printed on its standard output.
        exit: what that program ended with; None where it did not.
        greeted: our side has started on it at all.
    """

    answer: Mapping[str, Any] | None = None
    why: str = ""
    text: str = ""
    exit: int | None = None
    greeted: bool = False
    _said: list[str] = field(default_factory=list)

    def take(self, frame: Frame) -> None:
        """Take note of a line of the node."""
        if frame.kind == ANSWER:
            self.answer = frame.value
        elif frame.kind == OUT:
            self._said.append(frame.value)
        elif frame.kind == END:
            code = frame.value.get("exit")
            self.exit = code if isinstance(code, int) else None
            self.why = one_line(str(frame.value.get("error") or ""), 400)

    def close(self, channel: Channel, late: str = "") -> None:
        """Conclude when the connection is closed, or was given up, which ``late`` says."""
        self.text = "".join(self._said)
        self.greeted = channel.greeted
        if late:
            self.answer, self.why = None, late
        elif not channel.ended:
            self.answer, self.why = None, explained(channel)


def ask_node(
    hosts: Sequence[Host],
    request_of: Callable[[Host], bytes],
    access: Access,
    *,
    within_seconds: float,
    at_once: int = AT_ONCE,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Reply]:
    """Ask every host, so many at a time, and return name -> reply in their order. Nothing that was started stays.

    Args:
        hosts: whom.
        request_of: host -> what it is asked.
        access: how they are reached.
        within_seconds: the longest that each may take.
        at_once: so many.
        stop: whether to give up; who has not answered by then has no answer.

    Raises:
        EnvironmentBroken: ssh cannot be started.
    """
    replies = {host.name: Reply() for host in hosts}
    waiting, asked = deque(hosts), dict[str, tuple[Channel, float]]()
    try:
        while (waiting or asked) and not stop():
            while waiting and len(asked) < at_once:
                host = waiting.popleft()
                channel = Channel(ssh_command(host, access), request_of(host))
                asked[host.name] = channel, time.monotonic() + within_seconds
            for name, (channel, until) in list(asked.items()):
                over = channel.closed
                for frame in channel.drain():
                    replies[name].take(frame)
                late = not over and time.monotonic() > until
                if over or late:
                    del asked[name]
                    replies[name].close(channel, f"no answer within {within_seconds:g} s" if late else "")
                    channel.kill()
            time.sleep(_POLL_SECONDS)
    finally:
        for channel, _ in asked.values():
            channel.kill()
    return replies


def explained(channel: Channel) -> str:
    """Return why there is no answer, and what to do about what is seen most often."""
    why = channel.why
    hint = next((hint for words, hint in _HINTS if words in why.lower()), "")
    lost = "the connection was lost: " if channel.greeted else ""
    return f"{lost}{why}{hint}"


_HINTS = (
    ("host key verification failed", ": connect once by hand, or add its key to ~/.ssh/known_hosts"),
    ("permission denied", ": let a key in that needs no password (ssh-copy-id, or an agent)"),
    ("no module named", ": install this version of pytest-gpucluster on the node, or name its python with --python"),
    ("no such file or directory", ": name the python of the nodes with --python"),
    ("not found", ": name the python of the nodes with --python"),
)


def require_ssh(access: Access) -> None:
    """Make sure that there is an ssh.

    Raises:
        EnvironmentBroken: there is none.
    """
    if shutil.which(access.program) is None:
        raise EnvironmentBroken(f"{access.program} is not on the PATH: install OpenSSH's client")
