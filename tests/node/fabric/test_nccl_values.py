from __future__ import annotations

import pytest

from pytest_gpucluster.node.fabric.nccl_rules import excludes, number


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (" 1", 1), ("+2", 2), ("-1", -1), ("0x1F", 31), ("017", 15), ("09", 0), ("", 0), ("yes", 0), ("1x", 1)],
)
def test_a_number_is_what_strtoll_takes_it_for(text: str, value: int) -> None:
    assert number(text) == value


@pytest.mark.parametrize(
    ("value", "word", "without"),
    [
        ("Ring,Tree", "nvls", True),
        ("RING, NVLS", "nvls", False),
        ("^Tree", "tree", True),
        ("^Tree", "nvls", False),
        ("allreduce:ring", "nvls", True),
        ("broadcast:ring", "nvls", False),
        ("ring;allreduce:^tree", "nvls", False),
        ("nvls;allreduce:tree", "nvls", True),
        ("LL,LL128", "simple", True),
        ("^LL128", "ll128", True),
    ],
)
def test_a_list_leaves_out_what_nccl_takes_it_to_leave_out(value: str, word: str, without: bool) -> None:
    assert excludes(value, word) == without
