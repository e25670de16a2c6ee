"""docs/reference/reference.md says what the code says."""

import argparse
import functools
import importlib.util
import re
from pathlib import Path

from each import of_each

from pytest_gpucluster import plugin
from pytest_gpucluster.cli import main
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.plugin import HookSpecs
from pytest_gpucluster.session import fixtures, options
from pytest_gpucluster.session import options as option_values

DOCS = Path(__file__).parents[2] / "docs"


def load_generator():
    spec = importlib.util.spec_from_file_location("gpucluster_reference", DOCS / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


@functools.cache
def page():
    """The page as the code has it, made once: it reads every module."""
    return str(GENERATOR.page())


def section(title):
    """The rows of the first table under a heading, without its header."""
    body = page().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line for line in body.splitlines() if line.startswith("|")][2:]


def names(title):
    return [match[1] for row in section(title) if (match := re.match(r"\| `([^` (]+)", row))]


TABLES = {
    "Options": [option.flag for option in options.OPTIONS],
    "Timeouts": list(option_values.Timeouts.__dataclass_fields__),
    "Markers": [re.split(r"[(:]", marker)[0] for marker in plugin._MARKERS],
    "Fixtures": [
        name
        for name, value in vars(fixtures).items()
        if hasattr(value, "_pytestfixturefunction") or "FixtureFunctionDefinition" in type(value).__name__
    ],
    "Metrics": list(measurement.METRICS),
}


@of_each("title", list(TABLES))
def test_every_one_is_on_the_page_with_its_meaning(title):
    assert names(title) == TABLES[title]
    assert all(row.strip("|").split("|")[-1].strip() for row in section(title))


def test_every_exit_code_is_on_the_page():
    assert [int(row.split("|")[1]) for row in section("Exit codes")] == list(verdict.EXIT_CODES)


def test_every_variable_of_this_project_is_on_the_page():
    source = "".join(path.read_text(encoding="utf-8") for path in GENERATOR.PACKAGE.rglob("*.py"))
    named = set(re.findall(r"\bGPUCLUSTER_[A-Z_]*[A-Z]\b", source)) - {option.variable for option in options.OPTIONS}
    assert sorted(named) == sorted(GENERATOR.VARIABLES)
    assert names("Environment variables") == list(GENERATOR.VARIABLES)


def test_every_hook_is_on_the_page_with_its_example():
    hooks = [
        name for name, value in vars(HookSpecs).items() if name.startswith("pytest_gpucluster_") and callable(value)
    ]
    body = page().partition("## Hooks\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### `(\w+)\(", body, re.MULTILINE) == hooks
    assert body.count("```python\n") == len(hooks)


@of_each("word", list(main.COMMANDS))
def test_every_command_is_on_the_page_with_its_options_and_exit_codes(word):
    body = page().partition(f"\n### gpucluster {word}\n")[2].partition("\n### ")[0]
    parser = argparse.ArgumentParser(prog=f"gpucluster {word}")
    main.load(word).configure(parser)
    assert "```console\n" in body
    assert re.search(r"^Exit codes.*:$", body, re.MULTILINE)
    missing = [flag for flag in flags(parser) if not re.search(rf"`{re.escape(flag)}[ `]", body)]
    assert missing == []


def flags(parser):
    found = []
    for action in parser._actions:
        found += [flag for flag in action.option_strings if flag not in ("-h", "--help")]
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found += flags(inner)
    return found
