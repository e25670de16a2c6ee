"""Which part of the suite was asked for, and which tests the declared topology has room for."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path

import pytest

_CHOOSING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")


def only_lists(config: pytest.Config) -> bool:
    """Tell whether pytest was asked to list something and to run nothing: that needs no GPU and leaves no report."""
    return any(
        getattr(config.option, name, False) for name in ("collectonly", "showfixtures", "show_fixtures_per_test")
    )


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


def why_not_applicable(item: pytest.Item, *, ranks: int, nodes: int) -> str | None:
    """Return why a test cannot run with this many ranks and nodes, or None if it can.

    Raises:
        pytest.UsageError: a marker without a whole number says nothing, and must not be taken for "any number".
    """
    for name, have, what in (("needs_ranks", ranks, "ranks"), ("needs_nodes", nodes, "nodes")):
        marker = item.get_closest_marker(name)
        if marker is None:
            continue
        need = marker.args[0] if marker.args else marker.kwargs.get("n")
        if isinstance(need, bool) or not isinstance(need, int):
            raise pytest.UsageError(f"{item.nodeid}: the marker {name}(n) needs a whole number, not {need!r}")
        if have < need:
            return f"needs {need} {what}, and there {'is' if have == 1 else 'are'} {have}"
    return None
