"""What a block that is no command must be: YAML that loads, limits that the product takes, Python that compiles."""

from __future__ import annotations

import ast
import configparser
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from doc_pages import LANGUAGES, Block
from shell_words import BadShell, check_syntax

from pytest_gpucluster import metrics, thresholds, workload_file
from pytest_gpucluster.errors import GpuClusterError
from pytest_gpucluster.metric_catalogue import Metric


class _Strict(yaml.SafeLoader):
    """Refuses what YAML readers resolve in different ways: a key that comes twice."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} comes twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)


@contextlib.contextmanager
def metrics_of(blocks: Sequence[Block]) -> Iterator[None]:
    """Let limits be set on metrics that a page itself adds, as its conftest.py would."""
    before = dict(metrics._REGISTRY)
    try:
        for block in blocks:
            if block.language == "python":
                with contextlib.suppress(SyntaxError):  # told as what it is
                    for metric in _shown_metrics(ast.parse(block.text)):
                        metrics.register(metric)
        yield
    finally:
        metrics._REGISTRY.clear()
        metrics._REGISTRY.update(before)


def _shown_metrics(tree: ast.Module) -> Iterator[Metric]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Metric":
            yield Metric(**{str(word.arg): ast.literal_eval(word.value) for word in node.keywords})


def complaints(block: Block, folder: Path) -> list[str]:
    """Return what is wrong with a block, with its place.

    Args:
        block: of a page.
        folder: an empty one for files.
    """
    return [f"{block.where}: {complaint}" for complaint in _complaints(block, folder)]


def _complaints(block: Block, folder: Path) -> Iterator[str]:
    if block.language not in LANGUAGES:
        yield f"{block.language!r} is no language of a block here; there are {', '.join(LANGUAGES)}"
    elif block.language == "yaml":
        yield from _yaml(block.text, folder)
    elif block.language == "json":
        yield from _json(block.text)
    elif block.language == "python":
        yield from _python(block.text)
    elif block.language == "ini":
        yield from _ini(block.text)
    elif block.language == "toml":
        yield from _toml(block.text)
    elif block.language == "bash":
        try:
            check_syntax(block.text)
        except BadShell as error:
            yield str(error)
    if "\t" in block.text and block.language not in ("text", "console"):
        yield "a tab: it has another width for each reader"


def _yaml(text: str, folder: Path) -> Iterator[str]:
    try:
        documents = list(yaml.load_all(text, Loader=_Strict))
    except yaml.YAMLError as error:
        yield f"no YAML: {' '.join(str(error).split())}"
        return
    if not documents or None in documents:
        yield "an empty document"
    for document in documents:
        if isinstance(document, dict) and {"apiVersion", "kind"} <= set(document):
            yield from _kubernetes(document)
    if len(documents) == 1 and isinstance(documents[0], dict):
        yield from _ours(documents[0], text, folder)


def _kubernetes(document: dict[str, Any]) -> Iterator[str]:
    """Hold a whole object of Kubernetes against its schema; objects of others have tests beside their files."""
    group = str(document["apiVersion"]).rpartition("/")[0]
    if ("." in group and not group.endswith(".k8s.io")) or group == "kustomize.config.k8s.io":
        return
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path)) or document['kind']}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        yield str(error.message)


def _ours(document: dict[Any, Any], text: str, folder: Path) -> Iterator[str]:
    """Let the product read what is a file of limits, or of workloads."""
    file = folder / "shown.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        if {"skus", "every_sku"} & set(document):
            thresholds.load(thresholds.shipped_path(), file)
        elif "profiles" in document:
            for profile in document["profiles"]:
                workload_file.load(file, profile=str(profile))
    except GpuClusterError as error:
        yield str(error).replace(f"{folder}/", "")


def _json(text: str) -> Iterator[str]:
    try:
        json.loads(text)
    except ValueError as error:
        try:
            for line in text.splitlines():  # one object a line, as in a journal
                json.loads(line)
        except ValueError:
            yield f"no JSON: {error}"


def _python(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield f"no Python: {error}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pytest_gpucluster"):
            module = __import__(str(node.module), fromlist=["*"])
            for name in node.names:
                if not hasattr(module, name.name):
                    yield f"{node.module} has no {name.name}"
        if isinstance(node, ast.Constant) and node.value is Ellipsis:
            yield "an ellipsis in place of code"


def _ini(text: str) -> Iterator[str]:
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        yield f"no ini file: {' '.join(str(error).split())}"
        return
    if parser.has_section("pytest"):
        yield from _settings(parser["pytest"])


def _toml(text: str) -> Iterator[str]:
    """Look at names only: Python 3.10 has no reader of TOML."""
    table = text.partition("[tool.pytest.ini_options]")[2].partition("\n[")[0]
    yield from _settings(dict.fromkeys(re.findall(r"^([\w-]+)\s*=", table, re.MULTILINE), ""))


def _settings(section: Any) -> Iterator[str]:
    from pytest_gpucluster import options

    known = {"gpucluster", *(option.dest for option in options.OPTIONS)}
    for name in section:
        if name.startswith("gpucluster") and name not in known:
            yield f"{name}: no ini setting; there are {', '.join(sorted(known))}"
