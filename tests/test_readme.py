"""What the README and CONTRIBUTING tell an operator to expect is so. What holds for every page is in tests/docs/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pytest_gpucluster import thresholds, verdict
from pytest_gpucluster.launch import detect

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULES = sorted(
    path.relative_to(ROOT / "pytest_gpucluster")
    for path in (ROOT / "pytest_gpucluster").rglob("*.py")
    if not path.stem.startswith("__")
)
_OF_A_LAUNCHER = ("TORCH", "SLURM_", "OMPI_", "PMIX_", "GPUCLUSTER_", "PYTEST_")


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose header begins so."""
    body = text.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in body]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_LAUNCHER)}


def test_the_table_of_exit_codes_is_the_code_s() -> None:
    rows = table(README, "exit code")
    assert {int(code): text for code, text in rows} == dict(verdict.EXIT_CODES)


def test_variables_of_launchers_are_those_that_are_read() -> None:
    modules = [ROOT / "pytest_gpucluster" / name for name in ("launch.py", "launch_variables.py")]
    source = "".join(module.read_text(encoding="utf-8") for module in modules)
    section = README.partition("### srun, mpirun, Kubernetes")[2].partition("\n## ")[0]
    documented = {name for name in re.findall(r"`([A-Z][A-Z_]{3,})\b", section) if name != "GPUCLUSTER_HOSTNAME"}
    assert len(documented) > 20
    assert sorted(name for name in documented if f'"{name}"' not in source) == []


def test_the_pod_template_makes_a_rank() -> None:
    [template] = [block for block in blocks(README, "yaml") if block.startswith("env:")]
    variables = {entry["name"]: entry["value"] for entry in yaml.safe_load(template)["env"]}
    assert all(isinstance(value, str) for value in variables.values()), "Kubernetes takes text only"
    facts = detect({"JOB_COMPLETION_INDEX": "3", **variables}, "pod-3")
    assert (facts.rank, facts.world_size, facts.nnodes) == (3, 16, 16)


def test_the_example_of_limits_loads_over_the_shipped_file(tmp_path: Path) -> None:
    [example] = [block for block in blocks(README, "yaml") if block.startswith("schema_version")]
    file = tmp_path / "my-limits.yaml"
    file.write_text(example, encoding="utf-8")
    limits = thresholds.load(thresholds.shipped_path(), file)
    found = limits.limit("nccl.all_reduce.busbw", sku="H100 SXM", world_size=16, nnodes=2, labels={"size": "1 GB"})
    assert found is not None
    assert (found.min, found.origin) == (380.0, f"{file}:6:11")
    assert limits.sku_for("NVIDIA My GPU 96GB") == "My GPU"


def test_the_expected_cluster_of_the_readme_is_one() -> None:
    from pytest_gpucluster.agreement.preflight import Expectation

    found = set(re.findall(r"--gpucluster-expect=(\w+)", README))
    assert {str(Expectation.parse(text)) for text in found} == found


def test_the_example_test_passes_in_a_rehearsal(tmp_path: Path) -> None:
    [example] = blocks(README, "python")
    (tmp_path / "test_example.py").write_text(example, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\ngpucluster = true\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--gpucluster-device=cpu", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "REHEARSED" in done.stdout


@pytest.mark.parametrize("text", [row[0].strip("`") for row in table(README, "you see")])
def test_what_an_operator_sees_is_what_the_code_says(text: str) -> None:
    """Each message has words of its own in the source; names and numbers are made up when it is shown."""
    source = "".join((ROOT / "pytest_gpucluster" / path).read_text(encoding="utf-8") for path in MODULES)
    pieces = (
        "is gone without a word",
        "hangs {place}",
        "does not answer (",
        "different tests collected: ",
        " were launched, but --gpucluster-expect=",
        "is built without CUDA",
        "ended without a word",
        ": no SKU matches it",
        "too fast to be true: ",
        "_beyond(metric, of[rank].value, limit)",
        " is not surely ",
        " is inconclusive: ",
        " is {found} of {of_whom}",
        " (look at the node)",
        "the slowest at {",
        " carries it, expected is ",
        '"HW thermal slowdown"',
        "{codes} during this test: {places}",
        " does not reach ",
        '"isolated: "',
        "{codes}: {places}",
    )
    told = {
        "is gone without a word": "process 4711 is gone without a word",
        "hangs {place}": "hangs at",
        "_beyond(metric, of[rank].value, limit)": " GB/s < ",
        " is {found} of {of_whom}": " is 0.62 of the median of the ",
        "the slowest at {": "the slowest at 3.1 GB/s",
        '"HW thermal slowdown"': "HW thermal slowdown 62 %",
        "{codes} during this test: {places}": " during this test: GPU 3",
        '"isolated: "': "isolated: node-c; ",
        "{codes}: {places}": "ecc_uncorrected: GPU 3 (",
    }
    mine = [piece for piece in pieces if told.get(piece, piece) in text]
    assert len(mine) == 1
    assert mine[0] in source


def test_the_picture_of_the_layers_names_every_module() -> None:
    [picture] = blocks(CONTRIBUTING, "text")
    missing = [path.as_posix() for path in MODULES if not re.search(rf"\b{path.stem}\b", picture)]
    assert missing == [], "add it to the picture in CONTRIBUTING.md, where its imports put it"
