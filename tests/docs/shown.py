"""The commands and files of a page, checked: commands by their programs' own parsers, files by their readers."""

import ast
import contextlib
import functools
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from pages import ROOT

from pytest_gpucluster import plugin
from pytest_gpucluster.cli import main
from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.errors import GpuClusterError
from pytest_gpucluster.judge import loader
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.runners.torchrun import command_line
from pytest_gpucluster.session import options

MARKERS = {re.split(r"[(:]", marker)[0] for marker in plugin._MARKERS}
SETTINGS = {"gpucluster", *(option.dest for option in options.OPTIONS)}
TARGETS = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
FOLDERS = "acceptance|deploy|docs|perf|pytest_gpucluster|tests"
_IMAGE = "/opt/pytest-gpucluster/"  # where the suite lies in the image
_LINE = re.compile(r"(?m)^\s*(?:- |(?:- )?run: )?((?:sbatch|srun|gpucluster|make|python|pytest|torchrun) [^\[]*)$")


@functools.cache
def source(*folders, ext="py"):
    """Return all of the source below these folders."""
    paths = [path for name in folders for path in sorted((ROOT / name).rglob(f"*.{ext}"))]
    return "".join(path.read_text(encoding="utf-8") for path in paths)


def wrong_variables(text):
    """Yield the variables of this project that it does not have."""
    known = {option.variable for option in options.OPTIONS}
    for name in sorted(set(re.findall(r"\bGPUCLUSTER_[A-Z_]*[A-Z]\b", text)) - known):
        if name not in source("pytest_gpucluster"):
            yield f"there is no variable {name}"


def wrong_commands(page, config):
    """Yield what is wrong with the commands of a page, also with those in the steps of a CI."""
    shown = "".join(block.text for block in page.blocks_of("console", "bash"))
    made = {block.file for block in page.blocks}
    made |= {name.rstrip("/") for name in re.findall(r"(?:>>?|\b(?:tee|touch|mkdir|mkdir -p))\s+([\w./-]+)", shown)}
    for block in page.blocks_of("console", "bash", "yaml"):
        text = block.text
        if block.language == "yaml":
            text = "\n".join(_LINE.findall(re.sub(r"\\\n[#\s]*", " ", text)))
        yield from (f"{page.name}:{block.line}: {wrong}" for wrong in _wrong_lines(text, config, made))


def _wrong_lines(text, config, made):
    """Yield what is wrong with lines for a shell; files that are ``made`` by the page need not be in the repository."""
    yield from wrong_variables(text)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30, check=False)
    if checked.stderr:
        yield " ".join(checked.stderr.split())
        return
    for words in _commands(text):
        line = " ".join(words)
        first = next((at for at, word in enumerate(words) if word in _CHECKS), None)
        if first is not None and "pip" not in words and (words[first] != "make" or first == 0):
            yield from (f"{line}: {wrong}" for wrong in _CHECKS[words[first]](words[first + 1 :], config))
        for word in words:
            path = word.removeprefix("./").removeprefix(_IMAGE).partition("::")[0].rstrip("/")
            if re.match(rf"(?:{FOLDERS})/[\w./-]+$", path) and not (ROOT / path).exists() and path not in made:
                yield f"{line}: there is no {path}"


def _commands(text):
    """Yield the words of each command. A variable and the output of a command stand as 1, which most options take."""
    text = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n.*?^\s*\1$", "", text.replace("\\\n", " "), flags=re.S | re.M)
    text = re.sub(r"(?m)(?:^|(?<=\s))#(?: .*)?$", "", text)
    inner = re.findall(r"\$\(([^()]*)\)", text)
    text = re.sub(r"\$\([^()]*\)|\$\{\w+[^}]*\}|\$[\w@?*]+", "1", text)
    text = re.sub(r"""(?<=\s)\d?(?:>>?|<)&?\s*(?:"[^"]*"|[^\s"']+)""", " ", text)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    words = []
    for token in [*lexer, "\n"]:
        if token and set(token) <= set(";|&()\n"):
            yield from [words] if words else []
            words = []
            continue
        words.append(token)
        if " " in token and re.search(r"\b(?:gpucluster|pytest|torchrun) ", token):
            inner.append(token)  # what ssh, bash -c or a sweep is given in quotes
    for shown in inner:
        with contextlib.suppress(ValueError):
            yield from _commands(shown)


