"""A keyword selects of the acceptance suite what an operator means by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KEYWORDS = ("", "lora", "scaling", "ddp", "fsdp", "checkpoint", "vision")
_DEADLINE_SECONDS = 300
_COLLECT = """
import json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        self.ids = [item.nodeid for item in session.items]

found = {}
for keyword in sys.argv[1:]:
    collected = Collected()
    options = ["acceptance", "--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    pytest.main([*options, "-k", keyword], plugins=[collected])
    found[keyword] = collected.ids
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def in_order() -> dict[str, list[str]]:
    """Keyword -> what it selects in the order of the run, without the folder; of "" the whole suite. torch is loaded
    once for all of them."""
    left_over = ("PYTEST_", "GPUCLUSTER_", "TORCH", "SLURM_", "OMPI_", "RANK", "WORLD_SIZE", "LOCAL_")
    done = subprocess.run(
        [sys.executable, "-c", _COLLECT, *KEYWORDS],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(left_over)},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
        check=True,
    )
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {keyword: [nodeid.removeprefix("acceptance/") for nodeid in ids] for keyword, ids in found.items()}


@pytest.fixture(scope="module")
def selected(in_order: dict[str, list[str]]) -> dict[str, set[str]]:
    """The same without the order."""
    return {keyword: set(ids) for keyword, ids in in_order.items()}


def of_files(selected: dict[str, set[str]], *names: str) -> set[str]:
    """All tests of these files."""
    found = {nodeid for nodeid in selected[""] if nodeid.partition("::")[0] in names}
    assert {nodeid.partition("::")[0] for nodeid in found} == set(names)
    return found


@pytest.mark.parametrize(
    ("keyword", "file"),
    [
        ("lora", "test_qwen2_lora.py"),
        ("scaling", "test_scaling.py"),
        ("checkpoint", "test_checkpoint.py"),
        ("vision", "test_vision.py"),
    ],
)
def test_a_keyword_selects_a_whole_file_and_nothing_else(
    selected: dict[str, set[str]], keyword: str, file: str
) -> None:
    assert selected[keyword] == of_files(selected, file)


@pytest.mark.parametrize(("keyword", "other"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_keyword_selects_the_file_and_the_throughput_of_a_way_to_share(
    selected: dict[str, set[str]], keyword: str, other: str
) -> None:
    file = of_files(selected, f"test_{keyword}.py")
    rates = {nodeid for nodeid in selected[""] if nodeid.startswith(f"test_training.py::test_throughput[{keyword}-")}
    assert rates
    assert selected[keyword] == file | rates
    assert not selected[keyword] & selected[other]


def test_what_needs_no_communicator_runs_before_one_exists_and_lora_runs_last(in_order: dict[str, list[str]]) -> None:
    files = list(dict.fromkeys(nodeid.partition("::")[0] for nodeid in in_order[""]))
    assert files[:5] == [
        "test_inventory.py",
        "test_host.py",
        "test_health.py",
        "test_nccl_environment.py",
        "test_infiniband.py",
    ]
    ends = [nodeid.partition("::")[0] for nodeid in in_order[""]]
    assert ends.index("test_qwen2_lora.py") == len(ends) - ends.count("test_qwen2_lora.py")
