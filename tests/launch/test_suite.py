"""Where the acceptance suite is: in a checkout or in an installed wheel; and a run from a wheel, in an empty folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import environment

from pytest_gpucluster.journal.journal import read
from pytest_gpucluster.journal.verdict import VARIABLE
from pytest_gpucluster.launch import suite
from pytest_gpucluster.session.options import EXIT_NOTES

tomllib = pytest.importorskip("tomllib")  # of Python 3.11

ROOT = Path(__file__).parents[2]


def make_suite(folder):
    (folder / "acceptance").mkdir(parents=True)
    (folder / "acceptance" / "criteria.txt").touch()
    return folder / "acceptance"


@pytest.fixture
def places(tmp_path, monkeypatch):
    package = tmp_path / "checkout" / "pytest_gpucluster"
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(suite, "PACKAGE", package)
    return tmp_path / "work", tmp_path / "checkout", package


def test_the_nearest_suite_is_taken(places):
    work, checkout, package = places
    assert suite.find_suite() == package / "acceptance"
    assert suite.suite_of([str(package / "acceptance")], work) is None  # there is none
    for folder in (package, checkout, work):
        make_suite(folder)
        assert suite.find_suite() == folder / "acceptance"


def test_a_folder_of_that_name_without_criteria_is_no_suite(places):
    work, _, package = places
    packed = make_suite(package)
    (work / "acceptance").mkdir()
    assert suite.find_suite() == packed
    assert suite.suite_of(["acceptance"], work) is None


def test_a_sites_own_tests_are_run_without_a_list_of_criteria_and_other_projects_stay_as_they_are(places):
    work, _, package = places
    make_suite(package)
    (work / "acceptance").mkdir()
    (work / "acceptance" / "test_own.py").touch()
    assert suite.find_suite() == work / "acceptance"
    assert suite.suite_of(["acceptance"], work) is None


@pytest.mark.parametrize(
    ("argument", "asked"),
    [
        ("pytest_gpucluster.acceptance", True),
        ("pytest_gpucluster.acceptance.test_hbm::test_hbm[copy]", True),
        ("../checkout/pytest_gpucluster/acceptance/test_hbm.py::test_hbm[copy]", True),
        ("../checkout/pytest_gpucluster", False),
        (".", False),
        ("test_hbm.py", False),
    ],
)
def test_an_argument_asks_for_a_suite_by_path_or_by_module(argument, asked, places):
    work, _, package = places
    packed = make_suite(package)
    assert suite.suite_of(["elsewhere", argument], work) == (packed if asked else None)


def test_the_plugin_knows_the_variable_of_a_run():
    assert EXIT_NOTES == VARIABLE


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what a wheel installs, by pyproject.toml."""
    folder = tmp_path_factory.mktemp("site")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in {**{name: name for name in wheel["packages"]}, **wheel["force-include"]}.items():
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, folder / target, copy_function=os.link, ignore=ignored)
        else:
            os.link(ROOT / source, folder / target)
    return folder


def test_a_wheel_and_one_command_are_all_that_a_node_needs(installed, tmp_path):
    command = [sys.executable, "-m", "pytest_gpucluster", "run", "--", "--gpucluster-device=cpu", "-k", "inventory"]
    environ = environment({"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"})
    left = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert left.returncode == 0, left.stdout + left.stderr
    assert left.stderr.splitlines()[-1].startswith(
        "gpucluster: REHEARSAL, REHEARSED, exit code 0: 1 passed; 1 node, 2 "
    )
    journal = read(tmp_path / "gpucluster-report" / "latest" / "journal.jsonl")
    assert [result.nodeid for result in journal.results] == ["acceptance/test_inventory.py::test_inventory"]
    assert "only a selection ran" in journal.reason
    assert not list(installed.rglob(".pytest_cache"))


def test_pytest_runs_the_packed_suite_as_a_module_with_the_plugin_on_and_the_names_of_a_checkout(installed, tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass")
    script = (
        "import sys, pytest\n"
        "from pytest_gpucluster.session.selection import is_selection, root_of\n"
        "class Look:\n"
        "    def pytest_collection_finish(self, session):\n"
        "        print('selection', is_selection(session.config), root_of(session.config))\n"
        "sys.exit(pytest.main(['--collect-only', '-q', '--pyargs', *sys.argv[1:]], plugins=[Look()]))"
    )
    environ = environment({"PYTHONPATH": str(installed)})

    def collect(*arguments):
        command = [sys.executable, "-c", script, *arguments]
        left = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert left.returncode == 0, left.stdout + left.stderr
        return left.stdout.splitlines()

    lines = collect("pytest_gpucluster.acceptance")
    listed = (ROOT / "acceptance" / "criteria.txt").read_text().splitlines()
    criteria = [line for line in listed if line[:1] not in ("", "#")]
    found = {line.removeprefix("acceptance/") for line in lines if "::" in line}
    assert found >= set(criteria)
    assert f"selection False {installed / 'pytest_gpucluster'}" in lines
    assert any(line.startswith("selection True") for line in collect("pytest_gpucluster.acceptance.test_inventory"))
    assert f"selection False {tmp_path}" in collect("test_own.py") + collect(".")
