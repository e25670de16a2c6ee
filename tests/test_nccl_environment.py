from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpucluster import nccl_environment, nccl_log
from pytest_gpucluster.nccl_environment import Setting, differences, effective, read


def settings(
    environ: dict[str, str], folder: Path, user: str | None = None, system: str | None = None
) -> tuple[Setting, ...]:
    for name, text in {".nccl.conf": user, "etc.conf": system}.items():
        if text is not None:
            (folder / name).write_text(text)
    return read(environ, home_of_user=lambda: folder, system_file=folder / "etc.conf")


def test_every_variable_of_nccl_and_ucx_is_there_and_a_few_more(tmp_path: Path) -> None:
    environ = {
        "NCCL_IB_HCA": "mlx5",
        "UCX_TLS": "rc",
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_LAUNCH_BLOCKING": "0",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
        "NCCL_SOMETHING_NEW": "",
        "PATH": "/bin",
        "XNCCL_": "",
        "OMP_PROC_BIND": "true",
    }
    found = settings(environ, tmp_path)
    assert [setting.name for setting in found] == sorted(set(environ) - {"PATH", "XNCCL_", "OMP_PROC_BIND"})
    assert {setting.origin for setting in found} == {"environment"}


def test_the_environment_comes_before_the_user_s_file_and_that_before_the_system_s(tmp_path: Path) -> None:
    found = settings(
        {"NCCL_ALGO": "Tree"},
        tmp_path,
        user="NCCL_ALGO=Ring\nNCCL_PROTO=LL\n",
        system="NCCL_ALGO=NVLS\nNCCL_PROTO=LL\nNCCL_IB_TC=106",
    )
    assert [str(setting) for setting in found] == [
        f"NCCL_ALGO=Tree (environment, instead of Ring ({tmp_path}/.nccl.conf) and NVLS ({tmp_path}/etc.conf))",
        f"NCCL_IB_TC=106 ({tmp_path}/etc.conf)",
        f"NCCL_PROTO=LL ({tmp_path}/.nccl.conf)",
    ]
    assert effective(found) == {"NCCL_ALGO": "Tree", "NCCL_IB_TC": "106", "NCCL_PROTO": "LL"}


def test_a_named_file_takes_the_place_of_the_user_s(tmp_path: Path) -> None:
    (tmp_path / "mine.conf").write_text("NCCL_PROTO=Simple\n")
    found = settings({"NCCL_CONF_FILE": str(tmp_path / "mine.conf")}, tmp_path, user="NCCL_ALGO=Ring\n")
    assert effective(found) == {"NCCL_CONF_FILE": str(tmp_path / "mine.conf"), "NCCL_PROTO": "Simple"}


def test_lines_are_read_as_nccl_reads_them(tmp_path: Path) -> None:
    text = "# NCCL_ALGO=Ring\n\nNCCL_PROTO = LL\n NCCL_NET=IB\nNCCL_IB_HCA==mlx5_0\nnonsense\nNCCL_DEBUG=\n"
    found = settings({}, tmp_path, user=text)
    assert effective(found) == {"NCCL_PROTO ": " LL", "NCCL_IB_HCA": "=mlx5_0", "NCCL_DEBUG": ""}


def test_what_this_suite_has_set_is_nobody_s_leftover(tmp_path: Path) -> None:
    environ = {"NCCL_IB_HCA": "mlx5"}
    nccl_log.prepare(environ)
    assert effective(settings(environ, tmp_path)) == {"NCCL_IB_HCA": "mlx5"}
    theirs = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "/scratch/nccl.%p"}
    assert effective(settings(theirs, tmp_path)) == theirs


def test_a_user_without_a_home_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read({}, home_of_user=lambda: None, system_file=tmp_path / "none") == ()

    def unknown(uid: int) -> object:
        raise KeyError(uid)

    assert nccl_environment.home() is not None
    monkeypatch.setattr(nccl_environment.pwd, "getpwuid", unknown)
    assert nccl_environment.home() is None


def test_a_setting_that_is_told_to_other_ranks_comes_back_the_same() -> None:
    setting = Setting(name="NCCL_ALGO", value="Tree", origin="environment", instead_of=("Ring (~/.nccl.conf)",))
    assert Setting.from_json(json.loads(json.dumps(setting.to_json()))) == setting


LOCAL = {rank: rank % 4 for rank in range(8)}
NODES = {rank: rank // 4 for rank in range(8)}


def test_ranks_that_are_alike_differ_in_nothing() -> None:
    assert differences({rank: {"NCCL_ALGO": "Tree"} for rank in range(8)}, LOCAL, NODES) == []
    assert differences({}, {}, {}) == []


def test_the_odd_rank_is_named_with_its_value() -> None:
    values = {rank: {"NCCL_ALGO": "Ring"} if rank == 5 else {} for rank in range(8)}
    [found] = differences(values, LOCAL, NODES)
    assert str(found) == "NCCL_ALGO is not set on ranks 0-4, 6-7; Ring on rank 5"
    assert not found.is_meant


def test_a_card_for_each_local_rank_is_meant_and_any_other_pattern_is_not() -> None:
    per_rank = {rank: {"NCCL_IB_HCA": f"mlx5_{rank % 4}"} for rank in range(8)}
    assert [found.is_meant for found in differences(per_rank, LOCAL, NODES)] == [True]
    broken = {**per_rank, 6: {"NCCL_IB_HCA": "mlx5_0"}}
    assert [found.is_meant for found in differences(broken, LOCAL, NODES)] == [False]
    other = {rank: {"NCCL_ALGO": "Ring" if rank % 4 else "Tree"} for rank in range(8)}
    found = differences(other, LOCAL, NODES)
    assert [one.is_meant for one in found] == [False], "no launcher sets this for each rank"


def test_an_interface_for_each_node_is_meant_and_one_rank_with_another_is_not() -> None:
    per_node = {rank: {"NCCL_SOCKET_IFNAME": f"ens{rank // 4}f0"} for rank in range(8)}
    assert [found.is_meant for found in differences(per_node, LOCAL, NODES)] == [True]
    odd = {**per_node, 6: {"NCCL_SOCKET_IFNAME": "lo"}}
    assert [found.is_meant for found in differences(odd, LOCAL, NODES)] == [False]
    other = {rank: {"NCCL_ALGO": "Ring" if rank // 4 else "Tree"} for rank in range(8)}
    assert [found.is_meant for found in differences(other, LOCAL, NODES)] == [False]
