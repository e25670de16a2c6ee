from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpucluster.yaml_document import Document, Node


def root(document: Document, path: Path) -> Node | None:
    return document.root(path, needs="skus", block_scalar_hint="write 'X or more'")


def of(text: str, tmp_path: Path) -> tuple[Document, Node | None]:
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    document = Document("my.yaml")
    return document, root(document, tmp_path / "my.yaml")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("", "1:1: the file is empty; it needs skus", id="empty"),
        pytest.param("# nothing\n", "1:1: the file is empty; it needs skus", id="only a comment"),
        pytest.param(
            "schema_version: 1\nskus:\n\tH200: {}\n",
            "3:1: no valid YAML: while scanning for the next token, found character '\\t' that cannot start any token",
            id="tab",
        ),
        pytest.param(
            "a: 1\n---\nb: 2\n",
            "2:1: no valid YAML: expected a single document in the stream, but found another document",
            id="two documents",
        ),
        pytest.param(
            "schema_version: 1\nskus: \x07\n",
            "2:7: no valid YAML: the character U+0007 is not allowed",
            id="control character",
        ),
        pytest.param(
            "size: >= 1 GB\n",
            "1:8: no valid YAML: while scanning a block scalar, expected chomping or indentation indicators, but found"
            " '='; write 'X or more'",
            id="comparison",
        ),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_place(text: str, complaint: str, tmp_path: Path) -> None:
    document, found = of(text, tmp_path)
    assert found is None
    assert document.report() == [f"my.yaml:{complaint}"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"# gr\xfc\xdfe\n")
    told = []
    for path in (latin, tmp_path, tmp_path / "missing.yaml"):
        document = Document(path.name)
        assert root(document, path) is None
        told += [line.partition(":1:1: ")[2] for line in document.report()]
    assert told == [
        "the file is not UTF-8: byte 4 is 0xfc",
        "the file cannot be read: Is a directory",
        "the file cannot be read: No such file or directory",
    ]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    document, found = of("\ufeffa: 1\n", tmp_path)
    assert found is not None
    assert list(document.mapping(found, "the file", ("a",)) or {}) == ["a"]
    assert document.report() == []


def test_values_are_read_as_they_are_written(tmp_path: Path) -> None:
    document, found = of("[1e9, 012, 1:30, NO, ' a ']\n", tmp_path)
    assert found is not None
    assert [document.text(item, "an item") for item in document.items(found)] == ["1e9", "012", "1:30", "NO", "a"]


def test_complaints_come_once_and_in_the_order_of_the_file(tmp_path: Path) -> None:
    document, found = of("a: 1\na: 2\nc: [x]\n", tmp_path)
    assert found is not None
    nodes = document.mapping(found, "the file", None) or {}
    for _ in range(2):
        assert document.text(nodes["c"][1], "c") is None
    document.fail(nodes["a"][0], "first")
    assert document.report() == [
        "my.yaml:1:1: first",
        "my.yaml:2:1: duplicate key 'a'; the first one is at line 1",
        "my.yaml:3:4: c must be a single value, not a list",
    ]
