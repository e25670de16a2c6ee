"""Sessions that measure with a workload: which file, told where, refused when, and the same on every rank."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from complaints import in_order
from torchrun import torchrun

from pytest_gpucluster.session import session

SHIPPED = Path(__file__).parents[2] / "acceptance" / "workloads.yaml"
SUITE = """
import pytest

@pytest.mark.criterion("size")
def test_size(workload, measure):
    measure("inventory.ranks", 1, unit="ranks", record_only=True, sizes=",".join(map(str, workload.matmul.sizes)))
    assert (workload.profile, workload.health.mig) == ("cpu", "off")

def test_other():
    pass
"""


def with_file(project, text=None, folder="."):
    path = project.path / folder / "workloads.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SHIPPED.read_text(encoding="utf-8") if text is None else text, encoding="utf-8")
    return path


def refused(left, *texts):
    """Check that nothing was run, and that the terminal and the report say why, each of them once."""
    assert (left.exit, left.end) == (4, ("BROKEN", 4)), left.output
    assert list(left.verdicts) == ["usage"], left.verdicts
    for text in texts:
        assert left.body("usage").count(text) == 1, left.body("usage")
    assert left.verdicts["usage"].startswith(f"error: {texts[0]}"[:190])
    assert left.last_line[2].startswith(texts[0][:190])
    assert left.stderr.count(texts[-1]) == 1, left.stderr
    assert "Traceback" not in left.output


# ---- what was run is told ------------------------------------------------------------------------------------------


def test_a_report_states_what_was_run_and_where_it_was_set(project):
    project.suite(SUITE)
    with_file(project)
    left = project.run("--gpucluster-workload=matmul.sizes=32,64")
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    (judged,) = left.journal.results[0].measurements
    assert judged.labels["sizes"] == "32,64"
    said = left.journal.workload
    assert (said.profile, said.file) == ("cpu", "workloads.yaml")
    assert (said.values["matmul.sizes"], said.values["health.product_size"]) == ("32, 64", "64")
    assert said.origins["matmul.sizes"] == "command line: --gpucluster-workload matmul.sizes=32,64"
    assert said.origins["hbm.sizes"].startswith("workloads.yaml:")
    assert "gpucluster workload: cpu (workloads.yaml), overridden: matmul.sizes=32, 64" in left.stdout.splitlines()
    assert left.last_line[2].endswith("; workload overridden: matmul.sizes=32, 64")


def test_a_rehearsal_takes_the_profile_cpu_whatever_was_asked_for_and_its_verdict_does_not_speak_of_it(project):
    project.suite(SUITE)
    with_file(project)
    left = project.run("--gpucluster-profile=soak")
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    assert in_order(left.stdout, "\ngpucluster profile: cpu instead of soak: ")
    assert "gpucluster workload: cpu (workloads.yaml)" in left.stdout.splitlines()
    assert left.journal.workload.profile == "cpu"
    assert not {"workload", "profile"} & set(left.last_line[2].split())


def test_a_suite_without_the_fixture_needs_no_file(project):
    project.suite(
        "def test_it(): pass",
        test_own="import pytest\n@pytest.fixture\ndef workload(): return 7\n"
        "def test_own(workload): assert workload == 7",
    )
    left = project.run()
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    assert left.journal.workload is None
    assert "gpucluster workload" not in left.stdout


@pytest.mark.parametrize(
    "options",
    [["-k", "other"], ["test_it.py::test_other"], ["--collect-only"]],
    ids=["deselected", "not named", "only listed"],
)
def test_a_broken_file_matters_only_to_tests_that_are_to_run(project, options):
    project.suite(SUITE)
    with_file(project, "nonsense")
    assert project.run(*options).exit == 0


def test_the_nearest_file_above_the_tests_is_taken(project):
    folder = project.path / "deep" / "deeper"
    folder.mkdir(parents=True)
    (folder / "test_deep.py").write_text(
        "import pytest\n@pytest.fixture\ndef between(workload): return workload\n"
        "def test_deep(between): assert between.health.product_size == 64\n"
    )
    with_file(project, "nonsense")
    with_file(project, folder="deep")
    left = project.run()
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    assert left.journal.workload.file == "deep/workloads.yaml"


# ---- refused -------------------------------------------------------------------------------------------------------


def test_every_error_of_the_file_is_told_before_the_first_test(project):
    project.suite(SUITE)
    text = SHIPPED.read_text(encoding="utf-8").replace("sizes: [128, 256]", "sizes: [128, 250]")
    (number,) = (number for number, line in enumerate(text.splitlines(), 1) if "[128, 250]" in line)
    with_file(project, text.replace("load: 0.05 s", "load: 0.05"))
    refused(project.run(), f"workloads.yaml:{number}:20: matmul.sizes: 250 is", "health.load: '0.05'")
    # Without a file, and with a value that contradicts it.
    (project.path / "workloads.yaml").unlink()
    refused(project.run(), "test_it.py::test_size uses the fixture gpucluster_workload")
    with_file(project)
    option = "--gpucluster-workload=matmul.window=1h"
    refused(project.run(option), f"command line: {option.replace('=', ' ', 1)}: matmul.window is 1h")


def test_two_files_in_one_run_are_refused(project):
    project.suite(SUITE)
    with_file(project)
    with_file(project, folder="more")
    (project.path / "more" / "test_more.py").write_text("def test_more(workload): pass")
    refused(
        project.run(),
        "two workloads in one run: more/workloads.yaml (for more/test_more.py::test_more) and workloads.yaml (for"
        " test_it.py::test_size)",
    )


def test_an_override_that_nobody_understands_is_refused_before_anything_is_collected(project):
    project.suite("raise AssertionError('must not be imported')")
    left = project.run("--gpucluster-workload=matmul.size=16")
    assert left.exit == 4
    assert list(left.verdicts) == ["usage"]
    told = "--gpucluster-workload matmul.size=16: unknown key 'matmul.size'; allowed in matmul are matmul.sizes, "
    assert told in left.body("usage")
    assert "did you mean 'matmul.sizes'?" in left.stderr
    assert "AssertionError" not in left.output


def test_a_test_that_asks_while_it_runs_gets_no_workload(project):
    project.suite("def test_late(request): request.getfixturevalue('workload')")
    with_file(project)
    left = project.run()
    assert left.exit != 0
    assert "name `gpucluster_workload` among the arguments" in left.body("test_late")


# ---- what does not apply ---------------------------------------------------------------------------------------------


def test_markers_that_say_nothing_usable_are_told_in_the_report(project):
    for marker, words in {"needs_gpu(1)": "needs_gpu 1", "criterion": "criterion(name) None"}.items():
        project.suite(f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(): raise AssertionError('must not run')")
        left = project.run()
        refused(left, "test_it.py::test_it: the marker")
        assert in_order(left.body("usage"), f"the marker {words}"), marker


# ---- local workers -----------------------------------------------------------------------------------------------

WORKERS = ("-n", "2", "--dist", "each", "--max-worker-restart=0")


@pytest.mark.extended
def test_what_local_workers_cannot_run_is_told_once(project):
    project.suite(SUITE)
    text = SHIPPED.read_text(encoding="utf-8").replace("load: 0.05 s", "load: 0.05").replace("8 MiB", "8 Mib")
    with_file(project, text)
    left = project.run_apart(*WORKERS)
    assert (left.exit, left.end) == (4, ("BROKEN", 4)), left.output
    assert list(left.verdicts) == ["usage"], left.verdicts
    assert "hbm.sizes: unknown unit 'Mib'" in left.verdicts["usage"]
    assert left.body("usage").count("health.load: '0.05' has no unit") == 1
    assert left.output.count("health.load: '0.05' has no unit") == 1
    assert "INTERNALERROR" not in left.output


def test_local_workers_with_different_workloads_are_no_pass(project):
    project.suite(
        SUITE,
        conftest="import os\nif os.environ.get('PYTEST_XDIST_WORKER') == 'gw1':\n"
        "    os.environ['GPUCLUSTER_WORKLOAD'] = 'matmul.sizes=48'\n",
    )
    with_file(project)
    left = project.run_apart(*WORKERS)
    assert (left.exit, left.end) == (11, ("BROKEN", 11)), left.output
    assert "different workloads: rank " in left.last_line[2]
    assert "matmul.sizes" in left.last_line[2]


# ---- ranks under torchrun ------------------------------------------------------------------------------------------

ON_RANK_1 = "import os\nif os.environ['RANK'] == '1':\n    os.environ['GPUCLUSTER_WORKLOAD'] = '{}'\n"
SWEEP = """
from stamps import stamp

