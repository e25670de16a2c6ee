"""Which part of the suite was asked for, and which tests there is room for: ranks, nodes, a GPU, its dtypes, data."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.metrics.datasheets import PEAK_UNITS, Sku
from pytest_gpucluster.metrics.units import did_you_mean
from pytest_gpucluster.training_inputs import DATA_NAMES

SCHEDULERS = ("slurm", "kubernetes")
LISTING = ("collectonly", "showfixtures", "show_fixtures_per_test")
"""Options of pytest by which it lists something and runs nothing."""
_CHOOSING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")


def only_lists(config: pytest.Config) -> bool:
    """Tell whether pytest was asked to list something and to run nothing: that needs no GPU and leaves no report."""
    return any(getattr(config.option, name, False) for name in LISTING)


def is_selection(config: pytest.Config) -> bool:
    """Tell whether only a part of the suite was asked for: by ``-k``, ``-m``, the cache, a file or a single test.

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