def _parsed(parse, *arguments):
    """Return what a parser makes of arguments, or None and what it complains of."""
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
            return parse(*arguments), []
    except (pytest.UsageError, GpuClusterError) as error:
        return None, [str(error)]
    except SystemExit as error:
        return None, [" ".join(stderr.getvalue().partition("error: ")[2].split())] if error.code else []
    except Exception as error:  # pytest's own, which ends its help
        return None, [] if type(error).__name__ == "PrintHelp" else [repr(error)]


def _gpucluster(words, config):
    if words[:1] == ["doctor"] and main.HOSTS in words:
        words = ["run", *words[1:]]  # whose options it takes
    parsed, wrong = _parsed(main.parse, list(words))
    yield from wrong
    if parsed is not None and "for_torchrun" in parsed:
        line, wrong = _parsed(command_line, parsed.for_torchrun, parsed.forwarded, {})
        yield from wrong or _torchrun(line, config)
    elif parsed is not None and parsed.forwarded[:1] not in (["gpucluster"], ["nvidia-smi"]):
        yield from _pytest(parsed.forwarded, config)


def _torchrun(words, config):
    from torch.distributed.run import get_args_parser

    parsed, wrong = _parsed(get_args_parser().parse_args, list(words))
    yield from wrong
    if parsed is not None and parsed.training_script == "pytest":
        yield from _pytest(parsed.training_script_args, config)


def _pytest(words, config):
    parsed, wrong = _parsed(config._parser.parse, list(words))
    yield from wrong
    for option in options.OPTIONS if parsed is not None else ():
        given = getattr(parsed, option.dest, None)
        for text in given if isinstance(given, list) else [] if given is None else [given]:
            if option.takes != "base":
                yield from _parsed(functools.partial(option.read, origin=option.flag, base=Path()), str(text))[1]
    for word in set(re.findall(r"\w+", parsed.markexpr if parsed is not None else "")) - {"and", "or", "not"} - MARKERS:
        yield f"there is no marker {word}"


def _make(words, config):
    yield from (f"there is no target {word}" for word in words if word not in TARGETS and "=" not in word)


_CHECKS = {"gpucluster": _gpucluster, "torchrun": _torchrun, "pytest": _pytest, "make": _make}


def wrong_files(page, folder):
    """Yield what is wrong with the blocks that are files: read by the product, by Kubernetes' schema, or by Python."""
    before = dict(measurement._REGISTRY)
    try:
        for block in page.blocks:
            try:
                found = list(_wrong_file(block, folder))
            except Exception as error:  # of any reader: no block is left out
                found = [f"{type(error).__name__}: {getattr(error, 'message', error)}"]
            yield from (f"{page.name}:{block.line}: {wrong}" for wrong in found)
    finally:
        measurement._REGISTRY.clear()
        measurement._REGISTRY.update(before)


def _wrong_file(block, folder):
    if block.language == "yaml":
        for document in filter(None, yaml.safe_load_all(block.text)):
            group = str(document.get("apiVersion", "a.b/")).rpartition("/")[0] if isinstance(document, dict) else "a.b"
            if ("." not in group or group.endswith(".k8s.io")) and "kustomize" not in group and "kind" in document:
                kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        (folder / "shown.yaml").write_text(block.text, encoding="utf-8")
        if isinstance(document, dict) and {"skus", "every_sku"} & set(document):
            loader.load(loader.shipped_path(), folder / "shown.yaml")
        for profile in document.get("profiles", ()) if isinstance(document, dict) else ():
            workload_loader.load(folder / "shown.yaml", profile=str(profile))
    elif block.language == "json":
        [json.loads(line) for line in (block.text.splitlines() if "\n{" in block.text else [block.text])]
    elif block.language == "python":
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("pytest_gpucluster"):
                exec(ast.unparse(node), {})
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Metric":  # one that the page itself adds
                measurement.register(Metric(**{str(word.arg): ast.literal_eval(word.value) for word in node.keywords}))
    elif block.language in ("ini", "toml"):
        named = set(re.findall(r"^(gpucluster\w*)\s*=", block.text, re.MULTILINE))
        yield from (f"there is no setting {name}" for name in named - SETTINGS)
