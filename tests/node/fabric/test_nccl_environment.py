import pytest

from pytest_gpucluster.device import environment
from pytest_gpucluster.node.fabric import nccl_environment
from pytest_gpucluster.node.fabric.nccl_environment import effective, read_environment


def settings(environ, folder, user=None, system=None):
    for name, text in {".nccl.conf": user, "etc.conf": system}.items():
        if text is not None:
            (folder / name).write_text(text)
    return read_environment(environ, home_of_user=lambda: folder, system_file=folder / "etc.conf")


def test_every_variable_of_nccl_and_ucx_is_there_and_a_few_more(tmp_path):
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


def test_the_environment_comes_before_the_user_s_file_and_that_before_the_system_s(tmp_path):
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


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        (None, "NCCL_NVLS_ENABLE", []),
        ("ALL", "ALL", ["NCCL_NO_CACHE"]),
        ("NCCL_ALGO", "NCCL_ALGO,NCCL_NVLS_ENABLE", ["NCCL_NO_CACHE"]),
        ("NCCL_NVLS_ENABLE", "NCCL_NVLS_ENABLE", []),
    ],
)
def test_nvls_can_be_switched_off_later_and_the_suite_s_own_is_no_leftover(tmp_path, before, after, shown):
    environ = {"NCCL_NO_CACHE": before} if before else {}
    environment.prepare(environ)
    environment.prepare(environ)
    assert environ["NCCL_NO_CACHE"] == after
    environment.switch_nvls_off(environ)
    assert environ["NCCL_NVLS_ENABLE"] == "0"
    assert [setting.name for setting in settings(environ, tmp_path)] == shown
    operators = settings({"NCCL_NVLS_ENABLE": "0"}, tmp_path)
    assert [setting.name for setting in operators] == ["NCCL_NVLS_ENABLE"]


def test_a_named_file_takes_the_place_of_the_user_s(tmp_path):
    (tmp_path / "mine.conf").write_text("NCCL_PROTO=Simple\n")
    found = settings({"NCCL_CONF_FILE": str(tmp_path / "mine.conf")}, tmp_path, user="NCCL_ALGO=Ring\n")
    assert effective(found) == {"NCCL_CONF_FILE": str(tmp_path / "mine.conf"), "NCCL_PROTO": "Simple"}


def test_lines_are_read_as_nccl_reads_them(tmp_path):
    text = "# NCCL_ALGO=Ring\n\nNCCL_PROTO = LL\n NCCL_NET=IB\nNCCL_IB_HCA==mlx5_0\nnonsense\nNCCL_DEBUG=\n"
    found = settings({}, tmp_path, user=text)
    assert effective(found) == {"NCCL_PROTO ": " LL", "NCCL_IB_HCA": "=mlx5_0", "NCCL_DEBUG": ""}


def test_a_user_without_a_home_has_no_file(tmp_path, monkeypatch):
    assert read_environment({}, home_of_user=lambda: None, system_file=tmp_path / "none") == ()

    def unknown(uid):
        raise KeyError(uid)

    assert nccl_environment.home() is not None
    monkeypatch.setattr(nccl_environment.pwd, "getpwuid", unknown)
    assert nccl_environment.home() is None
