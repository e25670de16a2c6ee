"""Write docs/reference.md from the code: options, variables, markers, fixtures, hooks, metrics, exit codes, commands.

python docs/reference.py
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from pytest_gpucluster import fixtures, plugin
from pytest_gpucluster.cli import main
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.limits import EVERY_SKU, KNOWN_LABELS, TOPOLOGY
from pytest_gpucluster.metrics import datasheets, measurement, units
from pytest_gpucluster.node.fabric.nccl_rules import RULES
from pytest_gpucluster.node.health.xid_table import Entry
from pytest_gpucluster.node.health.xid_table import table as xid_table
from pytest_gpucluster.plugin import HookSpecs
from pytest_gpucluster.session import options

PAGE = Path(__file__).with_name("reference.md")
PACKAGE = Path(plugin.__file__).parent

VARIABLES = {
    "GPUCLUSTER_HOSTNAME": "replaces the host's name in every report. Set it to the node's name in a pod or a"
    " container: ranks on one node need the same, ranks on different nodes different ones",
    "GPUCLUSTER_EXIT_NOTES": "a folder in which each rank leaves the verdict at its end, for the program that started"
    " its launcher ([quickstart.md](quickstart.md#gpucluster-run)); `gpucluster run` sets it",
    "GPUCLUSTER_CHILD_JOB": "marks the processes of the training that `failure_propagation` starts and lets die; never"
    " to be set",
    "GPUCLUSTER_NVLS_SWITCHED_OFF": "marks a process that has set `NCCL_NVLS_ENABLE=0` itself, after NVLS had failed;"
    " never to be set",
}
"""Variables of this project that are no options. A test compares them with those that the code names."""

_OF_LAUNCHERS = re.compile(
    r"(?:SLURM|OMPI|PMIX|PET|TORCHELASTIC|KUBERNETES|JOB|MASTER|LOCAL|GROUP|PYTEST)_[A-Z][A-Z_]*[A-Z]"
    r"|RANK|WORLD_SIZE|NODE_RANK|LOGLEVEL"
)

_XIDS_BY_LINE = {*range(144, 151), 154}

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
            *_variables(),
            *_nccl_variables(),
            *_xids(),
            *_exit_codes(),
            *_markers(),
            *_fixtures(),
            *_hooks(),
            *_metrics(),
            *_limits(),
            *_skus(),
            *_commands(),
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


def _variables() -> Iterator[str]:
    yield "## Environment variables\n"
    yield "In addition to those of the options above:\n"
    yield from _table(("variable", "meaning"), ((f"`{name}`", text) for name, text in VARIABLES.items()))
    yield "## Variables of launchers\n"
    yield (
        "Variables of launchers and schedulers that are read, and the modules that do so. The"
        " [how-it-works.md](how-it-works.md#without-torchrun) lists those that give a process its rank. NCCL's own are"
        " [below](#nccl-variables).\n"
    )
    yield from _table(
        ("variable", "read by"), ((f"`{name}`", _listed(modules)) for name, modules in sorted(variables_read().items()))
    )


def _nccl_variables() -> Iterator[str]:
    yield "## NCCL variables\n"
    yield (
        "What `test_nccl_environment` knows about variables of NCCL, UCX and CUDA. NCCL reads a flag as a number:"
        " `NCCL_IB_DISABLE=true` means 0. A blank before `=` in a file makes another name of it."
        " [network.md](network.md#variables) has what to set by fabric.\n"
    )
    yield from _table(("variable", "what it does"), ((f"`{name}`", rule.does) for name, rule in sorted(RULES.items())))


def _xids() -> Iterator[str]:
    yield "## Xids\n"
    yield (
        "How Xids of NVIDIA's driver are judged; [troubleshooting.md](troubleshooting.md#ecc-errors-and-xids)"
        " has what to do. Of 144 to 150 (NVLink 5) and 154 the line itself decides.\n"
    )
    codes: dict[Entry, list[int]] = {}
    for report, entry in xid_table().items():
        if report.isdecimal() and report != "0":
            codes.setdefault(entry, []).append(int(report))
    yield from _table(
        ("Xid", "meaning", "judged", "action", "next"),
        (
            (
                ", ".join(map(str, numbers)),
                entry.meaning,
                "by the line" if numbers[0] in _XIDS_BY_LINE else "hardware" if entry.rejects else "note",
                entry.action,
                entry.next,
            )
            for entry, numbers in sorted(codes.items(), key=lambda row: row[1])
        ),
    )


def variables_read() -> dict[str, list[str]]:
    """Return the variables of launchers and schedulers that the package names, with the modules that name them."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _OF_LAUNCHERS.fullmatch(node.value):
                found.setdefault(node.value, set()).add(path.relative_to(PACKAGE).as_posix())
    return {name: sorted(modules) for name, modules in found.items()}


def _exit_codes() -> Iterator[str]:
    yield "## Exit codes\n"
    yield "Those of a run. Each [command](#commands) lists its own.\n"
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


