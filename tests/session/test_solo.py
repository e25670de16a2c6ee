"""One process without a launcher: every verdict that one CPU rank can reach, and pytest's features under the plugin."""

import re

import pytest

from pytest_gpucluster.metrics import measurement

RECORDED = 'measure("inventory.ranks", 1, unit="ranks", record_only=True)'


@pytest.fixture(autouse=True)
def metrics_as_before():
    """Forget the metrics that suites of these tests add: a session in this process shares them with other tests."""
    before = dict(measurement._REGISTRY)
    yield
    measurement._REGISTRY.clear()
    measurement._REGISTRY.update(before)


# ---- verdicts and exit codes ----------------------------------------------------------------------------------------


def test_all_passed_on_cpu_is_a_rehearsal(project):
    project.suite(
        f"""
        import pytest

        @pytest.mark.criterion("first")
        def test_first(measure):
            {RECORDED}

        @pytest.mark.criterion("limited")
        def test_limited(measure):
            measure("matmul.fp32.tflops", 2, unit="GFLOPS", samples=[2, 3], n=256)

        def test_no_criterion():
            pass
        """
    )
    left = project.run()
    assert (left.exit, left.end) == (0, ("REHEARSED", 0))
    assert left.verdicts == {"test_first": "passed", "test_limited": "passed", "test_no_criterion": "passed"}
    assert left.properties["rehearsal"] == "true"
    assert left.measured("test_limited")["matmul.fp32.tflops{n=256}"].startswith("0.002 TFLOPS (limit >= 0.00")
    header = " ".join(left.stdout.partition("rootdir")[0].split())  # at 80 columns its lines go on in the next one
    for told in (
        "1 rank on 1 node (pytest), device cpu, REHEARSAL",
        "device=cpu (command line)",
        "cpu-rehearsal, from ",
    ):
        assert told in header
    assert left.last_line[:2] == ("REHEARSED", 0)
    assert left.last_line[2].startswith("3 passed; 1 node, 1 rank, as launched")


FP32 = 'measure("matmul.fp32.tflops", %s, unit="TFLOPS")'
NAN_RANKS = 'measure("inventory.ranks", float("nan"), unit="ranks", record_only=True)'
SLOW = 'measure("matmul.fp32.tflops", 1, unit="MFLOPS")'
MISSED = "failure: matmul.fp32.tflops 0.000001 TFLOPS < 0.0005 TFLOPS on rank 0 ("
VERDICTS = {
    ("REJECTED", 1): {
        "a limit missed": (SLOW, MISSED),
        "a limit missed and NaN": (f"{NAN_RANKS}; {SLOW}", MISSED),
        "a limit missed before the body breaks": (f"{SLOW}; raise errors.StoreError('gone')", MISSED),
        "an assertion": ("assert 1 == 2", "failure: rank 0 ("),
        "a wrong result": ("raise errors.WrongResult('3 of 9 differ')", "failure: rank 0 ("),
    },
    ("INCOMPLETE", 10): {
        "an inconclusive measurement": (
            "raise errors.InconclusiveMeasurement('scatters too much')",
            "skipped: too slow to rehearse here: ",
        ),
        "skipped in the body": ("pytest.skip('no disk here')", "skipped: no disk here"),
        "a missing extra": ("pytest.importorskip('no_such_module')", "skipped: could not import"),
        "an expected failure": (f"{SLOW}; pytest.xfail('too slow')", "skipped: too slow"),
    },
    ("BROKEN", 11): {
        "a broken environment": ("raise errors.CommunicationError('no group')", "error: rank 0 ("),
        "nothing measured": ("pass", "error: criterion it has measured nothing"),
        "no limit for the metric": (
            'measure("site.thing", 1, unit="GB/s")',
            "error: site.thing: no limit on cpu-rehearsal",
        ),
        "NaN": (FP32 % 'float("nan")', "error: matmul.fp32.tflops: the value is NaN on rank 0"),
        "NaN that is only recorded": (NAN_RANKS, "error: inventory.ranks: the value is NaN on rank 0"),
        "a bad sample": (
            'measure("matmul.fp32.tflops", 1, unit="TFLOPS", samples=[1, float("nan")])',
            "error: matmul.fp32.tflops: 1 of 2 samples cannot be judged, the first is NaN on rank 0",
        ),
        "the wrong dimension": ('measure("matmul.fp32.tflops", 1, unit="GB/s")', "error: rank 0 ("),
        "an unknown metric": ('measure("matmul.bf32.tflops", 1, unit="TFLOPS")', "error: rank 0 ("),
        "measured twice": (f"{RECORDED}; {RECORDED}", "error: inventory.ranks: measured 2 times on rank 0"),
    },
}
"""Verdict and exit code -> what happens -> the body, and how its verdict begins."""
SITE = """
    import pytest
    from pytest_gpucluster.metrics import measurement

    def pytest_configure():
        measurement.register(measurement.Metric(name="site.thing", unit="GB/s", better="higher", doc="of a site"))
"""


