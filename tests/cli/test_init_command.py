"""``gpucluster init``: every file that it writes is one that its reader takes, and none is ever replaced."""

import os
import stat

import pytest
import yaml

from pytest_gpucluster.cli import init, main
from pytest_gpucluster.judge import loader


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_writes_what_was_asked_for_and_nothing_else(site, capsys):
    assert main.main(["init", "limits", "slurm", "hosts"]) == 0
    expected = {"limits.yaml", "deploy/slurm/acceptance.sbatch", "deploy/slurm/job.sh", "hosts"}
    assert set(tree(site)) == expected == set(capsys.readouterr().out.splitlines())
    assert os.access(site / "deploy/slurm/acceptance.sbatch", os.X_OK) == os.access(
        init.PACKAGE.parent / "deploy/slurm/acceptance.sbatch", os.X_OK
    )


def test_the_limits_are_those_that_are_shipped_until_they_are_edited(site, capsys):
    assert main.main(["init", "limits"]) == 0
    assert main.main(["thresholds", "check", "limits.yaml"]) == 0
    shipped = loader.load(loader.shipped_path())
    own = loader.load(loader.shipped_path(), site / "limits.yaml")
    new = [limit for limit in own.limits if limit not in shipped.limits]
    assert [(limit.metric, limit.layer) for limit in new] == [("gpu.findings", 1)]
    # And its example, once it is no comment any more.
    text = (site / "limits.yaml").read_text()
    (site / "limits.yaml").write_text(text.replace("# skus", "skus").replace("\n# ", "\n").partition("schema")[2])
    (site / "limits.yaml").write_text("schema" + (site / "limits.yaml").read_text())
    capsys.readouterr()
    assert main.main(["thresholds", "check", "limits.yaml"]) == 0


@pytest.mark.parametrize("what", ["github", "gitlab", "jenkins"])
def test_a_job_of_a_ci_system_needs_no_checkout(site, what, capsys):
    assert main.main(["init", what]) == 0
    (content,) = tree(site).values()
    text = content.decode()
    assert "gpucluster run -- --junitxml" in text
    assert "acceptance/" not in text
    assert "constraints.txt" not in text
    assert "pytest-gpucluster[lora,vision] @ file://$PWD/pytest_gpucluster-" in text
    if what != "jenkins":
        assert yaml.safe_load(text)
    assert "copy it here" in capsys.readouterr().out


def test_the_manifests_are_those_of_the_checkout(site):
    assert main.main(["init", "kubernetes"]) == 0
    source = init.PACKAGE.parent / "deploy" / "kubernetes"
    assert tree(site / "deploy" / "kubernetes") == tree(source)
    assert (site / "deploy/kubernetes/collect.sh").stat().st_mode & stat.S_IXUSR


def test_no_file_is_replaced_and_then_none_is_written(site, capsys):
    (site / "hosts").write_text("mine")
    assert main.main(["init", "limits", "hosts"]) == 4
    assert "hosts" in capsys.readouterr().err
    assert tree(site) == {"hosts": b"mine"}
