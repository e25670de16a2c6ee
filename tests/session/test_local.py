"""The GPUs of one node without a launcher: N workers' reports become one testcase, one verdict, one report."""

import getpass
import os
import re
import signal
import textwrap
import time

import pytest
from sessions import DEADLINE_SECONDS

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import journal

WORKERS = ("-n", "2", "--dist", "each", "--max-worker-restart=0")
HEAD = """\
import os, pytest, signal, time
RANK = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""


def local(project, suite, *options):
    project.suite(HEAD + textwrap.dedent(suite))
    return project.run_apart(*WORKERS, *options)


def test_the_reports_of_two_workers_become_one_testcase_each(project):
    left = local(
        project,
        """
    @pytest.mark.single_gpu
    @pytest.mark.criterion("speed")
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_speed(dtype, measure, record_property):
        print(f"output of {RANK}")
        record_property("serial", 4711)
        measure(f"matmul.{dtype}.tflops", 1 + RANK, unit="TFLOPS", samples=[1, 2], n=256)

    class TestIt:
        @pytest.mark.single_gpu
        def test_rank(self, cluster, gpu, inventory):
            assert (cluster.world_size, len(inventory), gpu.sku) == (1, 1, "cpu-rehearsal")

    @pytest.mark.criterion("links")
    def test_not_selected(measure): pass
        """,
        *("-m", "single_gpu", "-v", "-o", "junit_logging=all"),
    )
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    assert [(case.get("classname"), case.get("name")) for case in left.cases] == [
        ("test_it", "test_speed[bf16]"),
        ("test_it", "test_speed[fp32]"),
        ("test_it.TestIt", "test_rank"),
    ]
    assert set(left.verdicts.values()) == {"passed"}
    (judged,) = left.journal.results[0].measurements
    assert (judged.value, judged.worst_rank, judged.values) == (1.0, 0, {0: 1.0, 1: 2.0})
    assert left.journal.run.world_size == 2
    assert [place.rank for place in left.journal.cluster.ranks] == [0, 1]
    assert "output of 0" in (left.case("test_speed[bf16]").findtext("system-out") or "")
    assert "[[PROPERTY|serial=4711]]" in (left.case("test_speed[bf16]").findtext("system-out") or "")
    assert len(re.findall("PASSED test_it.py::test_speed.bf16.", left.stdout)) == 1
    assert "gpucluster: 2 ranks on 1 node" in left.stdout
    assert "3 passed" in left.stdout
    assert left.last_line[2].startswith("3 passed; 1 node, 2 ranks, as launched")
    # One process finds the same testcases.
    alone = project.run("-m", "single_gpu")
    assert [case.attrib["name"] for case in alone.cases] == [case.attrib["name"] for case in left.cases]


def test_what_happens_on_one_worker_decides(project):
    left = local(
        project,
        """
    @pytest.mark.criterion("limit")
    def test_limit(measure):
        measure("matmul.fp32.tflops", 1, unit="MFLOPS" if RANK else "TFLOPS")

    @pytest.mark.criterion("silent")
    def test_one_measures(measure):
        if RANK == 0:
            measure("matmul.fp32.tflops", 1, unit="TFLOPS")

    @pytest.fixture
    def bad_setup():
        assert RANK == 0, "no disk"

    def test_setup(bad_setup): pass

    @pytest.fixture
    def bad_teardown():
        yield
        assert RANK == 0, "still busy"

    def test_teardown(bad_teardown): pass

    def test_fails():
        assert RANK == 0, "only here"

    def test_fails_alike():
        assert False, "everywhere"

    def test_skipped_here():
        if RANK:
            pytest.skip("not on this GPU")

    def test_skipped():
        pytest.skip("no such thing")

    @pytest.mark.xfail(reason="known")
    def test_expected():
        assert RANK == 0

    @pytest.mark.xfail(reason="known", strict=True)
    def test_unexpected(): pass

    def test_subtests(subtests):
        with subtests.test("sub"):
            assert RANK == 0

    @pytest.mark.deadline(1)
    def test_hangs():
        if RANK:
            time.sleep(30)

    def test_gpu():
        from pytest_gpucluster.errors import HardwareFault

        if RANK:
            raise HardwareFault("Xid 64", ranks=[0])  # it takes itself for the only rank

    def test_fine(): pass
        """,
    )
    assert (left.exit, left.end) == (1, ("REJECTED", 1)), left.output
    told = {name: re.sub(r"\(.*?\)", "()", verdict) for name, verdict in left.verdicts.items()}
    has_subtests = pytest.version_tuple >= (9, 0)
    assert told == {
        "test_limit": "failure: matmul.fp32.tflops 0.000001 TFLOPS < 0.0005 TFLOPS on rank 1 ()",
        "test_one_measures": told["test_one_measures"],
        "test_setup": "error: rank 1 (): AssertionError: no disk",
        "test_teardown": "error: rank 1 (): AssertionError: still busy",
        "test_fails": "failure: rank 1 (): AssertionError: only here",
        "test_fails_alike": "failure: ranks 0-1: AssertionError: everywhere",
        "test_skipped_here": "error: ranks disagree: rank 1 skipped (), rank 0 did not",
        "test_skipped": "skipped: no such thing",
        "test_expected": "skipped: known",
        "test_unexpected": told["test_unexpected"],
        "test_subtests": "failure: rank 1 (): 1 subtest failed: [sub]: assert 1 == 0"
        if has_subtests
        else "error: all 2 ranks: FixtureLookupError: fixture 'subtests' not found",
        "test_hangs": "error: rank 1 (): hangs at test_it.py:53 in test_hangs",
        "test_gpu": "failure: rank 1 (): HardwareFault: Xid 64",
        "test_fine": "passed",
    }
    assert told["test_one_measures"].startswith("error: matmul.fp32.tflops: ")
    assert "rank 1" in told["test_one_measures"]
    assert told["test_unexpected"].startswith("failure: ")
    assert "rank 0 (" in left.body("test_fails")
    assert 'assert RANK == 0, "only here"' in left.body("test_fails")
    assert left.body("test_fails_alike").count('assert False, "everywhere"') == 1
    assert "time.sleep(30)" in left.body("test_hangs")
    # Plain pytest's own counting sees each test once too.
    failed, errors = (6, 5) if has_subtests else (5, 6)
    assert f"{failed} failed, 1 passed, 1 skipped, 1 xfailed, {errors} errors in" in left.stdout


def test_a_killed_worker_is_named_and_what_ran_before_is_kept(project):
    left = local(
        project,
        """
    def test_before(cluster): pass

    def test_killed():
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def test_after(): pass
        """,
    )
    assert (left.exit, left.end) == (11, ("BROKEN", 11)), left.output
    assert left.verdicts["test_before"] == "passed"
    assert re.match(r"error: rank 1 \(.*\): lost during test_it.py::test_killed: ", left.verdicts["test_killed"])
    assert left.verdicts["test_after"].startswith("error: rank 1 (")
    assert re.match(r"error: rank 1 \(.*\) is lost .*test_it.py::test_killed", left.verdicts["rank lost"])
    assert len(left.cases) == 4


def test_different_tests_in_the_workers_are_never_a_pass(project):
    left = local(project, "@pytest.mark.parametrize('value', range(2 + RANK))\ndef test_it(value): pass\n")
    assert (left.exit, left.end) == (11, ("BROKEN", 11)), left.output
    message = "different tests collected: rank 1 (gw1) alone has 1 test (test_it.py::test_it[2])"
    assert left.verdicts["collection"] == f"error: {message}"
    assert left.verdicts["test_it[0]"] == "passed"
    assert left.verdicts["test_it[2]"].startswith("error: rank 0 (")
    assert left.last_line == ("BROKEN", 11, message)


def test_an_import_error_on_one_worker_is_told(project):
    left = local(project, "if RANK:\n    import no_such_module_here\ndef test_it(): pass\n")
    assert (left.exit, left.end) == (11, ("BROKEN", 11)), left.output
    assert "cannot collect test_it.py: ModuleNotFoundError" in left.verdicts["collection"]
    assert left.verdicts["test_it"].startswith("error: ")


def test_an_import_error_on_all_workers_is_pytests_own_end(project):
    left = local(project, "import no_such_module_here\n")
    assert (left.exit, left.end) == (2, ("BROKEN", 2)), left.output
    assert "cannot collect test_it.py: ModuleNotFoundError" in left.verdicts["collection"]


def test_a_worker_that_refuses_to_start_says_why(project):
    project.pytester.makeconftest(
        "import os\nif os.environ.get('PYTEST_XDIST_WORKER') == 'gw1': os.environ['GPUCLUSTER_DEADLINE'] = 'soon'"
    )
    left = local(project, "def test_it(): pass")
    assert (left.exit, left.end) == (11, ("BROKEN", 11)), left.output
    assert "rank 1 (gw1) is lost" in left.verdicts["rank lost"]
    assert "GPUCLUSTER_DEADLINE=soon" in left.verdicts["rank lost"]


@pytest.mark.parametrize(
    ("option", "verdicts"),
    [
        ("-x", {"test_fails": "failure", "test_fails_too": "skipped"}),
        ("--maxfail=2", {"test_fails": "failure", "test_fails_too": "failure"}),
    ],
)
def test_stopping_counts_merged_failures(project, option, verdicts):
    left = local(
        project,
        """
    def test_fails(): assert 0
    def test_fails_too():
        time.sleep(1)
        assert 0
    def test_slow(): time.sleep(20)
        """,
        option,
    )
    assert (left.exit, left.end) == (1, ("REJECTED", 1)), left.output
    found = {name: verdict.split(":")[0] for name, verdict in left.verdicts.items()}
    assert found == {**verdicts, "test_slow": "skipped"}


def test_a_session_of_a_test_deletes_nothing_of_other_sessions(project, tmp_path):
    left_by_others = [tmp_path / f"pytest-of-{getpass.getuser()}" / f"pytest-{number}" for number in range(5)]
    for folder in left_by_others:
        folder.mkdir(parents=True)
    project.suite("def test_it(): pass")
    left = project.run_apart(*WORKERS, more={"TMPDIR": str(tmp_path)})
    assert left.exit == 0, left.output
    assert all(folder.exists() for folder in left_by_others)


def test_a_selection_of_nothing_is_broken(project):
    left = local(project, "def test_it(): pass", "-k", "nothing_is_called_so")
    assert (left.exit, left.end) == (5, ("BROKEN", 5)), left.output
    assert [verdict.split(":")[0] for verdict in left.verdicts.values()] == ["error"]


def test_of_reruns_on_one_worker_the_first_attempt_counts(project):
    pytest.importorskip("pytest_rerunfailures")
    left = local(
        project,
        """
    tries = []

    def test_flaky():
        tries.append(1)
        assert RANK == 0 or len(tries) > 1, "the first time"
        """,
        "--reruns=1",
    )
    assert (left.exit, left.end) == (1, ("REJECTED", 1)), left.output
    assert left.verdicts["test_flaky"].startswith("failure: rank 1 (")


def interrupted(project, *, everybody):
    """Press Ctrl-C once all workers are in their long test, and the one before is in the journal.

    It reaches the controller, or all of its group.
    """

    def is_there():
        if not all((project.path / f"at{rank}").exists() for rank in (0, 1)):
            return False
        try:
            return bool(journal.read(project.path / "gpucluster-report" / "latest" / "journal.jsonl").results)
        except JournalError:  # its first line has not come yet
            return False

    with project.spawn(*WORKERS) as process:
        until = time.monotonic() + DEADLINE_SECONDS
        while not is_there():
            assert time.monotonic() < until, process.output
            assert process.popen.poll() is None, process.output
            time.sleep(0.05)
        (os.killpg if everybody else os.kill)(process.popen.pid, signal.SIGINT)
        return process.wait()


@pytest.mark.parametrize("everybody", [False, True], ids=["controller", "terminal"])
def test_ctrl_c_leaves_a_report(project, everybody):
    project.suite(HEAD + "def test_before(): pass\ndef test_long():\n    open(f'at{RANK}', 'w')\n    time.sleep(30)\n")
    left = interrupted(project, everybody=everybody)
    assert (left.exit, left.end) == (2, ("BROKEN", 2)), left.output
    assert left.verdicts["test_before"] == "passed"
    # "to its end on every worker" only where a worker's word that it has begun came before Ctrl-C.
    assert left.verdicts["test_long"].startswith("skipped: not run")
    assert left.verdicts["interrupted"].startswith("error: interrupted")


SHOWN_GPUS = """
from pytest_gpucluster.node import inventory

