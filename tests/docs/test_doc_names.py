"""What stands in backticks as an option, variable, marker, metric, test, command or file is one."""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace

import doc_pages
import pytest
from doc_pages import ROOT, Page
from pytest_words import Wrong, check_pytest
from shown_programs import Reader, made_by
from suite_names import Item

from pytest_gpucluster import cli, metrics, options, plugin, verdict, workload_file

SKIPPED = ("CHANGELOG.md", "docs/results.md")
"""What was so once, and what was measured then."""
_PACKAGE = ROOT / "pytest_gpucluster"
_FILE_SUFFIXES = (
    *("md", "py", "sh", "sbatch", "yaml", "yml", "json", "jsonl", "toml", "ini", "txt", "html", "css", "js", "xml"),
    *("prom", "csv", "log", "safetensors", "conf", "cfg", "service"),
)


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each word of `gpucluster`."""
    found = {}
    for word in cli.COMMANDS:
        parser = argparse.ArgumentParser(prog=f"gpucluster {word}")
        cli._module(word).configure(parser)
        found[word] = parser
    return found


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every option of a parser and of those below it."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from options_of(inner)


@functools.cache
def exit_codes() -> frozenset[int]:
    """Every exit code that the run or a command documents."""
    texts = [parser.epilog or "" for parser in parsers().values()]
    listed = [match for text in texts for match in re.findall(r"^  ([\d, ]+?) {1,}\S", text, re.MULTILINE)]
    of_commands = {int(code) for codes in listed for code in codes.split(",") if code.strip()}
    of_a_shell = {128 + number for number in signal.Signals}  # of what a signal has ended
    return frozenset(of_commands | of_a_shell | set(verdict.EXIT_CODES))


@functools.cache
def variables() -> frozenset[str]:
    """Every variable of this project that its code names."""
    source = "".join(path.read_text(encoding="utf-8") for path in _PACKAGE.rglob("*.py"))
    named = set(re.findall(r"\bGPUCLUSTER_[A-Z_]*[A-Z]\b", source))
    return frozenset(named | {option.variable for option in options.OPTIONS})


@functools.cache
def workload_keys() -> frozenset[str]:
    """Every key of the workload, and what they stand under."""
    found: set[str] = set()

    def walk(tree, above: str) -> None:
        for name, below in tree.items():
            key = f"{above}.{name}" if above else name
            found.add(key)
            if isinstance(below, dict):
                walk(below, key)

    walk(workload_file.key_tree(), "")
    return frozenset(found)


@functools.cache
def own_tests() -> frozenset[str]:
    return frozenset(
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in (path.stem, *re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    )


def dotted_names(items: Sequence[Item]) -> frozenset[str]:
    """Metrics, criteria and keys of the workload, and the beginnings that several of them share."""
    criteria = {name for item in items for name in item.criteria}
    names = {*metrics.METRICS, *criteria, *workload_keys()}
    beginnings = {name.rpartition(".")[0] for name in names}
    return frozenset(names | beginnings)


def wrong_names(page: Page, items: Sequence[Item], config: pytest.Config) -> list[str]:
    """What is no name of anything, with its place."""
    reader = Reader(config=config, items=items, made=made_by(page.blocks))
    shown = "\n".join(block.text for block in page.blocks_of("python"))
    found = []
    for line, code in page.code:
        try:
            complaints = [*_name(code, page, shown, items), *_command(code, reader)]
        except Wrong as error:
            complaints = [str(error)]
        found += [f"{page.name}:{line}: `{code}`: {complaint}" for complaint in complaints]
    for match in re.finditer(r"\bexit codes? (\d+)(?:(?: to |, | and | or )(\d+))*", page.prose):
        for code in filter(None, match.groups()):
            if int(code) not in exit_codes():
                found.append(f"{page.name}: {match[0]}: no such exit code")
    return found


def _name(code: str, page: Page, shown: str, items: Sequence[Item]) -> Iterator[str]:
    for flag in re.findall(r"--gpucluster-[\w-]*\w", code):
        if flag not in {option.flag for option in options.OPTIONS}:
            yield f"there is no option {flag}"
    for name in re.findall(r"\bGPUCLUSTER_[A-Z_]*[A-Z]\b", code):
        if name not in variables():
            yield f"there is no variable {name}"
    for name in re.findall(r"(?<![\w.$/-])gpucluster_\w+(?![\w.(])", code):
        known = {option.dest for option in options.OPTIONS}
        if name not in known and not re.search(r"[A-Z]{3}", name) and name not in _exported():
            yield f"there is no setting {name}"
    for name in re.findall(r"pytest\.mark\.(\w+)", code):
        known_markers = {re.split(r"[(:]", marker)[0] for marker in plugin._MARKERS}
        if name not in {*known_markers, "parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings"}:
            yield f"there is no marker {name}"
    if match := re.fullmatch(r"(test_\w+)(?:\[[^\]]*\])?", code):
        known_tests = {item.function for item in items} | {item.file.rpartition("/")[2][:-3] for item in items}
        if match[1] not in known_tests | own_tests() and f"def {match[1]}(" not in shown:
            yield "there is no such test"
    if re.fullmatch(r"[a-z_0-9]+(\.[a-z_0-9]+)+", code):
        yield from _dotted(code, page, items)
    if re.fullmatch(r"(acceptance|deploy|docs|perf|pytest_gpucluster|tests|agreement|benchmarks)/[\w./-]+", code):
        places = (ROOT / code, _PACKAGE / code, page.folder / code)
        if not any(place.exists() for place in places) and not any(code in block.text for block in page.blocks):
            yield "there is no such file"


def _dotted(code: str, page: Page, items: Sequence[Item]) -> Iterator[str]:
    known = dotted_names(items)
    if code.split(".")[0] not in {name.split(".")[0] for name in known}:
        return
    if code in known or code in _literals() or code.rpartition(".")[2] in _FILE_SUFFIXES:
        return
    module, _, attribute = code.rpartition(".")
    if _module_has(code.replace(".", "/")) or (_module_has(module.replace(".", "/")) and _defines(module, attribute)):
        return
    if any(code in block.text for block in page.blocks):
        return  # the page itself makes it
    fixtures = ("cluster", "gpu", "limits", "workload", "window", "board", "settings", "artifacts", "record")
    if code.split(".")[0] in fixtures and code.count(".") == 1 and _an_attribute(attribute):
        return
    yield "neither a metric, a criterion, a key of the workload nor a module"


@functools.cache
def _exported() -> str:
    """What is exported to Prometheus, whose metrics begin alike."""
    golden = (ROOT / "tests" / "golden").rglob("*.prom")
    return "".join(path.read_text(encoding="utf-8") for path in golden)


@functools.cache
def _literals() -> frozenset[str]:
    """Every dotted name that stands in quotes in the code: properties, kinds of findings and the like."""
    folders = (_PACKAGE, ROOT / "acceptance")
    source = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    whole = set(re.findall(r"""["']([a-z_0-9]+(?:\.[a-z_0-9]+)+)["']""", source))
    beginnings = set(re.findall(r"""f["']([a-z_0-9.]+)\.\{\w+\}["']""", source))
    words = set(re.findall(r"""["']([a-z_0-9]+)["']""", source))
    return frozenset(whole | {f"{beginning}.{word}" for beginning in beginnings for word in words})


def _module_has(path: str) -> bool:
    return bool(path) and ((_PACKAGE / f"{path}.py").exists() or (_PACKAGE / path / "__init__.py").exists())


def _defines(module: str, attribute: str) -> bool:
    return hasattr(importlib.import_module(f"pytest_gpucluster.{module}"), attribute)


@functools.cache
def _an_attribute(name: str) -> bool:
    """Whether a class of the package has an attribute or method of this name."""
    return any(
        re.search(rf"^    (?:def )?{name}\b[(:]", path.read_text(encoding="utf-8"), re.MULTILINE)
        for path in _PACKAGE.rglob("*.py")
    )


def _command(code: str, reader: Reader) -> Iterator[str]:
    if "…" in code or "..." in code:
        return
    words = code.split()
    if any(word.endswith(":") for word in words):
        return  # what a program says
    if words[0] == "gpucluster" and len(words) > 1 and re.fullmatch(r"[a-z][\w-]*", words[1]):
        if words[1] not in cli.COMMANDS:
            yield f"there is no command {words[1]}"
            return
        known = set(options_of(parsers()[words[1]]))
        own = words[2 : words.index("--")] if "--" in words else words[2:]
        for word in own:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known and words[1] not in cli.FOR_OTHERS:
                yield f"gpucluster {words[1]} has no option {flag}"
    elif words[0] == "make" and len(words) > 1:
        reader.check(words)
    elif words[0] in ("-k", "-m") and len(words) > 1 and not {"<", "EXPRESSION", "mypy", "pip", "venv"} & set(words):
        if words[0] == "-m" and re.fullmatch(r"[\w.]+", words[1]) and (words[1] == "pytest" or "." in words[1]):
            return
        check_pytest(["acceptance/", words[0], code[2:].strip().strip("'\"")], reader.config, reader.items)
    elif words[0] == "pytest" and len(words) > 1 and not re.search(r"\b(?:N|[A-Z]{3,})\b", code):
        reader.check_line(code)


@pytest.mark.parametrize(
    "page", [page for page in doc_pages.every_page() if page.name not in SKIPPED], ids=lambda page: page.name
)
def test_what_stands_in_backticks_is_there(page, items, pytestconfig):
    assert wrong_names(page, items, pytestconfig) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`--gpucluster-devise`", "there is no option --gpucluster-devise"),
        ("`GPUCLUSTER_DEVISE=cpu`", "there is no variable GPUCLUSTER_DEVISE"),
        ("`gpucluster_devise`", "there is no setting gpucluster_devise"),
        ("`@pytest.mark.needs_rank(2)`", "there is no marker needs_rank"),
        ("`test_hmb`", "there is no such test"),
        ("`test_hmb[copy]`", "there is no such test"),
        ("`nccl.all_reduce.bussbw`", "neither a metric"),
        ("`matmul.size`", "neither a metric"),
        ("`deploy/slurm/none.sbatch`", "there is no such file"),
        ("`gpucluster inform`", "there is no command inform"),
        ("`gpucluster report RUN --jsno OUT`", "gpucluster report has no option --jsno"),
        ("`make tests`", "make tests: no target"),
        ("`-m singel_gpu`", "there is no marker singel_gpu"),
        ("`-k nvme`", "nothing that would run has nvme"),
        ("`pytest acceptence/`", "acceptence/: there is no such file"),
        ("It ends with exit code 99.", "exit code 99: no such exit code"),
    ],
)
def test_a_planted_fault_is_named(text, expected, items, pytestconfig):
    page = Page(name="docs/page.md", text=f"# A page\n\nSee {text}\n")
    [complaint] = wrong_names(page, items, pytestconfig)
    assert expected in complaint
    assert complaint.startswith("docs/page.md:")


@pytest.mark.parametrize(
    "text",
    [
        "`--gpucluster-device=cpu`, `GPUCLUSTER_DEVICE`, `gpucluster_device`, exit code 11",
        "`test_hbm[copy]`, `nccl.all_reduce.busbw`, `matmul.sizes=8192`, `gpu.health`, `report.html`",
        "`gpucluster report RUN --text`, `-k nccl`, `-m single_gpu`, `-m pytest`, `make test`",
    ],
)
def test_what_is_right_is_not_complained_of(text, items, pytestconfig):
    page = replace(doc_pages.page_named("docs/run.md"), text=f"# A page\n\n{text}\n")
    assert wrong_names(page, items, pytestconfig) == []
