"""One ssh that is under way: what its node says, and a heart that beats for as long as this process lives."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import IO

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.remote import frames
from pytest_gpucluster.remote.frames import Frame
from pytest_gpucluster.text import one_line

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
            self.greeted = self.greeted or frame.kind == frames.HELLO
            self.ended = self.ended or frame.kind == frames.END
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
        while not self._stop.wait(frames.BEAT_SECONDS):
            self.tell(frames.BEAT)

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                frame = frames.decode(line)
                if frame is not None:
                    self._frames.put(frame)

    def _listen(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                self._words.append(line.decode("utf-8", "backslashreplace").strip())