def _hooks() -> Iterator[str]:
    yield "## Hooks\n"
    yield "Functions of a `conftest.py` or a plugin, with which a site adds to the suite.\n"
    [hooks] = ast.parse(inspect.getsource(HookSpecs)).body
    assert isinstance(hooks, ast.ClassDef)
    for node in hooks.body:
        if isinstance(node, ast.FunctionDef):
            yield f"### `{node.name}({', '.join(argument.arg for argument in node.args.args)})`\n"
            text, _, example = (ast.get_docstring(node) or "").partition("::\n")
            yield text.strip().replace("``", "`") + (":\n" if example else "\n")
            if example:
                yield f"```python\n{textwrap.dedent(example).strip()}\n```\n"


def _commands() -> Iterator[str]:
    yield "## Commands\n"
    yield from _table(
        ("command", "what it does"),
        ((f"[`gpucluster {word}`](#gpucluster-{word})", does) for word, does in main.COMMANDS.items()),
    )
    yield "2 is wrong usage everywhere; 141 means that the reader of the output has closed it.\n"
    for word in main.COMMANDS:
        parser = argparse.ArgumentParser(prog=f"gpucluster {word}")
        main.load(word).configure(parser)
        yield from _command(parser, "###", epilogs=[])
        if word == "run":
            parser = argparse.ArgumentParser(prog=f"gpucluster {word} {main.HOSTS}")
            main.load("run_hosts").configure(parser)
            yield from _command(parser, "####", epilogs=[])


def _command(parser: argparse.ArgumentParser, level: str, epilogs: list[str]) -> Iterator[str]:
    """Yield the section of one command: from its arguments, for argparse's help differs between versions of Python."""
    yield f"{level} {parser.prog}\n"
    for paragraph in (parser.description or "").strip().split("\n\n"):
        preformatted = re.search(r"^  ", paragraph, re.MULTILINE)
        yield f"```text\n{paragraph}\n```\n" if preformatted else f"{_outside_code(paragraph)}\n"
    if parser.usage:
        yield f"```text\n{textwrap.dedent(parser.usage).strip()}\n```\n"
    rows = [row for action in parser._actions if (row := _argument(action, parser.prog))]
    if rows:
        yield from _table(("argument", "meaning"), rows)
    for title, text in _parts(parser.epilog or ""):
        if text not in epilogs:
            epilogs.append(text)
            yield f"{title}:\n\n```{'console' if title == 'Examples' else 'text'}\n{text}\n```\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _command(inner, f"{level}#", epilogs)


def _argument(action: argparse.Action, prog: str) -> tuple[str, str] | None:
    if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help == argparse.SUPPRESS:
        return None
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    shown = " ".join(value) if isinstance(value, tuple) else value
    shown = {"?": f"[{shown}]", "+": f"{shown} ...", "*": f"[{shown} ...]"}.get(str(action.nargs), shown)
    names = [f"`{name} {shown}`" if shown and action.nargs != 0 else f"`{name}`" for name in action.option_strings]
    text = (action.help or "") % {**vars(action), "prog": prog}
    if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        text = f"{text}; one of {_listed(map(str, action.choices))}"
    needed = "; needed" if action.required and action.option_strings else ""
    return ", ".join(names) or f"`{shown}`", _outside_code(" ".join(text.split())) + needed


def _parts(epilog: str) -> Iterator[tuple[str, str]]:
    """Split what stands below a command's arguments: its examples, and its exit codes."""
    examples, _, codes = epilog.partition("\nexit codes")
    if examples.strip():
        yield "Examples", textwrap.dedent(examples.partition("examples:\n")[2].rstrip("\n"))
    if codes.strip():
        title, _, listed = codes.partition("\n")
        yield f"Exit codes{title.rstrip(':')}", textwrap.dedent(listed.rstrip("\n"))


def _metrics() -> Iterator[str]:
    yield "## Metrics\n"
    yield (
        "Scope says who must report a value: every rank, one rank of each node, or anyone. The peak is the data sheet"
        " figure that a value is compared with; a value above it is an error, unless the peak is marked as no bound.\n"
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
            for m in measurement.METRICS.values()
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
    limits = loader.load(loader.shipped_path())
    entries = {name: sum(limit.sku == name for limit in limits.limits) for name in (EVERY_SKU, *limits.skus)}
    yield (
        f"thresholds.yaml also has {entries[EVERY_SKU]} entries that hold on every SKU (`every_sku`) without its own, "
        "on one that an operator adds too.\n"
    )
    yield from _table(
        ("SKU", "NVML name", "own entries in thresholds.yaml"),
        ((name, _listed(sku.nvml_names) or "none: CPU ranks", str(entries[name])) for name, sku in limits.skus.items()),
    )
    yield from _table(
        ("SKU", *(f"{name} ({unit})" for name, unit in datasheets.PEAK_UNITS.items())),
        (
            (name, *(_figure(getattr(sku.peaks, peak)) for peak in datasheets.PEAK_UNITS))
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
