"""How torchrun is started over pytest."""

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.runners.torchrun import command_line, rendezvous_host

SUITE = ["acceptance/"]
CPU = ["--gpucluster-device=cpu"]


@pytest.mark.parametrize(
    ("launch", "pytest_words", "environ", "ranks"),
    [
        ([], SUITE, {}, ("--nproc-per-node=gpu",)),
        ([], [*SUITE, *CPU], {}, ("--nproc-per-node=2",)),
        ([], [*SUITE, "--gpucluster-device", "cpu"], {}, ("--nproc-per-node=2",)),
        ([], SUITE, {"GPUCLUSTER_DEVICE": "cpu"}, ("--nproc-per-node=2",)),
        ([], [*CPU, *SUITE, "--gpucluster-device=cuda"], {"GPUCLUSTER_DEVICE": "cpu"}, ("--nproc-per-node=gpu",)),
        ([], SUITE, {"PYTEST_ADDOPTS": "-k 'a b' --gpucluster-device=cpu"}, ("--nproc-per-node=2",)),
        ([], [*SUITE, "--gpucluster-device=cuda"], {"PYTEST_ADDOPTS": CPU[0]}, ("--nproc-per-node=gpu",)),
        ([], [*SUITE, "--gpucluster-device"], {}, ("--nproc-per-node=gpu",)),
        (["--nnodes=2"], SUITE, {"PET_NPROC_PER_NODE": "8"}, ()),
        (["--nproc-per-node=4"], SUITE, {}, ()),
        (["--nproc_per_node", "4"], [*SUITE, *CPU], {}, ()),
    ],
)
def test_without_a_number_of_ranks_there_is_one_for_each_gpu_or_two_to_rehearse(launch, pytest_words, environ, ranks):
    assert command_line(launch, pytest_words, environ) == [*ranks, *launch, "-m", "pytest", *pytest_words]


def test_options_that_select_another_program_are_refused():
    for word in ("-m", "--module", "--no-python", "--no_python", "--run-path", "--run_path=1"):
        with pytest.raises(OptionError, match=f"^{word}: "):
            command_line(["--nnodes=1", word], SUITE, {})
    with pytest.raises(OptionError, match=r"`gpucluster run -- acceptance/`"):
        command_line(["acceptance/"], [], {})
    with pytest.raises(OptionError, match=r"^PYTEST_ADDOPTS "):
        command_line([], SUITE, {"PYTEST_ADDOPTS": "-k 'a"})


@pytest.mark.parametrize(
    ("launch", "environ", "found"),
    [
        ([], {}, None),
        (["--nnodes=2", "--master-addr=gpu-06", "--master-port=1"], {}, ("--master-addr", "gpu-06")),
        (["--master_addr", "gpu-06"], {}, ("--master-addr", "gpu-06")),
        (["--rdzv-endpoint=gpu-06:29400"], {}, ("--rdzv-endpoint", "gpu-06")),
        (["--rdzv-endpoint", "[fd00::6]:29400"], {}, ("--rdzv-endpoint", "fd00::6")),
        (["--rdzv-endpoint=gpu-06:1", "--master-addr=gpu-07"], {}, ("--rdzv-endpoint", "gpu-06")),
        (["--rdzv-endpoint=/shared/rdzv"], {}, None),
        (["--rdzv-endpoint=etcd-0:2379,etcd-1:2379"], {}, None),
        (["--master-addr=::1"], {}, ("--master-addr", "::1")),
        ([], {"PET_MASTER_ADDR": "gpu-06"}, ("--master-addr", "gpu-06")),
        (["--master-addr=gpu-07"], {"PET_MASTER_ADDR": "gpu-06"}, ("--master-addr", "gpu-07")),
        (["--standalone", "--master-addr=gpu-06"], {}, None),
        (["--master-addr=gpu-06"], {"PET_STANDALONE": "1"}, None),
    ],
)
def test_where_the_agents_meet_is_read_as_torchrun_reads_it(launch, environ, found):
    assert rendezvous_host(launch, environ) == found
