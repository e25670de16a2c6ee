"""In a project that merely has the plugin installed, pytest behaves as without it."""

import re
import sys
import xml.etree.ElementTree as ET

import pytest
from sessions import Process, environment

WITHOUT = ("-p", "no:gpucluster")
SUITE = """
    import unittest
    import pytest

    @pytest.fixture
    def broken():
        '''A fixture of this project.'''
        yield
        raise ValueError("late")

    def test_passes(record_property):
        record_property("key", "value")
        print("output")

    def test_fails(): assert [1, 2] == [1, 3]
    def test_teardown(broken): pass
    def test_skipped(): pytest.skip("not here")

    @pytest.mark.xfail(reason="known")
    def test_expected(): assert 0

    @pytest.mark.parametrize("value", ["a", "b"])
    def test_parameters(value): pass

    class TestIt(unittest.TestCase):
        def test_it(self): self.assertEqual(1, 1)
"""


@pytest.fixture
def plain(project):
    project.ini("")
    project.suite(SUITE)
    return project


def normalised(left):
    """Return what was printed, without times and without the line of plugins."""
    text = re.sub(r"\d+\.\d+s", "0s", left.output)
    lines = [line for line in text.splitlines() if not line.startswith("plugins: ")]
    return "\n".join(re.sub(r"0x[0-9a-f]+", "0x0", line) for line in lines)


@pytest.mark.parametrize(
    "options",
    [
        ["-v"],
        ["-rA", "-vv"],
        ["-x"],
        ["--fixtures"],
        ["--markers"],
        ["--collect-only", "-q"],
        ["--strict-markers", "-k", "passes"],
        ["no_such_file.py"],
    ],
    ids=" ".join,
)
def test_it_prints_and_returns_what_pytest_does(plain, options):
    found = [plain.run("-p", "no:cacheprovider", *extra, *options, device=None, junit=False) for extra in ((), WITHOUT)]
    assert normalised(found[0]) == normalised(found[1])
    assert found[0].exit == found[1].exit
    assert not (plain.path / "gpucluster-report").exists()


@pytest.mark.parametrize("family", ["xunit2", "xunit1", "legacy"])
def test_junit_is_pytests_own(plain, family):
    def report(*extra):
        arguments = ["-p", "no:cacheprovider", "-o", f"junit_family={family}", "--junitxml=own.xml", *extra]
        # Here a warning is an error, and pytest warns of record_property in xunit2.
        left = plain.run("-W", "default::pytest.PytestWarning", *arguments, device=None, junit=False)
        assert left.exit == 1
        root = ET.parse(plain.path / "own.xml").getroot()
        for element in root.iter():
            for name in ("time", "timestamp"):
                element.attrib.pop(name, None)
        return ET.tostring(root, encoding="unicode")

    assert report() == report(*WITHOUT)


def test_the_environment_does_not_turn_it_on(plain, monkeypatch):
    for name, value in {"DEVICE": "cpu", "EXPECT": "2x8", "DEADLINE": "soon", "REPORT_DIR": "elsewhere"}.items():
        monkeypatch.setenv(f"GPUCLUSTER_{name}", value)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "half"}.items():
        monkeypatch.setenv(name, value)
    left = plain.run(device=None, junit=False)
    assert left.exit == 1
    assert "1 failed, 5 passed" in left.stdout
    assert {path.name for path in plain.path.iterdir() if "gpucluster" in path.name} == set()
    assert not (plain.path / "elsewhere").exists()


HEAVY = """
import atexit, sys
def tell():
    with open("loaded.txt", "w") as file:
        print(*sys.modules, file=file)
atexit.register(tell)
"""


def run_apart(plain, *options):
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", *options]
    with Process(command, plain.path, environment()) as process:
        left = process.wait()
    assert left.exit == 0, left.output
    return left


@pytest.mark.parametrize("options", [["--help"], ["-q"], ["--fixtures"], ["--co"]], ids=" ".join)
def test_nothing_heavy_is_loaded(plain, options):
    plain.suite("def test_it(): pass", conftest=HEAVY)
    left = run_apart(plain, *options)
    assert ("--gpucluster-device" in left.stdout) == (options == ["--help"])
    loaded = (plain.path / "loaded.txt").read_text().split()
    assert "pytest_gpucluster.plugin" in loaded
    assert {name.partition(".")[0] for name in loaded} & {"torch", "numpy", "pynvml", "yaml", "jinja2"} == set()
    own = {name.partition(".")[2] for name in loaded if name.startswith("pytest_gpucluster.")}
    assert own <= {"plugin", "errors", "launch", "launch.suite", "session", "session.options"}


def test_xdist_distributes_as_without_it_and_environment_variables_for_torch_are_left_alone(plain):
    plain.suite(
        """
        import os, pytest

        @pytest.mark.parametrize("value", range(4))
        def test_it(value):
            assert not [name for name in os.environ if name.startswith("TORCH_")]
        """
    )
    assert "4 passed" in run_apart(plain, "-n", "2").stdout
