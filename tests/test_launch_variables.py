from __future__ import annotations

import pytest

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch_variables import LaunchVariables


def variables(**environ: str) -> LaunchVariables:
    return LaunchVariables(environ, "gpu-07", "a launcher", "start it properly")


def told(read: LaunchVariables) -> str:
    with pytest.raises(LaunchError) as caught:
        read.settle()
    return str(caught.value)


def test_what_is_right_settles_in_silence() -> None:
    read = variables(RANK="3", SIZE="8", NAME="x", MASTER_ADDR="gpu-06")
    assert (read.number("RANK"), read.number("SIZE", least=1), read.text("NAME")) == (3, 8, "x")
    assert (read.master_addr(None, nnodes=2), read.master_port(29500)) == ("gpu-06", 29500)
    read.below("RANK", "SIZE")
    read.at_most("RANK", "SIZE")
    read.settle()


@pytest.mark.parametrize("value", ["", "x", "-1", "1.0", "1e3", " 1", "\u0661", "1" * 19])
def test_what_is_no_whole_number_is_complained_about_and_read_as_the_least(value: str) -> None:
    read = variables(SIZE=value)
    assert read.number("SIZE", least=1) == 1
    assert "SIZE" in told(read)


def test_all_complaints_are_one_error_that_shows_what_was_found_and_what_to_do() -> None:
    read = variables(RANK="8", SIZE="8", LOCAL="9", NAME="")
    for name in ("RANK", "SIZE", "LOCAL", "ABSENT"):
        read.number(name)
    read.text("NAME")
    read.below("RANK", "SIZE")
    read.at_most("LOCAL", "SIZE")
    read.complain("too bad")
    read.complain("too bad")
    assert told(read) == (
        "gpu-07: the variables of a launcher do not make a rank: ABSENT is missing; NAME is empty;"
        " RANK=8 is not below SIZE=8; LOCAL=9 is above SIZE=8; too bad"
        "\nfound: RANK=8 SIZE=8 LOCAL=9 NAME="
        "\nwhat to do: start it properly"
    )


def test_numbers_that_could_not_be_read_are_not_compared() -> None:
    read = variables(RANK="x", SIZE="8")
    read.number("RANK")
    read.number("SIZE")
    read.below("RANK", "SIZE")
    read.at_most("RANK", "SIZE")
    assert told(read).splitlines()[0].endswith("do not make a rank: RANK='x' is not a whole number of at least 0")


@pytest.mark.parametrize("address", ["localhost", "LocalHost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_an_address_that_means_each_node_itself_serves_one_node_only(address: str) -> None:
    variables(MASTER_ADDR=address).master_addr(None, nnodes=1)
    read = variables(MASTER_ADDR=address)
    read.master_addr(None, nnodes=2)
    assert f"MASTER_ADDR={address} is this node itself, but the ranks are on 2 nodes" in told(read)


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_is_between_1_and_65535(port: str) -> None:
    read = variables(MASTER_PORT=port)
    read.master_port(None)
    assert f"MASTER_PORT={port} is not between 1 and 65535" in told(read)
