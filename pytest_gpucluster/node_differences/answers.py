"""What nodes have told of themselves: one file of JSON each, as ``gpucluster info all --json`` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.text import one_line

SUFFIX = ".json"
VIEW, SCHEMA_VERSION = "all", 1
"""What can be compared: all that a node is, by the names of docs/info.md, and the version of these names."""
_MOST_BYTES = 16 * 2**20
_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Who has answered what.

    Attributes:
        told: node -> what ``gpucluster info`` has told there.
        without: node -> why nothing is known of it.
        uninvited: nodes that have answered and were not expected.
    """

    told: Mapping[str, Mapping[str, Any]]
    without: Mapping[str, str]
    uninvited: tuple[str, ...] = ()


def read(folder: Path, expected: Sequence[str] = ()) -> Answers:
    """Return the answers in a folder. Each is a file with the node's name and ``.json`` behind it.

    Args:
        folder: with the files; others in it are passed over.
        expected: nodes that should have answered; none for those that have.

    Raises:
        OSError: the folder cannot be read.
    """
    paths = {path.name.removesuffix(SUFFIX): path for path in folder.iterdir() if _is_answer(path)}
    told: dict[str, Mapping[str, Any]] = {}
    without = {node: "no answer" for node in expected if node not in paths}
    for node in sorted(paths):
        found = _read(paths[node])
        if isinstance(found, str):
            without[node] = found
        else:
            told[node] = found
    uninvited = tuple(sorted(set(paths) - set(expected))) if expected else ()
    return Answers(told=told, without=dict(sorted(without.items())), uninvited=uninvited)


def _is_answer(path: Path) -> bool:
    return path.name.endswith(SUFFIX) and not path.name.startswith(".")


def _read(path: Path) -> Mapping[str, Any] | str:
    """Return what a file tells, or why that is nothing."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return f"{path.name} is larger than {_MOST_BYTES >> 20} MiB"
        told = json.loads(path.read_bytes())
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        return one_line(f"{path.name} is no JSON: {error}", _CHARACTERS)
    if not isinstance(told, dict) or "schema_version" not in told or "host" not in told:
        return f"{path.name} was not written by `gpucluster info --json`"
    if told["schema_version"] != SCHEMA_VERSION or told.get("view") != VIEW:
        found = f"version {told['schema_version']!r}, view {told.get('view')!r}"
        return one_line(f"{path.name} is not of `gpucluster info all --json` of this version: {found}", _CHARACTERS)
    return told
