from pathlib import Path

import pytest

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.isolation.finding import Culprit, IsolationResult, exclude_text, excluded_hosts
from pytest_gpucluster.launch.hostlist import expand_hostlist


def found(*culprits):
    return IsolationResult(
        culprits=culprits, cleared=(), undecided=(1, 2), rounds=(), why_undecided="", reproduced=True
    )


def unit(number):
    return Culprit(units=(number,), kind="unit", failed=3, probes=3, evidence=())


LINK = Culprit(units=(4, 9), kind="link", failed=5, probes=5, evidence=())


def host(number):
    return f"gpu-{number:03}"


def sections(text):
    read = {}
    for line in text.splitlines():
        if line.startswith("["):
            read[line] = []
        elif line and not line.startswith("#"):
            read[list(read)[-1]].append(line)
    return read


def test_the_list_has_slurms_form_and_kubernetes_names():
    text = exclude_text(found(unit(3), unit(7)), host=host)
    assert sections(text) == {"[slurm]": ["gpu-[003,007]"], "[kubernetes]": ["gpu-003", "gpu-007"]}
    assert "# kubectl cordon gpu-003\n# kubectl cordon gpu-007\n" in text
    assert "# gpu-003: failed 3 of 3 probes" in text


def test_the_command_in_the_list_reads_the_list():
    lines = exclude_text(found(unit(3), unit(7)), host=host).splitlines()
    [command] = [line for line in lines if "sbatch" in line]
    assert r"/^\[slurm\]/{n;p}" in command  # the line after the section's head
    assert expand_hostlist(lines[lines.index("[slurm]") + 1]) == ["gpu-003", "gpu-007"]


def test_of_a_bad_link_one_end_is_left_out():
    text = exclude_text(found(LINK), host=host)
    assert sections(text) == {"[slurm]": ["gpu-004"], "[kubernetes]": ["gpu-004"]}
    assert "gpu-004 and gpu-009: failed 5 of 5 probes" in text
    assert "gpu-004 is left out" in text


def test_gpus_of_a_node_are_its_host():
    gpus = found(unit(3), unit(5))
    text = exclude_text(gpus, host=lambda unit: "gpu-06", name=lambda unit: f"GPU {unit} of gpu-06")
    assert excluded_hosts(text) == ("gpu-06",)
    assert "# GPU 3 of gpu-06: failed" in text
    assert sections(text)["[slurm]"] == ["gpu-06"]


def test_hosts_at_which_a_test_failed_are_listed_with_it_beside_confirmed_ones_or_alone():
    failed = {"gpu-008": "test_ddp: rank 64 has\n[slurm]\nall"}
    for result, hosts in ((found(unit(3)), ["gpu-003", "gpu-008"]), (found(), ["gpu-008"]), (None, ["gpu-008"])):
        text = exclude_text(result, host=host, failed=failed)
        assert sections(text)["[kubernetes]"] == hosts
        assert "# gpu-008: test_ddp: rank 64 has [slurm] all\n" in text
        assert ("with partners" in text) == (len(hosts) == 2)


def test_a_suspicion_excludes_no_host():
    assert exclude_text(found(), host=host) == ""


def test_a_name_cannot_break_out_of_its_comment():
    text = exclude_text(found(unit(3)), host=host, name=lambda unit: "gpu\n[slurm]\nall")
    assert sections(text) == {"[slurm]": ["gpu-003"], "[kubernetes]": ["gpu-003"]}


def test_a_host_that_no_list_can_hold_is_an_error():
    with pytest.raises(LaunchError, match="'gpu 3'"):
        exclude_text(found(unit(3)), host=lambda unit: "gpu 3")


def test_the_page_shows_a_list_as_it_is_written():
    page = (Path(__file__).parents[2] / "docs" / "isolation.md").read_text(encoding="utf-8")
    now_and_then = Culprit(units=(7,), kind="unit", failed=3, probes=11, evidence=())
    assert f"```text\n{exclude_text(found(unit(3), now_and_then), host=host)}```" in page


def test_the_hosts_of_a_list_can_be_read_again():
    text = exclude_text(found(unit(7), unit(3), LINK), host=host)
    assert excluded_hosts(text) == ("gpu-003", "gpu-004", "gpu-007")


@pytest.mark.parametrize("text", ["", "[slurm]", "[kubernetes]\ngpu-1\n", "# [slurm]\ngpu-1\n"])
def test_a_list_without_hosts_is_an_error_and_not_an_empty_list(text):
    with pytest.raises(LaunchError, match=r"no line after \[slurm\]"):
        excluded_hosts(text)
