"""Write docs/reference.md from the code: options, markers, fixtures, metrics, exit codes, timeouts, SKUs.

python docs/reference.py
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pytest_gpucluster import fixtures, hardware, metrics, options, plugin, thresholds, units, verdict
from pytest_gpucluster.limits import EVERY_SKU, KNOWN_LABELS, TOPOLOGY

PAGE = Path(__file__).with_name("reference.md")

_INTRODUCTION = """\
# Reference

This page is made from the code by `python docs/reference.py`. Do not edit it: a test compares the two.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join(
        [
            _INTRODUCTION,
            *_options(),
            *_timeouts(),
            *_exit_codes(),
            *_markers(),
            *_fixtures(),
            *_metrics(),
            *_limits(),
            *_skus(),
        ]
    )


def _options() -> Iterator[str]:
    yield "## Options\n"
    yield (
        "The command line wins over the environment, the environment over the ini file, the ini file over the default."
        " The header of a run shows every value that is no default, with where it comes from. Any of these options and"
        " any of these ini settings turns the plugin on, and so does `gpucluster = true` in the ini file."
        " An environment variable alone does not.\n"
    )
    yield from _table(
        ("command line", "ini", "environment", "default", "meaning"),
        (
            (
                f"`{option.flag} {option.metavar}`" if option.bare is None else f"`{option.flag} [{option.metavar}]`",
                f"`{option.dest}`",
                f"`{option.variable}`",
                f"`{option.default}`" if option.default else "",
                _outside_code(re.sub(r" \(default: [^)]*\)$", "", option.help)),
            )
            for option in options.OPTIONS
        ),
    )


def _timeouts() -> Iterator[str]:
    yield "## Timeouts\n"
    yield "Seconds, for `--gpucluster-timeouts NAME=SECONDS,...`.\n"
    meanings = dict(_attributes(options.Timeouts))
    fields = options.Timeouts.__dataclass_fields__.values()
    yield from _table(
        ("name", "default", "meaning"), ((f"`{f.name}`", f"{f.default:g}", meanings[f.name]) for f in fields)
    )


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n"
    yield from _table(("exit code", "verdict"), ((str(code), text) for code, text in verdict.EXIT_CODES.items()))


def _markers() -> Iterator[str]:
    yield "## Markers\n"
    texts = (marker.partition(":") for marker in plugin._MARKERS)
    yield from _table(
        ("marker", "meaning"), ((f"`{name}`", _outside_code(meaning.strip())) for name, _, meaning in texts)
    )


def _fixtures() -> Iterator[str]:
    yield "## Fixtures\n"
    yield from _table(("fixture", "scope", "what it is"), _fixture_rows(fixtures))


def _metrics() -> Iterator[str]:
    yield "## Metrics\n"
    yield (
        "Scope says who must report a value: every rank, one rank of each node, or anyone. The peak is the data sheet"
        " figure that a value is held beside; a value above it is an error, unless the peak is marked as no bound.\n"
    )
    yield from _table(
        ("metric", "unit", "better", "scope", "peak", "what it is"),
        (
            (
                f"`{m.name}`",
                m.unit,
                m.better,
                m.scope,
                f"`{m.peak}`{'' if m.peak_is_bound else ' (no bound)'}" if m.peak else "",
                m.doc,
            )
            for m in metrics.METRICS.values()
        ),
    )


def _limits() -> Iterator[str]:
    yield "## Conditions of a limit\n"
    names = [*TOPOLOGY, *KNOWN_LABELS]
    yield (
        f"Under `when`: {_listed(names)}, and under `labels:` any other label of a measurement. A condition is a value,"
        " `X or more`, `below X` or `X to Y`.\n"
    )
    yield "## Units\n"
    dimensions: dict[str, list[str]] = {}
    for unit in units.UNITS.values():
        dimensions.setdefault(unit.dimension, []).append(unit.symbol)
    yield from _table(("dimension", "units"), ((name, _listed(symbols)) for name, symbols in dimensions.items()))


def _skus() -> Iterator[str]:
    yield "## Known GPUs\n"
    yield "A pattern must match the whole name that NVML and `nvidia-smi -L` show. Any other GPU is unknown.\n"
    limits = thresholds.load(thresholds.shipped_path())
    entries = {name: sum(limit.sku == name for limit in limits.limits) for name in (EVERY_SKU, *limits.skus)}
    yield (
        f"Beside a SKU's own entries thresholds.yaml has {entries[EVERY_SKU]} that hold on every SKU (`every_sku`), "
        "on one that an operator adds too.\n"
    )
    yield from _table(
        ("SKU", "NVML name", "own entries in thresholds.yaml"),
        ((name, _listed(sku.nvml_names) or "none: CPU ranks", str(entries[name])) for name, sku in limits.skus.items()),
    )
    yield from _table(
        ("SKU", *(f"{name} ({unit})" for name, unit in hardware.PEAK_UNITS.items())),
        (
            (name, *(_figure(getattr(sku.peaks, peak)) for peak in hardware.PEAK_UNITS))
            for name, sku in limits.skus.items()
            if sku.peaks is not None
        ),
    )


def _fixture_rows(module: ModuleType) -> Iterator[tuple[str, str, str]]:
    """Read the fixtures from the source: how pytest wraps a fixture differs between its versions."""
    for node in ast.parse(inspect.getsource(module)).body:
        for decorator in getattr(node, "decorator_list", ()):
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(node, ast.FunctionDef) and ast.unparse(call) == "pytest.fixture":
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else ()
                scope = next((ast.literal_eval(k.value) for k in keywords if k.arg == "scope"), "function")
                yield f"`{node.name}`", scope, _one_paragraph(ast.get_docstring(node) or "")


def _attributes(of: type) -> Iterator[tuple[str, str]]:
    """Yield the documented attributes of a class with their docstrings, which only the source has."""
    [definition] = ast.parse(inspect.getsource(of)).body
    assert isinstance(definition, ast.ClassDef)
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            yield ast.unparse(node.target), _one_paragraph(str(ast.literal_eval(after.value)))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    for row in rows:
        yield _row(row)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _outside_code(text: str) -> str:
    """Keep Markdown from taking <GPUs> for a tag."""
    return text.replace("<", "&lt;")


def _one_paragraph(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
