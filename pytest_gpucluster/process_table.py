"""Who a process is, for an operator who has to find and end it."""

from __future__ import annotations

import pwd
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_LONGEST_COMMAND = 120


@dataclass(frozen=True, kw_only=True)
class Who:
    """A process as far as this host shows it; ``known`` is False for one that this process table does not have."""

    pid: int
    user: str = ""
    command: str = ""
    known: bool = True

    def __str__(self) -> str:
        if not self.known:
            return f"pid {self.pid}, which this host or container does not show"
        return f"pid {self.pid} of user {self.user or 'unknown'} ({self.command or 'no command'})"


def who_is(pid: int, proc: Path = PROC) -> Who:
    """Look a process up. Source: proc_pid_status(5), proc_pid_cmdline(5), proc_pid_comm(5)."""
    folder = proc / str(pid)
    try:
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Who(pid=pid, known=False)
    uid = next((line.split()[1] for line in status.splitlines() if line.startswith("Uid:")), "")
    return Who(pid=pid, user=_user(uid), command=_command(folder))


def _user(uid: str) -> str:
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return f"uid {uid}" if uid else ""


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        # A zombie has no command line any more; its name stays.
        words = words or (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    words = " ".join(words.split())
    return words if len(words) <= _LONGEST_COMMAND else f"{words[:_LONGEST_COMMAND]}..."
