"""The hosts file: its form, and messages about errors in it."""

from pathlib import Path

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.runners.hosts import Host, parse_hosts, read_hosts, select_hosts

EXAMPLE = Path(__file__).parents[2] / "deploy" / "bare-metal" / "hosts.example"


def test_a_line_names_a_node_and_what_ssh_has_to_know_of_it():
    text = """\
# a comment

gpu-[001-002]   # the first two
admin@gpu-003 port=2222
root@gpu-004 address=fd00::4
"""
    assert parse_hosts(text, "hosts") == (
        Host(name="gpu-001", address="gpu-001"),
        Host(name="gpu-002", address="gpu-002"),
        Host(name="gpu-003", address="gpu-003", user="admin", port=2222),
        Host(name="gpu-004", address="fd00::4", user="root"),
    )


def test_a_wrong_line_is_reported_with_its_number():
    for line, message in (
        ("-oProxyCommand=x", "hosts:1: '-oProxyCommand=x'"),
        ("gpu-1;reboot", "hosts:1: 'gpu-1;reboot'"),
        ("gpu-1 port=65536", "hosts:1: 'port=65536' "),
        ("gpu-1 port=0", "hosts:1: 'port=0' "),
        ("gpu-1 port=٣", "hosts:1: 'port=٣' "),
        ("gpu-1 slots=8", "hosts:1: 'slots=8' "),
        ("gpu-1 gpu-2", "hosts:1: 'gpu-2' "),
        ("-oX@gpu-1", "hosts:1: '-oX' "),
        ("gpu-1 address=-oX", "hosts:1: 'address=-oX' "),
        ("gpu-1 address=a address=b", "hosts:1: 'address=b' "),
        ("gpu-[1-2] address=10.0.0.1", "hosts:1: one address "),
        ("gpu-[1-", "hosts:1: "),
        ("gpu-1\ngpu-[0-2]", "hosts:2: gpu-1 "),
        ("# no node", "hosts: names no node"),
    ):
        with pytest.raises(OptionError) as error:
            parse_hosts(line, "hosts")
        assert str(error.value).startswith(message), message
    with pytest.raises(OptionError) as error:
        parse_hosts("gpu-1 a=b\ngpu-2\ngpu-3 port=x\n", "hosts")
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == ["hosts:1", "hosts:3"]


def test_a_file_that_is_no_hosts_file_is_reported(tmp_path):
    path = tmp_path / "my hosts"
    for content in (None, b"\xff\xfe"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(OptionError) as error:
            read_hosts(path)
        assert str(error.value).startswith(f"{path}: ")


HOSTS = parse_hosts("gpu-[1-4]", "hosts")


def test_nodes_are_chosen_and_left_out_in_the_order_of_the_file(tmp_path):
    exclude = tmp_path / "exclude.txt"
    exclude.write_text("# gpu-2: REJECTED\n[slurm]\ngpu-[2-3]\n\n[kubernetes]\ngpu-2\ngpu-3\n")
    assert [host.name for host in select_hosts(HOSTS, "gpu-4,gpu-1", None)] == ["gpu-1", "gpu-4"]
    assert [host.name for host in select_hosts(HOSTS, None, "gpu-1")] == ["gpu-2", "gpu-3", "gpu-4"]
    assert [host.name for host in select_hosts(HOSTS, "gpu-[1-3]", str(exclude))] == ["gpu-1"]


def test_a_choice_that_cannot_be_is_refused(tmp_path):
    no_list = tmp_path / "exclude.txt"
    no_list.write_text("gpu-1\n")
    for nodes, exclude, message in (
        ("gpu-[1-9]", None, "--nodes: gpu-[5-9] "),
        (None, "gpu-7", "--exclude: gpu-7 "),
        (None, "gone/exclude.txt", "--exclude gone/exclude.txt: "),
        ("gpu-[", None, "--nodes: "),
        ("gpu-1", "gpu-1", "--nodes and --exclude "),
        (None, str(no_list), f"--exclude {no_list}"),
    ):
        with pytest.raises(OptionError) as error:
            select_hosts(HOSTS, nodes, exclude)
        assert str(error.value).startswith(message)


def test_the_example_that_is_shipped_is_one():
    hosts = read_hosts(EXAMPLE)
    assert len(hosts) > 4
    assert any(host.port for host in hosts)
    assert any(host.address != host.name for host in hosts)
