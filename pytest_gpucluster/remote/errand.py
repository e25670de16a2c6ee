"""A run on one node, from its start until its reports are here."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.remote import frames
from pytest_gpucluster.remote.asking import explained
from pytest_gpucluster.remote.channel import Channel
from pytest_gpucluster.remote.frames import Frame
from pytest_gpucluster.remote.hosts import Host
from pytest_gpucluster.remote.keeper import GRACE_SECONDS
from pytest_gpucluster.remote.parcel import unpack
from pytest_gpucluster.remote.ssh_command import Access, ssh_command

HANG_UP_SECONDS = GRACE_SECONDS + 15.0
"""From the request to end until the connection is closed: the node kills what is left before that."""
_CLOSE_SECONDS = 15.0
COLLECT_SECONDS = 600.0
_LOST_SECONDS = frames.SILENT_SECONDS + GRACE_SECONDS
"""How long a node that was lost may need to notice that, and to end what runs there."""


@dataclass(frozen=True, kw_only=True)
class Brought:
    """What came of it.

    Attributes:
        exit: of the run on the node; None where nobody knows.
        seconds: how long it took, without bringing the reports.
        stopped: why it was ended from here; empty where it was not.
        why: why there is no exit code; empty where there is one.
        folder: where its reports are now; None where they could not be brought.
        missing: why not.
    """

    exit: int | None
    seconds: float
    stopped: str = ""
    why: str = ""
    folder: Path | None = None
    missing: str = ""


class Errand:
    """A run on a node. Nothing waits in here: look at it again and again."""

    def __init__(
        self,
        host: Host,
        access: Access,
        *,
        words: Sequence[str],
        directory: str,
        environ: dict[str, str],
        remote_folder: str,
        first_folder: str,
        folder: Path,
        log: Path,
        within_seconds: float,
        answer_seconds: float,
        on_line: Callable[[str, str], None] = lambda kind, line: None,
    ) -> None:
        """Start it.

        Args:
            host: the node.
            access: how it is reached.
            words: of ``gpucluster``, to run there.
            directory: to run in.
            environ: variables beside those of the node.
            remote_folder: of this run on the node.
            first_folder: that of rank 0's node, by the same path: what ranks here have written there is brought too.
            folder: where its content comes to, here. It must not be there yet.
            log: where its output goes, here.
            within_seconds: after so long it is ended.
            answer_seconds: the longest that the node may take until it says its first word.
            on_line: called with OUT or ERR and each line that it prints.

        Raises:
            EnvironmentBroken: ssh cannot be started.
            OSError: the log cannot be written.
        """
        self.host = host
        self._access, self._directory, self._remote_folder, self._folder = access, directory, remote_folder, folder
        self._first_folder = first_folder
        self._within, self._answer_within, self._on_line = within_seconds, answer_seconds, on_line
        self._started = time.monotonic()
        self._seconds = 0.0
        self._told_to_end: float | None = None
        self._told: set[str] = set()
        self._hung_up: float | None = None
        self._stopped = self._why = ""
        self._exit: int | None = None
        self._half = {frames.OUT: "", frames.ERR: ""}
        self._brought: Brought | None = None
        self._collect: Channel | None = None
        self._collect_until = 0.0
        self._archive: IO[bytes] | None = None
        self._log = log.open("wb", buffering=0)
        request = frames.request("run", words=list(words), directory=directory, env=environ, folder=remote_folder)
        try:
            self._channel = Channel(ssh_command(host, access), request)
        except EnvironmentBroken:
            self._log.close()
            raise

    @property
    def running(self) -> bool:
        """Whether the run itself is not over yet."""
        return self._collect is None and self._brought is None

    @property
    def exit(self) -> int | None:
        """What the run has ended with, as soon as that is known."""
        return self._exit

    def look(self) -> Brought | None:
        """Go on; return what came of it when all is here."""
        if self._brought is not None:
            return self._brought
        if self._collect is None:
            self._follow()
        else:
            self._take_parts(self._collect)
        return self._brought

    def tell_to_end(self, why: str, word: str = frames.TERMINATE) -> None:
        """Let the node end the run; its reports are written, and brought."""
        if not self.running or word in self._told:
            return
        self._told.add(word)
        self._stopped = self._stopped or why
        self._told_to_end = self._told_to_end or time.monotonic()
        self._channel.tell(word)

    def leave_reports(self, why: str) -> None:
        """Do not wait any longer for the reports of a run that is over: they stay on the node."""
        if self._collect is not None and self._brought is None:
            self._collect.kill()
            self._bring(None, why)

    def abandon(self) -> str:
        """Give it up at once. Return what may still run; an empty text where that is nothing."""
        was_running = self.running
        self._channel.kill()
        if self._collect is not None:
            self._collect.kill()
        self._close()
        if not was_running or self._channel.ended:
            return ""
        return f"{self.host.name}: its run was given up; the node ends it by itself within {_LOST_SECONDS:.0f} s"

    # ---- the run

    def _follow(self) -> None:
        over = self._channel.closed
        for frame in self._channel.drain():
            self._take(frame)
        now = time.monotonic()
        if over or self._channel.ended:
            self._seconds = round(now - self._started, 3)
            self._over()
        elif not self._channel.greeted and now - self._started > self._answer_within:
            self._stopped = self._stopped or f"no answer within {self._answer_within:g} s"
            self._channel.kill()
        elif self._told_to_end is None:
            if now - self._started > self._within:
                self.tell_to_end(f"no end of it within {self._within:g} s")
        elif self._hung_up is None:
            if now - self._told_to_end > HANG_UP_SECONDS:
                self._hung_up = now
                self._channel.hang_up()
        elif now - self._hung_up > _CLOSE_SECONDS:
            self._channel.kill()

    def _take(self, frame: Frame) -> None:
        if frame.kind in self._half:
            self._print(frame.kind, frame.value)
        elif frame.kind == frames.END:
            code = frame.value.get("exit")
            self._exit = code if isinstance(code, int) else None
            self._why = "" if self._exit is not None else str(frame.value.get("error") or "it has said no exit code")

    def _print(self, kind: str, text: str) -> None:
        self._keep(text)
        *lines, self._half[kind] = (self._half[kind] + text).split("\n")
        for line in lines:
            self._on_line(kind, line.rstrip("\r"))

    def _keep(self, text: str) -> None:
        self._log.write(text.encode("utf-8", "backslashreplace"))

    def _over(self) -> None:
        for kind, half in self._half.items():
            if half:
                self._on_line(kind, half)
        if not self._channel.ended:
            self._why = explained(self._channel)
            self._keep(f"{self._why}\n")
        greeted = self._channel.greeted
        lost = not self._channel.ended
        self._channel.kill()
        if not greeted:
            self._bring(None, "")
            return
        wait = _LOST_SECONDS if lost else 0.0
        request = frames.request(
            "collect",
            directory=self._directory,
            folder=self._remote_folder,
            beside=self._first_folder,
            wait_seconds=wait,
        )
        self._archive = tempfile.TemporaryFile(prefix="gpucluster-")  # noqa: SIM115  # closed when it is unpacked
        self._collect_until = time.monotonic() + COLLECT_SECONDS
        self._collect = Channel(ssh_command(self.host, self._access), request)

    # ---- its reports

    def _take_parts(self, channel: Channel) -> None:
        assert self._archive is not None
        over = channel.closed
        problem, done = "", False
        for frame in channel.drain():
            if frame.kind == frames.PART:
                self._archive.write(frame.value)
            elif frame.kind == frames.END:
                done, problem = True, str(frame.value.get("error") or "")
                code = frame.value.get("exit")
                # A run whose connection was lost has left word of its end, which is better than none.
                if self._exit is None and isinstance(code, int):
                    self._why = f"{self._why}; on the node it has ended with exit code {code}"
        if not done and not over:
            if time.monotonic() < self._collect_until:
                return
            problem = f"not here within {COLLECT_SECONDS:g} s"
        elif not done:
            problem = explained(channel)
        channel.kill()
        if not problem:
            try:
                self._folder.mkdir(parents=True)
                self._archive.seek(0)
                unpack(self._archive, self._folder)
            except EnvironmentBroken as error:
                problem = str(error)
            except OSError as error:
                problem = f"{error.filename or self._folder}: {error.strerror or error}"
        self._bring(None if problem else self._folder, problem)

    def _bring(self, folder: Path | None, problem: str) -> None:
        where = f"{self.host.name}:{self._remote_folder}"
        self._brought = Brought(
            exit=self._exit,
            seconds=self._seconds,
            stopped=self._stopped,
            why=self._why,
            folder=folder,
            missing=f"{problem}; its reports are in {where}" if problem else "",
        )
        self._close()

    def _close(self) -> None:
        self._log.close()
        if self._archive is not None:
            with contextlib.suppress(OSError):  # a temporary file that nobody needs any more
                self._archive.close()
