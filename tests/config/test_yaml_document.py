from complaints import require_complaints
from each import of_each

from pytest_gpucluster.config.yaml_source import Document


def root(document, path):
    return document.root(path, needs="skus", block_scalar_hint="write 'X or more'")


def of(text, tmp_path):
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    document = Document("my.yaml")
    return document, root(document, tmp_path / "my.yaml")


@of_each(
    "case",
    [
        ("", "1:1: empty skus"),
        ("# nothing\n", "1:1: empty skus"),
        ("schema_version: 1\nskus:\n\tH200: {}\n", "3:1: '\\t'"),
        ("a: 1\n---\nb: 2\n", "2:1: document"),
        ("schema_version: 1\nskus: \x07\n", "2:7: U+0007"),
        ("size: >= 1 GB\n", "1:8: '='; 'X or more'"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_place(case, tmp_path):
    text, complaint = case
    document, found = of(text, tmp_path)
    assert found is None
    require_complaints(document.report(), [complaint])


def test_files_that_cannot_be_read_are_named(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"# gr\xfc\xdfe\n")
    complaints = []
    for path in (latin, tmp_path, tmp_path / "missing.yaml"):
        document = Document(path.name)
        assert root(document, path) is None
        complaints += [line.partition(":1:1: ")[2] for line in document.report()]
    for line, words in zip(complaints, ("UTF-8: byte 4 is 0xfc", "Is a directory", "No such file"), strict=True):
        assert words in line


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path):
    document, found = of("\ufeffa: 1\n", tmp_path)
    assert list(document.mapping(found, "the file", ("a",)) or {}) == ["a"]
    assert document.report() == []


def test_values_are_read_as_they_are_written(tmp_path):
    document, found = of("[1e9, 012, 1:30, NO, ' a ']\n", tmp_path)
    assert [document.text(item, "an item") for item in document.items(found)] == ["1e9", "012", "1:30", "NO", "a"]


def test_complaints_come_once_and_in_the_order_of_the_file(tmp_path):
    document, found = of("a: 1\na: 2\nc: [x]\n", tmp_path)
    nodes = document.mapping(found, "the file", None) or {}
    for _ in range(2):
        assert document.text(nodes["c"][1], "c") is None
    document.fail(nodes["a"][0], "first")
    require_complaints(document.report(), ["1:1: first", "2:1: duplicate 'a' line 1", "3:4: c list"])
