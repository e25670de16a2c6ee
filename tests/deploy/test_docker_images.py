"""deploy/docker: what can be said of the images without an engine to build them; hadolint: test_check_deploy.py."""

import fnmatch
import importlib.metadata
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from shell import finished

from pytest_gpucluster import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
GPU, CPU = DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"
SCRIPT = DOCKER / "image_constraints.py"

both = pytest.mark.parametrize("dockerfile", [GPU, CPU], ids=lambda path: path.name)


def instructions(dockerfile):
    text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def told(dockerfile, word):
    return [rest for found, rest in instructions(dockerfile) if found == word]


def copied(dockerfile):
    """Return what is copied from the build context, each with where it goes."""
    pairs = []
    for rest in told(dockerfile, "COPY"):
        words = rest.split()
        if not words[0].startswith("--from="):
            pairs += [(source, words[-1]) for source in words[:-1]]
    return pairs


def ignored(path):
    """Tell whether .dockerignore keeps a file out. Source: https://docs.docker.com/build/concepts/context/#syntax."""
    out = False
    parts = Path(path).parts
    leading = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            names = parts if "**/" in line else leading
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                out = not line.startswith("!")
    return out


def test_what_is_copied_is_in_the_build_context_and_nothing_else():
    for dockerfile in (GPU, CPU):
        sources = [source for source, _ in copied(dockerfile)]
        assert sources
        assert [source for source in sources if not (ROOT / source).exists() or ignored(source.rstrip("/"))] == []
    for path in (
        *(".git/config", ".venv/bin/python", "gpucluster-report/latest", "report.xml", ".env", "id_rsa", "tests/x.py"),
        *("acceptance/__pycache__/x.pyc", "pytest_gpucluster/agreement/__pycache__/x.cpython-311.pyc"),
    ):
        assert ignored(path), path


def test_the_copied_files_are_enough_to_run_the_suite(tmp_path):
    """Without the rest of the checkout, as in the image: the command answers, and every criterion is collected."""
    inside = [
        {source for source, target in copied(dockerfile) if not target.startswith("/opt/constraints")}
        for dockerfile in (GPU, CPU)
    ]
    assert inside[0] == inside[1]
    place = tmp_path / "opt pytest-gpucluster"
    place.mkdir()
    for source, target in copied(CPU):
        if not target.startswith("/"):
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place / target)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPUCLUSTER_", "PYTEST_"))}
    environ |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    code = "import pytest, sys, pytest_gpucluster as ours; print(ours.__file__); sys.exit(pytest.main(sys.argv[1:]))"
    done = finished(
        [sys.executable, "-c", code, "acceptance/", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=place,
        env=environ,
        seconds=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    where, *listed = done.stdout.splitlines()
    assert Path(where).is_relative_to(place)
    files = {line.partition("::")[0] for line in listed if "::" in line}
    assert files == {f"acceptance/{path.name}" for path in (ROOT / "acceptance").glob("test_*.py")}


@both
def test_the_version_is_that_of_the_suite_the_base_is_pinned_and_the_user_is_not_root(dockerfile):
    text, given = dockerfile.read_text(), dict(rest.partition("=")[::2] for rest in told(dockerfile, "ARG"))
    assert given["VERSION"] == __version__
    built = f"registry.example/gpucluster-acceptance:{__version__}{'-cpu' if dockerfile == CPU else ''}"
    assert f"docker build -f {dockerfile.relative_to(ROOT)} -t {built} ." in text
    (extras,) = re.findall(r"-e '\.\[(.*?)\]'", text)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in pyproject] == []
    assert re.match(r"\d+\.\d+", given["BASE_IMAGE"].rpartition(":")[2]), given["BASE_IMAGE"]
    assert {rest.partition(" AS ")[0] for rest in told(dockerfile, "FROM")} == {"${BASE_IMAGE}${BASE_DIGEST}"}
    assert told(dockerfile, "USER") == ["10001"]
    assert any("useradd --uid 10001 " in rest and rest.endswith(" gpucluster") for rest in told(dockerfile, "RUN"))
    # Its own Python is the first one before anything is installed.
    place = [word for word, rest in instructions(dockerfile) if "python -m pip install" in rest or "/venv/bin:" in rest]
    assert place[0] == "ENV"


def test_pip_must_take_the_pinned_versions():
    (install,) = [rest for rest in told(CPU, "RUN") if "TORCH_INDEX" in rest]
    assert "--no-deps" in install, "only torch may come from its own index"
    pattern = re.search(r"grep '(.*?)' constraints.txt", install)
    assert pattern is not None
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert len([line for line in lines if re.search(pattern[1], line)]) == 1
    assert "PIP_CONSTRAINT=/opt/pytest-gpucluster/constraints.txt" in " ".join(told(CPU, "ENV"))
    assert "PIP_CONSTRAINT=/opt/constraints/image-constraints.txt" in " ".join(told(GPU, "ENV"))


def test_constraints_of_an_image():
    image_constraints = runpy.run_path(str(SCRIPT))["image_constraints"]
    marked = ['numpy==2.4.6; python_version >= "3.11"', 'numpy==2.2.6; python_version < "3.11"']
    for lines, kept, expected in (
        (["torch==2.13.0"], {"torch": "2.13.0a0+9.nv26.07"}, ["torch==2.13.0a0+9.nv26.07"]),
        (["pytest==9.2.0"], {"torch": "2"}, ["pytest==9.2.0", "torch==2"]),
        (["# torch==1", "", " rich==15.0.0  # why"], {}, ["rich==15.0.0"]),
        (marked, {"NumPy": "1.26.4"}, ["numpy==1.26.4"]),
        (["typing_extensions==4"], {"Typing.Extensions": "5"}, ["typing-extensions==5"]),
        (["torchvision==1"], {"torch": "2"}, ["torch==2", "torchvision==1"]),
    ):
        assert image_constraints(lines, kept) == expected


def test_constraints_are_of_the_torch_that_is_installed_and_an_image_without_it_is_refused():
    script = [sys.executable, SCRIPT, ROOT / "constraints.txt", "--keep", "torch"]
    lines = finished([*script, "numpy"]).stdout.splitlines()
    assert [line for line in lines if line.startswith("torch==")] == [f"torch=={importlib.metadata.version('torch')}"]
    assert any(line.startswith("pytest==") for line in lines)
    done = finished([*script, "no-such-package"])
    assert (done.returncode, "no-such-package" in done.stderr, done.stdout) == (1, True, "")
