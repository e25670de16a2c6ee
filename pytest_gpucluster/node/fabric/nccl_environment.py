"""The variables that change what NCCL, UCX and CUDA do: their values on each rank, and where each is from.

NCCL reads files as well: what is not set in the environment it takes from ``NCCL_CONF_FILE`` or else ``~/.nccl.conf``,
and then from ``/etc/nccl.conf``. Source: NCCL, src/misc/param.cc, initEnv and setEnvFile; NCCL user guide,
"Environment Variables".
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.device.environment import NO_CACHE, NVLS, NVLS_OFF_BY_SUITE
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.node.fabric import nccl_log

ENVIRONMENT = "environment"
PREFIXES = ("NCCL_", "UCX_")
ALSO = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "TORCH_DISTRIBUTED_DEBUG")
"""Further variables of interest."""
SYSTEM_FILE = Path("/etc/nccl.conf")
USER_FILE = ".nccl.conf"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A variable that is set. ``origin``: "environment" or a file's path; ``instead_of``: overridden values."""

    name: str
    value: str
    origin: str
    instead_of: tuple[str, ...] = ()

    def __str__(self) -> str:
        over = f", instead of {' and '.join(self.instead_of)}" if self.instead_of else ""
        return f"{self.name}={self.value} ({self.origin}{over})"


def home() -> Path | None:
    """Return this user's home as NCCL finds it, which is not ``$HOME``; None where the user is unknown."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def read_environment(
    environ: Mapping[str, str],
    *,
    home_of_user: Callable[[], Path | None] = home,
    system_file: Path = SYSTEM_FILE,
) -> tuple[Setting, ...]:
    """Return every variable of interest that is set, by name, without those that this suite has set."""
    own = set(nccl_log.own_settings(environ))  # this suite's, as those of the next two lines
    own |= {NO_CACHE} if environ.get(NO_CACHE) == NVLS else set()
    own |= {NVLS} if environ.get(NVLS_OFF_BY_SUITE) else set()
    user = home_of_user()
    named = environ.get("NCCL_CONF_FILE")
    files = [Path(named)] if named else [user / USER_FILE] if user is not None else []
    lines = [(name, value, ENVIRONMENT) for name, value in environ.items()]
    lines += [(name, value, str(file)) for file in (*files, system_file) for name, value in _lines(file)]
    found = grouped(
        (name, (value, origin))
        for name, value, origin in lines
        if (name.startswith(PREFIXES) or name in ALSO) and name not in own
    )
    return tuple(
        Setting(
            name=name,
            value=values[0][0],
            origin=values[0][1],
            instead_of=tuple(f"{value} ({origin})" for value, origin in values[1:] if value != values[0][0]),
        )
        for name, values in sorted(found.items())
    )


def effective(settings: Sequence[Setting]) -> dict[str, str]:
    """Return name -> value."""
    return {setting.name: setting.value for setting in settings}


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and value of each line as NCCL does: a blank before ``=`` is a part of the name."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # NCCL ignores it, too
    for line in text.split("\n"):
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            yield name, value
