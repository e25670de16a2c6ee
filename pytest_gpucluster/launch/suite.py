"""Where the acceptance suite is: in a checkout, or inside the package that a wheel has installed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
MODULE = "pytest_gpucluster.acceptance"
"""The packed suite, as ``pytest --pyargs`` names it. A checkout has no such module."""
_NAME, _MARK = "acceptance", "criteria.txt"


def _suites() -> list[Path]:
    places = (folder / _NAME for folder in (Path.cwd(), PACKAGE.parent, PACKAGE))
    return [place for place in places if (place / _MARK).is_file()]


def find_suite() -> Path:
    """Return the folder of the suite: in the working directory, else in the package's checkout, else the packed one.

    A site's own needs no list of criteria.
    """
    own = Path.cwd() / _NAME
    return own if any(own.glob("test_*.py")) else next(iter(_suites()), PACKAGE / _NAME)


def place_of(argument: str, directory: Path) -> Path:
    """Return the file or folder that an argument of pytest names, by path or by module, without its ``::`` part."""
    name = argument.partition("::")[0]
    return (PACKAGE.parent / name.replace(".", "/") if name.startswith(MODULE) else directory / name).resolve()


def suite_of(arguments: Iterable[str], directory: Path) -> Path | None:
    """Return the first suite of which one of pytest's arguments names all or a part; None if none does."""
    suites = [suite.resolve() for suite in _suites()]
    places = [place_of(argument, directory) for argument in arguments]
    return next((suite for place in places for suite in suites if place.is_relative_to(suite)), None)
