"""Why a run ends before its last test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why the run ends before its last test, and with which exit code."""

    name: str
    message: str
    exit: int
    culprits: Sequence[int] = ()
    text: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "message": self.message,
            "exit": self.exit,
            "culprits": list(self.culprits),
            "text": self.text,
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Ending:
        """Read what :meth:`to_json` wrote; other keys are left alone."""
        known = {name: body[name] for name in ("name", "message", "exit", "culprits", "text") if name in body}
        return cls(**known)
