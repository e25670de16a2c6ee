"""A process becomes a rank of a simulated cluster; its folder goes with the last one."""

import json
import subprocess
import sys

import pytest

from pytest_gpucluster.errors import LaunchError, OptionError
from pytest_gpucluster.launch.launchers import detect
from pytest_gpucluster.simulation.install import install

BECOMES = """
import json, os, sys
from pytest_gpucluster.launch.launchers import detect
from pytest_gpucluster.simulation.install import install
facts = install(sys.argv[1], detect(os.environ, "laptop"), os.environ)
import torch
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.node.inventory import identify
who = identify(facts, "cuda")
memory = accelerator(torch.device("cpu")).total_bytes()
print(json.dumps([facts.hostname, memory, who["gpu"]["name"], who["gpu"]["index"]]))
"""


def environment(tmp_path, *, node=1, local=3, nodes=2, per_node=8):
    place = {"RANK": node * per_node + local, "LOCAL_RANK": local, "GROUP_RANK": node, "LOCAL_WORLD_SIZE": per_node}
    place |= {
        "WORLD_SIZE": nodes * per_node,
        "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1234,
    }
    place |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": 0, "TMPDIR": tmp_path}
    return {name: str(value) for name, value in place.items()}


def test_a_rank_has_its_gpu_of_the_cluster_and_leaves_no_folder(tmp_path):
    env = {"PATH": "", **environment(tmp_path)}
    command = [sys.executable, "-c", BECOMES, "2x8xH100"]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert json.loads(found.splitlines()[-1]) == ["gpu-01", 85520809984, "NVIDIA H100 80GB HBM3", 3]
    assert not list(tmp_path.glob("gpucluster-simulation-*"))


@pytest.mark.parametrize(
    ("what", "shape", "error", "names"),
    [
        ("2x8xH100", {"nodes": 3, "node": 2}, LaunchError, "--nnodes=2 --nproc-per-node=8"),
        ("2x4xH100", {}, LaunchError, "--nproc-per-node=4"),
        ("2x8xH1", {}, OptionError, "2x8xH100"),
    ],
)
def test_what_the_cluster_has_not_is_refused(tmp_path, what, shape, error, names):
    facts = detect(environment(tmp_path, **shape), "laptop")
    with pytest.raises(error, match=names):
        install(what, facts, {})
