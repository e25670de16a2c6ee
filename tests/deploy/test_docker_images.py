"""deploy/docker: what can be said of the images without an engine to build them; hadolint: test_check_deploy.py."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import require_program

from pytest_gpucluster import __version__, cli

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
GPU, CPU = DOCKER / "Dockerfile", DOCKER / "Dockerfile.cpu"
SCRIPT = DOCKER / "image_constraints.py"

both = pytest.mark.parametrize("dockerfile", [GPU, CPU], ids=lambda path: path.name)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return each instruction of a Dockerfile and what it is told, comments and line ends left out."""
    text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.strip().partition(" ") for line in lines) if word]


def told(dockerfile: Path, word: str) -> list[str]:
    return [rest for found, rest in instructions(dockerfile) if found == word]


def copied(dockerfile: Path) -> list[tuple[str, str]]:
    """Return what is copied from the build context, each with where it goes."""
    pairs = []
    for rest in told(dockerfile, "COPY"):
        words = rest.split()
        if not words[0].startswith("--from="):
            pairs += [(source, words[-1]) for source in words[:-1]]
    return pairs


def arguments(dockerfile: Path) -> dict[str, str]:
    return dict(rest.partition("=")[::2] for rest in told(dockerfile, "ARG"))


def ignored(path: str) -> bool:
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


@both
def test_every_file_that_is_copied_is_there_and_in_the_build_context(dockerfile: Path) -> None:
    sources = [source for source, _ in copied(dockerfile)]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [source for source in sources if ignored(source.rstrip("/"))] == []


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".venv/bin/python", "gpucluster-report/latest", "report.xml", ".env", "id_rsa", "tests/x.py"),
        *("acceptance/__pycache__/x.pyc", "pytest_gpucluster/agreement/__pycache__/x.cpython-311.pyc"),
    ],
)
def test_nothing_else_is_in_the_build_context(path: str) -> None:
    assert ignored(path)


@both
def test_the_copied_files_are_enough_to_run_the_suite(dockerfile: Path, tmp_path: Path) -> None:
    """Without the rest of the checkout, as in the image: the command answers, and every criterion is collected."""
    place = tmp_path / "opt pytest-gpucluster"
    place.mkdir()
    for source, target in copied(dockerfile):
        if not target.startswith("/"):
            leave_out = shutil.ignore_patterns("__pycache__")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place / target, ignore=leave_out)
            else:
                shutil.copy(ROOT / source, place / target)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GPUCLUSTER_", "PYTEST_"))}
    environ |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=place, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("-c", "import pytest_gpucluster; print(pytest_gpucluster.__file__)")
    assert Path(where.strip()).is_relative_to(place)
    assert __version__ in run("-m", "pytest_gpucluster", "--version")
    if dockerfile == CPU:  # as seconds-long for one as for the other, and the files are the same
        listed = run("-m", "pytest", "acceptance/", "--collect-only", "-q", "-p", "no:cacheprovider")
        files = {line.partition("::")[0] for line in listed.splitlines() if "::" in line}
        assert files == {f"acceptance/{path.name}" for path in (ROOT / "acceptance").glob("test_*.py")}


def test_both_images_have_the_same_suite() -> None:
    def inside(dockerfile: Path) -> set[str]:
        return {source for source, target in copied(dockerfile) if not target.startswith("/opt/constraints")}

    assert inside(GPU) == inside(CPU)
    assert set(told(GPU, "WORKDIR")) >= {"/opt/pytest-gpucluster"} == set(told(CPU, "WORKDIR"))


@both
def test_the_version_is_that_of_the_suite(dockerfile: Path) -> None:
    assert arguments(dockerfile)["VERSION"] == __version__
    built = f"registry.example/gpucluster-acceptance:{__version__}{'-cpu' if dockerfile == CPU else ''}"
    assert f"docker build -f {dockerfile.relative_to(ROOT)} -t {built} ." in dockerfile.read_text()


@both
def test_the_base_is_pinned_by_tag_and_can_be_by_digest(dockerfile: Path) -> None:
    given = arguments(dockerfile)
    tag = given["BASE_IMAGE"].rpartition(":")[2]
    assert re.match(r"\d+\.\d+", tag), given["BASE_IMAGE"]
    assert given["BASE_DIGEST"] == '""'
    assert {rest.partition(" AS ")[0] for rest in told(dockerfile, "FROM")} == {"${BASE_IMAGE}${BASE_DIGEST}"}


@both
def test_it_runs_without_root_as_one_user(dockerfile: Path) -> None:
    assert told(dockerfile, "USER") == ["10001"]
    assert any("useradd --uid 10001 " in rest and rest.endswith(" gpucluster") for rest in told(dockerfile, "RUN"))
    assert told(dockerfile, "HEALTHCHECK") == ["NONE"]


@both
def test_its_own_python_is_the_first_one(dockerfile: Path) -> None:
    assert any(rest.startswith("PATH=/opt/venv/bin:${PATH}") for rest in told(dockerfile, "ENV"))
    place = [
        word for word, rest in instructions(dockerfile) if "python -m pip install" in rest or "/opt/venv/bin:" in rest
    ]
    assert place[0] == "ENV"


