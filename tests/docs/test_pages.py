"""What a page shows is so: its links, its commands, its files and the names in it; and a mistake in any is found."""

from __future__ import annotations

import argparse
import functools
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from each import of_each
from pages import ROOT, Page, every_page, page_named
from shown import (
    FOLDERS,
    MARKERS,
    SETTINGS,
    TARGETS,
    lines_in,
    source,
    wrong_commands,
    wrong_files,
    wrong_lines,
    wrong_variables,
)

from pytest_gpucluster import cli, metrics, options, verdict, workload_file

INDEX = page_named("docs/README.md")
OF_THE_PAST = ("CHANGELOG.md", "docs/results.md")  # what was so once, and what was measured then
OF_PYTEST = {"parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings", "pytest", "and", "or", "not"}


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each word of ``gpucluster``."""
    found = {word: argparse.ArgumentParser(prog=f"gpucluster {word}") for word in cli.COMMANDS}
    for word, parser in found.items():
        cli._module(word).configure(parser)
    return found


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield every option of a parser and of those below it."""
    for action in parser._actions:
        yield from action.option_strings
        for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from flags_of(inner)


@functools.cache
def exit_codes() -> set[int]:
    """Every exit code that the run or a command documents, and those of what a signal has ended."""
    listed = [re.findall(r"^  ([\d, ]+?) +\S", parser.epilog or "", re.MULTILINE) for parser in parsers().values()]
    of_commands = {int(code) for found in listed for codes in found for code in re.findall(r"\d+", codes)}
    return of_commands | {128 + number for number in signal.Signals} | set(verdict.EXIT_CODES)


def dotted_names(items: Sequence[SimpleNamespace]) -> set[str]:
    """Metrics, criteria and keys of the workload, and the beginnings that several of them share."""

    def keys(tree: object, above: str) -> Iterator[str]:
        for name, below in tree.items() if isinstance(tree, dict) else ():
            yield f"{above}{name}"
            yield from keys(below, f"{above}{name}.")

    criteria = {name for item in items for name in item.criteria}
    names = {*metrics.METRICS, *criteria, *keys(workload_file.key_tree(), "")}
    return names | {name.rpartition(".")[0] for name in names}


def wrong_links(page: Page) -> Iterator[str]:
    """Yield the links of a page that lead nowhere."""
    others = {other.place(): other for other in (*every_page(), page)}
    for target, anchor in page.links:
        place = page.place(target)
        if not place.exists() or not place.is_relative_to(ROOT):
            yield f"{page.name}: {target}: there is no such file in the repository"
        elif anchor and place in others and anchor not in others[place].anchors:
            yield f"{page.name}: {target}#{anchor}: there is no such heading"


def wrong_names(page: Page, items: Sequence[SimpleNamespace]) -> Iterator[str]:
    """Yield what stands in backticks as a name of this project's, and is none."""
    shown = "".join(block.text for block in page.blocks)
    known = dotted_names(items)
    families = {name.partition(".")[0] for name in known if "." in name}
    for line, code in page.code:
        for wrong in (*_of_the_plugin(code), *_of_a_command(code), *_of_a_test_or_file(code, page, shown)):
            yield f"{page.name}:{line}: `{code}`: {wrong}"
        first, dot, last = code.rpartition(".")
        if re.fullmatch(r"[\w.]+", code) and dot and code.split(".")[0] in families and code not in known:
            everything = source("pytest_gpucluster", "acceptance") + shown
            made = f"{first}.{{" in everything and f'"{last}"' in everything  # as f"nccl.{name}"
            if code not in everything and not made:
                yield f"{page.name}:{line}: `{code}`: neither a metric, a criterion nor a key of the workload"
    for codes in re.findall(r"\bexit codes? (\d+(?:(?: to |, | and | or )\d+)*)", page.prose):
        unknown = {int(code) for code in re.findall(r"\d+", codes)} - exit_codes()
        yield from (f"{page.name}: exit code {code}: there is none" for code in unknown)


