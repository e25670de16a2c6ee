import pytest
from each import of_each


@of_each("number", range(10))
@pytest.mark.parametrize("factor", [1, 2])
def test_every_case_is_tried_with_what_pytest_gives(number, factor, tmp_path):
    assert number * factor < 20
    assert tmp_path is not None


def test_every_miss_is_listed_also_of_a_case_that_cannot_be_tried():
    @of_each("number", [1, 0, 3], name=lambda number: f"case {number}")
    def tried(number):
        assert 1 / number > 0.5, "too small"

    with pytest.raises(
        AssertionError, match=r"(?s)2 of 3:\ncase 0: ZeroDivisionError: .*\ncase 3: AssertionError: too"
    ):
        tried()


def test_without_a_case_nothing_passes():
    with pytest.raises(AssertionError, match="nothing to try"):
        of_each("number", [])(lambda number: None)()
