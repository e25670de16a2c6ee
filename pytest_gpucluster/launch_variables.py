"""A launcher's environment variables, read strictly: every complaint about them is kept for one error."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pytest_gpucluster.errors import LaunchError

_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|\[::1\]", re.IGNORECASE)


class LaunchVariables:
    """Reads one source's variables and keeps every complaint, so that one error can name them all."""

    def __init__(self, environ: Mapping[str, str], hostname: str, source: str, remedy: str) -> None:
        self._environ, self._hostname, self._source, self._remedy = environ, hostname, source, remedy
        self._seen: list[str] = []
        self._numbers: dict[str, int] = {}
        self._complaints: list[str] = []

    def text(self, name: str, default: str | None = None) -> str:
        """Read a text. An empty variable is a missing one."""
        if name not in self._seen:
            self._seen.append(name)
        value = self._environ.get(name, "")
        if value:
            return value
        if default is None:
            self.complain(f"{name} is {'empty' if name in self._environ else 'missing'}")
        return default or ""

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int | None = None) -> int:
        """Read a whole number. A bad one becomes a complaint, and `least` stands in to go on reading."""
        value = self.text(name, None if default is None else str(default))
        if not value:
            return least
        if not re.fullmatch(r"\d{1,18}", value, re.ASCII):
            self.complain(f"{name}={value!r} is not a whole number of at least {least}")
            return least
        if int(value) < least or (most is not None and int(value) > most):
            allowed = f"at least {least}" if most is None else f"between {least} and {most}"
            self.complain(f"{name}={value} is not {allowed}")
            return least
        self._numbers[name] = int(value)
        return int(value)

    def below(self, index: str, count: str) -> None:
        """Complain where an index is not below its count. What could not be read was reported already."""
        numbers = self._numbers
        if index in numbers and count in numbers and numbers[index] >= numbers[count]:
            self.complain(f"{index}={numbers[index]} is not below {count}={numbers[count]}")

    def at_most(self, part: str, whole: str) -> None:
        """Complain where a part is more than the whole."""
        numbers = self._numbers
        if part in numbers and whole in numbers and numbers[part] > numbers[whole]:
            self.complain(f"{part}={numbers[part]} is above {whole}={numbers[whole]}")

    def master_addr(self, default: str | None, *, nnodes: int, name: str = "MASTER_ADDR") -> str:
        """Read the address of rank 0, which must not mean each node itself."""
        address = self.text(name, default)
        if nnodes > 1 and _LOOPBACK.fullmatch(address):
            self.complain(f"{name}={address} is this node itself, but the ranks are on {nnodes} nodes")
        return address

    def master_port(self, default: int | None, *, name: str = "MASTER_PORT") -> int:
        """Read the port of rank 0's store."""
        return self.number(name, default, least=1, most=65535)

    def complain(self, text: str) -> None:
        """Remember what is wrong."""
        if text not in self._complaints:
            self._complaints.append(text)

    def settle(self) -> None:
        """Raise everything that was found wrong as one error."""
        if not self._complaints:
            return
        found = " ".join(f"{name}={self._environ[name]}" for name in self._seen if name in self._environ)
        raise LaunchError(
            f"{self._hostname}: the variables of {self._source} do not make a rank: "
            + "; ".join(self._complaints)
            + f"\nfound: {found or 'none of them'}\nwhat to do: {self._remedy}"
        )
