"""A node as text: nothing is too wide, there are no control characters, and missing values are shown."""

from __future__ import annotations

import fake_node
import pytest
from each import of_each

from pytest_gpucluster.node.info import VIEWS, collect_info
from pytest_gpucluster.node.info_text import render_info
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.processes import Output
from pytest_gpucluster.node.sysfs import Tree
from pytest_gpucluster.text import columns

HOSTILE = "\x1b[2J<script>\u202e\r\nname|" + "x" * 10_000


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return fake_node.tree(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return Tree(root=tmp_path_factory.mktemp("bare"))


def shown(view, tree, width=80, **changes):
    return render_info(collect_info(view, fake_node.sources(tree, **changes)), width=width)


@of_each("view", list(VIEWS))
def test_no_line_is_wider_than_asked_for(node, bare, view):
    for tree in (node, bare):
        info = collect_info(view, fake_node.sources(tree))
        for width in (60, 80, 200):
            lines = render_info(info, width=width).splitlines()
            assert max(map(columns, lines)) <= width
            assert all(line == line.rstrip() for line in lines)


def test_a_node_is_summed_up_in_lines_that_say_it_all(node):
    text = shown("summary", node)
    for line in (
        "driver                     580.65.06",
        "7    NVIDIA H100 80GB HBM3  79.65 GiB  61 C  690/700  100 %  yes   no   18/18",
        "mlx5_7/1  InfiniBand  ACTIVE, LinkUp  400 Gb/sec (4X NDR)     1  28.39.2048",
    ):
        assert f"\n  {line}" in text


def test_values_that_gpus_share_stand_once_and_others_with_their_gpus(node):
    fake = fake_node.nvml({"processes": ((7, 1),)})
    fake.planted[list(fake.planted)[3]] |= {"power.limit": 400.0, "ecc.mode": NotAvailable("no permission (ecc.mode)")}
    text = " ".join(shown("gpu", node, fake=fake).split())
    for part in (
        "700 (GPU 0, GPU 1, GPU 2, GPU 4, GPU 5, GPU 6, GPU 7); 400 (GPU 3)",
        "no permission (ecc.mode) (GPU 3)",
        "vbios 96.00.74.00.01 inforom",
        "processes pid 7, memory 1 B, user alice, command python train.py",
        "nvlink ends switch 18",
    ):
        assert part in text


def test_a_lost_gpu_and_a_driver_that_hangs_are_shown(node, bare):
    fake = fake_node.nvml()
    fake.silent = {list(fake.planted)[5]}
    assert "missing                    1 of 8 GPUs " in shown("summary", node, fake=fake)
    late = Output(why_not="no answer in 30 s")
    text = shown("summary", bare, gpus=lambda: late)
    assert "not available              no answer in 30 s\n" in text


def test_names_from_anywhere_do_no_harm(tmp_path):
    changes = {
        "/etc/os-release": f'PRETTY_NAME="{HOSTILE}"\n',
        "/proc/cpuinfo": f"model name : {HOSTILE}\n",
        "/sys/module/nvidia/version": HOSTILE,
        "/proc/self/mountinfo": f"21 1 0:19 / /\\033[2J rw - nfs {'x' * 10_000} rw\n",
        "/sys/class/net/eth0/operstate": HOSTILE,
    }
    tree = fake_node.tree(tmp_path, changes)
    for name in ("rate", "state"):
        tree.path(f"/sys/class/infiniband/mlx5_0/ports/1/{name}").write_text(HOSTILE)
    tree.path("/sys/class/infiniband/mlx5_0/fw_ver").write_text(HOSTILE)
    fake = fake_node.nvml({"serial": HOSTILE, "vbios": HOSTILE, "processes": ((7, 1),)}, name=HOSTILE, driver=HOSTILE)
    hostile = {"fake": fake, "hostname": lambda: HOSTILE, "environ": {"SLURM_JOB_ID": HOSTILE}}
    for view in VIEWS:
        text = shown(view, tree, **hostile)
        assert all(line.isprintable() for line in text.split("\n"))
        assert max(map(columns, text.splitlines())) <= 80
