"""Which part of the suite was asked for, and which tests the declared topology has room for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

_CHOOSING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")


def is_selection(config: pytest.Config) -> bool:
    """Tell whether only a part of the suite was asked for: by ``-k``, ``-m``, the cache, a file or a single test.

    A directory that holds the whole of ``testpaths`` is the whole suite.
    """
    if any(getattr(config.option, name, None) for name in _CHOOSING):
        return True
    whole = [(config.rootpath / path).resolve() for path in config.getini("testpaths")]
    return bool(config.args) and not _covers(config.args, whole, config.invocation_params.dir)


def _covers(arguments: Sequence[str], whole: Sequence[Path], directory: Path) -> bool:
    asked = [(directory / argument.partition("::")[0]).resolve() for argument in arguments]
    if any("::" in argument for argument in arguments) or not all(path.is_dir() for path in asked):
        return False
    return all(any(path == part or path in part.parents for path in asked) for part in whole)


def why_not_applicable(item: pytest.Item, *, ranks: int, nodes: int) -> str | None:
    """Return why a test cannot run with this many ranks and nodes, or None if it can."""
    for name, have, what in (("needs_ranks", ranks, "ranks"), ("needs_nodes", nodes, "nodes")):
        marker = item.get_closest_marker(name)
        if marker is not None and marker.args and have < int(marker.args[0]):
            return f"needs {marker.args[0]} {what}, and there {'is' if have == 1 else 'are'} {have}"
    return None
