"""Whether pytest would take these arguments, and whether they select anything of the suite."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from _pytest.config import PrintHelp
from _pytest.mark.expression import Expression
from doc_pages import ROOT
from suite_names import Item, within

from pytest_gpucluster import options, plugin
from pytest_gpucluster.errors import GpuClusterError

INSTALLED = "/opt/pytest-gpucluster/"
"""Where the suite lies in the image: what is below it there is what is below the repository here."""
_ANSWERS = re.compile(r"\b(?:and|or|not|True|False)\b")


class Wrong(Exception):
    """What is wrong with a command that a page shows."""


def check_pytest(
    arguments: Sequence[str], config: pytest.Config, items: Sequence[Item], made: Collection[str] = ()
) -> None:
    """Hold arguments against pytest's own parser with all plugins, against every option of ours, and the suite.

    Args:
        arguments: what follows `pytest`.
        config: of a session in which the plugin is installed.
        items: of the acceptance suite.
        made: files that the page itself has shown.

    Raises:
        Wrong: with what is wrong.
    """
    told = _parsed(list(arguments), config)
    for option in options.OPTIONS:
        given = getattr(told, option.dest, None)
        for text in given if isinstance(given, list) else [] if given is None else [given]:
            _take(option, str(text))
    paths = [str(path) for path in told.file_or_dir or ()]
    for path in paths:
        find(path.partition("::")[0], made)
    own = [path.removeprefix(INSTALLED) for path in paths if path.partition("::")[0] not in made]
    if paths and not (own and all(path.startswith("acceptance") for path in own)):
        return  # tests of this project itself, or of the page: what they hold is not known here
    chosen = within(items, own)
    for path in own:
        if not within(items, [path]):
            raise Wrong(f"{path}: there is no such test in the suite")
    _select(told.keyword, "-k", chosen)
    _select(told.markexpr, "-m", chosen)


def find(path: str, made: Collection[str] = ()) -> Path:
    """Return where a path of the repository is, which the page may also have shown.

    Raises:
        Wrong: there is no such file or folder.
    """
    text = path.removeprefix(INSTALLED)
    if any(text.rstrip("/") in (name, str(Path(name).parent)) for name in made):
        return ROOT / text
    if text.startswith(("/", "~")) or not (ROOT / text).exists():
        raise Wrong(f"{path}: there is no such file or folder in the repository, and the page shows none")
    return ROOT / text


def _parsed(arguments: list[str], config: pytest.Config) -> argparse.Namespace:
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return config._parser.parse(arguments)
    except PrintHelp:
        return argparse.Namespace(file_or_dir=[], keyword="", markexpr="")
    except (pytest.UsageError, SystemExit) as error:
        said = str(error) if isinstance(error, pytest.UsageError) else complaint.getvalue()
        raise Wrong(f"pytest: {' '.join(said.split())[-300:]}") from None


def _take(option: options._Option, text: str) -> None:
    beside: dict[str, list[object]] = {"text": [], "place": [option.flag], "base": [ROOT]}
    try:
        option.parse(text, *beside[option.takes])
    except GpuClusterError as error:
        # What a path leads to is the reader's own affair: it need not be there.
        if option.takes != "base":
            raise Wrong(f"{option.flag} {text}: {error}") from None


def _select(expression: str, option: str, items: Sequence[Item]) -> None:
    """Hold -k or -m against the tests: each word must select something, and so must all of it."""
    if not expression:
        return
    try:
        compiled = Expression.compile(expression)
    except Exception as error:  # pytest's own errors differ between its versions
        raise Wrong(f"{option} {expression!r}: {error}") from None
    known = {re.split(r"[(:]", marker)[0] for marker in plugin._MARKERS}
    for word in re.findall(r"[\w.:\[\]+-]+", _ANSWERS.sub(" ", expression)):
        if option == "-m" and word not in known:
            raise Wrong(f"-m {expression!r}: there is no marker {word}; there are {', '.join(sorted(known))}")
        if not any(_has(item, option, word) for item in items):
            raise Wrong(f"{option} {expression!r}: nothing that would run has {word}")
    if not any(compiled.evaluate(lambda word, item=item, **_: _has(item, option, word)) for item in items):
        raise Wrong(f"{option} {expression!r}: selects no test of those that would run")


def _has(item: Item, option: str, word: str) -> bool:
    if option == "-m":
        return word in item.markers
    return any(word.lower() in name.lower() for name in item.words)
