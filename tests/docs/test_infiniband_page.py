"""The page about fabrics: its table of variables is what the rules say, and its commands say what to look for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from page_tables import rows
from shown_programs import DIAGNOSTIC, PLAIN
from suite_criteria import CRITERIA

from pytest_gpucluster.nccl_advice import cloud
from pytest_gpucluster.nccl_advice.advice import Advised
from pytest_gpucluster.nccl_advice.advising import advise
from pytest_gpucluster.nccl_advice.fabric import KINDS
from pytest_gpucluster.nccl_advice.gathering import gather

sys.path.insert(0, str(Path(__file__).parent.parent / "nccl_advice"))

import made_nodes
from made_nodes import Node

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE, COMMAND_PAGE = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("infiniband", "nccl-env"))
HEADER = ["variable", "InfiniBand", "RoCE", "Ethernet", "EFA"]
WANTED = (
    *("ibstat", "ibv_devinfo", "perfquery", "rdma", "ethtool", "show_gids", "nvidia-smi", "iblinkinfo", "ibdiagnet"),
    *("mlxlink", "ib_write_bw", "fi_info", "lsmod", "ulimit", "sminfo", "ip"),
)


def with_storage(root: Path) -> Node:
    node = made_nodes.infiniband(root)
    node.card("mlx5_8", board="MT_0000000359", rate="100 Gb/sec (4X EDR)")
    return node


def with_bridge(make: Callable[[Path], Node]) -> Callable[[Path], Node]:
    def made(root: Path) -> Node:
        node = make(root)
        kept = list(node.found)
        node.found.clear()
        node.network("br-0", real=False, bridge=True)
        node.found += kept
        return node

    return made


def old_roce(root: Path) -> Node:
    node = made_nodes.roce(root)
    node.nccl = "2.18.5"
    node.roce("mlx5_8", "ens8")
    return node


def roce_behind_eth0(root: Path) -> Node:
    node = made_nodes.roce(root)
    node.found.reverse()
    return node


def two_speeds(root: Path) -> Node:
    node = made_nodes.ethernet(root)
    node.network("ens9", speed=10_000)
    return node


def slow(root: Path) -> Node:
    return made_nodes.ethernet(root, speed=25_000)


NODES: Mapping[str, tuple[Callable[[Path], Node], ...]] = {
    "InfiniBand": (made_nodes.infiniband, with_storage, made_nodes.azure, with_bridge(made_nodes.infiniband)),
    "RoCE": (made_nodes.roce, old_roce, roce_behind_eth0),
    "Ethernet": (made_nodes.ethernet, slow, two_speeds),
    "EFA": (made_nodes.efa, with_bridge(made_nodes.efa)),
}
"""Kind -> nodes on which everything that is said of it is said."""


def advised(node: Node) -> Advised:
    return advise(gather(node.sources()))


def test_the_table_of_variables_is_what_the_rules_say(tmp_path: Path) -> None:
    said: dict[str, dict[str, set[str]]] = {}
    for kind, makers in NODES.items():
        for number, make in enumerate(makers):
            found = advised(make(tmp_path / f"{kind}{number}"))
            assert found.fabric.kind == kind
            for word, some in (("set", found.set), ("leave", found.leave)):
                for one in some:
                    said.setdefault(one.name, {}).setdefault(kind, set()).add(word)
    shown = {
        row[0].strip("`"): {
            kind: set(re.findall(r"\b(?:leave|set)\b", cell))
            for kind, cell in zip(HEADER[1:], row[1:], strict=True)
            if cell
        }
        for row in rows(PAGE, HEADER)
    }
    assert shown == said
    assert set(NODES) == set(HEADER[1:]) == set(KINDS)


def test_each_fabric_has_a_chapter_or_a_row() -> None:
    for heading in ("InfiniBand", "RoCE", "Ethernet", "Clouds"):
        assert re.search(rf"^## {heading}$", PAGE, re.MULTILINE)
    clouds = [row[0] for row in rows(PAGE, ["cloud", "what the machine has", "what the job needs", "from"])]
    assert {name.partition(",")[0] for name in clouds} == {"Azure", "AWS", "Google Cloud"}


def test_the_page_names_the_provider_s_files_as_the_rules_do() -> None:
    for path in cloud.GOOGLE_SCRIPTS.values():
        assert f"`{Path(path).name}`" in PAGE
    for path in cloud.AZURE_TOPOLOGIES.values():
        assert f"`{Path(path).parent}`" in PAGE
    for source in (cloud.AWS, cloud.GOOGLE, cloud.AZURE):
        assert f"({source})" in PAGE


def test_each_diagnostic_command_has_its_package_and_what_to_look_for() -> None:
    told = list(rows(PAGE, ["command", "package", "what to look for"]))
    programs = [row[0].strip("`").split()[0] for row in told]
    assert set(WANTED) <= set(programs)
    assert set(programs) <= set(DIAGNOSTIC) | PLAIN
    for row in told:
        assert len(row) == 3
        assert all(len(cell) > 2 for cell in row)
        assert len(row[2].split()) >= 2, row


def test_every_symptom_has_cause_command_and_fix() -> None:
    told = list(rows(PAGE, ["symptom", "likely cause", "command", "fix"]))
    assert len(told) >= 10
    for row in told:
        assert len(row) == 4
        assert all(row), row


def test_every_line_of_the_checklist_names_a_command_and_criteria_that_there_are() -> None:
    told = list(rows(PAGE, ["", "check", "command", "criterion"]))
    assert [row[0] for row in told] == [str(number) for number in range(1, len(told) + 1)]
    for _, check, command, criterion in told:
        assert check
        assert re.fullmatch(r"`[^`]+`", command)
        names = re.findall(r"`([a-z0-9_.]+)`", criterion)
        assert set(names) <= set(CRITERIA)
        assert names or "every criterion" in criterion


def test_the_example_of_the_command_is_what_it_prints(tmp_path: Path) -> None:
    from pytest_gpucluster.nccl_advice import formats

    node = made_nodes.azure(tmp_path)
    node.environ = {"NCCL_ALGO": "Ring"}
    facts = gather(node.sources())
    real = formats.shell(facts, advise(facts)).splitlines()
    [block] = re.findall(r"^```text\n(.*?)^```$", COMMAND_PAGE, re.DOTALL | re.MULTILINE)
    shown = block.splitlines()
    assert len(shown) == len(real)
    for seen, line in zip(shown, real, strict=True):
        pattern = ".*".join(map(re.escape, seen.split("…")))
        assert re.fullmatch(pattern, line), f"{seen!r} is not {line!r}"


@pytest.mark.parametrize("name", ["text", "shell", "slurm", "yaml", "json"])
def test_the_page_of_the_command_has_every_format(name: str) -> None:
    from pytest_gpucluster.commands import nccl_env

    assert name in nccl_env._FORMATS
    assert set(nccl_env._FORMATS) == {
        row[0].strip("`") for row in rows(COMMAND_PAGE, ["`--format`", "what", "how it is used"])
    }
