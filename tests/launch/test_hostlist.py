import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import LaunchError
from pytest_gpucluster.launch.hostlist import compress_hostlist, expand_hostlist


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
def test_hostlists_expand_in_order(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "a,,b", "gpu-[1-3", "gpu-1]", "gpu-[]", "gpu-[a-b]", "gpu-[9-1]", "gpu[0-99999999]", "a[1-999]b[1-999]"],
)
def test_a_malformed_hostlist_is_an_error_that_shows_the_form(text):
    with pytest.raises(LaunchError, match=r"gpu-\[003,007-009\],login1"):
        expand_hostlist(text)


def test_65536_hosts_are_the_most_however_they_are_written():
    for text, more in (("n[1-65536]", "n[0-65536]"), ("r[0-255]n[0-255]", "r[0-255]n[0-256]"), ("a[1-65535],b", "c")):
        assert len(expand_hostlist(text)) == 65536
        with pytest.raises(LaunchError, match="more than 65536 hosts"):
            expand_hostlist(f"{text},{more}" if more == "c" else more)


def test_a_range_of_more_hosts_than_a_list_may_have_is_two() -> None:
    assert compress_hostlist([f"n{number}" for number in (9, *range(100000, 165537))]) == "n[9,100000-165535,165536]"


@given(st.text(alphabet="ab1-,[]09 ", max_size=30))
def test_any_text_is_a_hostlist_or_an_error(text):
    try:
        hosts = expand_hostlist(text)
    except LaunchError:
        return
    assert hosts
    assert all(hosts)


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        pytest.param(["login1"], "login1", id="one host"),
        pytest.param(["gpu-007", "gpu-003"], "gpu-[003,007]", id="sorted"),
        pytest.param(["gpu-003", "gpu-003"], "gpu-003", id="each once"),
        pytest.param(["gpu9", "gpu10", "gpu8", "gpu11"], "gpu[8-11]", id="by number, not by letter"),
        pytest.param(["n098", "n099", "n100", "n102"], "n[098-100,102]", id="leading zeros"),
        pytest.param(["n1", "n01", "n001"], "n[1,01,001]", id="zeros belong to the name"),
        pytest.param(["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1", id="the last number only"),
        pytest.param(["gpu1-ib", "gpu2-ib"], "gpu1-ib,gpu2-ib", id="Slurm takes no brackets inside a name"),
        pytest.param(["gpu", "gpu1", "gpu2"], "gpu,gpu[1-2]", id="a name without a number"),
        pytest.param(["10", "9", "11"], "[9-11]", id="only a number"),
    ],
)
def test_host_names_are_written_shortly(hosts, text):
    assert compress_hostlist(hosts) == text


HOSTS = st.lists(
    st.one_of(
        st.from_regex(r"[a-c]{0,2}-?0{0,2}[0-9]{1,3}", fullmatch=True),
        st.from_regex(r"[a-z][a-z0-9.-]{0,12}", fullmatch=True),
    ),
    min_size=1,
    max_size=40,
)


@given(HOSTS)
def test_the_short_form_stands_for_the_same_hosts(hosts):
    expanded = expand_hostlist(compress_hostlist(hosts))
    assert sorted(expanded) == sorted(set(hosts))


@pytest.mark.parametrize("hosts", [[], [""], ["a,b"], ["a[1]"], ["a b"], ["a\n"]], ids=repr)
def test_what_no_host_list_can_hold_is_refused(hosts):
    with pytest.raises(LaunchError, match="host"):
        compress_hostlist(hosts)
