"""The kinds of reports, the names of their files, and writing them into a folder.

A report that cannot be rendered never prevents another one: the problem is returned instead.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pytest_gpucluster import files
from pytest_gpucluster.journal.journal import Journal

_KINDS = {
    "junitxml": ("junit.xml", "junit"),
    "html": ("report.html", "html.page"),
    "json": ("results.json", "results_json"),
    "prometheus": ("metrics.prom", "prometheus"),
    "markdown": ("report.md", "markdown"),
    "text": ("report.txt", "terminal"),
}
FILES: Mapping[str, str] = MappingProxyType({kind: file for kind, (file, _) in _KINDS.items()})
"""Kind of report -> the name of its file."""

OF_A_RUN = ("json", "prometheus", "html")
"""Those that every run writes next to its journal and JUnit file. The slowest comes last."""

FILES_OF_A_RUN = tuple(FILES[kind] for kind in OF_A_RUN)

_LABELS = {
    "journal": "journal.jsonl",
    "JUnit": FILES["junitxml"],
    "report": FILES["html"],
    "results": FILES["json"],
    "metrics": FILES["prometheus"],
    "exclude": "exclude.txt",
}
"""The files in a run's folder, by the labels in the terminal."""

RENDER_HINT = "gpucluster report {} --all DIR renders it again"
"""What to do about a missing report."""


def existing_files(folder: Path, *, junit: Path | None = None) -> list[tuple[str, str]]:
    """Return label and path of the files of a run that exist. ``junit``: path of the JUnit file if it is elsewhere."""
    places = [(name, folder / file) for name, file in _LABELS.items()]
    places = [(name, junit if name == "JUnit" and junit is not None else path) for name, path in places]
    return [(name, str(path)) for name, path in places if path.exists()]


def render(kind: str, journal: Journal, *, folder: Path | None = None, page_folder: Path | None = None) -> str:
    """Return a report. Only the modules that it needs are imported.

    Args:
        kind: one of ``FILES``.
        journal: of the run.
        folder: of the run, for the artifacts in the page.
        page_folder: where the page will be; by default the run's folder.
    """
    module = _module(kind)
    more: dict[str, Any] = {"folder": folder, "page_folder": page_folder} if kind == "html" else {}
    return str(module.render(journal, **more))


def _module(kind: str) -> Any:
    return importlib.import_module(f"pytest_gpucluster.reports.{_KINDS[kind][1]}")


def prepare(kinds: Iterable[str] = OF_A_RUN) -> None:
    """Import what reports need, early: at the end of the run the disk may have failed, and time is limited."""
    for kind in kinds:
        with contextlib.suppress(Exception):  # reported when it is to be rendered
            _module(kind)


def write(
    journal: Journal, folder: Path, kinds: Iterable[str] = OF_A_RUN, *, run_folder: Path | None = None
) -> dict[str, str]:
    """Write reports into a folder, each atomically. ``run_folder``: of the run, if it is another one.

    Returns:
        Name of each missing file -> why.
    """
    missing = {}
    for kind in kinds:
        name = FILES[kind]
        try:
            files.atomic_write(folder / name, render(kind, journal, folder=run_folder or folder, page_folder=folder))
        except OSError as error:
            missing[name] = f"not written: {error.strerror or error}"
        except Exception as error:  # a failure of one report must not prevent the others
            missing[name] = f"cannot be rendered: {type(error).__name__}: {error}"
    return missing
