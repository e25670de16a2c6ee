from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.hostlist import expand_hostlist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        pytest.param("login1", ["login1"], id="one host"),
        pytest.param("gpu-[003,007-009],login1", ["gpu-003", "gpu-007", "gpu-008", "gpu-009", "login1"], id="mixed"),
        pytest.param("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"], id="no leading zeros"),
        pytest.param("r[1-2]n[01,03]", ["r1n01", "r1n03", "r2n01", "r2n03"], id="two brackets"),
        pytest.param("gpu[1-2]-ib.cluster", ["gpu1-ib.cluster", "gpu2-ib.cluster"], id="suffix"),
        pytest.param("a1,b[2],c3", ["a1", "b2", "c3"], id="one in brackets"),
    ],
)
def test_hostlists_expand_in_order(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,,b",
        "gpu-[1-3",
        "gpu-1]",
        "gpu-[]",
        "gpu-[a-b]",
        "gpu-[9-1]",
        "gpu[0-99999999]",
        "a[1-999]b[1-999]",
    ],
)
def test_a_malformed_hostlist_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(LaunchError, match=r"gpu-\[003,007-009\],login1"):
        expand_hostlist(text)


@given(st.text(alphabet="ab1-,[]09 ", max_size=30))
def test_any_text_is_a_hostlist_or_an_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except LaunchError:
        return
    assert hosts
    assert all(hosts)
