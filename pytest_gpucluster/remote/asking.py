"""One short question to many nodes, with a deadline for each of them."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.remote import frames
from pytest_gpucluster.remote.channel import Channel
from pytest_gpucluster.remote.hosts import Host
from pytest_gpucluster.remote.ssh_command import Access, ssh_command
from pytest_gpucluster.text import one_line

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

    def take(self, frame: frames.Frame) -> None:
        """Take note of a line of the node."""
        if frame.kind == frames.ANSWER:
            self.answer = frame.value
        elif frame.kind == frames.OUT:
            self._said.append(frame.value)
        elif frame.kind == frames.END:
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


def ask(
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
