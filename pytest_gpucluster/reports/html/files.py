"""Links from a page to the files of its run: only to those that are there, and as they lie from where the page is."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pytest_gpucluster.journal import FILE_NAME
from pytest_gpucluster.run_directory import ARTIFACTS, artifacts_name

_OF_THE_RUN = (FILE_NAME, "junit.xml", "results.json", "metrics.prom", "exclude.txt")
_MOST_LINKS = 40
_MOST_LOOKED_AT = 2000


@dataclass(frozen=True, kw_only=True)
class Link:
    """A file. ``href`` is relative, and has no characters that mean anything else than a path."""

    name: str
    href: str
    size: str


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The folder of a run, seen from the folder in which the page lies; both None where nothing is known of them."""

    folder: Path | None
    page_folder: Path | None

    @property
    def journal(self) -> Link | None:
        """Return the journal, which holds every sample."""
        return next((link for link in self.of_the_run() if link.name == FILE_NAME), None)

    def of_the_run(self) -> tuple[Link, ...]:
        """Return the journal and the reports beside it."""
        if self.folder is None:
            return ()
        paths = (self.folder / name for name in _OF_THE_RUN)
        return tuple(self._link(path, path.name) for path in paths if path.is_file())

    def of_test(self, nodeid: str) -> tuple[tuple[Link, ...], str]:
        """Return the files that a test has left, and what of them is not listed. Links are not followed."""
        if self.folder is None:
            return (), ""
        # What a rank of a local run has left lies in a folder of its own.
        name = artifacts_name(nodeid)
        folder = self.folder / ARTIFACTS
        found: list[tuple[Path, str]] = []
        for place in (folder / name, *sorted(folder.glob(f"rank-*/{_literal(name)}"), key=_numbered)):
            rank = "" if place.parent == folder else f"{place.parent.name}/"
            for path in _files(place):
                found.append((path, f"{rank}{path.relative_to(place)}"))
                if len(found) > _MOST_LOOKED_AT:
                    break
        shown = tuple(self._link(path, told) for path, told in found[:_MOST_LINKS])
        more = len(found) - len(shown)
        amount = "more than " if len(found) > _MOST_LOOKED_AT else ""
        return shown, f"and {amount}{more} more in {ARTIFACTS}/{name}" if more else ""

    def _link(self, path: Path, name: str) -> Link:
        base = self.page_folder or self.folder
        assert base is not None
        relative = os.path.relpath(os.path.abspath(path), os.path.abspath(base))
        # A first part with a colon would be taken for a scheme: the dot before it says that it is a path.
        href = "./" + quote(Path(relative).as_posix().encode("utf-8", "surrogateescape"), safe="/")
        return Link(name=name, href=href, size=_size(path))


def _files(place: Path) -> Iterator[Path]:
    if place.is_symlink():
        return
    for directory, names, files in os.walk(place, followlinks=False):
        names.sort(key=_numbered)
        for name in sorted(files, key=_numbered):
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield path


def _numbered(name: object) -> list[tuple[str, int]]:
    """Return a key by which rank-2 comes before rank-10."""
    parts = re.findall(r"([^0-9]*)([0-9]{0,18})", str(name))
    return [(text, int(digits or -1)) for text, digits in parts]


def _literal(name: str) -> str:
    # artifacts_name leaves no character that a pattern would take for its own, but says so nowhere.
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _size(path: Path) -> str:
    try:
        size = float(path.stat().st_size)
    except OSError:
        return "size unknown"
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("GB is the last unit")
