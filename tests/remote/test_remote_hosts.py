"""The hosts file: what it may say, and how it is told what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.remote.hosts import Host, chosen, parse_hosts, read_hosts

EXAMPLE = Path(__file__).parents[2] / "deploy" / "bare-metal" / "hosts.example"


def test_a_line_names_a_node_and_what_ssh_has_to_know_of_it():
    text = """\
# a comment

gpu-[001-002]   # the first two
admin@gpu-003 port=2222 slots=4
gpu-004 address=fd00::4 user=root
"""
    assert parse_hosts(text, "hosts") == (
        Host(name="gpu-001", address="gpu-001"),
        Host(name="gpu-002", address="gpu-002"),
        Host(name="gpu-003", address="gpu-003", user="admin", port=2222, slots=4),
        Host(name="gpu-004", address="fd00::4", user="root"),
    )


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-oProxyCommand=x", "hosts:1: '-oProxyCommand=x' is no name of a node"),
        ("gpu-1;reboot", "hosts:1: 'gpu-1;reboot' is no name of a node"),
        ("gpu-1 port=70000", "hosts:1: port=70000 is no whole number from 1 to 65535"),
        ("gpu-1 slots=0", "hosts:1: slots=0 is no whole number from 1 to 1024"),
        ("gpu-1 slots=٣", "hosts:1: slots=٣ is no whole number from 1 to 1024"),
        ("gpu-1 gpus=8", "hosts:1: 'gpus=8' is not understood; a line is NAME [user=USER]"),
        ("gpu-1 gpu-2", "hosts:1: 'gpu-2' is not understood"),
        ("a@gpu-1 user=b", "hosts:1: user is said twice"),
        ("gpu-1 user=-oX", "hosts:1: user=-oX is no name of a user"),
        ("gpu-1 address=-oX", "hosts:1: address=-oX is no name or address of a host"),
        ("gpu-[1-2] address=10.0.0.1", "hosts:1: one address cannot be that of 2 nodes"),
        ("gpu-[1-", "hosts:1: "),
        ("gpu-1\ngpu-[0-2]", "hosts:2: gpu-1 stands in line 1 already; a node counts once"),
        ("# nobody", "hosts: names no node; write one a line: NAME [user=USER]"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(line, told):
    with pytest.raises(OptionError) as error:
        parse_hosts(line, "hosts")
    assert str(error.value).startswith(told)


def test_all_wrong_lines_are_told_at_once():
    with pytest.raises(OptionError) as error:
        parse_hosts("gpu-1 a=b\ngpu-2\ngpu-3 port=x\n", "hosts")
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == ["hosts:1", "hosts:3"]


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "No such file or directory"), (b"\xff\xfe", "no text"), (b"a" * (1 << 20) + b"\n", "larger than 1 MiB")],
)
def test_a_file_that_is_none_is_told(content, told, tmp_path):
    path = tmp_path / "my hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=told) as error:
        read_hosts(path)
    assert str(error.value).startswith(f"{path}: ")


HOSTS = parse_hosts("gpu-[1-4]", "hosts")


def test_nodes_are_chosen_and_left_out_in_the_order_of_the_file(tmp_path):
    exclude = tmp_path / "exclude.txt"
    exclude.write_text("# gpu-2: REJECTED\n[slurm]\ngpu-[2-3]\n\n[kubernetes]\ngpu-2\ngpu-3\n")
    assert [host.name for host in chosen(HOSTS, "gpu-4,gpu-1", None)] == ["gpu-1", "gpu-4"]
    assert [host.name for host in chosen(HOSTS, None, "gpu-1")] == ["gpu-2", "gpu-3", "gpu-4"]
    assert [host.name for host in chosen(HOSTS, "gpu-[1-3]", str(exclude))] == ["gpu-1"]


@pytest.mark.parametrize(
    ("nodes", "exclude", "told"),
    [
        ("gpu-[1-9]", None, "--nodes: gpu-[5-9] not in the hosts file"),
        (None, "gpu-7", "--exclude: gpu-7 not in the hosts file"),
        (None, "gone/exclude.txt", "--exclude gone/exclude.txt: no such file"),
        ("gpu-[", None, "--nodes: "),
        ("gpu-1", "gpu-1", "--nodes and --exclude leave none of the 4 nodes"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(nodes, exclude, told):
    with pytest.raises(OptionError) as error:
        chosen(HOSTS, nodes, exclude)
    assert str(error.value).startswith(told)


def test_an_exclude_list_that_is_none_is_refused(tmp_path):
    (tmp_path / "exclude.txt").write_text("gpu-1\n")
    with pytest.raises(OptionError, match=r"has no line after \[slurm\]"):
        chosen(HOSTS, None, str(tmp_path / "exclude.txt"))


def test_the_example_that_is_shipped_is_one():
    hosts = read_hosts(EXAMPLE)
    assert len(hosts) > 4
    assert any(host.port for host in hosts)
    assert any(host.slots for host in hosts)
    assert any(host.address != host.name for host in hosts)


def test_who_copies_the_example_is_told_to_edit_it():
    """Its names are made up, and its slots contradict the --expect of the commands that follow."""
    copied = []
    for page in ("bare-metal.md", "quickstart.md"):
        lines = (EXAMPLE.parents[2] / "docs" / page).read_text(encoding="utf-8").splitlines()
        copied += [lines[number + 1] for number, line in enumerate(lines) if line.startswith("cp deploy/bare-metal/")]
    assert copied == ["$EDITOR hosts"] * 2
