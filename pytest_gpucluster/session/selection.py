"""Which tests run and with which workload: the workload file, the part of the suite asked for, and marker values.

The workload is read from the file next to the collected tests before the first one runs. A test runs only where there
is room for it: ranks, nodes, a GPU, its dtypes, data. A marker of this plugin without a usable value is a usage error:
it must not be overlooked.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.config.workload_loader import FILE_NAME, Loaded, Override, find, load
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.metrics.datasheets import PEAK_UNITS, Sku
from pytest_gpucluster.metrics.units import did_you_mean
from pytest_gpucluster.session.training_inputs import DATA_NAMES

FIXTURE = "gpucluster_workload"


def read_workload(
    items: Sequence[pytest.Item], *, root: Path, profile: str, overrides: Sequence[Override] = ()
) -> Loaded | None:
    """Return the workload of these tests, or None if none of them uses the fixture ``workload``.

    Args:
        items: the collected tests.
        root: pytest's root directory. The file lies next to the tests, or in a folder above them up to this one.
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
                f"{item.nodeid} uses the fixture {FIXTURE}, and there is no {FILE_NAME} next to it or in a folder above"
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
    """Return whether the test gets this plugin's own fixture, and not one of the same name from its conftest."""
    known: Any = getattr(item, "_fixtureinfo", None)  # of functions only
    definitions: Sequence[Any] = known.name2fixturedefs.get(FIXTURE) or () if known is not None else ()
    return len(definitions) > 0 and definitions[-1].func.__module__ == "pytest_gpucluster.fixtures"


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


SCHEDULERS = ("slurm", "kubernetes")
LISTING = ("collectonly", "showfixtures", "show_fixtures_per_test")
"""Options of pytest by which it lists something and runs nothing."""
_CHOOSING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")


def only_lists(config: pytest.Config) -> bool:
    """Return whether pytest was asked to list something and to run nothing: that needs no GPU and leaves no report."""
    return any(getattr(config.option, name, False) for name in LISTING)


def is_selection(config: pytest.Config) -> bool:
    """Return whether only a part of the suite was asked for: by ``-k``, ``-m``, the cache, a file or a single test.

    The whole suite is ``testpaths``, or else what lies below the root directory; a directory that holds all of it is
    no selection.
    """
    if any(getattr(config.option, name, None) for name in _CHOOSING):
        return True
    overridden = getattr(config.option, "override_ini", None) or []
    if any(setting.startswith(("python_", "testpaths", "norecursedirs")) for setting in overridden):
        return True
    patterns = [str(config.rootpath / path) for path in config.getini("testpaths")]
    found = [path for pattern in patterns for path in glob.glob(pattern, recursive=True)] or [str(config.rootpath)]
    whole = [Path(path).resolve() for path in found]
    return bool(config.args) and not _covers(config.args, whole, config.invocation_params.dir)


