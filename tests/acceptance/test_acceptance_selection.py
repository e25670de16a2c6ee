"""A keyword selects of the acceptance suite what an operator means by it."""

import pytest
import shipped_suite
from each import of_each

from pytest_gpucluster.config.workload import CRITERIA
from pytest_gpucluster.journal.verdict import REHEARSED_ALWAYS

Selected = dict[str, dict[str, None]]


@pytest.fixture(scope="module")
def selected():
    """Options -> what they select in the order of the run, without the folder; of "" the whole suite."""
    return shipped_suite.selected()


def of_file(selected, name):
    """All tests of a file."""
    found = {nodeid for nodeid in selected[""] if nodeid.partition("::")[0] == name}
    assert found
    return found


@of_each(
    "case",
    [
        ("lora", "test_qwen2_lora.py"),
        ("scaling", "test_scaling.py"),
        ("checkpoint", "test_checkpoint.py"),
        ("vision", "test_vision.py"),
    ],
)
def test_a_keyword_selects_a_whole_file_and_nothing_else(selected, case):
    keyword, file = case
    assert set(selected[f"-k {keyword}"]) == of_file(selected, file)


@of_each("case", [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_keyword_selects_the_file_and_the_throughput_of_a_way_to_share(selected, case):
    keyword, other = case
    rates = {nodeid for nodeid in selected[""] if nodeid.startswith(f"test_training.py::test_throughput[{keyword}-")}
    assert rates
    assert set(selected[f"-k {keyword}"]) == of_file(selected, f"test_{keyword}.py") | rates
    assert not set(selected[f"-k {keyword}"]) & set(selected[f"-k {other}"])


@of_each("option", ["-k", "-m"])
def test_the_keyword_and_the_marker_nccl_select_what_measures_collectives_and_what_is_named_so(selected, option):
    measured = of_file(selected, "test_nccl.py") | of_file(selected, "test_collectives.py")
    assert len(measured) == 6 + 20, "scopes, collectives, dtypes"
    measured |= {"test_scaling.py::test_busbw_retention"}
    found = set(selected[f"{option} nccl"])
    assert measured <= found
    # What NCCL is told by its environment belongs to it, but measures nothing of it.
    assert {name.partition("::")[0] for name in found - measured} <= {"test_nccl_environment.py"}


def test_make_rehearsal_measures_in_every_group_and_what_a_rehearsal_always_needs():
    short, makefile = "-k not lora and not vision", (shipped_suite.ROOT / "Makefile").read_text()
    assert f"-k '{short.removeprefix('-k ')}'" in makefile

    def groups(options):
        return {one.group for name in shipped_suite.criteria(options) if (one := CRITERIA[name])}

    assert set(REHEARSED_ALWAYS) <= shipped_suite.criteria(short)
    assert groups("") - groups(short) == {"qwen2_lora", "qwen2_lora.throughput"}, "they need weights"
    assert 60 < len(shipped_suite.selected()[short]) < len(shipped_suite.selected()[""])


def test_what_local_workers_run_compares_no_ranks(selected):
    found = {nodeid for nodeid in selected["-m single_gpu"] if nodeid.startswith("test_burn_in.py")}
    assert of_file(selected, "test_burn_in.py") - found == {"test_burn_in.py::test_gpus_agree"}


def test_what_needs_no_communicator_runs_before_one_exists_and_lora_runs_last(selected):
    *others, very_last = selected[""]
    files = [nodeid.partition("::")[0] for nodeid in others]
    assert list(dict.fromkeys(files))[:6] == [
        "test_inventory.py",
        "test_host.py",
        "test_health.py",
        "test_nccl_environment.py",
        "test_infiniband.py",
        "test_connectivity.py",
    ]
    assert files.index("test_qwen2_lora.py") == len(files) - files.count("test_qwen2_lora.py")
    assert very_last == "test_scheduler.py::test_slurm[after]"  # a look at the nodes, which measures nothing
