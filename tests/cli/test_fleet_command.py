"""``gpucluster runs fleet``: what it takes, and what its exit codes say."""

import pytest
from written_runs import MATMUL, case, measured, place, write

from pytest_gpucluster.cli.main import main


def node(folder, number, outcome="passed", **more):
    host = f"gpu-00{number}"
    test = case(MATMUL, outcome, measured([730 + number]), message="" if outcome == "passed" else "slow")
    write(folder / host, test, ranks=[place(0, host=host)], run_id=host, **more)


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    for number in range(6):
        node(tmp_path / "sweep", number)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "sweep"


@pytest.mark.parametrize(
    ("outcome", "options", "code"),
    [
        ("passed", [], 0),
        ("failed", [], 1),
        ("error", [], 5),
        ("skipped", [], 5),
        ("passed", ["--nodes", "gpu-[000-006]"], 0),
        ("passed", ["--nodes", "gpu-[000-007]"], 5),
        ("failed", ["--nodes", "gpu-[000-007]"], 1),
    ],
)
def test_the_exit_code_says_whether_all_are_good(sweep, capsys, outcome, options, code):
    ends = {
        "passed": ("ACCEPTED", 0),
        "failed": ("REJECTED", 1),
        "error": ("BROKEN", 11),
        "skipped": ("INCOMPLETE", 10),
    }
    word, number = ends[outcome]
    node(sweep, 6, outcome, end={"verdict": word, "exit": number})
    assert main(["runs", "fleet", str(sweep), *options]) == code
    assert f"gpu-006  {word}" in capsys.readouterr().out


def test_files_are_written_where_they_are_asked_for(sweep, capsys):
    node(sweep, 6, "failed")
    assert main(["runs", "fleet", str(sweep), "--drain", "drain.txt", "--html", "fleet.html"]) == 1
    assert "[slurm]\ngpu-006\n" in (sweep.parent / "drain.txt").read_text()
    assert "1 to be drained" in (sweep.parent / "fleet.html").read_text()
    assert "1 to be drained" in capsys.readouterr().out


def test_a_history_names_the_gpus_that_fail_again_and_again(tmp_path, capsys):
    def write_run(number, culprits, **more):
        failed = case(
            MATMUL, "failed" if culprits else "passed", measured([730, 600 if culprits else 729]), culprits=culprits
        )
        started = f"2026-01-0{number}T00:00:00+00:00"
        write(tmp_path / "runs" / str(number), failed, run_id=str(number), started_at=started, **more)

    for number, culprits in enumerate(([], [1], []), start=1):
        write_run(number, culprits)
    assert main(["runs", "history", str(tmp_path / "runs")]) == 0
    # That a GPU has failed only once is not known where a run cannot be read.
    lost = tmp_path / "runs" / "lost" / "journal.jsonl"
    lost.parent.mkdir()
    lost.write_text("")
    assert main(["runs", "history", str(tmp_path / "runs"), "--html", "-"]) == 5
    page = capsys.readouterr().out.partition("<h1>")[2]
    assert "1 journal cannot be read" in page
    assert "lost/journal.jsonl: empty" in page
    write_run(4, [1])
    assert main(["runs", "history", str(tmp_path / "runs"), "--html", str(tmp_path / "history.html")]) == 1
    shown = capsys.readouterr().out
    assert "gpu-a GPU 1 GPU-gpu-a-1  2 of 4  .F.F" in shown
    assert "4 runs of 2 GPUs: 1 GPU failed in 2 runs or more, 0 in one" in shown
    page = (tmp_path / "history.html").read_text()
    assert page.count('class="chart-svg line-chart"') == 1
    assert "gpu-a GPU 0" in page.partition("All GPUs")[2]
    # Another GPU in that slot has not failed; one run of another kind is no history.
    write_run(5, [], ranks=[place(0), place(1, uuid="GPU-new")])
    assert main(["runs", "history", str(tmp_path / "runs")]) == 1
    assert "2 of 4  .F.F_" in capsys.readouterr().out
    assert main(["runs", "history", str(tmp_path / "runs"), "--html", str(tmp_path / "runs/1/journal.jsonl")]) == 2
    write_run(6, [], rehearsal=True)
    assert main(["runs", "history", str(tmp_path / "runs")]) == 5
    assert main(["runs", "history", str(tmp_path / "none")]) == 3
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "journal.jsonl").write_text("")
    assert main(["runs", "history", str(tmp_path / "lost"), "--html", str(tmp_path / "x.html")]) == 5


def test_a_journal_that_cannot_be_read_is_a_node_without_an_answer(sweep, capsys):
    (sweep / "gpu-009").mkdir()
    (sweep / "gpu-009" / "journal.jsonl").write_text("")
    assert main(["runs", "fleet", str(sweep)]) == 5
    shown = capsys.readouterr().out
    # Without spaces, for a long path is broken anywhere.
    assert "journal.jsonl:empty:therunendedbeforeitwasrecorded" in "".join(shown.split())
    assert "7 nodes: 6 good, 0 to be drained, 1 without an answer" in shown
    assert main(["runs", "fleet", str(sweep / "gpu-009" / "journal.jsonl"), str(sweep)]) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none"], 3, "no such journal"),
        (["empty"], 3, "no journal.jsonl in this folder or below it"),
        (["sweep", "--nodes", "gpu-[1"], 2, "--nodes: "),
        (["sweep", "--drain", "sweep/gpu-000/journal.jsonl/x"], 4, "--drain sweep/gpu-000/journal.jsonl/x: "),
        (["sweep", "--drain", "sweep/gpu-000/journal.jsonl"], 2, "that is a journal; name another file"),
        (["sweep", "--html", "sweep/gpu-000/journal.jsonl"], 2, "that is a journal; name another file"),
        (["sweep", "--html", "-", "--drain", "-"], 2, "--drain has the same output"),
        (["sweep", "rehearsal"], 5, "a REHEARSAL on cpu and a run on GPUs cannot"),
        (["joint"], 5, "none of these runs was on one node alone"),
    ],
)
def test_what_cannot_be_done_is_reported(sweep, capsys, arguments, code, message):
    (sweep.parent / "empty").mkdir()
    node(sweep.parent / "rehearsal", 9, rehearsal=True)
    write(sweep.parent / "joint", case(MATMUL), ranks=[place(0, host="a"), place(1, host="b")])
    assert main(["runs", "fleet", *arguments]) == code
    assert message in capsys.readouterr().err
