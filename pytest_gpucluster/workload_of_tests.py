"""Which workload the collected tests measure with: the file beside them, read before the first one runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.config.workload_loader import FILE_NAME, Loaded, Override, find, load
from pytest_gpucluster.errors import ThresholdsError

FIXTURE = "workload"


def read_workload(
    items: Sequence[pytest.Item], *, root: Path, profile: str, overrides: Sequence[Override] = ()
) -> Loaded | None:
    """Return the workload of these tests, or None if none of them uses the fixture ``workload``.

    Args:
        items: the collected tests.
        root: pytest's root directory. The file lies beside the tests, or in a folder above them up to this one.
        profile: the one in force.
        overrides: what the operator has changed.

    Raises:
        ThresholdsError: there is no file, or more than one, or it is malformed, or does not go with the overrides.
    """
    files: dict[Path, str] = {}
    for item in items:
        if not _uses_fixture(item):
            continue
        found = find(item.path.parent, root)
        if found is None:
            raise ThresholdsError(
                f"{item.nodeid} uses the fixture {FIXTURE}, and there is no {FILE_NAME} beside it or in a folder above"
                f" it up to {root}; write one as acceptance/{FILE_NAME} of pytest-gpucluster is written"
            )
        files.setdefault(found, item.nodeid)
    if len(files) > 1:
        listed = " and ".join(f"{_shown(path, root)} (for {nodeid})" for path, nodeid in list(files.items())[:2])
        raise ThresholdsError(
            f"two workloads in one run: {listed}; run these tests apart, or keep one {FILE_NAME} above both"
        )
    for path in files:
        return load(path, profile=profile, overrides=overrides, name=_shown(path, root))
    return None


def _uses_fixture(item: pytest.Item) -> bool:
    """Tell whether the test gets this plugin's own fixture, and not one of the same name from its conftest."""
    known: Any = getattr(item, "_fixtureinfo", None)  # of functions only
    definitions: Sequence[Any] = known.name2fixturedefs.get(FIXTURE) or () if known is not None else ()
    return len(definitions) > 0 and definitions[-1].func.__module__ == f"{__package__}.fixtures"


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