@pytest.mark.parametrize(("end", "which"), [(end, which) for end, cases in VERDICTS.items() for which in cases])
def test_what_happens_in_the_body_decides_word_exit_code_and_testcase(project, end, which):
    body, verdict = VERDICTS[end][which]
    project.suite(
        f"""
        import pytest
        from pytest_gpucluster import errors

        @pytest.mark.criterion("it")
        def test_it(measure):
            {body}

        @pytest.mark.criterion("other")
        def test_other(measure):
            {RECORDED}
        """,
        conftest=SITE,
    )
    left = project.run()
    assert (left.exit, left.end, left.last_line[:2]) == (end[1], end, end), left.output
    assert left.verdicts.keys() == {"test_it", "test_other"}
    assert left.verdicts["test_it"].startswith(verdict), left.verdicts
    assert left.verdicts["test_other"] == "passed"
    if which == "no limit for the metric":
        assert all("- min: <what you accept> GB/s" in text for text in (left.body("test_it"), left.stdout))


AROUND = {
    "in setup": ("raise ValueError('early')\n    yield", ("BROKEN", 11), "error: in setup: rank 0"),
    "an exit in setup": ("raise SystemExit(3)\n    yield", ("BROKEN", 11), "error: in setup: rank 0"),
    "in teardown": ("yield\n    raise ValueError('late')", ("BROKEN", 11), "error: in teardown: rank 0"),
    "a limit missed and then teardown": ("yield\n    raise ValueError('late')", ("REJECTED", 1), "failure: matmul"),
}


@pytest.mark.parametrize(("fixture", "end", "verdict"), AROUND.values(), ids=AROUND)
def test_a_fault_around_the_body_is_an_error_and_never_hides_a_missed_limit(project, fixture, end, verdict):
    unit = "MFLOPS" if end[1] == 1 else "TFLOPS"
    project.suite(
        f"import pytest\n\n@pytest.fixture\ndef thing():\n    {fixture}\n\n"
        "@pytest.mark.criterion('it')\ndef test_it(thing, measure):\n"
        f"    measure('matmul.fp32.tflops', 1, unit='{unit}')\n"
    )
    left = project.run()
    assert (left.exit, left.end) == (end[1], end)
    assert left.verdicts["test_it"].startswith(verdict), left.verdicts
    assert len(left.cases) == 1


# ---- what is required -----------------------------------------------------------------------------------------------

NEEDS = """
    import pytest

    @pytest.mark.criterion("alone")
    def test_alone(measure):
        measure("inventory.ranks", 1, unit="ranks", record_only=True)

    @pytest.mark.needs_ranks(2)
    @pytest.mark.criterion("links")
    def test_links(measure):
        raise AssertionError("must not run")

    @pytest.mark.needs_nodes(2)
    @pytest.mark.criterion("fabric")
    def test_fabric(measure):
        raise AssertionError("must not run")
"""


@pytest.mark.parametrize(
    ("allocated", "end"),
    [
        ({}, ("REHEARSED", 0)),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_PER_NODE": "8"}, ("INCOMPLETE", 10)),
        ({"SLURM_JOB_NUM_NODES": "2"}, ("BROKEN", 11)),
    ],
    ids=["none", "room for a criterion", "a node that was not launched"],
)
def test_what_the_allocation_has_no_room_for_is_skipped(project, monkeypatch, allocated, end):
    for name, value in (allocated | {"SLURM_JOB_ID": "77"} if allocated else {}).items():
        monkeypatch.setenv(name, value)
    project.suite(NEEDS)
    left = project.run()
    assert (left.exit, left.end) == (end[1], end)
    if end[1] == 11:
        assert "slurm allocated 2 nodes" in left.verdicts["preflight"]
        return
    assert left.verdicts["test_links"] == "skipped: needs 2 ranks, and there is 1"
    assert left.verdicts["test_fabric"].startswith("skipped: needs 2 nodes")
    assert (": links (" in left.last_line[2]) == bool(allocated)
    assert "fabric" not in left.last_line[2]