def _of_the_plugin(code: str) -> Iterator[str]:
    yield from wrong_variables(code)
    flags = {option.flag for option in options.OPTIONS}
    yield from (f"no option {flag}" for flag in re.findall(r"--gpucluster-[\w-]*\w", code) if flag not in flags)
    markers = re.findall(r"pytest\.mark\.(\w+)", code)
    if re.fullmatch(r'-m "?[a-z_]+( (and|or|not) [a-z_]+)*"?', code):
        markers += re.findall(r"[a-z_]+", code[2:])
    yield from (f"no marker {name}" for name in markers if name not in MARKERS | OF_PYTEST)
    for name in re.findall(r"(?<![\w.$/-])gpucluster_[a-z_]+(?![\w.(])", code):
        if name not in SETTINGS and name not in source("pytest_gpucluster") + source("tests/golden", ext="prom"):
            yield f"no setting {name}"


def _of_a_command(code: str) -> Iterator[str]:
    words = code.partition(" --  ")[0].split()
    if words[0] == "gpucluster" and re.fullmatch(r"[a-z][\w-]*", "".join(words[1:2])) and ": " not in code:
        if words[1] not in cli.COMMANDS:
            yield f"no command {words[1]}"
        elif words[1] not in cli.FOR_OTHERS:
            flags = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
            yield from (f"no option {flag}" for flag in flags - set(flags_of(parsers()[words[1]])))
    elif words[0] == "make" and len(words) == 2 and "=" not in code and words[1] not in TARGETS:
        yield f"no target {words[1]}"


def _of_a_test_or_file(code: str, page: Page, shown: str) -> Iterator[str]:
    test = re.fullmatch(r"(test_\w+)(?:\[[^\]]*\])?", code)
    if (
        test
        and f"def {test[1]}(" not in source("tests", "acceptance") + shown
        and not [*ROOT.glob(f"*/**/{test[1]}.py")]
    ):
        yield "there is no such test"
    places = (ROOT / code, ROOT / "pytest_gpucluster" / code, page.place(code))
    if re.fullmatch(rf"(?:{FOLDERS})/[\w./-]+", code) and code not in shown and not any(map(Path.exists, places)):
        yield "there is no such file"


@of_each("page", every_page(), name=lambda page: page.name)
def test_links_lead_somewhere_and_the_index_names_every_page(page: Page) -> None:
    found = list(wrong_links(page))
    assert not found, "\n".join(found)
    listed = {INDEX.place(target) for target, _ in INDEX.links} | {INDEX.place()}
    assert not page.name.startswith("docs/") or page.place() in listed, f"{INDEX.name} lacks it"


@of_each("page", every_page(), name=lambda page: page.name)
def test_every_command_is_one_that_its_program_takes(page: Page, pytestconfig: pytest.Config) -> None:
    found = list(wrong_commands(page, pytestconfig))
    assert not found, "\n".join(found)


@of_each("page", every_page(), name=lambda page: page.name)
def test_every_file_that_is_shown_is_one_that_its_reader_takes(page: Page, tmp_path: Path) -> None:
    assert len(re.findall(r"^ *```", page.text, re.MULTILINE)) == 2 * len(page.blocks), "a block is never closed"
    found = list(wrong_files(page, tmp_path))
    assert not found, "\n".join(found)


@of_each("page", [page for page in every_page() if page.name not in OF_THE_PAST], name=lambda page: page.name)
def test_names_in_backticks_are_names(page: Page, items: Sequence[SimpleNamespace]) -> None:
    found = list(wrong_names(page, items))
    assert not found, "\n".join(found)


