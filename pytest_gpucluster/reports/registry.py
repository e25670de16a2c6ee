"""Which reports there are, what their files are called, and how they come into a folder.

A report that cannot be made never prevents another one: the problem is reported instead.
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
from pytest_gpucluster.journal.records import JUnitOptions

FILES: Mapping[str, str] = MappingProxyType(
    {
        "junitxml": "junit.xml",
        "html": "report.html",
        "json": "results.json",
        "prometheus": "metrics.prom",
        "markdown": "report.md",
        "text": "report.txt",
    }
)
"""Kind of report -> the name of its file."""

_MODULES = {
    "junitxml": "pytest_gpucluster.reports.junit",
    "html": "pytest_gpucluster.reports.html.page",
    "json": "pytest_gpucluster.reports.results_json",
    "prometheus": "pytest_gpucluster.reports.prometheus",
    "markdown": "pytest_gpucluster.reports.markdown",
    "text": "pytest_gpucluster.reports.terminal",
}

OF_A_RUN = ("json", "prometheus", "html")
"""Those that every run leaves beside its journal and its JUnit file. The one that takes longest comes last."""

FILES_OF_A_RUN = tuple(FILES[kind] for kind in OF_A_RUN)

_TOLD = {
    "journal": "journal.jsonl",
    "JUnit": FILES["junitxml"],
    "report": FILES["html"],
    "results": FILES["json"],
    "metrics": FILES["prometheus"],
    "exclude": "exclude.txt",
}
"""What a run leaves in its folder, under the names by which people are told where it is."""

AGAIN = "gpucluster report {} --all DIR renders it again"
"""What to do about one that is missing."""


def found_in(folder: Path, *, junit: Path | None = None) -> list[tuple[str, str]]:
    """Return name and path of what a run has left and is there; ``junit`` where that lies elsewhere."""
    places = [(name, folder / file) for name, file in _TOLD.items()]
    places = [(name, junit if name == "JUnit" and junit is not None else path) for name, path in places]
    return [(name, str(path)) for name, path in places if path.exists()]


def rendered(
    kind: str,
    journal: Journal,
    *,
    folder: Path | None = None,
    page_folder: Path | None = None,
    junit_options: JUnitOptions | None = None,
) -> str:
    """Return a report. Only what it needs is imported.

    Args:
        kind: one of ``FILES``.
        journal: of the run.
        folder: of the run, for what the page takes from artifacts.
        page_folder: where the page will lie; by default the run's folder.
        junit_options: pytest's settings for the JUnit file, by default the run's own.
    """
    module: Any = importlib.import_module(_MODULES[kind])
    more: dict[str, Any] = {}
    if kind == "junitxml":
        more = {"options": junit_options}
    elif kind == "html":
        more = {"folder": folder, "page_folder": page_folder}
    return str(module.render(journal, **more))


def prepare(kinds: Iterable[str] = OF_A_RUN) -> None:
    """Import what reports need, so that their time is not spent on that, nor on a disk that is in trouble by then."""
    for kind in kinds:
        with contextlib.suppress(Exception):  # whatever is wrong with one is told when it is to be rendered
            importlib.import_module(_MODULES[kind])


def write(journal: Journal, folder: Path, kinds: Iterable[str] = OF_A_RUN) -> dict[str, str]:
    """Write reports into the folder of a run, each whole or not at all.

    Returns:
        Name of each file that is not there -> why.
    """
    missing = {}
    for kind in kinds:
        name = FILES[kind]
        try:
            files.atomic_write(folder / name, rendered(kind, journal, folder=folder))
        except OSError as error:
            missing[name] = f"not written: {error.strerror or error}"
        except Exception as error:  # whatever one report trips over, the others are made
            missing[name] = f"cannot be rendered: {type(error).__name__}: {error}"
    return missing