def test_sweep(workload, cluster):
    stamp("ran")
"""


def sweep(folder, override_of_rank_1):
    files = {"test_sweep.py": SWEEP, "workloads.yaml": SHIPPED.read_text(encoding="utf-8")}
    return torchrun(folder, {**files, "conftest.py": ON_RANK_1.format(override_of_rank_1)})


def test_ranks_with_different_sizes_start_nothing_and_the_difference_is_named(tmp_path):
    run = sweep(tmp_path, "nccl.all_reduce.sizes=1 MB; matmul.window=500 ms")
    said = run.verdicts["collection"]
    assert in_order(said, "error: different workloads: rank 1 (node-a) lacks 2 values alone has 2 values"), run.output
    for text in (
        "rank 0 against rank 1:",
        "- matmul.window = 0.3 s ",
        "+ matmul.window = 500 ms ",
        "- nccl.all_reduce.sizes = 64 kB, 256 kB, 1 MB ",
        "+ nccl.all_reduce.sizes = 1 MB ",
    ):
        assert text in run.body("collection")
        assert text in run.output
    assert run.verdicts["test_sweep"] == said.replace("error", "skipped: not run")
    assert (run.stamps, run.end, run.exits, run.left_over) == ({}, ("BROKEN", 11, "rank 0"), [1], [])


def test_a_workload_that_only_rank_1_cannot_use_is_told_with_its_rank(tmp_path):
    run = sweep(tmp_path, "hbm.window=1h")
    said = run.verdicts["collection"]
    assert in_order(said, "rank rank 1 node-a GPUCLUSTER_WORKLOAD=hbm.window=1h hbm.window 1h hbm.longest"), run.output
    assert (run.stamps, run.end) == ({}, ("BROKEN", 11, "rank 0"))


def test_a_file_that_no_rank_can_read_is_a_usage_error_told_once(tmp_path):
    run = torchrun(tmp_path, {"test_sweep.py": SWEEP, "workloads.yaml": "schema_version: 1\nprofiles: {cup: {}}\n"})
    said = "workloads.yaml:2:12: unknown key 'cup'; allowed are quick, full, soak, cpu; did you mean 'cpu'?"
    assert run.verdicts == {"usage": f"error: {said}"}, run.output
    assert run.output.count(f"ERROR: {said}") == 1
    assert (run.stamps, run.end, run.left_over) == ({}, ("BROKEN", 4, "rank 0"), [])


# ---- a slow machine ------------------------------------------------------------------------------------------------


def test_deadlines_follow_the_slowdown_of_a_rehearsal_that_measures(project, monkeypatch):
    project.suite(SUITE.replace("def test_other", "@pytest.mark.deadline(7)\ndef test_other"))
    with_file(project)
    monkeypatch.setattr(session, "measure_slowdown", lambda: 3.0)
    left = project.run("--gpucluster-deadline=20")
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    text = (project.path / "gpucluster-report/latest/journal.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["deadline_seconds"] for line in lines if line["type"] == "start"] == [60.0, 21.0]


def test_the_slowest_rank_counts_and_is_announced():
    lines = []
    one = session.Session.__new__(session.Session)
    one._run = SimpleNamespace(names={0: "rank 0", 1: "rank 1"}, write_lines=lines.extend)
    one._subset = False
    body = {"ids": ["a"], "workload": [], "errors": []}
    assert one._compare({0: {**body, "slowdown": 1.0}, 1: {**body, "slowdown": 3.0}}) == {"ids": ["a"], "slowdown": 3.0}
    assert lines == ["3.0 times slower than an ordinary CPU: limits and deadlines follow"]