@both
def test_what_it_does_by_itself_is_a_command_of_ours(dockerfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = (json.loads(rest) for rest in told(dockerfile, "CMD"))
    assert words[0] == "gpucluster"
    with pytest.raises(SystemExit) as ended:
        cli.main(words[1:])
    assert ended.value.code == 0
    assert "usage: gpucluster" in capsys.readouterr().out


def test_pip_must_take_the_pinned_versions() -> None:
    (install,) = [rest for rest in told(CPU, "RUN") if "TORCH_INDEX" in rest]
    assert "--no-deps" in install, "only torch may come from its own index"
    pattern = re.search(r"grep '(.*?)' constraints.txt", install)
    assert pattern is not None
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert len([line for line in lines if re.search(pattern[1], line)]) == 1
    assert "PIP_CONSTRAINT=/opt/pytest-gpucluster/constraints.txt" in " ".join(told(CPU, "ENV"))
    assert "PIP_CONSTRAINT=/opt/constraints/image-constraints.txt" in " ".join(told(GPU, "ENV"))


def test_extras_that_are_installed_exist() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    for dockerfile in (GPU, CPU):
        (extras,) = re.findall(r"-e '\.\[(.*?)\]'", dockerfile.read_text())
        assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in pyproject] == []


def test_nccl_tests_lie_where_they_are_looked_for() -> None:
    assert "--from=nccl-tests /opt/nccl-tests/build/ /opt/nccl-tests/build/" in told(GPU, "COPY")
    (build,) = [rest for rest in told(GPU, "RUN") if "nccl-tests.git" in rest]
    assert '--branch "v${NCCL_TESTS_VERSION}"' in build
    assert re.fullmatch(r"\d+\.\d+\.\d+", arguments(GPU)["NCCL_TESTS_VERSION"])
    assert build.endswith("test -x /opt/nccl-tests/build/all_reduce_perf"), "a build that failed must not pass"
    assert "|| true" not in build


def settings(name: str) -> dict[str, str]:
    lines = (line.strip() for line in (DOCKER / name).read_text().splitlines())
    return dict(line.partition(" ")[::2] for line in lines if line and not line.startswith("#"))


def test_ssh_and_sshd_are_of_one_mind() -> None:
    server, client = settings("sshd_config"), settings("ssh_config")
    assert server["Port"] == client["Port"]
    assert int(server["Port"]) > 1023, "without root"
    assert server["HostKey"].startswith("/home/gpucluster/.ssh/")
    assert {server[name] for name in ("PasswordAuthentication", "KbdInteractiveAuthentication", "UsePAM")} == {"no"}


def test_sshd_takes_its_settings(tmp_path: Path) -> None:
    sshd, keygen = require_program("sshd"), require_program("ssh-keygen")
    subprocess.run([keygen, "-q", "-t", "ecdsa", "-N", "", "-f", tmp_path / "id_rsa"], check=True)
    text = (DOCKER / "sshd_config").read_text().replace("/home/gpucluster/.ssh", str(tmp_path))

    def complaint(content: str) -> str:
        path = tmp_path / "config"
        path.write_text(content)
        told = subprocess.run([sshd, "-t", "-f", path], capture_output=True, text=True, check=False).stderr
        # Only an sshd that is started by root wants this folder, which Debian makes when its service starts.
        return "\n".join(line for line in told.splitlines() if "/run/sshd" not in line)

    assert complaint(text) == ""
    assert "PasswordAutentication" in complaint(text + "PasswordAutentication no\n")
    ssh = require_program("ssh")
    shown = subprocess.run(
        [ssh, "-G", "-F", DOCKER / "ssh_config", "worker-0"], capture_output=True, text=True, check=True
    ).stdout
    assert f"port {settings('sshd_config')['Port']}\n" in shown


@pytest.fixture
def image_constraints() -> Callable[..., list[str]]:
    return runpy.run_path(str(SCRIPT))["image_constraints"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("lines", "kept", "expected"),
    [
        pytest.param(["torch==2.13.0"], {"torch": "2.13.0a0+9.nv26.07"}, ["torch==2.13.0a0+9.nv26.07"], id="replaced"),
        pytest.param(["pytest==9.2.0"], {"torch": "2"}, ["pytest==9.2.0", "torch==2"], id="others stay, kept is added"),
        pytest.param(["# torch==1", "", " rich==15.0.0  # why"], {}, ["rich==15.0.0"], id="comments are left out"),
        pytest.param(
            ['numpy==2.4.6; python_version >= "3.11"', 'numpy==2.2.6; python_version < "3.11"'],
            {"NumPy": "1.26.4"},
            ["numpy==1.26.4"],
            id="every line of a kept one goes",
        ),
        pytest.param(["typing_extensions==4"], {"Typing.Extensions": "5"}, ["typing-extensions==5"], id="spellings"),
        pytest.param(["torchvision==1"], {"torch": "2"}, ["torch==2", "torchvision==1"], id="whole names only"),
    ],
)
def test_constraints_of_an_image(
    image_constraints: Callable[..., list[str]], lines: list[str], kept: dict[str, str], expected: list[str]
) -> None:
    assert image_constraints(lines, kept) == expected


def constraints_script(*words: str) -> Any:
    return subprocess.run(
        [sys.executable, SCRIPT, ROOT / "constraints.txt", *words], capture_output=True, text=True, check=False
    )


def test_constraints_are_of_the_torch_that_is_installed() -> None:
    import importlib.metadata

    done = constraints_script("--keep", "torch", "numpy")
    lines = done.stdout.splitlines()
    assert f"torch=={importlib.metadata.version('torch')}" in lines
    assert len([line for line in lines if line.startswith("torch==")]) == 1
    assert any(line.startswith("pytest==") for line in lines)


def test_an_image_without_torch_is_refused() -> None:
    done = constraints_script("--keep", "torch", "no-such-package")
    assert done.returncode == 1
    assert "no-such-package is not installed" in done.stderr
    assert done.stdout == ""
