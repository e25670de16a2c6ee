"""Whole files with several mistakes each, and everything that is said about them, to the letter.

After a change of a message: ``python tests/golden/regenerate.py``, and then read the diff.
"""

from each import of_each
from regenerate import FILES, FOLDER, errors_of


def test_each_file_has_its_errors():
    assert len(FILES) >= 10
    assert sorted(path.stem for path in FILES) == sorted(path.stem for path in FOLDER.glob("*.txt"))


@of_each("path", FILES, name=lambda path: path.stem)
def test_all_errors_of_a_broken_file_are_told_at_once_with_their_places(path):
    expected = path.with_suffix(".txt").read_text(encoding="utf-8")
    assert len(expected.splitlines()) > 3
    assert errors_of(path) == expected
