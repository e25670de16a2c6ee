"""What torch, NCCL and cuBLAS are told before they start."""

import re

import pytest

from pytest_gpucluster.device.environment import REPRODUCIBLE, VARIABLES, WORKSPACE, not_reproducible, prepare

GIVEN = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", "always", "would kill the process, and its report"),
    "TORCH_NCCL_ENABLE_MONITORING": ("0", "always", "aborts the process, and its report"),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": ("0", "always", "this plugin reads it itself"),
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": ("0", "always", "ends the process by SIGABRT"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "always", "what a wait and a release mean"),
    "TORCH_NCCL_USE_COMM_NONBLOCKING": ("0", "always", "what a wait and a release mean"),
    "TORCH_FR_BUFFER_SIZE": ("2000", "always", "which collectives each rank has entered and left"),
    "NCCL_DEBUG": ("INFO", "log", "transports, algorithms and NVLS"),
    "NCCL_DEBUG_FILE": ("%p.log", "log", "a file in a private folder"),
    "NCCL_DEBUG_SUBSYS": ("INIT,ENV,GRAPH,NET,TUNING", "log", "transports, algorithms and NVLS"),
    "NCCL_NO_CACHE": ("NCCL_NVLS_ENABLE", "added", "for each communicator whether to use NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", "default", "whether results must be reproducible"),
}
"""Variable -> its value, when it is given, and words of the reason."""


@pytest.mark.parametrize("name", GIVEN)
def test_each_variable_has_its_value_and_a_reason(name):
    value, given, why = GIVEN[name]
    found = VARIABLES[name]
    assert (found.value, found.given) == (value, given)
    assert why in found.reason


def test_no_other_variable_is_set_and_a_second_time_changes_nothing():
    environment = {"PATH": "/bin"}
    prepare(environment)
    assert set(environment) == {"PATH", *GIVEN} == {"PATH", *VARIABLES}
    assert all(environment[name] == value for name, (value, *_) in GIVEN.items() if name != "NCCL_DEBUG_FILE")
    assert re.fullmatch(r"/.*/gpucluster-nccl-[0-9a-f]{16}/%p\.log", environment["NCCL_DEBUG_FILE"])
    before = dict(environment)
    prepare(environment)
    assert environment == before


def test_what_would_end_a_rank_is_replaced_and_other_choices_of_the_operator_stay():
    for name, variable in VARIABLES.items():
        environment = {name: "theirs"}
        prepare(environment)
        theirs = {"always": variable.value, "added": f"theirs,{variable.value}"}.get(variable.given, "theirs")
        assert environment[name] == theirs


@pytest.mark.parametrize(("chosen", "hinders"), [(":4096:8", False), (":16:8", False), (":4096:2:16:8", True)])
def test_a_workspace_of_cublas_is_reproducible_or_it_is_said_why_not(chosen, hinders):
    assert bool(not_reproducible({WORKSPACE: chosen})) is hinders
    assert all(word in not_reproducible({}) for word in ("None", *REPRODUCIBLE))