def identify(facts, device):
    return {"host": facts.hostname, "visible_gpus": 2, "gpu": None, "versions": {}}

inventory.identify = identify
"""


@pytest.mark.parametrize("workers", [3, 16])
def test_more_workers_than_gpus_is_wrong_usage_that_says_how_many_there_are(project, workers):
    project.suite("def test_it(): pass", conftest=SHOWN_GPUS)
    left = project.run_apart("-n", str(workers), *WORKERS[2:], device=None)
    assert left.exit == 4, left.output
    assert re.search(rf"-n {workers} .* GPUs \(2\).* Use -n 2", left.stderr)
    assert left.end == ("BROKEN", 4)
    assert "created:" not in left.stdout, "no worker was started"


def test_what_is_too_slow_on_one_worker_is_skipped(project):
    left = local(
        project,
        """
    @pytest.mark.criterion("inventory")
    def test_inventory(measure): measure("inventory.ranks", 2, unit="ranks", record_only=True)

    @pytest.mark.criterion("gpu.compute")
    def test_computes(measure): measure("gpu.usable_dtypes", 4, unit="dtypes")

    @pytest.mark.criterion("matmul")
    @pytest.mark.deadline(1)
    def test_slow(cluster):
        until = time.monotonic() + 60 * RANK
        while time.monotonic() < until:
            pass

    @pytest.mark.criterion("matmul")
    def test_fine(measure): measure("matmul.bf16.tflops", 2, unit="TFLOPS")
        """,
    )
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    assert left.verdicts["test_slow"].startswith("skipped: too slow")
    assert "1 too slow" in left.last_line[2]


def test_a_test_whose_body_did_not_run_in_a_worker_is_no_pass(project):
    project.pytester.makeconftest(
        """
        import os
        from _pytest.runner import call_and_report

        def pytest_runtest_protocol(item, nextitem):
            if os.environ.get("PYTEST_XDIST_WORKER") != "gw1":
                return None
            item._initrequest()
            for when in ("setup", "teardown"):
                call_and_report(item, when, True, **({"nextitem": nextitem} if when == "teardown" else {}))
            return True
        """
    )
    left = local(project, "def test_it(): pass\n")
    assert (left.exit, left.end) == (11, ("BROKEN", 11)), left.output
    assert left.verdicts["test_it"].startswith("error: rank 1 (")
