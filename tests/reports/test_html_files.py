"""Links from a page to the files of its run."""

from __future__ import annotations

from pathlib import Path

from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.reports.html.criterion import RunFiles

NODEID = "acceptance/test_links.py::test_links[node]"


def leave(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / ARTIFACTS / artifacts_name(NODEID) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1234567890" * 200)


def test_files_of_a_test_are_linked_relative_to_the_page(tmp_path: Path) -> None:
    leave(tmp_path, "matrix.json", "deeper/curve.csv")
    links, more = RunFiles(folder=tmp_path, page_folder=None).of_test(NODEID)
    name = artifacts_name(NODEID)
    assert [link.name for link in links] == ["matrix.json", "deeper/curve.csv"]
    assert links[0].href == f"./{ARTIFACTS}/{name}/matrix.json"
    assert more == ""
    links, _ = RunFiles(folder=tmp_path, page_folder=tmp_path / "pages").of_test(NODEID)
    assert (tmp_path / "pages" / links[0].href).resolve() == tmp_path / ARTIFACTS / name / "matrix.json"


def test_only_what_is_there_is_linked_and_links_out_of_the_run_are_not(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        files = RunFiles(folder=folder, page_folder=None)
        assert (files.of_test(NODEID), files.of_the_run()) == (((), ""), ())
    (tmp_path / "secret").write_text("x")
    leave(tmp_path, "own.csv")
    place = tmp_path / ARTIFACTS / artifacts_name(NODEID)
    (place / "away").symlink_to(tmp_path / "secret")
    (place / "up").symlink_to(tmp_path, target_is_directory=True)
    assert [link.name for link in files.of_test(NODEID)[0]] == ["own.csv"]
    (tmp_path / "journal.jsonl").write_text("{}\n")
    assert [link.href for link in files.of_the_run()] == ["./journal.jsonl"]
