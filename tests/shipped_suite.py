"""The acceptance suite as pytest collects it: its tests, and what options select of them. One session for all of it."""

import functools
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import sessions

ROOT = Path(__file__).parent.parent
OPTIONS = (
    "",
    "-k lora",
    "-k scaling",
    "-k ddp",
    "-k fsdp",
    "-k checkpoint",
    "-k vision",
    "-k not lora and not vision",  # make rehearsal
    "-k nccl",
    "-m nccl",
    "-m single_gpu",
)
_PLUGIN = """
import json
import os
from pathlib import Path

import pytest
from _pytest.mark import deselect_by_keyword, deselect_by_mark

OPTIONS = json.loads(os.environ["SHIPPED_OPTIONS"])

@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    found = {}
    for options in OPTIONS:
        items = list(session.items)
        option, _, expression = options.partition(" ")
        session.config.option.keyword = session.config.option.markexpr = expression
        {"": lambda *_: None, "-k": deselect_by_keyword, "-m": deselect_by_mark}[option](items, session.config)
        found[options] = [
            {"id": item.nodeid, "file": item.nodeid.partition("::")[0], "name": item.name,
             "markers": sorted({mark.name for mark in item.iter_markers()}),
             "criteria": [str(mark.args[0]) for mark in item.iter_markers("criterion")]} for item in items
        ]
    Path(__file__).with_name("found.json").write_text(json.dumps(found))
"""


@functools.cache
def _collected():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shipped_plugin.py").write_text(_PLUGIN)
        command = [sys.executable, "-m", "pytest", str(ROOT / "acceptance"), f"--rootdir={ROOT}", "--collect-only"]
        command += ["-c", str(ROOT / "pyproject.toml"), "-qq", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        command += ["-p", "shipped_plugin"]
        environ = sessions.environment({"SHIPPED_OPTIONS": json.dumps(OPTIONS)})
        with sessions.Process(command, folder, environ, forked=True) as process:
            left = process.wait()
        assert left.exit == 0, left.output
        found = json.loads((folder / "found.json").read_text())
    return found


def shipped_tests():
    """Return every test in the order of a run: its id, file, name, markers and criteria."""
    return [SimpleNamespace(**told) for told in _collected()[""]]


def criteria(options):
    """Return the criteria that options select."""
    return {name for told in _collected()[options] for name in told["criteria"]}


def selected():
    """Return what each option selects, in the order of the run and without the folder; of "" the whole suite."""
    return {
        options: dict.fromkeys(told["id"].removeprefix("acceptance/") for told in tests)
        for options, tests in _collected().items()
    }
