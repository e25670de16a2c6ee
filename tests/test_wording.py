import pytest

from pytest_gpucluster.text import MESSAGE_CHARACTERS, first_line, one_line, rank_ranges, visible


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("\x1b[0m", "#x1B[0m", id="escape"),
        pytest.param("\x00", "#x00", id="nul"),
        pytest.param("\x7f\x9b", "#x7F#x9B", id="del-and-c1"),
        pytest.param("\ud800", "#xD800", id="lone-surrogate"),
        pytest.param("\uffff", "#xFFFF", id="noncharacter"),
        pytest.param("10 %\r20 %\r\n", "10 %#x0D20 %\n", id="progress-bar"),
        pytest.param("\ufeffé漢\U0001f600\t\n", "\ufeffé漢\U0001f600\t\n", id="what-xml-carries"),
    ],
)
def test_control_characters_are_shown_never_dropped(text, expected):
    assert visible(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("\n \n  first\nsecond", "first", id="the first line that says something"),
        pytest.param("a" * MESSAGE_CHARACTERS, "a" * MESSAGE_CHARACTERS, id="just fits"),
        pytest.param("a" * (MESSAGE_CHARACTERS + 1), "a" * (MESSAGE_CHARACTERS - 1) + "…", id="just too long"),
        pytest.param("one\u2028two", "one", id="a separator that only splitlines knows"),
    ],
)
def test_the_first_line_is_the_first_that_says_something(text, expected):
    assert first_line(text) == expected


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param([3], "rank 3", id="one"),
        pytest.param([2, 0, 1], "ranks 0-2", id="a run"),
        pytest.param([0, 1], "ranks 0-1", id="two"),
        pytest.param([5, 0, 1, 2, 7], "ranks 0-2, 5, 7", id="runs and single ones"),
        pytest.param([4, 4], "rank 4", id="the same twice"),
        pytest.param(range(1024), "ranks 0-1023", id="very many in one range"),
        pytest.param(
            range(0, 1024, 2),
            "ranks " + ", ".join(str(i) for i in range(0, 48, 2)) + ", ... (512 ranks)",
            id="more ranges than anyone reads",
        ),
    ],
)
def test_ranks_are_told_as_ranges(ranks, expected):
    assert rank_ranges(ranks) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param(" a\n\tb  c ", "a b c", id="all lines"),
        pytest.param("a\x1cb", "a#x1Cb", id="what Python takes for white space"),
        pytest.param("0123456789", "0123456789", id="just fits"),
        pytest.param("01234567890", "012345678…", id="just too long"),
    ],
)
def test_one_line_is_the_whole_text_as_far_as_it_fits(text, expected):
    assert one_line(text, 10) == expected
