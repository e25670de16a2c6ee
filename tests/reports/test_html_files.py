"""Links from a page to the files of its run."""

from __future__ import annotations

from pathlib import Path

from pytest_gpucluster.reports.html.files import RunFiles
from pytest_gpucluster.run_directory import ARTIFACTS, artifacts_name

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
    assert links[0].size == "2.0 kB"
    assert more == ""


def test_a_page_elsewhere_has_links_that_are_right_from_there(tmp_path: Path) -> None:
    run, pages = tmp_path / "run", tmp_path / "pages"
    leave(run, "matrix.json")
    links, _ = RunFiles(folder=run, page_folder=pages).of_test(NODEID)
    assert (pages / links[0].href).resolve() == run / ARTIFACTS / artifacts_name(NODEID) / "matrix.json"


def test_names_that_mean_something_in_an_address_are_quoted(tmp_path: Path) -> None:
    leave(tmp_path, "a b#c?d%.csv", '"><script>.csv', "javascript:alert(1)")
    links, _ = RunFiles(folder=tmp_path, page_folder=None).of_test(NODEID)
    assert all(link.href.startswith(f"./{ARTIFACTS}/") for link in links)
    assert not any(character in link.href for link in links for character in '<>"?#: ')


def test_only_what_is_there_is_linked_and_links_out_of_the_run_are_not(tmp_path: Path) -> None:
    files = RunFiles(folder=tmp_path, page_folder=None)
    assert files.of_test(NODEID) == ((), "")
    assert files.of_the_run() == ()
    (tmp_path / "secret").write_text("x")
    leave(tmp_path, "own.csv")
    place = tmp_path / ARTIFACTS / artifacts_name(NODEID)
    (place / "away").symlink_to(tmp_path / "secret")
    (place / "up").symlink_to(tmp_path, target_is_directory=True)
    assert [link.name for link in files.of_test(NODEID)[0]] == ["own.csv"]
    (tmp_path / "journal.jsonl").write_text("{}\n")
    assert [link.href for link in files.of_the_run()] == ["./journal.jsonl"]


def test_of_many_files_some_are_linked_and_the_rest_counted(tmp_path: Path) -> None:
    leave(tmp_path, *(f"{number:03}.csv" for number in range(45)))
    links, more = RunFiles(folder=tmp_path, page_folder=None).of_test(NODEID)
    assert len(links) == 40
    assert more == f"and 5 more in {ARTIFACTS}/{artifacts_name(NODEID)}"


def test_files_of_a_local_run_lie_by_rank(tmp_path: Path) -> None:
    place = tmp_path / ARTIFACTS / "rank-3" / artifacts_name(NODEID)
    place.mkdir(parents=True)
    (place / "curve.csv").write_text("")
    links, _ = RunFiles(folder=tmp_path, page_folder=None).of_test(NODEID)
    assert [(link.name, link.size) for link in links] == [("rank-3/curve.csv", "0 B")]


def test_numbers_in_names_are_counted_not_spelled(tmp_path: Path) -> None:
    leave(tmp_path, "rank-10.csv", "rank-9.csv", "rank-\u00b2.csv", f"rank-{'9' * 60}.csv")
    for rank in ("rank-12", "rank-3"):
        place = tmp_path / ARTIFACTS / rank / artifacts_name(NODEID)
        place.mkdir(parents=True)
        (place / "curve.csv").write_text("")
    names = [link.name for link in RunFiles(folder=tmp_path, page_folder=None).of_test(NODEID)[0]]
    assert names.index("rank-9.csv") < names.index("rank-10.csv")
    assert names[-2:] == ["rank-3/curve.csv", "rank-12/curve.csv"]
    assert len(names) == 6


def test_without_a_folder_nothing_is_linked() -> None:
    files = RunFiles(folder=None, page_folder=None)
    assert files.of_test(NODEID) == ((), "")
    assert files.of_the_run() == ()
