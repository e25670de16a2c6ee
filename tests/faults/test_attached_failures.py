"""Failures that are attached when pytest makes the report: of unittest.TestCase, and of plugins that change reports.

The body of such a test raises nothing. Where it happens on rank 1 only, all ranks must agree on it all the same.
"""

import pytest
from torchrun import torchrun

RANK_1 = "rank 1 (node-a)"
SUITE = {
    "conftest.py": """
        import pytest

        @pytest.hookimpl(wrapper=True, trylast=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            soft = item.stash.get(SOFT, None)  # kept until the report is made, as pytest-check does
            if soft is not None and soft[0] == call.when:
                del item.stash[SOFT]
                report.outcome, report.longrepr = soft[1:]
                if report.outcome == "expected":  # as pytest-check does under xfail
                    report.outcome, report.wasxfail = "skipped", soft[2]
            if item.name == "test_changed_each_time" and item.config.rank == 1 and call.when == "call":
                report.outcome, report.longrepr = "failed", "changed by a conftest"
            return report

        SOFT = pytest.StashKey()

        def pytest_configure(config):
            import os
            config.rank = int(os.environ["RANK"])

        @pytest.fixture
        def soft(request):
            def keep(when, outcome, longrepr):
                if request.config.rank == 1:
                    request.node.stash[SOFT] = when, outcome, longrepr
            yield keep
            if "in_teardown" in request.node.name:
                keep("teardown", "failed", "kept until the end")
    """,
    "test_it.py": """
        import unittest
        import pytest
        from stamps import RANK, all_reduce, stamp

        class TestCase(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def take(self, cluster):
                self.cluster = cluster

            def test_fails(self):
                stamp("fails")
                all_reduce(self.cluster)
                self.assertEqual(RANK, 0)

            def test_fails_twice(self):
                self.addCleanup(self.assertEqual, RANK, 0, "in the cleanup")
                self.assertEqual(RANK, 0, "in the body")

            def tearDown(self):
                if RANK == 1 and "hidden" in self.id():
                    self.skipTest("in the end")

            def test_hidden_by_a_skip(self):
                self.assertEqual(RANK, 0)

            def test_of_subtests(self):
                with self.subTest("part"):
                    self.assertEqual(RANK, 0)

            def test_skips(self):
                self.skipTest("not today")

            def test_skips_on_one_rank(self):
                if RANK == 1:
                    self.skipTest("not here")

            @unittest.expectedFailure
            def test_is_expected_to_fail(self):
                self.fail("as known")

        def test_checked(cluster, soft):
            soft("call", "failed", "a soft check has failed")
            all_reduce(cluster)

        def test_skipped_softly(soft):
            soft("call", "skipped", ("test_it.py", 1, "Skipped: kept for later"))

        @pytest.mark.xfail(reason="known", strict=True)
        def test_softly_expected(soft):
            soft("call", "expected", "as known")
            if RANK == 0:
                raise ValueError("as known")

        def test_changed_each_time():
            pass

        def test_in_teardown(soft):
            pass

        def test_after(cluster):
            stamp("after")
            assert all_reduce(cluster).tolist() == [2.0] * 4
    """,
}
EXPECTED = {
    "test_fails": f"failure: {RANK_1}: AssertionError: 1 != 0",
    "test_fails_twice": f"failure: {RANK_1}: AssertionError: 1 != 0 : in the body",
    "test_hidden_by_a_skip": f"failure: {RANK_1}: AssertionError: 1 != 0",
    "test_skips": "skipped: not today",
    "test_skips_on_one_rank": "error: ranks disagree: rank 1 skipped (not here), rank 0 did not",
    "test_is_expected_to_fail": "skipped: ",
    "test_checked": f"failure: {RANK_1}: a soft check has failed",
    "test_skipped_softly": "error: ranks disagree: rank 1 skipped (kept for later), rank 0 did not",
    "test_softly_expected": "skipped: known",
    "test_changed_each_time": f"failure: {RANK_1}: changed by a conftest",
    "test_in_teardown": f"error: in teardown: {RANK_1}: kept until the end",
    "test_after": "passed",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("attached"), SUITE, deadline=20.0)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_report_names_the_rank_whose_report_has_failed(run, name):
    assert run.verdicts[name].startswith(EXPECTED[name]), run.body(name)


def test_the_culprits_are_on_record_and_a_failed_subtest_is_no_pass(run):
    assert run.verdicts["test_of_subtests"].startswith(("failure: ", "error: ")), run.verdicts
    results = {result.nodeid.rpartition("::")[2]: result for result in run.journal.results}
    for name in ("test_fails", "test_checked", "test_changed_each_time", "test_in_teardown"):
        assert list(results[name].culprits) == [1], name
    assert run.end == ("REJECTED", 1, "rank 0")


def test_exit_first_stops_all_ranks_at_the_failure_of_one(tmp_path):
    run = torchrun(tmp_path, SUITE, "-x", "-k", "test_fails or test_after", deadline=20.0)
    for rank in (0, 1):
        assert [stamp.name for stamp in run.stamps[rank]] == ["fails"]
    assert run.verdicts["test_fails"] == EXPECTED["test_fails"]
    assert run.end == ("REJECTED", 1, "rank 0")
    assert run.left_over == []
