"""Lines of a given width: nothing is wider, nothing is lost, nothing acts on a terminal."""

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.text import clean, columns, paragraph, shortened


@given(text=st.text(max_size=300), width=st.integers(min_value=12, max_value=120))
def test_no_line_is_wider_than_asked_for_and_no_word_is_lost(text, width):
    lines = paragraph(text, width, first="- ", rest="    ")
    assert max(map(columns, lines)) <= width
    joined = "".join(line[2 if number == 0 else 4 :] for number, line in enumerate(lines))
    assert joined.replace(" ", "") == clean(text).replace(" ", "")


@given(text=st.text(max_size=100))
def test_a_clean_text_is_one_line_that_does_nothing_to_a_terminal(text):
    assert clean(text).isprintable()
    texts = {
        "\x1b[31mred": "#x1B[31mred",
        "a\u202eb": "a\N{REPLACEMENT CHARACTER}b",
        "one\n  two\tthree": "one two three",
        "\ud800": "#xD800",
        "": "",
    }
    assert {each: clean(each) for each in texts} == texts


@given(text=st.text(max_size=60), most=st.integers(min_value=2, max_value=40))
def test_a_shortened_text_fits_and_says_that_it_is_cut(text, most):
    whole = clean(text)
    short = shortened(whole, most)
    assert columns(short) <= most
    assert short == whole or short.endswith("…")
