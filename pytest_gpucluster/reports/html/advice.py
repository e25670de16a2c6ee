"""What was found and what is to be done about it, taken from the text of a failure.

Checks of GPUs and nodes write a line for each finding (``health.finding``); other failures end with "what to do: ...".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_gpucluster.reports.html.readable import line

_MOST = 64
_FINDING = re.compile(
    r"(?P<who>.{1,400}?): (?P<code>[a-z][\w.-]{0,60}) \((?P<kind>hardware|environment|note)\): (?P<found>.+?)"
    r"; allowed: (?P<allowed>.+?); what to do: (?P<remedy>.+)"
)
_REMEDY = re.compile(r"what to do: *(?P<remedy>.+)")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A finding with its fix. All but ``remedy`` may be empty."""

    who: str = ""
    code: str = ""
    kind: str = ""
    found: str = ""
    allowed: str = ""
    remedy: str


def advice_in(texts: Iterable[str]) -> tuple[Advice, ...]:
    """Return what the lines of some texts advise, each once, in their order."""
    found: dict[Advice, None] = {}
    for text in texts:
        for raw in text.splitlines():
            stripped = raw.strip()
            # A line that quotes source code or a pytest marker is no advice of its own.
            if stripped.startswith((">", "raise ", "E  ")):
                stripped = stripped.lstrip("E ") if stripped.startswith("E  ") else ""
            match = _FINDING.fullmatch(stripped) or _REMEDY.fullmatch(stripped)
            if match is not None and len(found) < _MOST:
                found.setdefault(Advice(**{name: line(told) for name, told in match.groupdict().items()}))
    return tuple(found)