def _covers(arguments: Sequence[str], whole: Sequence[Path], directory: Path) -> bool:
    asked = [(directory / argument.partition("::")[0]).resolve() for argument in arguments]
    if any("::" in argument for argument in arguments):
        return False
    return all(any(path == part or path in part.parents for path in asked) for part in whole)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What there is to run a test on."""

    ranks: int
    nodes: int
    ranks_per_node: int
    on_cpu: bool = False
    data_sheet: Callable[[], Sku | None] = lambda: None
    """What is known of the GPUs, asked for where a test depends on it. None on cpu, and for an unknown GPU."""
    data: frozenset[str] = frozenset()
    """Names of what ``--gpucluster-data`` gives."""
    scheduler: str | None = None
    """Whose job this is: "slurm", "kubernetes", or None."""


def why_not_applicable(item: pytest.Item, room: Room) -> str | None:
    """Return why a test cannot run here, or None if it can.

    Raises:
        pytest.UsageError: a marker that says nothing usable, such as one without a number, must not be taken for
            "always".
    """
    for name, have, what in (
        ("needs_ranks", room.ranks, "ranks"),
        ("needs_nodes", room.nodes, "nodes"),
        ("needs_local_ranks", room.ranks_per_node, "ranks on each node"),
    ):
        need = _value_of(item, name, "n")
        if need is _NO_MARKER:
            continue
        if isinstance(need, bool) or not isinstance(need, int):
            raise pytest.UsageError(f"{item.nodeid}: the marker {name}(n) needs a whole number, not {need!r}")
        if have < need:
            return f"needs {need} {what}, and there {'is' if have == 1 else 'are'} {have}"
    reasons = (_without_gpu, _without_peak, _without_data, _without_scheduler)
    return next((why for reason in reasons if (why := reason(item, room)) is not None), None)


def _without_gpu(item: pytest.Item, room: Room) -> str | None:
    value = _value_of(item, "needs_gpu", "")
    if value is not _NO_MARKER and value is not None:
        raise pytest.UsageError(f"{item.nodeid}: the marker needs_gpu takes no value, and has {value!r}")
    return "needs a GPU, and this is a rehearsal on cpu" if room.on_cpu and value is None else None


def _without_peak(item: pytest.Item, room: Room) -> str | None:
    name = _value_of(item, "needs_peak", "name")
    if name is _NO_MARKER:
        return None
    if name not in PEAK_UNITS:
        hint = did_you_mean(name, PEAK_UNITS) if isinstance(name, str) else ""
        raise pytest.UsageError(
            f"{item.nodeid}: the marker needs_peak(name) needs one of {', '.join(PEAK_UNITS)}, not {name!r}{hint}"
        )
    sku = room.data_sheet()
    if sku is None or sku.peaks is None or getattr(sku.peaks, name) is not None:
        return None
    return f"needs {name}, and the data sheet of {sku.name} has none"


def _without_data(item: pytest.Item, room: Room) -> str | None:
    name = _value_of(item, "needs_data", "name")
    if name is _NO_MARKER:
        return None
    if name not in DATA_NAMES:
        hint = did_you_mean(name, DATA_NAMES) if isinstance(name, str) else ""
        raise pytest.UsageError(
            f"{item.nodeid}: the marker needs_data(name) needs one of {', '.join(DATA_NAMES)}, not {name!r}{hint}"
        )
    return None if name in room.data else f"needs --gpucluster-data {name}=PATH, and it was not given"


def _without_scheduler(item: pytest.Item, room: Room) -> str | None:
    name = _value_of(item, "needs_scheduler", "name")
    if name is _NO_MARKER:
        return None
    if name not in SCHEDULERS:
        hint = did_you_mean(name, SCHEDULERS) if isinstance(name, str) else ""
        raise pytest.UsageError(
            f"{item.nodeid}: the marker needs_scheduler(name) needs one of {', '.join(SCHEDULERS)}, not {name!r}{hint}"
        )
    return None if room.scheduler == name else f"needs a job of {name}, and this is none"


_NO_MARKER = object()


def _value_of(item: pytest.Item, marker_name: str, parameter: str) -> Any:
    """Return the marker's one value, None where it has none, or _NO_MARKER."""
    marker = item.get_closest_marker(marker_name)
    if marker is None:
        return _NO_MARKER
    return marker.args[0] if marker.args else marker.kwargs.get(parameter)


def criterion_of(item: pytest.Item) -> str | None:
    """Return the name in the test's ``criterion`` marker, or None for a test that is no criterion.

    Raises:
        pytest.UsageError: a criterion without a name.
    """
    found, name = _value(item, "criterion", "name")
    if not found:
        return None
    if not isinstance(name, str) or not name.strip():
        raise pytest.UsageError(f"{item.nodeid}: the marker criterion(name) needs a name, not {name!r}")
    return name


def deadline_of(item: pytest.Item, default: float) -> float:
    """Return how many seconds each phase of the test may take.

    Raises:
        pytest.UsageError: a deadline that is no positive number.
    """
    found, seconds = _value(item, "deadline", "seconds")
    if not found:
        return default
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker deadline(seconds) needs a positive number of seconds, not {seconds!r}"
        )
    return float(seconds)


def turn_of(item: pytest.Item) -> tuple[int, float]:
    """Return the sort key of the order in which tests run.

    First those with the marker ``first``, by its number, without one after those that have one; then the tests without
    a marker of the order; then ``soak``; then ``last``.

    Raises:
        pytest.UsageError: a place in the order that is no number.
    """
    found, place = _value(item, "first", "place")
    if found:
        if isinstance(place, bool) or not isinstance(place, (int, float, type(None))):
            raise pytest.UsageError(f"{item.nodeid}: the marker first(place) needs a number, not {place!r}")
        return 0, math.inf if place is None else float(place)
    if item.get_closest_marker("last") is not None:
        return 3, 0.0
    return (1, 0.0) if item.get_closest_marker("soak") is None else (2, 0.0)


def require_usable(items: list[pytest.Item]) -> None:
    """Look at the markers of all tests before the first one runs.

    Raises:
        pytest.UsageError: as the functions above.
    """
    for item in items:
        criterion_of(item)
        deadline_of(item, 1.0)
        turn_of(item)


def _value(item: pytest.Item, marker_name: str, parameter: str) -> tuple[bool, Any]:
    marker = item.get_closest_marker(marker_name)
    if marker is None:
        return False, None
    return True, marker.args[0] if marker.args else marker.kwargs.get(parameter)