@pytest.mark.parametrize(
    ("required", "end"),
    [("alone", ("REHEARSED", 0)), ("alone,links", ("INCOMPLETE", 10)), ("alnoe", ("INCOMPLETE", 10))],
)
def test_required_criteria_must_have_run(project, required, end):
    project.suite(NEEDS)
    left = project.run(f"--gpucluster-require={required}")
    assert (left.exit, left.end) == (end[1], end)
    if end[1]:
        missing = required.rpartition(",")[2]
        assert f"did not run: {missing} (required" in left.last_line[2]


@pytest.mark.parametrize(
    ("options", "end"),
    [
        (["-k", "alone"], ("REHEARSED", 0)),
        (["-k", "nothing_is_called_so"], ("BROKEN", 5)),
        (["-m", "needs_ranks"], ("INCOMPLETE", 10)),
        (["test_it.py::test_alone"], ("REHEARSED", 0)),
        (["--deselect", "test_it.py::test_links"], ("REHEARSED", 0)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_selection_has_its_own_verdict(project, options, end):
    project.suite(NEEDS)
    left = project.run(*options)
    assert (left.exit, left.end) == (end[1], end), left.output
    assert left.journal.run.selection is True
    if end[1] == 5:
        assert [verdict.split(":")[0] for verdict in left.verdicts.values()] == ["error"]


def test_only_collecting_starts_nothing_and_leaves_no_report(project):
    project.suite(NEEDS)
    left = project.run("--collect-only", "-q")
    assert left.exit == 0
    assert left.stdout.splitlines()[:3] == [f"test_it.py::test_{name}" for name in ("alone", "links", "fabric")]
    assert not (project.path / "gpucluster-report").exists()


def test_a_body_that_was_released_and_came_back_as_if_nothing_had_been_has_not_passed(project):
    project.suite(
        """
        import time, pytest

        @pytest.mark.criterion("matmul")
        @pytest.mark.deadline(1)
        def test_swallows(measure):
            try:
                time.sleep(30)
            except BaseException:
                pass
            measure("matmul.fp32.tflops", 0.5, unit="TFLOPS")

        def test_after(): pass
        """
    )
    left = project.run()
    assert (left.exit, left.end) == (11, ("BROKEN", 11))
    assert left.verdicts["test_swallows"].startswith("error: ")
    assert left.verdicts["test_after"] == "passed"


@pytest.mark.parametrize(("code", "exit"), [(0, 2), (1, 2), (10, 2), (7, 7)])
def test_exit_in_a_test_ends_the_run_and_never_looks_like_a_verdict_about_hardware(project, code, exit):
    project.suite(
        f"""
        import pytest

        def test_before(): pass
        def test_exit(): pytest.exit("enough", returncode={code})
        def test_after(): pass
        """
    )
    left = project.run()
    assert (left.exit, left.journal.exit, left.journal.verdict) == (exit, exit, "BROKEN")
    assert left.verdicts["test_before"] == "passed"
    assert left.verdicts["test_exit"].startswith("error: ")
    assert "enough" in left.verdicts["test_exit"]
    assert left.verdicts["test_after"].startswith("skipped: not run: ")


def test_what_was_measured_before_ctrl_c_is_on_record_and_is_no_pass(project):
    project.suite(
        """
        import pytest

        @pytest.mark.criterion("speed")
        def test_it(measure, record_property):
            record_property("reached", "half of it")
            measure("matmul.fp32.tflops", 1, unit="TFLOPS", n=256)
            raise KeyboardInterrupt("after half")

        def test_after(): pass
        """
    )
    left = project.run()
    assert (left.exit, left.end) == (2, ("BROKEN", 2))
    assert left.verdicts["test_it"].startswith("error: interrupted (Ctrl-C) on rank 0")
    assert left.verdicts["test_it"].endswith("call of test_it.py::test_it: after half")
    assert left.verdicts["test_after"].startswith("skipped: not run: ")
    (result,) = (each for each in left.journal.results if each.nodeid.endswith("test_it"))
    assert (result.outcome, result.properties) == ("error", (("reached", "half of it"),))
    assert [(one.metric, one.value) for one in result.measurements] == [("matmul.fp32.tflops", 1.0)]


# ---- pytest's own features ------------------------------------------------------------------------------------------


# Here, as in every test of this project, a warning is an error.
def test_without_junitxml_the_report_lies_beside_the_journal(project):
    project.suite("def test_it(): pass")
    left = project.run(junit=False)
    left.junit_path = next((project.path / "gpucluster-report" / "latest").glob("*.xml"))
    assert left.verdicts == {"test_it": "passed"}
    assert re.search(rf"^JUnit: +{left.journal.run.junit.path}$", left.stdout, re.MULTILINE)


def test_expected_failures_are_shown_as_pytest_shows_them(project):
    project.suite(
        """
        import pytest

        @pytest.mark.xfail(reason="known")
        def test_fails(): assert 0

        @pytest.mark.xfail(reason="known")
        def test_passes(): pass

        @pytest.mark.xfail(reason="known", strict=True)
        def test_strict(): pass

        @pytest.mark.xfail(run=False, reason="never")
        def test_not_run(): assert 0

        def test_imperative(): pytest.xfail("imperative")
        """
    )
    left = project.run("-rxX")
    assert (left.exit, left.end) == (1, ("REJECTED", 1))
    assert left.verdicts["test_fails"] == "skipped: known"
    assert left.verdicts["test_passes"] == "passed"
    assert left.verdicts["test_strict"].startswith("failure: ")
    assert "XPASS(strict)" in left.verdicts["test_strict"]
    assert left.verdicts["test_not_run"] == "skipped: [NOTRUN] never"
    assert left.verdicts["test_imperative"] == "skipped: imperative"
    assert left.case("test_fails").find("skipped").get("type") == "pytest.xfail"
    assert re.search(r"1 failed, 3 xfailed, 1 xpassed", left.stdout)


def test_a_rerun_counts_its_attempts_and_keeps_what_the_first_one_said(project):
    pytest.importorskip("pytest_rerunfailures")
    project.suite(
        """
        import pytest
        tries = []

        @pytest.mark.criterion("flaky")
        def test_flaky(measure):
            tries.append(1)
            measure("inventory.ranks", len(tries), unit="ranks", record_only=True)
            assert len(tries) > 1, "the first time"

        def test_always(): assert 0
        """
    )
    left = project.run("--reruns=2")
    assert (left.exit, left.end) == (1, ("REJECTED", 1))
    assert left.verdicts["test_flaky"] == "passed"
    flaky, always = left.journal.results
    assert (flaky.attempts, always.attempts) == (2, 3)
    assert "the first time" in dict(flaky.properties)["attempt 1"]
    assert [judged.value for judged in flaky.measurements] == [2]
    assert re.search(r"1 failed, 1 passed,.* 3 rerun", left.stdout)


# ---- fixtures -------------------------------------------------------------------------------------------------------


def test_fixtures_say_what_this_rank_is(project):
    project.suite(
        """
        import pytest

        def test_cluster(cluster):
            assert (cluster.rank, cluster.world_size, cluster.local_world_size, cluster.nnodes) == (0, 1, 1, 1)
            assert str(cluster.device) == "cpu" and cluster.backend == "gloo"
            assert cluster.hosts == [cluster.hostname]

        def test_group(cluster):
            import torch
            ones = torch.ones(2)
            torch.distributed.all_reduce(ones, group=cluster.group)
            cluster.barrier()
            assert ones.tolist() == [1, 1]
            assert cluster.all_gather_object({"a": 1}) == [{"a": 1}]
            assert cluster.subgroups(1) is cluster.group

        def test_gpu(gpu):
            assert (gpu.name, gpu.sku, gpu.uuid, gpu.peaks) == ("cpu", "cpu-rehearsal", None, None)

        def test_limits(limits):
            found = limits.limit("matmul.fp32.tflops", sku="cpu-rehearsal", world_size=1, nnodes=1, labels={})
            assert found.min == 0.0005 and found.origin.startswith("thresholds.yaml:")

        def test_inventory(inventory, cluster):
            import os
            assert [who["rank"] for who in inventory] == [0]
            assert inventory[0]["pid"] == os.getpid()
            assert inventory[0]["versions"]["torch"]

        @pytest.mark.parametrize("size", ["1/2 GB"])
        def test_artifacts(artifacts, size):
            (artifacts / "plot.txt").write_text("x")
        """
    )
    left = project.run()
    assert (left.exit, left.end) == (0, ("REHEARSED", 0)), left.output
    (plot,) = (project.path / "gpucluster-report" / "latest").rglob("plot.txt")
    assert plot.parent.parent.name == "artifacts"
    assert "test_artifacts" in plot.parent.name


def test_the_groups_of_some_ranks_are_closed_after_each_test_however_it_ends(project):
    project.suite(
        """
        import pytest

        closed = []

        @pytest.fixture(autouse=True, scope="session")
        def noted(cluster):
            cluster.close_subgroups = lambda: closed.append("")

        @pytest.fixture
        def breaks():
            yield
            raise OSError("no disk")

        def test_first():
            assert not closed

        def test_fails():
            assert len(closed) == 1, "as meant"
            pytest.fail("in its body")

        def test_breaks(breaks):
            assert len(closed) == 2

        def test_last():
            assert len(closed) == 3
        """
    )
    left = project.run()
    assert [verdict.partition(":")[0] for verdict in left.verdicts.values()] == ["passed", "failure", "error", "passed"]
    assert "in its body" in left.verdicts["test_fails"]


def test_after_nvls_has_failed_later_values_say_that_it_is_off_and_a_second_failure_ends_the_run(project, monkeypatch):
    for name in ("NCCL_NVLS_ENABLE", "GPUCLUSTER_NVLS_SWITCHED_OFF", "NCCL_NO_CACHE"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
    project.suite(
        f"""
        import os

        def fail():
            raise RuntimeError("NCCL error\\nFailed to bind NVLink SHARP (NVLS) Multicast memory of size 1")

        def test_first(cluster):
            cluster.group
            fail()

        def test_without_a_group(measure):
            assert os.environ["NCCL_NVLS_ENABLE"] == "0"
            assert os.environ["NCCL_NO_CACHE"] == "NCCL_NVLS_ENABLE", "else NCCL does not look again"
            {FP32 % 1}

        def test_with_a_group(cluster, measure):
            cluster.barrier()
            {FP32 % 1}

        def test_again():
            fail()

        def test_last():
            pass
        """
    )
    left = project.run()
    assert left.end == ("BROKEN", 11)
    assert "Fabric Manager" in left.verdicts["test_first"]
    assert left.verdicts["test_without_a_group"] == "passed"
    assert left.verdicts["test_with_a_group"].startswith("error: matmul.fp32.tflops (nvls=switched off): ")
    assert left.verdicts["test_again"].startswith("error: ")
    assert left.verdicts["test_last"].startswith("skipped: not run: NVLS fails ")


def test_groups_that_cannot_be_aborted_end_the_run_as_broken_with_that_cause(project):
    project.suite(
        """
        from pytest_gpucluster.errors import CommunicationError, EnvironmentBroken

        def test_fails(cluster):
            def stuck(epoch):
                raise EnvironmentBroken("2 of 3 groups hang")
            cluster.discard = stuck
            raise CommunicationError("cut")

        def test_next():
            pass
        """
    )
    left = project.run()
    assert left.end == ("BROKEN", 11)
    assert "2 of 3 groups hang" in left.output
    assert left.verdicts["test_next"].startswith("skipped: not run")


def test_a_failure_that_holds_the_process_group_does_not_abort_the_process_at_its_end(project):
    project.suite(
        """
        def test_fails(cluster):
            group = cluster.group
            assert group is None, "and its traceback holds the group"
        """
    )
    left = project.run_apart()
    assert (left.exit, left.end) == (1, ("REJECTED", 1)), left.output
    assert left.stderr == ""


_FORKED = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--forked", action="store_true")
"""


@pytest.mark.parametrize("option", ["--setup-only", "--setup-plan", "--forked"])
def test_an_option_by_which_no_test_would_run_here_is_a_usage_error(project, option):
    project.suite("def test_it(): pass\n", conftest=_FORKED)
    left = project.run(option)
    assert (left.exit, left.end) == (4, ("BROKEN", 4))
    assert f"Leave out {option}" in left.output
    assert "error" in " ".join(left.verdicts.values())


_ELSEWHERE = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    # As pytest-forked does: the body runs in another process, and here its reports are logged.
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for when in {phases}:
        report = pytest.TestReport(item.nodeid, item.location, {{}}, "passed", None, when)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""


@pytest.mark.parametrize(
    "phases", [["setup", "call", "teardown"], ["setup", "teardown"], []], ids=["all", "without a call", "none"]
)
def test_reports_of_a_body_that_did_not_run_here_are_no_pass(project, phases):
    project.suite("def test_it(): pass\n", conftest=_ELSEWHERE.format(phases=phases))
    left = project.run()
    assert (left.exit, left.end) == (11, ("BROKEN", 11))
    assert left.verdicts["test_it"].startswith("error: ")


@pytest.mark.parametrize(
    ("second", "option", "told"),
    [
        ("assert 0, 'second'", "--maxfail=2", "2 failures"),
        ("request.session.shouldstop = 'the room is too warm'", "-v", "the room is too warm"),
        ("pytest.exit('the room is too warm')", "-v", "the room is too warm"),
    ],
    ids=["maxfail", "a plugin", "pytest.exit"],
)
def test_what_did_not_run_says_what_ended_the_run_and_not_what_failed_first(project, second, option, told):
    project.suite(
        f"""
        import pytest

        def test_first(): assert 0, "first"
        def test_second(request): {second}
        def test_third(): pass
        """
    )
    message = project.run(option).verdicts["test_third"]
    assert message.startswith("skipped: not run: ")
    assert told in message
    assert "first" not in message
