import pytest

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.session.options import Timeouts, positive_seconds


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e400", "five", "", "5 s"])
def test_seconds_are_a_positive_finite_number(text):
    with pytest.raises(OptionError, match=r"is not a (positive )?number of seconds"):
        positive_seconds(text)


def test_timeouts_are_read_by_name():
    assert Timeouts.parse("") == Timeouts()
    assert Timeouts.parse(" grace=2 , join=900 ,") == Timeouts(grace=2.0, join=900.0)
    every = {"join": 1.0, "grace": 2.0, "stuck": 3.0, "dead": 4.0, "unresponsive": 5.0, "terminate": 6.5}
    assert Timeouts.parse(",".join(f"{name}={seconds}" for name, seconds in every.items())) == Timeouts(**every)


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
def test_wrong_timeouts_are_refused(text, message):
    with pytest.raises(OptionError) as caught:
        Timeouts.parse(text)
    assert str(caught.value).startswith(message)
