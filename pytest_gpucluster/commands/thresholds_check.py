"""``gpucluster thresholds check``: all that is wrong in files of limits, with file, line and column."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.commands.command import DONE, NO_JOURNAL, complain
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.text import printable

if TYPE_CHECKING:
    from pytest_gpucluster.judge.limits import Limit, Thresholds

FAULTY = 1


def declare(plugin: str) -> str:
    """Make the metrics known that a site's plugin or conftest.py declares; return what is wrong with it, or nothing.

    Args:
        plugin: a Python file, or the name of a module.
    """
    from pytest_gpucluster.metrics import measurement

    try:
        if plugin.endswith(".py"):
            spec = importlib.util.spec_from_file_location("gpucluster_site", plugin)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(plugin)
        for metric in module.pytest_gpucluster_metrics():
            measurement.register(metric)
    except Exception as error:  # it is the site's own code: whatever it raises is said, and the check does not go on
        return f"--plugin {plugin}: {type(error).__name__}: {error}"
    return ""


def check(files: Sequence[Path], plugins: Sequence[str] = ()) -> int:
    """Print every problem of these files, or that there is none, and return the exit code."""
    from pytest_gpucluster.judge import evidence, loader
    from pytest_gpucluster.judge.limits import EVERY_SKU, looser

    for plugin in plugins:
        wrong = declare(plugin)
        if wrong:
            return complain(wrong, NO_JOURNAL)
    for path in files:
        try:
            path.read_bytes()
        except OSError as error:
            return complain(f"{path}: cannot be read: {error.strerror or error}", NO_JOURNAL)
    shipped = loader.shipped_path()
    others = [path for path in files if os.path.realpath(path) != os.path.realpath(shipped)]
    try:
        layers = [loader.load(shipped, *others[:count]) for count in range(len(others) + 1)]
    except ThresholdsError:
        return _problems(shipped, others)
    for before, after in itertools.pairwise(layers):
        for new, old in _replaced(after, before):
            less = looser(new, old)
            if less:
                print(printable(f"{new.origin}: note: {new.metric} demands less than {old.origin}: {less}"))
    found = layers[-1]
    near = evidence.too_high(found)
    for line in near:
        print(printable(line.replace(": ", ": note: ", 1) if others else line))
    if near and not others:
        print(f"{len(near)} {'problem' if len(near) == 1 else 'problems'}")
        return FAULTY
    own = [limit for limit in found.limits if limit.layer > 0] if others else list(found.limits)
    skus = {limit.sku for limit in own} - {EVERY_SKU}
    counted = "1 entry" if len(own) == 1 else f"{len(own)} entries"
    named = f"{len(skus)} {'SKU' if len(skus) == 1 else 'SKUs'}" if skus else ""
    every = EVERY_SKU if any(limit.sku == EVERY_SKU for limit in own) else ""
    print(f"no problem: {counted} for {' and '.join(filter(None, (named, every))) or 'no SKU'}")
    return DONE


def _problems(shipped: Path, others: Sequence[Path]) -> int:
    """Print the problems of all files: each is read, also after one that has some."""
    from pytest_gpucluster.judge import loader

    problems: list[str] = []
    try:
        loader.load(shipped, *others)
    except ThresholdsError as error:
        problems = str(error).splitlines()
    for line in problems:
        print(printable(line))
    print(f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}")
    return FAULTY


def _replaced(after: Thresholds, before: Thresholds) -> Iterator[tuple[Limit, Limit]]:
    """Yield each entry of the last file with those whose place it takes: of the same conditions, and of more."""

    def conditions(limit: Limit) -> frozenset[tuple[str, str]]:
        return frozenset((part.key, part.text) for part in limit.when)

    by_name: dict[tuple[str, str], list[Limit]] = {}
    for old in before.limits:
        by_name.setdefault((old.sku, old.metric), []).append(old)
    known = {old.origin for old in before.limits}
    for limit in after.limits:
        if limit.origin not in known:
            for old in by_name.get((limit.sku, limit.metric), []):
                if conditions(limit) <= conditions(old):
                    yield limit, old
