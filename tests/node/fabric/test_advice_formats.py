"""What is printed, in the hands of a real bash, also with names that mean harm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from each import of_each
from made_nodes import MAKERS, Node, azure, infiniband
from sysfs_ports import write

from pytest_gpucluster.node.fabric.nccl_advice import advise, render_advice, shell_lines
from pytest_gpucluster.node.fabric.nccl_facts import collect_facts

HOSTILE = ("$(touch${IFS}x)", "`touch${IFS}x`", "a';touch${IFS}x;'", 'a"b\\n', "a&touch<x", "--x", "*", "~", "#a", "!!")
"""Names that Linux takes for an interface or an RDMA device: no blank, no slash."""


def shown(node: Node) -> str:
    facts = collect_facts(node.sources())
    return shell_lines(facts, advise(facts))


def after(script: str, folder: Path, environ: dict[str, str] | None = None, how: str = 'eval "$1"') -> dict[str, str]:
    """Return the environment that a bash has after it was given these lines."""
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        ["bash", "-euc", f"{how}; env -0", "bash", script],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **(environ or {})},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""
    assert list(folder.iterdir()) == [], "something in the lines was run"
    return dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)


@pytest.mark.parametrize("how", ['eval "$1"', 'source /dev/stdin <<<"$1"'])
def test_a_shell_has_what_is_advised_and_no_longer_what_hurts(tmp_path: Path, how: str) -> None:
    node = azure(tmp_path / "node")
    node.environ |= {"NCCL_ALGO": "Ring", "NCCL_IB_TIMEOUT": "22"}
    found = after(shown(node), tmp_path / "empty", node.environ, how)
    assert found["NCCL_IB_HCA"] == "=" + ",".join(f"mlx5_ib{number}:1" for number in range(8))
    assert "NCCL_ALGO" not in found
    assert found["NCCL_IB_TIMEOUT"] == "22", "what may be right stays"
    node.environ["NCCL_IB_HCA"] = "mlx4"
    lines_out = shown(node)
    assert "unset NCCL_IB_HCA" not in lines_out, "it is replaced"
    assert after(lines_out, tmp_path / "empty", node.environ, how)["NCCL_IB_HCA"].startswith("=mlx5_ib0:1,")


def hostile(root: Path, name: str) -> Node:
    node = infiniband(root)
    node.found.clear()
    (node.proc / "net/route").unlink()
    node.network("br-0", real=False, bridge=True)
    node.network(name)
    node.card(name, board="MT_0000000359", rate="100 Gb/sec (4X EDR)")
    node.card(f"{name}9", close_to=0)
    node.dmi(product_name="Box\n$(touch x)")
    node.environ["NCCL_CHECK_POINTERS"] = "1\ntouch x\n"
    return node


@of_each("name", HOSTILE)
def test_names_that_mean_harm_are_one_word_of_a_shell(name: str, tmp_path: Path) -> None:
    node = hostile(tmp_path / f"node-{HOSTILE.index(name)}", name)
    found = after(shown(node), tmp_path / "empty", {"NCCL_CHECK_POINTERS": "1"})
    assert found["NCCL_SOCKET_IFNAME"] == f"={name}"
    assert f"{name}9:1" in found["NCCL_IB_HCA"].removeprefix("=").split(",")
    assert "NCCL_CHECK_POINTERS" not in found


def test_everything_else_is_a_comment_of_one_printable_line(tmp_path: Path) -> None:
    node = hostile(tmp_path, "eth0")
    node.environ["NCCL_DEBUG"] = "TRACE\x1b[2J\nexport X=1"
    node.gpus_unknown = "NVML has not answered within 30 s"
    lines = shown(node).splitlines()
    for line in lines:
        assert line.isprintable()
        assert line.startswith(("# ", "export NCCL_", "unset NCCL_")), line
    assert any(node.gpus_unknown in line for line in lines if line.startswith("# "))


def test_what_a_file_sets_cannot_be_unset_and_is_named(tmp_path: Path) -> None:
    node = infiniband(tmp_path)
    file = tmp_path / "etc/nccl.conf"
    write(file, "NCCL_ALGO=Ring\nNCCL_P2P_DISABLE=1")
    node.environ["NCCL_P2P_DISABLE"] = "2"
    lines_out = shown(node)
    assert "unset NCCL_ALGO" not in lines_out
    assert any(line.startswith("# ") and str(file) in line for line in lines_out.splitlines())
    assert "unset NCCL_P2P_DISABLE\n" in lines_out
    assert f" 1 ({file})" in lines_out


@pytest.mark.parametrize("name", MAKERS)
def test_the_text_is_never_wider_and_has_everything(tmp_path: Path, name: str) -> None:
    node = MAKERS[name](tmp_path)
    node.environ |= {"NCCL_CHECK_POINTERS": "1\x1b[2J", "NCCL_IB_TIMEOUT": "22"}
    facts = collect_facts(node.sources())
    advised = advise(facts)
    lines_out = render_advice(facts, advised, width=60)
    assert all(line.isprintable() and len(line) <= 60 for line in lines_out.splitlines())
    joined = "".join(lines_out.split())
    names = [one.name for one in (*advised.set, *advised.remove, *advised.look)]
    for words in (*names, *(step.what for step in advised.steps), *advised.unknown):
        assert "".join(words.split()) in joined