@of_each("path", [path for path in sorted((ROOT / "deploy").rglob("*")) if path.is_file() and path.suffix != ".pyc"])
def test_commands_in_the_comments_of_deployed_files_are_such_too(path: Path, pytestconfig: pytest.Config) -> None:
    if "node_modules" not in path.parts:
        comments = re.findall(r"^\s*#  +(.*\n)", path.read_text(encoding="utf-8"), re.MULTILINE)
        found = list(wrong_lines("\n".join(lines_in("".join(comments))), pytestconfig))
    assert not found, "\n".join(found)


PLANTED = {
    "a link": ("[that](nowhere.md)", "nowhere.md"),
    "an anchor": ("[that](run.md#exit-code)", "run.md#exit-code"),
    "an option in backticks": ("`--gpucluster-devise`", "--gpucluster-devise"),
    "a variable": ("`GPUCLUSTER_DEVISE=cpu`", "GPUCLUSTER_DEVISE"),
    "a marker": ("`@pytest.mark.needs_rank(2)`", "needs_rank"),
    "a test": ("`test_hmb[copy]`", "test_hmb"),
    "a metric": ("`nccl.all_reduce.bussbw`", "nccl.all_reduce.bussbw"),
    "a file": ("`deploy/slurm/none.sbatch`", "none.sbatch"),
    "a test file": ("`tests/docs/test_nothing.py`", "test_nothing.py"),
    "a subcommand in backticks": ("`gpucluster inform`", "no command inform"),
    "an option of a command in backticks": ("`gpucluster report RUN --jsno OUT`", "--jsno"),
    "a target": ("`make tests`", "no target tests"),
    "an exit code": ("It ends with exit code 99.", "exit code 99"),
}
PLANTED |= {
    f"shown: {line}": (f"```console\nmake help\n{line}\n```", expected)
    for line, expected in {
        "gpucluster inform": "invalid choice",
        "gpucluster verdict gpucluster-report/latest --jsno x": "--jsno",
        "gpucluster run -- acceptance/ --gpucluster-devise=cpu": "--gpucluster-devise",
        "gpucluster run --nprocs=8 -- acceptance/": "--nprocs",
        "torchrun --nproc_per_nodes=8 -m pytest acceptance/": "--nproc_per_nodes",
        "GPUCLUSTER_DEVISE=cpu gpucluster run -- acceptance/": "GPUCLUSTER_DEVISE",
        "torchrun --nproc-per-node=8 -m pytest acceptance/ -m singel_gpu": "singel_gpu",
        "pytest acceptence/ --gpucluster-expect=2xH100x8": "2xH100x8",
        "srun --nodes=2 gpucluster inform": "invalid choice",
        "ssh gpu-07 'cd /opt && gpucluster wach'": "invalid choice",
        "pytest tests/docs/test_nothing.py": "test_nothing.py",
        "gpucluster sweep slurm --nodes 'gpu-[1-2]": "EOF",
    }.items()
}
PLANTED |= {
    "limits": ("```yaml\nschema_version: 1\nskus: {H100 SXM: {limit: {}}}\n```", "'limit'"),
    "a workload": ("```yaml\nschema_version: 1\nprofiles: {quick: {matmull: {}}}\n```", "matmull"),
    "a manifest": ("```yaml\napiVersion: v1\nkind: Pod\nspec: {containers: [{name: a, imag: b}]}\n```", "imag"),
    "an import": ("```python\nfrom pytest_gpucluster.metrics import Metricc\n```", "Metricc"),
    "a setting": ("```ini\n[pytest]\ngpucluster_devise = cpu\n```", "gpucluster_devise"),
}


@of_each("name", list(PLANTED))
def test_a_planted_mistake_is_found(
    name: str, items: Sequence[SimpleNamespace], pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    text, expected = PLANTED[name]
    page = Page("docs/page.md", f"# A page\n\nSee\n{text}\n")
    found = [*wrong_links(page), *wrong_commands(page, pytestconfig), *wrong_files(page, tmp_path)]
    found += wrong_names(page, items)
    assert len(found) == 1, found
    assert expected in found[0]
