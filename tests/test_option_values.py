from __future__ import annotations

import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.option_values import Timeouts, names, one_of, positive_seconds, yes_or_no


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e400", "five", "", "5 s"])
def test_seconds_are_a_positive_finite_number(text: str) -> None:
    with pytest.raises(OptionError, match=r"is not a (positive )?number of seconds"):
        positive_seconds(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", Timeouts(), id="nothing changes nothing"),
        pytest.param("grace=2", Timeouts(grace=2.0), id="one"),
        pytest.param(" grace=2 , join=900 ,", Timeouts(grace=2.0, join=900.0), id="two, with spaces"),
        pytest.param(
            "join=1,grace=2,stuck=3,dead=4,unresponsive=5,terminate=6.5",
            Timeouts(join=1.0, grace=2.0, stuck=3.0, dead=4.0, unresponsive=5.0, terminate=6.5),
            id="all",
        ),
    ],
)
def test_timeouts_are_read_by_name(text: str, expected: Timeouts) -> None:
    assert Timeouts.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("grase=2", "unknown timeout 'grase'", id="a wrong name"),
        pytest.param("grace", "'' is not a number of seconds", id="no value"),
        pytest.param("grace=soon", "'soon' is not a number of seconds", id="no number"),
        pytest.param("grace=0", "'0' is not a positive number of seconds", id="zero"),
        pytest.param("grace=inf", "'inf' is not a positive number of seconds", id="for ever"),
        pytest.param("grace=1,grace=2", "timeout 'grace' is given twice", id="twice"),
    ],
)
def test_wrong_timeouts_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Timeouts.parse(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["yes", "Yes", " true ", "on", "1"])
def test_yes(text: str) -> None:
    assert yes_or_no(text) is True


@pytest.mark.parametrize("text", ["no", "No", "false", "off", "0"])
def test_no(text: str) -> None:
    assert yes_or_no(text) is False


@pytest.mark.parametrize("text", ["", "maybe", "acceptance/", "y"])
def test_neither_yes_nor_no_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is neither yes nor no; write =yes behind the option"):
        yes_or_no(text)


def test_words_and_names() -> None:
    assert one_of("a", "b")("b") == "b"
    with pytest.raises(OptionError, match="'c' is not allowed; choose one of: a, b"):
        one_of("a", "b")("c")
    assert names(" a,, b ") == ("a", "b")
