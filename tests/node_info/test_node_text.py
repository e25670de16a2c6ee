"""A node as text: nothing is too wide, nothing acts on the terminal, and what is not there is said."""

from __future__ import annotations

import fake_node
import pytest

from pytest_gpucluster.commands.info import _LEAST_COLUMNS
from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.node_info.gathering import VIEWS, gather
from pytest_gpucluster.node_info.program import Answer
from pytest_gpucluster.node_info.text import render
from pytest_gpucluster.nvml import NotAvailable
from pytest_gpucluster.reports.layout import columns

HOSTILE = "\x1b[2J<script>\u202e\r\nname|" + "x" * 10_000


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return fake_node.tree(tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return Tree(root=tmp_path_factory.mktemp("bare"))


def shown(view, tree, width=80, **changes):
    return render(gather(view, fake_node.sources(tree, **changes)), width=width)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_asked_for(node, bare, view, width):
    for tree in (node, bare):
        lines = shown(view, tree, width).splitlines()
        assert max(map(columns, lines)) <= width
        assert all(line == line.rstrip() for line in lines)


def test_a_node_is_summed_up_in_lines_that_say_it_all(node):
    text = shown("summary", node)
    for line in (
        "system          Ubuntu 22.04.4 LTS, Linux 5.15.0-1063-nvidia, ",
        "up              12 days 0:00, load 1.5 2.25 3",
        "CPUs            2 sockets, 64 cores, 128 CPUs; this process may use ",
        "driver          580.65.06, open kernel modules",
        "7    NVIDIA H100 80GB HBM3  79.6 GiB  61 C  690/700 W  100 %   on  off   18/18",
        "mlx5_7/1  InfiniBand  ACTIVE, LinkUp  400 Gb/sec (4X NDR)     1  28.39.2048",
        "eth0       up     10.0.0.7, 2001:db8::7  100 Gb/s  9000",
        "/home       nfs4    filer:/home         rw",
    ):
        assert f"\n  {line}" in text
    assert "Topology" not in text


def test_the_view_of_gpus_has_each_of_them_and_the_way_between_them(node):
    fake = fake_node.nvml(
        {
            "processes": ((7, 2**30),),
            "nvlink.up": {0: True, 1: False},
            "serial": NotAvailable("not supported by this GPU or driver (nvmlDeviceGetSerial)"),
            "throttle.reasons": ("hw_thermal",),
        }
    )
    text = shown("gpu", node, 100, fake=fake)
    assert "GPU 7: NVIDIA H100 80GB HBM3, GPU-00000007-0000-0000-0000-000000000000\n" in text
    assert "processes       7 alice 1 GiB (python train.py)\n" in text
    assert "NVLink          1/2 up, down: 1, version 4.0, 18 to a switch\n" in text
    assert "held down by hw_thermal\n" in text
    assert "serial ?, part 900-2G520-0000-000\n" in text
    assert "not available   serial: not supported by this GPU or driver\n" in text
    assert "  GPU6  NV18  NV18  NV18  NV18  NV18  NV18     X  NV18\n" in text
    assert "  mlx5_7   SYS   SYS   SYS   SYS  NODE  NODE  NODE   PIX\n" in text
    assert "PXB" not in text  # only the words that are used are explained


def test_a_matrix_that_is_too_wide_goes_on_below(node):
    text = shown("gpu", node, 40)
    head = [line.split() for line in text.splitlines() if line.strip().startswith("GPU0  GPU1")]
    assert head[0] == ["GPU0", "GPU1", "GPU2", "GPU3"]


def test_in_the_narrowest_table_no_number_is_cut(node):
    row = "  0    NVIDIA H100 …  79.6 GiB  61 C  690/700 W  100 %   on  off   18/18\n"
    assert row in shown("summary", node, _LEAST_COLUMNS)


def test_a_lost_gpu_and_a_driver_that_hangs_are_said(node, bare):
    fake = fake_node.nvml()
    fake.silent = {list(fake.gpus)[5]}
    assert "missing         1 of 8 GPUs do not answer\n" in shown("summary", node, fake=fake)
    late = Answer(why_not="python has not answered within 30 s")
    text = shown("summary", bare, gpus=lambda: late)
    assert "not available   python has not answered within 30 s\n" in text
    assert "GPUs            none" not in text


def test_a_laptop_has_none_of_it_and_says_so(bare):
    text = shown("all", bare, fake=fake_node.nvml(count=0), interfaces=tuple)
    assert "\n  GPUs            none\n" in text
    assert "\n  driver          none: /proc/driver/nvidia/version cannot be read" in text
    assert "\n  ports           none:" in text
    assert "\n  interfaces      none\n" in text
    assert "\n  mounts          none\n" in text
    assert "\n  model           not told\n" in text


def test_what_may_not_be_looked_at_is_said_to_be_unknown(tmp_path):
    # A name that no file system takes: as with a folder that is closed to this user, the answer is not "not there".
    text = shown("all", Tree(root=tmp_path / ("x" * 300)), fake=fake_node.nvml(count=1))
    assert "\n  model           not told\n" in text
    assert "File name too long" in text
    assert "\n  modules         not known: /sys/module cannot be looked at\n" in text
    assert "\n  0    NVIDIA H100" in text


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
